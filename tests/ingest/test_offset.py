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


STATES = st.tuples(SEQNOS, SEQNOS, SEQNOS, SEQNOS)


@given(STATES | STATES.map(sorted), st.booleans())
def test_an_offset_can_be_made_of_any_state(state: tuple[int, int, int, int], is_open: bool) -> None:
    """Boundary, staged seqno, and the marker's start and end, mostly in this order."""
    boundary, staged, start, end = state
    made = offset(boundary, staged, (start, end) if is_open else None)
    expected = (staged, boundary, end) if is_open and boundary < staged < end else (boundary,) * 3
    assert (made.start_seqno, made.snap_start_seqno, made.snap_end_seqno) == expected


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param((99, 99, None), (99, 99, 99, 0xA), id="between snapshots the boundary, three times"),
        pytest.param((100, 100, None), (100, 100, 100, 0xB), id="with the history that it lies on"),
        pytest.param((99, 99, (100, 120)), (99, 99, 99, 0xA), id="never the range of a marker without its first item"),
        pytest.param((40, 45, (45, 60)), (45, 40, 60, 0xA), id="inside, the range begins at our own boundary"),
        pytest.param((40, 45, (0, 60)), (45, 40, 60, 0xA), id="and not where the marker said"),
        pytest.param((40, 45, (41, 120)), (45, 40, 120, 0xB), id="with the history that its end lies on"),
    ],
)
def test_each_position_has_its_request(
    held: tuple[int, int, tuple[int, int] | None], expected: tuple[int, int, int, int]
) -> None:
    assert requested(*held) == expected


@pytest.mark.parametrize("open_snapshot", [None, (41, 45), (41, 44)])
def test_staged_rows_without_an_end_ahead_are_not_resumable(open_snapshot: tuple[int, int] | None) -> None:
    snapshot = SnapshotRange(Seqno(open_snapshot[0]), Seqno(open_snapshot[1])) if open_snapshot else None
    assert not is_resumable(Seqno(40), Seqno(45), snapshot)
    assert requested(40, 45, open_snapshot) == (40, 40, 40, 0xA)
