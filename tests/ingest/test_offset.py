"""Stream offsets: the invariant that two releases of another client broke, and what each kind of position asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.ingest.offset import OffsetInvalid, StreamOffset, is_resumable, resume_offset
from storage.model import FailoverLog, Seqno, SnapshotRange, Vbuuid

LOG = FailoverLog.of([(0xB, 100), (0xA, 0)])
SEQNOS = st.integers(0, 2**64 - 1) | st.integers(0, 5)


def offset(boundary: int, staged: int, open_snapshot: tuple[int, int] | None) -> StreamOffset:
    snapshot = SnapshotRange(Seqno(open_snapshot[0]), Seqno(open_snapshot[1])) if open_snapshot else None
    return resume_offset(Seqno(boundary), Seqno(staged), snapshot, LOG)


def requested(boundary: int, staged: int, open_snapshot: tuple[int, int] | None) -> tuple[int, int, int, int]:
    made = offset(boundary, staged, open_snapshot)
    return made.start_seqno, made.snap_start_seqno, made.snap_end_seqno, made.vbuuid


@given(SEQNOS, SEQNOS, SEQNOS)
def test_an_offset_outside_its_snapshot_cannot_be_made(start: int, snap_start: int, snap_end: int) -> None:
    if snap_start <= start <= snap_end:
        StreamOffset(Vbuuid(1), Seqno(start), Seqno(snap_start), Seqno(snap_end))
    else:
        with pytest.raises(OffsetInvalid, match=str(start)):
            StreamOffset(Vbuuid(1), Seqno(start), Seqno(snap_start), Seqno(snap_end))


@given(SEQNOS, SEQNOS, st.none() | st.tuples(SEQNOS, SEQNOS))
def test_whatever_a_state_says_an_offset_can_be_made_of_it(
    boundary: int, staged: int, open_snapshot: tuple[int, int] | None
) -> None:
    made = offset(boundary, staged, open_snapshot)
    assert made.snap_start_seqno <= made.start_seqno <= made.snap_end_seqno
    assert made.inside_snapshot or made.start_seqno == made.snap_start_seqno == made.snap_end_seqno == boundary


def test_between_snapshots_the_boundary_is_sent_in_three_places_with_the_history_it_lies_on() -> None:
    assert requested(99, 99, None) == (99, 99, 99, 0xA)
    assert requested(100, 100, None) == (100, 100, 100, 0xB)


def test_the_range_of_a_marker_without_its_first_item_is_never_sent() -> None:
    assert requested(99, 99, (100, 120)) == (99, 99, 99, 0xA)


def test_inside_a_snapshot_the_range_begins_at_our_own_boundary_and_not_where_the_marker_said() -> None:
    assert requested(40, 45, (45, 60)) == (45, 40, 60, 0xA)
    assert requested(40, 45, (0, 60)) == (45, 40, 60, 0xA)


def test_inside_a_snapshot_the_history_is_the_one_its_end_lies_on() -> None:
    assert requested(40, 45, (41, 120)) == (45, 40, 120, 0xB)


@pytest.mark.parametrize("open_snapshot", [None, (41, 45), (41, 44)])
def test_staged_rows_without_an_end_ahead_are_not_resumable(open_snapshot: tuple[int, int] | None) -> None:
    snapshot = SnapshotRange(Seqno(open_snapshot[0]), Seqno(open_snapshot[1])) if open_snapshot else None
    assert not is_resumable(Seqno(40), Seqno(45), snapshot)
    assert requested(40, 45, open_snapshot) == (40, 40, 40, 0xA)
