"""A stream: disk and memory snapshots, their flags and bounds, and what is shown in them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from mirror.sandbox import SandboxCluster
from mirror.sandbox.data.profile import DEFAULT_PROFILE, PROFILES
from mirror.sandbox.dcp.filter import SandboxFilter
from mirror.sandbox.dcp.producer_stream import ProducerStream
from mirror.server.controls import Controls
from mirror.wire import events as ev
from mirror.wire.constants import MarkerVersion, Opcode, StreamEndReason
from mirror.wire.frame import Frame, FrameBuffer
from mirror.wire.scan import Run, scan
from mirror.wire.system_events import decode_system_event
from tests.recordings import frames
from tests.sandbox.past import state_at

from .client import DATA, ENDLESS, Client
from .recorded import fill

ABILITIES = PROFILES[DEFAULT_PROFILE].abilities(keeps_history=False)


def data(client: Client, vbid: int = 0) -> list[int]:
    return [e.seqno for e in client.of(*DATA, vbid=vbid)]


async def test_changes_in_memory_are_sent_in_one_first_memory_snapshot(cluster: SandboxCluster) -> None:
    """As recorded: 210 documents that were never on disk come as [0..210] memory|checkpoint (72_d1)."""
    for index in range(210):
        cluster.set(f"k{index % 160}", {"n": index})
    client = await Client.streamed(cluster, 210)
    assert client.markers() == [(0, 210, 5)]
    assert data(client) == list(range(51, 211))


async def test_live_snapshots_are_small_and_each_shows_the_state_at_its_end() -> None:
    async with SandboxCluster(vbuckets=1, seed=3) as cluster:
        client = await Client.dcp(cluster)
        await client.stream(0)
        rng = random.Random(5)
        cluster.set("k0", {})
        await client.until_seqno(0, 1)
        for index in range(400):
            key = f"k{rng.randrange(12)}"
            if rng.random() < 0.2 and cluster.bucket.get(key) is not None:
                cluster.delete(key)
            else:
                cluster.set(key, {"n": index})
            if index % 40 == 0:
                await asyncio.sleep(0)
        await client.until_seqno(0, cluster.vbucket(0).high_seqno)
        markers = client.of(ev.SnapshotMarker)
        assert len(markers) > 100
        found: dict[bytes, bytes] = {}
        end = None
        for event in client.of(*DATA, ev.SnapshotMarker):
            if isinstance(event, ev.SnapshotMarker):
                if end is not None:
                    state = state_at(cluster.vbucket(0), end)
                    assert found == {key: item.value for key, item in state.items()}
                end = event.end_seqno
            elif isinstance(event, ev.Mutation):
                found[event.key] = event.value
            else:
                found.pop(event.key, None)


async def test_a_stream_with_an_end_is_sent_to_the_end_of_the_snapshot_around_it(cluster: SandboxCluster) -> None:
    for index in range(100):
        cluster.set(f"k{index}", {})
    cluster.bucket.to_disk()
    client = await Client.dcp(cluster)
    await client.stream(0, end=20)
    await client.until(lambda: client.of(ev.StreamEnd))
    assert client.markers() == [(0, 100, 6)]
    assert data(client) == list(range(1, 101))
    assert client.of(ev.StreamEnd)[0].reason == StreamEndReason.OK


async def test_a_resumed_stream_marks_from_its_start_and_later_from_the_next_seqno(cluster: SandboxCluster) -> None:
    for index in range(10):
        cluster.set(f"k{index}", {})
    uuid = cluster.vbucket(0).vbuuid
    client = await Client.dcp(cluster)
    await client.stream(0, start=4, uuid=uuid)
    await client.until_seqno(0, 10)
    cluster.set("k", {})
    await client.until_seqno(0, 11)
    assert [marker[:2] for marker in client.markers()] == [(4, 10), (11, 11)]
    other = await Client.dcp(cluster, name="other")
    cluster.bucket.to_disk()
    await other.stream(0, start=4, uuid=uuid, snap=(2, 8))
    await other.until_seqno(0, 11)
    assert other.markers() == [(2, 11, 6)]


async def test_a_cursor_that_is_dropped_continues_from_disk_and_returns_to_memory() -> None:
    async with SandboxCluster(vbuckets=1, checkpoint_items_max=10, checkpoints_kept=2) as cluster:
        client = await Client.dcp(cluster)
        await client.stream(0)
        for index in range(100):
            cluster.set(f"k{index % 30}", {"n": index})
        await client.until_seqno(0, 100)
        cluster.set("more", {})
        await client.until_seqno(0, 101)
        kinds = [flags & 3 for _, _, flags in client.markers()]
        assert kinds == [2, 1]
        for index in range(100):
            cluster.set(f"k{index % 30}", {"n": -index})
        await client.until_seqno(0, 201)
        assert 2 in [flags & 3 for _, _, flags in client.markers()[2:]]
        state = state_at(cluster.vbucket(0))
        assert client.state(0) == {key: item.value for key, item in state.items()}


async def test_new_checkpoints_are_marked_by_their_flag() -> None:
    async with SandboxCluster(vbuckets=1) as cluster:
        cluster.bucket.tuning.live_snapshot_items = 1
        client = await Client.dcp(cluster)
        await client.stream(0)
        for _ in range(2):
            cluster.set("k", {})
            await client.until_seqno(0, cluster.vbucket(0).high_seqno)
        cluster.bucket.create_scope("s")
        await client.until_seqno(0, 3)
        cluster.bucket.create_collection("s", "c")
        await client.until_seqno(0, 4)
        assert [flags for _, _, flags in client.markers()] == [5, 1, 1, 5]


async def test_a_marker_of_version_2_2_carries_the_purge_seqno(cluster: SandboxCluster) -> None:
    for key in "abc":
        cluster.set(key, {})
    for key in "ab":
        cluster.delete(key)
    cluster.bucket.purge()
    cluster.bucket.to_disk()
    client = await Client.streamed(cluster, 5, max_marker_version="2.2")
    cluster.set("d", {})
    await client.until_seqno(0, 6)
    disk, memory = client.of(ev.SnapshotMarker)
    assert (disk.version, disk.purge_seqno) == (MarkerVersion.V2_2, 4)
    assert memory.version == MarkerVersion.V1
    assert data(client) == [3, 5, 6]
    cluster.bucket.tuning.purge_seqno_reported = False
    client = await Client.streamed(cluster, 6, name="a setting is off", max_marker_version="2.2")
    assert client.of(ev.SnapshotMarker)[0].version == MarkerVersion.V1


async def test_writes_outside_the_filter_are_not_sent_live(cluster: SandboxCluster) -> None:
    cluster.bucket.create_scope("s")
    cluster.bucket.create_collection("s", "c")
    client = await Client.streamed(cluster, 2, value=b'{"collections":["8"]}')
    for index in range(10):
        cluster.set(f"k{index}", {})
        await asyncio.sleep(0)
    cluster.set("k", {}, collection="s.c")
    await client.until_seqno(0, 13)
    assert not client.of(ev.SeqnoAdvanced)
    assert data(client) == [13]


async def test_a_resumed_client_reaches_the_end_of_its_snapshot_even_if_filtered(cluster: SandboxCluster) -> None:
    """MB-47009: it would hold part of a snapshot until something is shown again."""
    cluster.bucket.create_scope("s")
    cluster.bucket.create_collection("s", "c")
    cluster.set("k", {}, collection="s.c")
    for index in range(3):
        cluster.set(f"k{index}", {})
    client = await Client.dcp(cluster)
    uuid = cluster.vbucket(0).vbuuid
    await client.stream(0, start=3, uuid=uuid, snap=(0, 5), value=b'{"collections":["8"]}')
    await client.until(lambda: client.of(ev.SeqnoAdvanced))
    assert [marker[:2] for marker in client.markers()] == [(0, 6)]
    assert [each.seqno for each in client.of(ev.SeqnoAdvanced)] == [6]
    assert data(client) == []


async def test_a_dropped_cursor_does_not_backfill_over_purged_tombstones(cluster: SandboxCluster) -> None:
    """Found by the simulation: the deletion was purged before it was sent, and the client kept the document for ever.
    The engine judges the position again when it opens the file, and ends the stream as rolled back.
    """
    cluster.set("kept", {})
    cluster.set("gone", {})
    client = await Client.streamed(cluster, 2)
    vbucket = cluster.vbucket(0)
    unreported, vbucket.changed = vbucket.changed, set()
    cluster.bucket.delete("gone", vbid=0)
    cluster.set("more", {})
    vbucket.purge()
    vbucket.to_disk()
    vbucket.changed = unreported
    cluster.set("last", {})
    await client.until(lambda: [e.reason for e in client.of(ev.StreamEnd)] == [StreamEndReason.STATE_CHANGED])
    assert data(client) == [1, 2]


async def test_a_backfill_sends_the_state_at_its_begin(cluster: SandboxCluster) -> None:
    """Found by the simulation: tombstones that were purged while a backfill ran were left out of the rest of it."""
    for index in range(4):
        cluster.set(f"k{index}", {})
    cluster.bucket.delete("k0", vbid=0)
    cluster.set("last", {})
    vbucket = cluster.vbucket(0)
    vbucket.to_disk()
    request = ev.StreamRequest(0, 0, 0, 2**64 - 1, 0, 0, 0, opaque=7)
    controls = Controls(ABILITIES, collections=True)
    stream = ProducerStream(vbucket, request, SandboxFilter(), controls, random.Random(1))
    assert stream.take(1)  # the marker
    vbucket.purge()
    assert vbucket.purge_seqno == 5
    frames, _ = scan(stream.take(1 << 20), 0, {7: bytes(4)})
    assert isinstance(frames[0], Run)
    assert [int.from_bytes(key[4:]) for key, _ in frames[0].rows] == [2, 3, 4, 5, 6]


class Counts(random.Random):
    """Says how many changes each memory snapshot is to have."""

    def __init__(self, *counts: int) -> None:
        super().__init__(1)
        self.counts = list(counts)

    def randint(self, a: int, b: int) -> int:
        return self.counts.pop(0)


def write(cluster: SandboxCluster, *steps: str) -> None:
    bucket, hotel = cluster.bucket, {"collection": "inventory.hotel", "vbid": 13}
    for step in steps:
        key, _, how = step.partition(" ")
        if how == "prepare":
            bucket.prepare(key, {}, **hotel)  # type: ignore[arg-type]
        elif how == "commit":
            bucket.commit(key, **hotel)  # type: ignore[arg-type]
        elif how == "abort":
            bucket.abort(key, **hotel)  # type: ignore[arg-type]
        elif how == "delete":
            bucket.vbuckets[13].open_checkpoint()
            bucket.delete(key, **hotel)  # type: ignore[arg-type]
        else:
            bucket.set(key, {}, **hotel)  # type: ignore[arg-type]


DURABLE = [f"dur-{n} {how}" for n in range(6) for how in ("prepare", "commit")]
HOTELS = [f"hotel-00{n}" for n in range(3)]


@pytest.mark.parametrize(
    ("name", "high", "counts", "steps"),
    [
        ("72_k20_durable_writes_plain_client", 285, (1, 2, 2, 2, 1, 1, 1, 1, 1, 1), [*DURABLE, "dur-5 delete"]),
        ("72_k23_pending_prepare_timeout", 302, (1, 4), ["pend prepare", "pend abort", *HOTELS]),
    ],
)
def test_durable_writes_are_shown_as_recorded(name: str, high: int, counts: tuple[int, ...], steps: list[str]) -> None:
    """Compares markers, kinds, keys and seqnos of the live messages after the backfill, in the recorded snapshots."""
    cluster = SandboxCluster(vbuckets=14, profile="7.2")
    cluster.bucket.create_scope("inventory")
    cluster.bucket.create_collection("inventory", "hotel")
    vbucket = cluster.vbucket(13)
    fill(vbucket, {}, high)
    vbucket.newest.setdefault(8, {})
    features = Controls(ABILITIES, collections=True)
    request = ev.StreamRequest(13, 0, 0, ENDLESS, 0, 0, 0)
    stream = ProducerStream(vbucket, request, SandboxFilter(), features, Counts(*counts))
    sent = stream.take(1 << 20)
    vbucket.open_checkpoint()
    write(cluster, *steps)
    sent += stream.take(1 << 20)
    buffer = FrameBuffer()
    buffer.feed(sent)
    got = []
    while (frame := buffer.next_frame()) is not None:
        got.append(frame)
    recorded = [frame for direction, frame in frames(name) if direction == "s2c"]
    expected = [f for f in recorded if not f.is_response and f.opcode in range(0x56, 0x66) and f.opcode != 0x5C]
    assert (got[0].extras, got[0].value) == (expected[0].extras, expected[0].value)

    def seen(side: list[Frame]) -> list[tuple[object, ...]]:
        live = next(i for i, f in enumerate(side[1:], 1) if f.opcode == Opcode.DCP_SNAPSHOT_MARKER)
        return [
            (f.opcode, f.extras, f.value) if f.opcode == Opcode.DCP_SNAPSHOT_MARKER else (f.opcode, f.extras[:8], f.key)
            for f in side[live:]
        ]

    assert seen(got) == seen(expected)


async def test_only_a_commit_of_a_durable_write_is_sent(cluster: SandboxCluster) -> None:
    bucket = cluster.bucket
    bucket.set("k", {"old": 1})
    bucket.prepare("gone", {})
    bucket.abort("gone")
    bucket.prepare("k", {"new": 1})
    bucket.to_disk()
    plain = await Client.streamed(cluster, 4, name="plain")
    assert [(type(e).__name__, e.seqno) for e in plain.events[1:]] == [("Mutation", 1), ("SeqnoAdvanced", 4)]
    bucket.commit("k")
    await plain.until_seqno(0, 5)
    assert plain.state(0) == {b"\0k": b'{"new":1}'}
    bucket.prepare("k", None)
    bucket.commit("k")
    await plain.until_seqno(0, 7)
    assert plain.state(0) == {}


async def test_a_filtered_backfill_sends_its_seqno_in_the_middle_of_the_snapshot() -> None:
    async with SandboxCluster(vbuckets=1) as cluster:
        cluster.bucket.tuning.antilag_items = 10
        cluster.bucket.create_scope("s")
        cluster.bucket.create_collection("s", "c")
        cluster.set("first", {}, collection="s.c")
        for index in range(25):
            cluster.set(f"k{index}", {})
        cluster.set("second", {}, collection="s.c")
        for index in range(5):
            cluster.set(f"l{index}", {})
        cluster.bucket.to_disk()
        requested: dict[str, dict[str, Any]] = {"plain": {}, "with ids": {"enable_stream_id": "true"}}
        for name, more in requested.items():
            client = await Client.dcp(cluster, name=name, **more)
            value = b'{"collections":["8"],"sid":7}' if more else b'{"collections":["8"]}'
            await client.stream(0, value=value)
            await client.until_seqno(0, 34)
            assert client.markers() == [(0, 34, 6)]
            seen = [(type(e).__name__, e.seqno, e.stream_id) for e in client.events[1:]]
            stream_id = 7 if more else None
            assert seen == [
                ("SystemEvent", 2, stream_id),
                ("Mutation", 3, stream_id),
                ("SeqnoAdvanced", 13, stream_id),
                ("SeqnoAdvanced", 23, stream_id),
                ("Mutation", 29, stream_id),
                ("SeqnoAdvanced", 34, stream_id),
            ]


async def test_a_seqno_advanced_at_the_very_end_is_sent_once() -> None:
    async with SandboxCluster(vbuckets=1) as cluster:
        cluster.bucket.tuning.antilag_items = 3
        cluster.bucket.create_scope("s")
        cluster.bucket.create_collection("s", "c")
        for index in range(6):
            cluster.set(f"k{index}", {})
        cluster.bucket.to_disk()
        client = await Client.streamed(cluster, 8, value=b'{"collections":["8"]}')
        cluster.set("last", {}, collection="s.c")
        await client.until_seqno(0, 9)
        assert [e.seqno for e in client.of(ev.SeqnoAdvanced)] == [5, 8]


DISK_HISTORY = 6 | 0x30


async def history(cluster: SandboxCluster, name: str, **request: object) -> list[tuple[object, ...]]:
    """Markers as (flags, start, end), the rest as seqnos."""
    client = await Client.dcp(cluster, name=name, change_streams="true")
    await client.stream(0, **request)  # type: ignore[arg-type]
    await client.until_seqno(0, cluster.vbucket(0).high_seqno)
    return [
        (int(e.flags), e.start_seqno, e.end_seqno) if isinstance(e, ev.SnapshotMarker) else (e.seqno,)
        for e in client.events
    ]


async def test_change_streams_get_every_version_behind_a_second_marker_with_the_same_end() -> None:
    async with SandboxCluster(vbuckets=1, keeps_history=True) as cluster:
        for number in range(8):
            cluster.set("ab"[number % 2], {"n": number})
        cluster.delete("a")
        cluster.bucket.to_disk()
        everything = [(seqno,) for seqno in range(1, 10)]
        assert await history(cluster, "whole") == [(DISK_HISTORY, 0, 9), *everything]
        cluster.set("c", {})
        cluster.bucket.to_disk()
        cluster.bucket.discard_history(below_seqno=6)
        uuid = cluster.vbucket(0).vbuuid
        both = await history(cluster, "both")
        assert both == [(6, 0, 10), (DISK_HISTORY, 0, 10), (6,), (7,), (8,), (9,), (10,)]
        assert await history(cluster, "resumed", start=6, uuid=uuid) == [(DISK_HISTORY, 6, 10), (7,), (8,), (9,), (10,)]
        plain = await Client.streamed(cluster, 10, name="plain")
        assert (plain.markers(), data(plain)) == ([(0, 10, 6)], [8, 9, 10])
        assert plain.state(0) == {key: item.value for key, item in state_at(cluster.vbucket(0)).items()}


async def test_the_part_without_history_ends_before_its_snapshot() -> None:
    async with SandboxCluster(vbuckets=1, keeps_history=True) as cluster:
        for key in "abab":
            cluster.set(key, {})
        cluster.set("old", {})
        for key in "aab":
            cluster.set(key, {})
        cluster.bucket.to_disk()
        cluster.bucket.discard_history(below_seqno=7)
        assert await history(cluster, "x") == [(6, 0, 8), (5,), (DISK_HISTORY, 0, 8), (7,), (8,)]
        cluster.bucket.discard_history()
        assert await history(cluster, "y") == [(6, 0, 8), (5,), (7,), (8,)]
        cluster.set("a", {})
        cluster.set("a", {})
        cluster.bucket.to_disk()
        assert await history(cluster, "z") == [(6, 0, 10), (5,), (8,), (DISK_HISTORY, 0, 10), (9,), (10,)]


async def test_live_snapshots_of_change_streams_deduplicate_only_collections_without_history() -> None:
    async with SandboxCluster(vbuckets=1, keeps_history=True) as cluster:
        cluster.bucket.create_scope("s")
        cluster.bucket.create_collection("s", "c")
        cluster.bucket.modify_collection("s.c", history=False)
        client = await Client.dcp(cluster, change_streams="true")
        for _ in range(3):
            cluster.set("k", {})
            cluster.set("k", {}, collection="s.c")
        await client.stream(0, start=3, uuid=cluster.vbucket(0).vbuuid)
        await client.until_seqno(0, 9)
        assert client.markers() == [(3, 9, 5 | 0x30)]
        assert data(client) == [4, 6, 8, 9]


async def test_a_backfill_with_history_has_every_version_that_the_filter_shows() -> None:
    async with SandboxCluster(vbuckets=1, keeps_history=True) as cluster:
        cluster.bucket.create_scope("s")
        cluster.bucket.create_collection("s", "c")
        for _ in range(2):
            cluster.set("k", {}, collection="s.c")
        cluster.bucket.to_disk()
        value = b'{"collections":["8"]}'
        client = await Client.streamed(cluster, 4, value=value, change_streams="true")
        assert client.markers() == [(0, 4, DISK_HISTORY)]
        assert data(client) == [3, 4]
        plain = await Client.streamed(cluster, 4, value=value, name="plain")
        assert data(plain) == [4]


async def test_collections_are_modified_and_flushed_in_the_shape_that_the_client_requested(
    cluster: SandboxCluster,
) -> None:
    bucket = cluster.bucket
    flat = await Client.dcp(cluster, name="flat", flatbuffers_system_events="true")
    fixed = await Client.dcp(cluster, name="fixed")
    scoped = await Client.dcp(cluster, name="scoped", flatbuffers_system_events="true")
    bucket.create_scope("s")
    for client, value in ((flat, b""), (fixed, b""), (scoped, b'{"scope":"8"}')):
        await client.stream(0, value=value)
    bucket.create_collection("s", "c")
    cluster.set("gone", {}, collection="s.c")
    bucket.modify_collection("s.c", max_ttl=60)
    bucket.flush_collection("s.c")
    cluster.set("k", {}, collection="s.c")
    for client in (flat, fixed, scoped):
        await client.until_seqno(0, 6)
    reported = [decode_system_event(e) for e in flat.of(ev.SystemEvent)]
    assert reported == [decode_system_event(e) for e in scoped.of(ev.SystemEvent)]
    assert reported == [
        ev.ScopeCreated(1, 8, "s"),
        ev.CollectionCreated(2, 8, 8, "c"),
        ev.CollectionModified(3, 8, 8, "c", 60),
        ev.CollectionCreated(4, 8, 8, "c", 60, flush_uid=4),
    ]
    assert [decode_system_event(e) for e in fixed.of(ev.SystemEvent)] == [
        ev.ScopeCreated(1, 8, "s"),
        ev.CollectionCreated(2, 8, 8, "c"),
        ev.CollectionCreated(4, 8, 8, "c", 60),
    ]
    assert fixed.state(0).keys() == {b"\x08k"}
    bucket.modify_collection("s.c", max_ttl=None)
    bucket.to_disk()
    for name, kind in (("flat again", ev.SystemEvent), ("fixed again", ev.SeqnoAdvanced)):
        controls: dict[str, Any] = {"flatbuffers_system_events": "true"} if kind is ev.SystemEvent else {}
        client = await Client.streamed(cluster, 7, name=name, **controls)
        assert isinstance(client.events[-1], kind)
    bucket.drop_collection("s.c")
    bucket.to_disk()
    last = await Client.streamed(cluster, 8, name="last", flatbuffers_system_events="true")
    assert [e.event for e in last.of(ev.SystemEvent)] == [3, 1]
