"""Every recording of a real engine, served to the real consumer into the real store: the store equals the recorded
state, key by key, in all that comparable.json counts as equal.

Recordings that resume or roll back are preceded by a script that gives the store the state they presuppose: the
session before (d1 before d2), or one made from the recorded state and the recording's notes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mirror.wire import events as ev
from mirror.wire.constants import SnapshotFlag, Status
from storage.check import check
from storage.model import Document, Kind
from storage.view import open_view
from tests.feed.conftest import CAPTURES
from tests.feed.harness import Mirror
from tests.feed.recorded_source import (
    BUCKET,
    BUCKET_UUID,
    PASSWORD,
    VBUCKETS,
    RecordedSource,
    Script,
    fresh_exchange,
    read_script,
    stored_events,
)

COMPARABLE: dict[str, dict[str, dict[str, Any]]] = json.loads((CAPTURES / "comparable.json").read_text())
DISK = int(SnapshotFlag.DISK)
UNKNOWN_VBUUID = 0x1122334455667788


def notes_of(name: str) -> dict[str, Any]:
    notes: dict[str, Any] = json.loads((CAPTURES / f"{name}.json").read_text())
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


# What comes before: (script, seqno that is then published, seqno that is then staged).
Before = tuple[Script, int, int]


def before_mid_snapshot(name: str) -> Before:
    """An earlier session saw the marker and stopped inside of it."""
    ((vbid, state),) = states_of(name).items()
    asked = notes_of(name)["request"]
    events = [marker(vbid, 0, asked["snap_end"]), *stored_events(state, vbid, asked["start"])]
    log = [(asked["vbuuid"], 0)]
    return Script(frozenset((6, 7, 8, 11)), {vbid: [fresh_exchange(vbid, log, events)]}), 0, asked["start"]


def before_whole(name: str, last_seqno: int, log: list[tuple[int, int]] | None = None) -> Before:
    """An earlier session held everything up to a seqno."""
    ((vbid, state),) = states_of(name).items()
    events = stored_events(state, vbid, last_seqno)
    if not events or events[-1].seqno != last_seqno:  # type: ignore[attr-defined]
        events.append(ev.Deletion(vbid, b"overwritten later", last_seqno, 1, 1))
    script = Script(
        frozenset((6, 7, 8, 11)),
        {vbid: [fresh_exchange(vbid, log or log_of(state), [marker(vbid, 0, last_seqno), *events])]},
    )
    return script, last_seqno, last_seqno


def before_crash(name: str) -> Before:
    """The session that saw what the crash lost."""
    script = read_script(CAPTURES, name.replace("d2_rollback_after_crash", "d1_before_crash"))
    return script, 210, 210


def before_lost_branch(name: str) -> Before:
    """Ten documents beyond the point where the source's history branched off."""
    notes = notes_of(name)
    (vbid,) = states_of(name)
    log = [(entry["uuid"], entry["seqno"]) for entry in notes["failover_before"]]
    script, _, _ = before_whole(name, 135, log)
    later = [marker(vbid, 136, 145, 1), *ghosts(vbid, range(136, 146))]
    script.exchanges[vbid][0].messages += fresh_exchange(vbid, [], later).messages
    return script, 145, 145


def before_beyond_high(name: str) -> Before:
    """A thousand documents beyond the source's high seqno."""
    ((vbid, state),) = states_of(name).items()
    events = [
        marker(vbid, 0, 155),
        *ghosts(vbid, range(1, 156), [f"kept-{seqno}" for seqno in range(1, 156)]),
        marker(vbid, 156, 1155, 1),
        *ghosts(vbid, range(156, 1156)),
    ]
    return Script(frozenset((6, 7, 8, 11)), {vbid: [fresh_exchange(vbid, log_of(state), events)]}), 1155, 1155


def before_purge(name: str) -> Before:
    """The documents whose tombstones were purged meanwhile, still alive at seqno 100."""
    ((vbid, state),) = states_of(name).items()
    purged = [key for key, held in state["keys"].items() if held is None]
    held = stored_events(state, vbid, 100)
    events = [marker(vbid, 0, 100), *ghosts(vbid, list(range(1, 1 + len(purged))), purged), *held]
    assert events[-1].seqno == 100  # type: ignore[attr-defined]
    return Script(frozenset((6, 7, 8, 11)), {vbid: [fresh_exchange(vbid, log_of(state), events)]}), 100, 100


BEFORE: dict[str, Callable[[str], Before]] = {
    "c_resume_mid_snapshot": before_mid_snapshot,
    "c2_resume_at_high_seqno": lambda name: before_whole(name, 3010),
    "d2_rollback_after_crash": before_crash,
    "d3_rollback_unknown_vbuuid": lambda name: before_whole(name, 125, [(UNKNOWN_VBUUID, 0)]),
    "d4_rollback_new_failover_entry": before_lost_branch,
    "d5_rollback_beyond_high": before_beyond_high,
    "l2_rollback_after_purge": before_purge,
}


@pytest.mark.parametrize("name", COMPARABLE)
async def test_store_equals_the_recorded_state(name: str, tmp_path: Path) -> None:
    script = read_script(CAPTURES, name)
    vbids = sorted(script.exchanges)
    assert set(vbids) == {int(vbid) for vbid in COMPARABLE[name]}
    mirror = Mirror(
        tmp_path,
        bucket=BUCKET,
        bucket_uuid=BUCKET_UUID,
        vbuckets=VBUCKETS,
        password=PASSWORD,
        settings={"connection_buffer_size": 16 * 1024},
    )
    before = BEFORE.get(name.partition("_")[2])
    async with RecordedSource(script, seed=len(name)) as source:
        if before is not None:
            source.script, published_seqno, staged_seqno = before(name)
        mirror.start(source.connection_string)
        if before is not None:
            await mirror.until_published(vbids[0], published_seqno)
            await mirror.until(lambda: mirror.row(vbids[0])["staged_seqno"] == staged_seqno, "staged before")
            source.last_end.clear()
            source.requests.clear()
            source.play_next(script)
        refused = {vbid for vbid in vbids if all(e.status != Status.SUCCESS for e in script.exchanges[vbid])}
        for vbid in vbids:
            if vbid in refused:
                await mirror.until(lambda: bool(source.statuses_sent), "refusal")
                await mirror.until_state(vbid, "waiting", "refused")
            else:
                await mirror.until(lambda: bool(source.requests), "a request")
                await mirror.until_state(vbid, "streaming", "backfilling", "refused")
                await mirror.until_published(vbid, source.last_end.get(vbid, 0))
        assert_window_is_whole(mirror, source)
        if before is not None:
            assert_request_was_the_recorded_one(name, source)
        counters = mirror.consumer.status()["counters"] if mirror.consumer else {}
        assert counters["requested_again_bytes"] == 0
        await mirror.stop()
    assert check(mirror.path, deep=True).problems == []
    for vbid in vbids:
        compare(mirror.path, name, vbid)


def assert_window_is_whole(mirror: Mirror, source: RecordedSource) -> None:
    """What the source counts as unacked is what the consumer has still to ack: nothing leaked."""
    assert mirror.consumer is not None
    (node,) = mirror.consumer.status()["nodes"]
    if node["ready"] and source.windows[-1].window_bytes:
        assert node["received_bytes"] - node["acked_bytes"] == node["unacked_bytes"]
        assert source.windows[-1].outstanding >= node["unacked_bytes"]


def assert_request_was_the_recorded_one(name: str, source: RecordedSource) -> None:
    recorded = next(iter(read_script(CAPTURES, name).exchanges.values()))
    wanted = {(exchange.asked.start_seqno, exchange.asked.vbuuid) for exchange in recorded}
    first = source.requests[0]
    assert (first.start_seqno, first.vbuuid) in wanted


def compare(path: str, name: str, vbid: int) -> None:
    """The state of one vbucket, key by key."""
    state, rules = states_of(name)[vbid], COMPARABLE[name][str(vbid)]
    left_out = {*rules["in_state_not_in_stream"], *rules["differs"]}
    with open_view(path) as view:
        stored = {
            (document.collection_id, document.key): document for document in view.scan(vbid, deletions=True, now=0)
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
        if text in left_out:
            continue
        assert document is not None, f"{text} is missing"
        assert document.deleted == bool(held["deleted"]), text
        assert (document.cas, document.rev_seqno) == (held["cas"], held["rev"]), text
        if (seqno := seqno_of(state, text, held)) is not None:
            assert document.seqno == seqno, text
        if document.deleted:
            tombstone_count += 1
            continue
        assert (document.flags, document.expiry) == (held["flags"], held["expiry"]), text
        if rules["equal_without_value"] and not document.value:
            without_value_count += 1
        else:
            assert equal_value(document, held["value"]), text
            live_count += 1
    assert (live_count, tombstone_count, without_value_count) == (
        rules["equal_live"],
        rules["equal_tombstones"],
        rules["equal_without_value"],
    )
    extra = {identity for identity, document in stored.items() if not document.deleted} - live_in_state
    assert all(key.startswith(b"kept-") for _, key in extra), extra
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


def test_every_recording_with_a_comparable_state_is_here() -> None:
    recorded = {path.stem for path in CAPTURES.glob("[67]*.jsonl")}
    assert set(COMPARABLE) <= recorded
    assert len(COMPARABLE) >= 70
