"""Streams over a real socket: what is sent when, the window, noops, and what ends a stream."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from mirror.server import producer
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import MarkerVersion, Opcode, SnapshotFlag, StreamEndReason
from storage.format.keys import vbid_of
from storage.model import Collection, Seqno
from tests.serve.dcp_rig import DcpEndpoint, serving_dcp, system_event
from tests.serve.kv_rig import DEFAULT, Store

VBUCKETS = 1
UUID = 77
DISK, MEMORY = int(SnapshotFlag.DISK | SnapshotFlag.CHECKPOINT), int(SnapshotFlag.MEMORY | SnapshotFlag.CHECKPOINT)

BOMB = b"\xff\xff\xff\xff\x0f"
"""Snappy that claims to be 4 GiB."""


@pytest.mark.usefixtures("all_settled")
async def test_a_stream_sends_a_backfill_and_then_each_publish(store: Store, dcp: DcpEndpoint) -> None:
    store.put(b"a", b"old", 1)
    store.put(b"b", b"2", 2)
    store.put(b"a", b"new", 3)
    client = await dcp.client()
    assert (await client.stream(0)).status == 0
    marker, b, a = await client.events(3)
    assert marker == ev.SnapshotMarker(0, 0, 3, DISK, opaque=0x77)
    assert isinstance(b, ev.Mutation)
    assert isinstance(a, ev.Mutation)
    assert [(each.seqno, each.value) for each in (b, a)] == [(2, b"2"), (3, b"new")]
    for seqno in (4, 5):
        store.delete(b"b", seqno)
        live, gone = await client.events(2)
        assert live == ev.SnapshotMarker(0, seqno, seqno, MEMORY, opaque=0x77)
        assert isinstance(gone, ev.Deletion)
        assert (gone.key, gone.seqno, gone.delete_time) == (b"\0b", seqno, None)
    assert await client.silent()


async def test_a_new_history_ends_the_streams_before_anything_of_it_is_sent(store: Store, dcp: DcpEndpoint) -> None:
    """Or the client would call what comes by the old history's name."""
    store.put(b"a", b"1", 1)
    client = await dcp.client()
    assert (await client.stream(0)).status == 0
    await client.until_end(1)
    store.log(0, (UUID + 1, 1), (UUID, 0))
    store.put(b"b", b"2", 2)
    assert await client.event() == ev.StreamEnd(0, int(StreamEndReason.STATE_CHANGED), opaque=0x77)
    assert (await client.stream(0, 1, vbuuid=UUID)).failover_log == ((UUID + 1, 1), (UUID, 0))
    await client.until_end(2)


async def test_a_resync_ends_the_streams_and_its_copy_is_judged_by_its_own_history(
    store: Store, dcp: DcpEndpoint
) -> None:
    store.put(b"a", b"1", 5)
    client = await dcp.client()
    assert (await client.stream(0)).status == 0
    await client.until_end(5)
    store.writer.vbuckets[0].begin_resync()
    assert await client.event() == ev.StreamEnd(0, int(StreamEndReason.STATE_CHANGED), opaque=0x77)
    store.log(0, (UUID + 9, 0))
    store.put(b"z", b"1", 7)
    assert (await client.stream(0, 5, vbuuid=UUID)).rollback_seqno == 0
    assert (await client.stream(0)).status == 0
    assert (await client.until_end(7))[-1].key == b"\0z"  # type: ignore[union-attr]


@pytest.mark.usefixtures("all_settled")
async def test_the_window_is_overshot_by_one_message_at_most(store: Store, dcp: DcpEndpoint) -> None:
    for seqno in range(1, 101):
        store.put(b"key%03d" % seqno, b"x" * 300, seqno)
    one = 24 + 31 + 7 + 300
    client = await dcp.client(controls={b"connection_buffer_size": b"4096"})
    assert (await client.stream(0)).status == 0
    while not await client.silent():
        assert client.counted < 4096 + one
    assert 4096 <= client.counted < 4096 + one
    taken = client.counted
    await client.send(ack(10))
    assert await client.silent(), "the window is still full"
    await client.send(ack(taken - 10))
    seqno = 0
    while seqno < 100:
        event = await client.event()
        seqno = getattr(event, "seqno", seqno)
        if client.counted - taken > 2000:
            await client.send(ack(client.counted - taken))
            taken = client.counted
    assert await client.alive()


def ack(count: int) -> fr.Frame:
    return fr.request(Opcode.DCP_BUFFER_ACK, extras=count.to_bytes(4))


async def test_a_window_may_be_smaller_than_a_message_and_change(store: Store, dcp: DcpEndpoint) -> None:
    store.put(b"a", b"x" * 1000, 1)
    client = await dcp.client(controls={b"connection_buffer_size": b"1"})
    assert (await client.stream(0)).status == 0
    marker = await client.receive()
    assert marker is not None
    assert await client.silent()
    await client.send(ack(marker.wire_size))
    mutation = await client.receive()
    assert mutation is not None
    assert mutation.opcode == Opcode.DCP_MUTATION
    store.put(b"b", b"x", 2)
    assert await client.silent()
    assert await client.control(b"connection_buffer_size", b"0") == 0
    await client.until_end(2)


async def test_noops_are_sent_while_a_stream_is_open(store: Store, dcp: DcpEndpoint) -> None:
    client = await dcp.client(controls={b"set_noop_interval": b"0.1"})
    assert await client.silent(), "no stream, no noop"
    assert (await client.stream(0)).status == 0
    opaques = set()
    for _ in range(3):
        noop = await client.receive()
        assert noop is not None
        assert noop.opcode == Opcode.DCP_NOOP
        opaques.add(noop.opaque)
        await client.send(fr.response(noop))
    assert len(opaques) == 3
    assert await client.control(b"enable_noop", b"false") == 0


async def test_a_client_that_does_not_answer_noops_is_disconnected(
    store: Store, dcp: DcpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "IDLE_TIMEOUT_S", 0.5)
    client = await dcp.client(controls={b"set_noop_interval": b"0.1"})
    assert (await client.stream(0)).status == 0
    while (noop := await client.receive()) is not None:
        assert noop.opcode == Opcode.DCP_NOOP


@pytest.mark.usefixtures("all_settled")
async def test_a_filtered_stream_sends_its_documents_events_and_seqno_advances(store: Store, dcp: DcpEndpoint) -> None:
    carts, items = Collection(9, 8, "carts", Seqno(2)), Collection(10, 8, "items", Seqno(3))
    store.put(b"a", b"default", 1)
    system_event(store, 2, ev.CollectionCreated(2, 8, 9, "carts"), DEFAULT, carts)
    system_event(store, 3, ev.CollectionCreated(3, 8, 10, "items"), DEFAULT, carts, items)
    store.put(b"c", b"cart", 4, cid=9)
    store.put(b"i", b"item", 5, cid=10)
    client = await dcp.client()
    assert (await client.stream(0, value=b'{"collections":["9"]}')).status == 0
    marker, begin, cart, advanced = await client.events(4)
    assert isinstance(marker, ev.SnapshotMarker)
    assert marker.end_seqno == 5
    assert isinstance(begin, ev.SystemEvent)
    assert (begin.seqno, begin.key) == (2, b"carts")
    assert isinstance(cart, ev.Mutation)
    assert cart.key == b"\x09c"
    assert advanced == ev.SeqnoAdvanced(0, 5, opaque=0x77)
    store.put(b"b", b"default", 6)
    assert (await client.events(2))[1] == ev.SeqnoAdvanced(0, 6, opaque=0x77)
    system_event(store, 7, ev.CollectionDropped(7, 8, 9), DEFAULT, items)
    assert [type(each) for each in await client.events(3)] == [ev.SnapshotMarker, ev.SystemEvent, ev.StreamEnd]
    whole = await dcp.client(name="whole")
    assert (await whole.stream(0)).status == 0
    found = await whole.until_end(7)
    documents = [each.key for each in found if isinstance(each, ev.Mutation)]
    assert documents == [b"\0a", b"\x0ai", b"\0b"], "a dropped collection's documents are not sent"


@pytest.mark.usefixtures("all_settled")
async def test_superseded_system_events_are_not_sent(store: Store, dcp: DcpEndpoint) -> None:
    """Begin, flush and end of a collection have one key at a server, its settings another, a scope a third."""
    carts, items = Collection(9, 8, "carts", Seqno(1)), Collection(10, 8, "items", Seqno(2))
    flushed = Collection(10, 8, "items", Seqno(5))
    system_event(store, 1, ev.CollectionCreated(1, 8, 9, "carts"), DEFAULT, carts)
    system_event(store, 2, ev.CollectionCreated(2, 8, 10, "items"), DEFAULT, carts, items)
    system_event(store, 3, ev.CollectionModified(3, 8, 10, "items", 60), DEFAULT, carts, items)
    controls = {b"flatbuffers_system_events": b"true"}
    early = await dcp.client(name="early", controls=controls)
    assert (await early.stream(0)).status == 0
    assert [getattr(each, "seqno", None) for each in await early.until_end(3)] == [None, 1, 2, 3]
    system_event(store, 4, ev.CollectionDropped(4, 8, 9), DEFAULT, items)
    system_event(store, 5, ev.CollectionCreated(5, 8, 10, "items"), DEFAULT, flushed)
    system_event(store, 6, ev.CollectionModified(6, 8, 10, "items", 70), DEFAULT, flushed)
    system_event(store, 7, ev.ScopeCreated(7, 12, "gone"), DEFAULT, flushed)
    system_event(store, 8, ev.ScopeDropped(8, 12), DEFAULT, flushed)
    late = await dcp.client(name="late", controls=controls)
    assert (await late.stream(0)).status == 0
    assert [getattr(each, "seqno", None) for each in await late.until_end(8)] == [None, 4, 5, 6, 8]
    assert (await late.say(ev.CloseStream(0))).status == 0
    assert (await late.stream(0, 3, vbuuid=UUID)).status == 0
    found = [getattr(each, "seqno", None) for each in await late.until_end(8)]
    assert found == [None, 4, None, 5, None, 6, None, 7, None, 8], "each was published by itself"


async def test_a_client_without_collections_gets_snapshots_that_end_in_a_document(
    store: Store, dcp: DcpEndpoint
) -> None:
    store.put(b"a", b"default", 1)
    system_event(store, 2, ev.CollectionCreated(2, 8, 9, "carts"), DEFAULT, Collection(9, 8, "carts", Seqno(2)))
    for seqno in range(3, 2103):
        store.put(b"c%d" % seqno, b"cart", seqno, cid=9, publish=seqno == 2102)
    client = await dcp.client(features=(0x07, 0x08), flags=1)
    assert (await client.stream(0)).status == 0
    marker, document = await client.events(2)
    assert isinstance(marker, ev.SnapshotMarker)
    assert marker.end_seqno == 1
    assert isinstance(document, ev.Mutation)
    assert document.key == b"a"
    assert await client.silent()
    store.put(b"b", b"default", 2103)
    assert [getattr(each, "seqno", None) for each in await client.events(2)] == [None, 2103]
    assert (await client.stream(0, value=b'{"uid":"0"}')).status != 0


@pytest.mark.parametrize(
    ("controls", "purged", "expected"),
    [
        ({b"max_marker_version": b"2.2"}, 3, (MarkerVersion.V2_2, 3)),
        ({b"max_marker_version": b"2.2"}, 0, (MarkerVersion.V2_2, 0)),
        ({}, 3, (MarkerVersion.V1, 0)),
    ],
)
async def test_a_marker_reports_the_purge_seqno_if_the_client_requested_it(
    store: Store, dcp: DcpEndpoint, controls: dict[bytes, bytes], purged: int, expected: tuple[int, int]
) -> None:
    store.writer.vbuckets[0].save(failover_log=store.writer.vbuckets[0].state.failover_log, missing_seqno=purged)
    store.put(b"a", b"1", 5)
    client = await dcp.client(controls=controls)
    assert (await client.stream(0)).status == 0
    marker = await client.event()
    assert isinstance(marker, ev.SnapshotMarker)
    assert (marker.version, marker.purge_seqno, marker.max_visible_seqno) == (*expected, 0)


@pytest.mark.parametrize("order", [b"sequential", b"round-robin"])
@pytest.mark.usefixtures("all_settled")
async def test_backfills_follow_each_other_or_take_turns(tmp_path: Path, order: bytes) -> None:
    store = Store(tmp_path, vbuckets=4)
    store.logs(UUID)
    last: dict[int, int] = {}
    for seqno in range(1, 401):
        vbid = store.put(b"key%d" % seqno, b"x" * 20_000, seqno)
        last[vbid] = seqno
    async with serving_dcp(store.path) as dcp:
        client = await dcp.client(controls={b"backfill_order": order})
        for vbid in last:
            assert (await client.stream(vbid, opaque=vbid)).status == 0
        seen: list[int] = []
        while len(seen) < 400:
            event = await client.event()
            if isinstance(event, ev.Mutation):
                assert event.opaque == event.vbid
                seen.append(event.vbid)
        changes = sum(a != b for a, b in itertools.pairwise(seen))
        assert (changes == 3) == (order == b"sequential")
        status = dcp.server.status()
        assert (status["dcp_documents"], status["dcp_snapshots"]) == (400, 4)
    store.close()


async def test_live_changes_come_between_the_pieces_of_a_backfill(tmp_path: Path) -> None:
    store = Store(tmp_path, vbuckets=2)
    store.logs(UUID)
    large = store.put(b"key1", b"x" * 20_000, 1)
    for number in range(2, 600):
        if vbid_of(b"key%d" % number, 2) == large:
            store.put(b"key%d" % number, b"x" * 20_000, number)
    async with serving_dcp(store.path) as dcp:
        client = await dcp.client(controls={b"connection_buffer_size": b"100000"})
        assert (await client.stream(1 - large, opaque=1)).status == 0
        assert (await client.stream(large, opaque=2)).status == 0
        await client.event()
        live = next(key for key in (b"live%d" % number for number in range(99)) if vbid_of(key, 2) != large)
        store.put(live, b"now", 1)
        after = 0
        while True:
            event = await client.event()
            await client.send(ack(client.counted))
            client.counted = 0
            if event.opaque == 1 and isinstance(event, ev.Mutation):
                break
            after += 1
        assert after < 60, "it did not wait for the end of the other's snapshot"
    store.close()


async def test_a_malformed_value_is_sent_as_stored_and_the_stream_goes_on(store: Store, dcp: DcpEndpoint) -> None:
    store.put(b"a", BOMB, 1, datatype=2)
    store.put(b"b", b"fine", 2)
    client = await dcp.client(features=(0x06, 0x07, 0x08, 0x0B, 0x12))
    assert (await client.stream(0)).status == 0
    found = [each for each in await client.until_end(2) if isinstance(each, ev.Mutation)]
    assert [(each.value, each.datatype) for each in found] == [(BOMB, 2), (b"fine", 0)]


async def test_a_damaged_row_ends_only_its_own_stream(
    store: Store, dcp: DcpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> bytes:
        raise ValueError("metadata of 9 bytes in 1 byte of value")

    monkeypatch.setattr("mirror.serve.dcp.encoder.RowEncoder._document", damaged)
    store.put(b"a", BOMB, 1, datatype=2)
    client = await dcp.client(features=(0x06, 0x07, 0x08, 0x0B, 0x12))
    assert (await client.stream(0)).status == 0
    _, end = await client.events(2)
    assert end == ev.StreamEnd(0, int(StreamEndReason.BACKFILL_FAIL), opaque=0x77)
    assert await client.alive()
