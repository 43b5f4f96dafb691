"""Every conversation of real engines, replayed into machines over a toy store; tests/feed compares what is stored."""

from __future__ import annotations

import pytest

from mirror.ingest import instructions as ins
from mirror.ingest.state import Phase
from tests import recordings
from tests.ingest.recordings import Replay

NAMES = [name for name in recordings.names() if not name.startswith("sdk_")]
OUT_OF_ORDER = "72_k14_oso_collection"
SYNC_WRITES = "72_k22_marker_v2_replica"
COMPARABLE = recordings.notes("comparable")
REFUSED = (OUT_OF_ORDER, SYNC_WRITES)
"""These streams have messages that a mirror does not request."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_no_recording_breaks_a_machine(name: str) -> None:
    for rig in Replay(name).run().rigs.values():
        assert rig.machine.shown.violation_count == 0
        assert not rig.machine.assembler.holds_part or name not in COMPARABLE, "part of a snapshot was left"


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


def test_an_out_of_order_snapshot_breaks_the_protocol() -> None:
    [rig] = Replay(OUT_OF_ORDER).run().rigs.values()
    assert rig.machine.shown.violation_count
    assert not rig.store.published
    assert "an out-of-order snapshot (flags 0x1), which was not requested" in rig.reports[-1].text


def test_a_commit_without_its_value_breaks_the_protocol() -> None:
    [rig] = Replay(SYNC_WRITES).run().rigs.values()
    assert rig.machine.shown.violation_count
    assert "without its value, which was not requested" in rig.reports[-1].text


def test_a_request_refused_for_missing_noops_waits_for_people_and_then_goes_on() -> None:
    [rig] = Replay("605_h3_include_xattrs").run().rigs.values()
    assert any(report.status is ins.VbucketStatus.REFUSED and "enable_noop" in report.text for report in rig.reports)
    assert rig.machine.phase is Phase.STREAMING


def test_a_state_change_refreshes_the_map_and_asks_again() -> None:
    [rig] = Replay("605_g2_end_state_changed").run().rigs.values()
    assert any("changed its state" in report.text for report in rig.reports)
    assert rig.store.served.seqno == 206
