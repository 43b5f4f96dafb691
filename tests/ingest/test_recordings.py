"""Real engines as the source: every recording is replayed into machines over a toy store, and compared with what the
engine itself said of its keys afterwards.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mirror.ingest import instructions as ins
from mirror.ingest.state import Phase
from mirror.wire.events import Mutation
from mirror.wire.leb128 import decode as decode_leb128
from storage.model import Manifest
from tests import recordings
from tests.ingest.recordings import Replay, compare, recorded_states, state_key
from tests.ingest.toy_store import ToyBoundary, ToyStore

NAMES = [name for name in recordings.names() if not name.startswith("sdk_")]
OUT_OF_ORDER = "72_k14_oso_collection"
SYNC_WRITES = "72_k22_marker_v2_replica"
REFUSED = (OUT_OF_ORDER, SYNC_WRITES)
"""These streams have messages that a mirror does not request."""
COMPARABLE = [name for name in NAMES if recorded_states(name) and name not in REFUSED]
NO_VALUE = {"605_h7_no_value", "605_h8_no_value_xattrs", "72_h7_no_value", "72_h8_no_value_xattrs"} | {
    "72_h11_no_value_underlying_dt"
}


def compared(replay: Replay, vbid: int, recorded: dict[str, Any]) -> tuple[Counter[str], set[str]]:
    """How the published documents of a vbucket compare, and the keys that did."""
    keys: dict[str, Any] = recorded["keys"]
    with_collection = all(key.partition(":")[0] in ("0", "8", "9", "a", "1234") for key in keys)
    verdicts: Counter[str] = Counter()
    seen = set()
    for (rig_vbid, _), rig in replay.rigs.items():
        if rig_vbid != vbid:
            continue
        for wire_key, event in rig.store.served.documents.items():
            key = state_key(wire_key, with_collection=with_collection)
            state = keys.get(key)
            if state is not None and "cas" in state:
                verdict = compare(event, state)
                verdicts[verdict] += 1
                seen.add(key)
                assert verdict != "differs", (key, event, state)
            elif key in keys:
                raise AssertionError(f"{key} is held, and the engine says it does not exist")
    return verdicts, seen


@pytest.mark.parametrize("name", COMPARABLE)
def test_what_is_published_is_what_the_engine_holds(name: str) -> None:
    replay = Replay(name).run()
    for vbid, recorded in recorded_states(name).items():
        verdicts, seen = compared(replay, vbid, recorded)
        comparable = recorded["comparable"]
        absent = set(comparable["in_state_not_in_stream"])
        assert not absent & seen
        live = comparable["equal_live"] + len(comparable["differs"])
        assert verdicts["tombstone"] == comparable["equal_tombstones"]
        if name in NO_VALUE:
            assert verdicts["live"] + verdicts["without_value"] == live + comparable["equal_without_value"]
        else:
            assert verdicts["live"] == live
    for rig in replay.rigs.values():
        assert rig.machine.shown.violation_count == 0
        assert not rig.machine.assembler.holds_part, "part of a snapshot was left"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*COMPARABLE, *REFUSED)])
def test_no_recording_breaks_a_machine(name: str) -> None:
    for rig in Replay(name).run().rigs.values():
        assert rig.machine.shown.violation_count == 0


@pytest.mark.parametrize("name", ["605_a_backfill_then_live", "72_k1_collections_live"])
@pytest.mark.parametrize("run_rows_max", [1, 7])
def test_how_rows_are_cut_into_runs_makes_no_difference(name: str, run_rows_max: int) -> None:
    whole, cut = Replay(name).run(), Replay(name, run_rows_max).run()
    for key, rig in whole.rigs.items():
        assert cut.rigs[key].store.served == rig.store.served
        assert cut.rigs[key].store.published == rig.store.published


def test_live_snapshots_are_published_one_by_one() -> None:
    [rig] = Replay("605_a_backfill_then_live").run().rigs.values()
    assert len(rig.store.published) == 37
    assert rig.store.published == sorted(set(rig.store.published))


@pytest.mark.parametrize("server", ["605", "72"])
def test_after_a_crash_of_the_source_the_lost_tail_is_gone(server: str) -> None:
    """The recording goes on from another, in which 110 mutations came that the crash then lost."""
    [before] = Replay(f"{server}_d1_before_crash").run().rigs.values()
    store = before.store
    assert store.served.seqno == 210
    lost = {event.key for event in store.served.documents.values() if event.seqno > 100}
    kept = {key: event for key, event in store.served.documents.items() if event.seqno <= 100}
    assert len(lost) == 110
    store.staging.boundaries.insert(1, ToyBoundary(100, kept, Manifest.initial()))  # as if published on its way

    replay = Replay(f"{server}_d2_rollback_after_crash", stores={9: store}).run()
    [rig] = replay.rigs.values()
    assert store.rollbacks == [(210, 100)]
    assert [request.offset.start_seqno for request in rig.outbox if isinstance(request, ins.RequestStream)] == [
        210,
        100,
    ]
    assert store.served.seqno == 135
    [recorded] = recorded_states(f"{server}_d2_rollback_after_crash").values()
    verdicts, seen = compared(replay, 9, recorded)
    assert verdicts["live"] == len(store.served.documents) == 85  # 50 of the 100 had been overwritten, and deduplicated
    assert not any(key.startswith("lost-") for key in seen)


def test_without_a_kept_boundary_a_rollback_is_a_resync_next_to_the_old_copy() -> None:
    store = ToyStore(9).holding(210)
    [rig] = Replay("605_d2_rollback_after_crash", stores={9: store}).run().rigs.values()
    assert rig.machine.resyncing
    assert store.served.seqno == 210
    assert rig.last(ins.RequestStream).offset.start_seqno == 0


def test_below_the_purge_seqno_everything_is_fetched_again_and_the_tombstones_go() -> None:
    replay = Replay("605_l2_rollback_after_purge").run()
    [rig] = replay.rigs.values()
    assert not rig.machine.resyncing
    assert all(isinstance(event, Mutation) for event in rig.store.served.documents.values())
    assert len(rig.store.served.documents) == 110


def test_a_resumed_snapshot_is_published_once_at_its_end() -> None:
    [rig] = Replay("72_c_resume_mid_snapshot").run().rigs.values()
    assert rig.store.published == [3010]
    [request] = [request for request in rig.outbox if isinstance(request, ins.RequestStream)]
    assert (request.offset.snap_start_seqno, request.offset.start_seqno, request.offset.snap_end_seqno) == (
        0,
        1736,
        3010,
    )


def test_an_out_of_order_snapshot_breaks_the_protocol() -> None:
    [rig] = Replay(OUT_OF_ORDER).run().rigs.values()
    assert rig.machine.shown.violation_count
    assert not rig.store.published
    assert "an out-of-order snapshot (flags 0x1), which was not requested" in rig.reports[-1].text


def test_a_commit_without_its_value_breaks_the_protocol() -> None:
    [rig] = Replay(SYNC_WRITES).run().rigs.values()
    assert rig.machine.shown.violation_count
    assert "without its value, which was not requested" in rig.reports[-1].text


def test_dropped_collections_take_their_documents_along_and_leave_the_manifest() -> None:
    [rig] = Replay("72_k1_collections_live").run().rigs.values()
    manifest = rig.store.served.manifest
    assert manifest.uid == 4
    assert {collection.name for collection in manifest.collections.values()} >= {"_default", "hotel"}
    assert "route" not in {collection.name for collection in manifest.collections.values()}
    assert {decode_leb128(key)[0] for key in rig.store.served.documents} <= set(manifest.collections)


def test_a_request_refused_for_missing_noops_waits_for_people_and_then_goes_on() -> None:
    [rig] = Replay("605_h3_include_xattrs").run().rigs.values()
    assert any(report.status is ins.VbucketStatus.REFUSED and "enable_noop" in report.text for report in rig.reports)
    assert rig.machine.phase is Phase.STREAMING


def test_a_state_change_refreshes_the_map_and_asks_again() -> None:
    [rig] = Replay("605_g2_end_state_changed").run().rigs.values()
    assert any("changed its state" in report.text for report in rig.reports)
    assert rig.store.served.seqno == 206
