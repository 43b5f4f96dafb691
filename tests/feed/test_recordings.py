"""Every recording of a real engine, served to the real consumer into the real store: the store equals the recorded
state, key by key, in all that comparable.json counts as equal.

Recordings that resume or roll back are preceded by a script that gives the store the state they presuppose: the
session before (d1 before d2), or one made from the recorded state and the recording's notes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mirror.wire import events as ev
from mirror.wire.codec_dcp import decode, decode_failover_log
from mirror.wire.constants import SnapshotFlag, Status
from storage.admin.check import check
from storage.model import Document, Kind
from storage.read.view import open_view
from tests import recordings
from tests.feed.harness import Mirror
from tests.feed.recorded_source import RecordedSource, Script, fresh_exchange, mirror_at, read_script, stored_events

COMPARABLE: dict[str, dict[str, dict[str, Any]]] = recordings.notes("comparable")
REFUSED = ("72_k14_oso_collection", "72_k19_two_stream_ids", "72_k22_marker_v2_replica")
"""A mirror requests no such streams."""
DISK = int(SnapshotFlag.DISK)
UNKNOWN_VBUUID = 0x1122334455667788


def notes_of(name: str) -> dict[str, Any]:
    notes: dict[str, Any] = recordings.notes(name)
    return notes


def states_of(name: str) -> dict[int, dict[str, Any]]:
    state = notes_of(name)["state"]
    return {state["vbucket"]: state} if "vbucket" in state else {int(vbid): held for vbid, held in state.items()}


def ghosts(vbid: int, seqnos: range | list[int], names: list[str] | None = None) -> list[ev.Event]:
    """Documents that the recorded source does not have (any more)."""
    return [
        ev.Mutation(vbid, (names[index] if names else f"ghost-{seqno}").encode(), seqno, 1, seqno, value=b"{}")
        for index, seqno in enumerate(seqnos)
    ]


def log_of(state: dict[str, Any]) -> list[tuple[int, int]]:
    return [(entry["uuid"], entry["seqno"]) for entry in state["failover_log"]]


def marker(vbid: int, start: int, end: int, flags: int = DISK) -> ev.SnapshotMarker:
    return ev.SnapshotMarker(vbid, start, end, flags)


# What comes before: scripts that are played one after the other, each with the seqnos that are then published and
# staged. The source restarts between them, so that each ends in a commit of its own and its boundary is kept.
Step = tuple[Script, int, int]
FEATURES = frozenset((6, 7, 8, 11))


def step(vbid: int, log: list[tuple[int, int]], published: int, staged: int, events: list[ev.Event]) -> Step:
    return Script(FEATURES, {vbid: [fresh_exchange(vbid, log, events)]}), published, staged


def before_mid_snapshot(name: str) -> list[Step]:
    """An earlier session saw the marker and stopped inside of it."""
    ((vbid, state),) = states_of(name).items()
    requested = notes_of(name)["request"]
    events = [marker(vbid, 0, requested["snap_end"]), *stored_events(state, vbid, requested["start"])]
    return [step(vbid, [(requested["vbuuid"], 0)], 0, requested["start"], events)]


def before_whole(name: str, last_seqno: int, log: list[tuple[int, int]] | None = None) -> list[Step]:
    """An earlier session held everything up to a seqno."""
    ((vbid, state),) = states_of(name).items()
    events = stored_events(state, vbid, last_seqno)
    if not events or events[-1].seqno != last_seqno:  # type: ignore[attr-defined]
        events.append(ev.Deletion(vbid, b"overwritten later", last_seqno, 1, 1))
    return [step(vbid, log or log_of(state), last_seqno, last_seqno, [marker(vbid, 0, last_seqno), *events])]


def before_crash(name: str) -> list[Step]:
    """Everything up to seqno 100, which was on disk, then the changes that the crash lost."""
    script = read_script(name.replace("d2_rollback_after_crash", "d1_before_crash"))
    ((vbid, (exchange,)),) = script.exchanges.items()
    events = [decode(message) for message in exchange.messages]
    lost = [event for event in events if getattr(event, "seqno", 0) > 100]
    log = decode_failover_log(exchange.body)
    return [*before_whole(name, 100, log), step(vbid, log, 210, 210, [marker(vbid, 101, 210, 1), *lost])]


def before_lost_branch(name: str) -> list[Step]:
    """Ten documents beyond the point where the source's history branched off."""
    (vbid,) = states_of(name)
    log = [(entry["uuid"], entry["seqno"]) for entry in notes_of(name)["failover_before"]]
    later = [marker(vbid, 136, 145, 1), *ghosts(vbid, range(136, 146))]
    return [*before_whole(name, 135, log), step(vbid, log, 145, 145, later)]


def before_beyond_high(name: str) -> list[Step]:
    """A thousand documents beyond the source's high seqno."""
    ((vbid, state),) = states_of(name).items()
    held = ghosts(vbid, range(1, 156), [f"kept-{seqno}" for seqno in range(1, 156)])
    later = [marker(vbid, 156, 1155, 1), *ghosts(vbid, range(156, 1156))]
    log = log_of(state)
    return [step(vbid, log, 155, 155, [marker(vbid, 0, 155), *held]), step(vbid, log, 1155, 1155, later)]


def before_purge(name: str) -> list[Step]:
    """The documents whose tombstones were purged meanwhile, still alive at seqno 100."""
    ((vbid, state),) = states_of(name).items()
    vbuuid = read_script(name).exchanges[vbid][0].request.vbuuid
    purged = [key for key, held in state["keys"].items() if held is None]
    held = stored_events(state, vbid, 100)
    events = [marker(vbid, 0, 100), *ghosts(vbid, list(range(1, 1 + len(purged))), purged), *held]
    assert events[-1].seqno == 100  # type: ignore[attr-defined]
    return [step(vbid, [(vbuuid, 0)], 100, 100, events)]


BEFORE: dict[str, Callable[[str], list[Step]]] = {
    "c_resume_mid_snapshot": before_mid_snapshot,
    "c2_resume_at_high_seqno": lambda name: before_whole(name, 3010),
    "d2_rollback_after_crash": before_crash,
    "d3_rollback_unknown_vbuuid": lambda name: before_whole(name, 125, [(UNKNOWN_VBUUID, 0)]),
    "d4_rollback_new_failover_entry": before_lost_branch,
    "d5_rollback_beyond_high": before_beyond_high,
    "l2_rollback_after_purge": before_purge,
}


PLAYED = sorted(name for name in COMPARABLE if name not in REFUSED)
NEWEST = {name.partition("_")[2]: name for name in PLAYED}.values()
"""By default each scenario is played as the newest recorded release sent it; .ci/run plays all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in NEWEST else pytest.mark.ci) for name in PLAYED]
)
async def test_the_store_equals_the_recorded_state(name: str, tmp_path: Path) -> None:
    script = read_script(name)
    vbids = sorted(script.exchanges)
    assert set(vbids) == {int(vbid) for vbid in COMPARABLE[name]}
    mirror = mirror_at(tmp_path, connection_buffer_size=16 * 1024)
    before = BEFORE[name.partition("_")[2]](name) if name.partition("_")[2] in BEFORE else []
    async with RecordedSource(script, seed=len(name)) as source:
        for index, (earlier, published_seqno, staged_seqno) in enumerate(before):
            source.play_next(earlier)
            if index == 0:
                mirror.start(source.connection_string)
            await mirror.until_published(vbids[0], published_seqno)
            await mirror.until(partial(has_staged, mirror, vbids[0], staged_seqno), "staged")
        if before:
            source.last_end.clear()
            source.requests.clear()
            source.play_next(script)
        else:
            mirror.start(source.connection_string)
        refused = {vbid for vbid in vbids if all(e.status != Status.SUCCESS for e in script.exchanges[vbid])}
        for vbid in vbids:
            if vbid in refused:
                await mirror.until(lambda: bool(source.statuses_sent), "refusal")
                await mirror.until_state(vbid, "waiting", "refused")
            else:
                await mirror.until(lambda: bool(source.requests), "a request")
                await mirror.until_state(vbid, "streaming", "backfilling")
                await mirror.until(partial(is_at_end, mirror, script, source, vbid), f"vb {vbid} at the end")
        assert_window_is_whole(mirror, source)
        if before:
            assert_request_was_the_recorded_one(name, source)
        counters = mirror.consumer.status()["counters"] if mirror.consumer else {}
        assert counters["requested_again_bytes"] == 0
        await mirror.stop()
    assert check(mirror.path).problems == []
    for vbid in vbids:
        compare(mirror.path, name, vbid, whole=bool(before))


def is_at_end(mirror: Mirror, script: Script, source: RecordedSource, vbid: int) -> bool:
    """True at the end of the last snapshot, or at the start of a stream that brought nothing."""
    end = source.last_end.get(vbid) or script.exchanges[vbid][-1].request.start_seqno
    return bool(mirror.row(vbid)["published_seqno"] == end)


def has_staged(mirror: Mirror, vbid: int, seqno: int) -> bool:
    return bool(mirror.row(vbid)["staged_seqno"] == seqno)


def assert_window_is_whole(mirror: Mirror, source: RecordedSource) -> None:
    """Assert that both sides count the same bytes as not acknowledged."""
    assert mirror.consumer is not None
    (node,) = mirror.consumer.status()["nodes"]
    if node["ready"] and source.windows[-1].window_bytes:
        assert node["received_bytes"] - node["acked_bytes"] == node["unacked_bytes"]
        assert source.windows[-1].outstanding >= node["unacked_bytes"]


def assert_request_was_the_recorded_one(name: str, source: RecordedSource) -> None:
    recorded = next(iter(read_script(name).exchanges.values()))
    expected = {(exchange.request.start_seqno, exchange.request.vbuuid) for exchange in recorded}
    first = source.requests[0]
    assert (first.start_seqno, first.vbuuid) in expected


def compare(path: str, name: str, vbid: int, *, whole: bool) -> None:
    """The state of one vbucket, key by key. `whole`: what the stream did not bring was there before, equal too."""
    state, rules = states_of(name)[vbid], COMPARABLE[name][str(vbid)]
    left_out = {*rules["in_state_not_in_stream"], *rules["differs"]}
    with open_view(path, partial=True) as view:
        stored = {
            (document.collection_id, document.key): document for document in view.scan(vbid, deletions=True, now=0)
        }
        raw = {
            (document.collection_id, document.key): document.value
            for document in view.scan(vbid, deletions=True, now=0, raw=True)
        }
    live_count = tombstone_count = without_value_count = 0
    live_in_state = set()
    for text, held in state["keys"].items():
        identity = key_of(name, text)
        document = stored.get(identity)
        if held is None or held.get("get_status") in ("UNKNOWN_COLLECTION", "UNKNOWN_SCOPE"):
            assert document is None or document.deleted, f"{text} must not be there"
            continue
        if not held["deleted"]:
            live_in_state.add(identity)
        counted = text not in left_out
        if not counted and (not whole or text in rules["differs"]):
            continue
        assert document is not None, f"{text} is missing"
        assert document.deleted == bool(held["deleted"]), text
        assert (document.cas, document.rev_seqno) == (held["cas"], held["rev"]), text
        if (seqno := seqno_of(state, text, held)) is not None:
            assert document.seqno == seqno, text
        if document.deleted:
            tombstone_count += counted
            continue
        assert (document.flags, document.expiry) == (held["flags"], held["expiry"]), text
        if rules["equal_without_value"] and not raw[identity]:
            without_value_count += counted
        elif rules["equal_without_value"]:
            assert raw[identity][4:8] != b"", "a value that is xattrs alone"
            assert document.value == b"", text
            live_count += counted
        else:
            assert equal_value(document, held["value"]), text
            live_count += counted
    assert (live_count, tombstone_count, without_value_count) == (
        rules["equal_live"],
        rules["equal_tombstones"],
        rules["equal_without_value"],
    )
    extra = {identity for identity, document in stored.items() if not document.deleted} - live_in_state
    # The recorder looked only for its own keys in some states: what else there is must have come in the stream.
    streamed = {message.key for exchange in read_script(name).exchanges[vbid] for message in exchange.messages}
    assert all(key.startswith(b"kept-") or key in streamed for _, key in extra), extra
    assert not any(key.startswith((b"ghost-", b"lost-")) for _, key in extra)
    assert all(document.kind in (Kind.MUTATION, Kind.DELETION, Kind.EXPIRATION) for document in stored.values())


def key_of(name: str, text: str) -> tuple[int, bytes]:
    collection_id = 0
    if name.startswith("72_k"):
        collection_text, _, text = text.partition(":")
        collection_id = int(collection_text, 16)
    return collection_id, bytes.fromhex(text[4:]) if text.startswith("hex:") else text.encode()


def seqno_of(state: dict[str, Any], text: str, held: dict[str, Any]) -> int | None:
    if "disk" in held:
        return int(held["disk"]["seq"])
    on_disk = state.get("disk")
    if isinstance(on_disk, dict) and isinstance(on_disk.get(text), dict):
        return int(on_disk[text]["seq"])
    return None


def equal_value(document: Document, held: Any) -> bool:
    if isinstance(held, dict):
        return (len(document.value), hashlib.sha256(document.value).hexdigest()) == (held["len"], held["sha256"])
    if isinstance(held, str) and held.startswith("hex:"):
        return document.value == bytes.fromhex(held[4:])
    return document.value == (held or "").encode()


async def test_a_rollback_below_the_only_boundary_resyncs_the_vbucket(tmp_path: Path) -> None:
    """d1 as it was recorded, one snapshot up to 210: no boundary is kept at or below 100, so everything comes again."""
    name = "72_d2_rollback_after_crash"
    first = read_script("72_d1_before_crash")
    script = read_script(name)
    (accepted,) = (exchange for exchange in script.exchanges[9] if exchange.status == Status.SUCCESS)
    held = [marker(9, 0, 100), *stored_events(states_of(name)[9], 9, 100)]
    accepted.messages = fresh_exchange(9, [], held).messages + accepted.messages
    mirror = mirror_at(tmp_path)
    async with RecordedSource(first) as source:
        mirror.start(source.connection_string)
        await mirror.until_published(9, 210)
        source.requests.clear()
        source.play_next(script)
        await mirror.until(lambda: mirror.row(9)["published_seqno"] == 135, "the new copy")
        assert [requested.start_seqno for requested in source.requests][-1] == 0
        await mirror.stop()
    assert check(mirror.path).problems == []
    compare(mirror.path, name, 9, whole=True)


def test_every_comparable_recording_exists() -> None:
    assert set(COMPARABLE) <= set(recordings.names())
    assert len(COMPARABLE) >= 70
