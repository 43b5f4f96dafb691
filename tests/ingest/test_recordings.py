"""Every conversation of real engines, replayed into machines over a toy store; tests/feed compares what is stored."""

from __future__ import annotations

import pytest

from mirror.ingest import instructions as ins
from mirror.ingest.state import Phase
from tests import recordings
from tests.ingest.recordings import Replay

NAMES = [name for name in recordings.names() if not name.startswith("sdk_")]
COMPARABLE = recordings.notes("comparable")
REFUSED = {
    "72_k14_oso_collection": "an out-of-order snapshot (flags 0x1), which was not requested",
    "72_k22_marker_v2_replica": "without its value, which was not requested",
}
"""Streams with messages that a mirror does not request."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_a_recording_is_replayed_without_a_violation(name: str) -> None:
    for rig in Replay(name).run().rigs.values():
        assert rig.violation_count == 0
        assert not rig.machine.assembler.holds_part or name not in COMPARABLE, "part of a snapshot was left"


def test_live_snapshots_are_published_one_by_one() -> None:
    [rig] = Replay("605_a_backfill_then_live").run().rigs.values()
    assert len(rig.store.published) == 37
    assert rig.store.published == sorted(set(rig.store.published))


@pytest.mark.parametrize(("name", "text"), REFUSED.items())
def test_messages_that_were_not_requested_are_violations(name: str, text: str) -> None:
    [rig] = Replay(name).run().rigs.values()
    assert rig.violation_count
    assert text in rig.reports[-1].text


def test_a_request_refused_for_missing_noops_is_reported_and_later_accepted() -> None:
    [rig] = Replay("605_h3_include_xattrs").run().rigs.values()
    assert any(report.status is ins.VbucketStatus.REFUSED and "enable_noop" in report.text for report in rig.reports)
    assert rig.machine.phase is Phase.STREAMING


def test_a_state_change_refreshes_the_map_and_requests_again() -> None:
    [rig] = Replay("605_g2_end_state_changed").run().rigs.values()
    assert any("changed its state" in report.text for report in rig.reports)
    assert rig.store.served.seqno == 206
