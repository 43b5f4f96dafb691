"""The point from which a stream is requested, and its rule.

Knows the position in a stream request and its derivation from the stored state. Must never know streams, answers or
rows.

Invariant, held by construction: snap_start_seqno <= start_seqno <= snap_end_seqno (a producer answers anything else
with ERANGE; docs/protocol.md 2.4). Of the three kinds of offset:
- fresh: all zero and no vbuuid;
- between snapshots: E,E,E where E is the newest complete boundary. The range of a marker whose first item was not yet
  accepted is never part of an offset;
- inside a snapshot: start is the last staged seqno X, the range is [E, end of the open snapshot]. The range begins at
  our own boundary and not at the marker's start, which is not reliable (2.6). With the marker's start, start could
  equal snap_start after the first item. The producer would then assume that the snapshot has not begun. It might accept
  on another history, which never sends the items that were deduplicated below.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.model import NO_VBUUID, FailoverLog, Seqno, SnapshotRange, Vbuuid


class OffsetInvalid(ValueError):
    """The three seqnos contradict each other."""


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The point from which a stream is requested: everything up to `start_seqno` is held, on the history `vbuuid`."""

    vbuuid: Vbuuid
    start_seqno: Seqno
    snap_start_seqno: Seqno
    snap_end_seqno: Seqno

    def __post_init__(self) -> None:
        if not 0 <= self.snap_start_seqno <= self.start_seqno <= self.snap_end_seqno:
            raise OffsetInvalid(
                f"a stream cannot begin at {self.start_seqno} of [{self.snap_start_seqno}, {self.snap_end_seqno}]"
            )

    @property
    def inside_snapshot(self) -> bool:
        """True if part of a snapshot is held, so that only its continuation makes it whole."""
        return self.snap_start_seqno != self.snap_end_seqno

    @staticmethod
    def fresh() -> StreamOffset:
        return StreamOffset(NO_VBUUID, Seqno(0), Seqno(0), Seqno(0))

    @staticmethod
    def between_snapshots(seqno: Seqno, vbuuid: Vbuuid) -> StreamOffset:
        return StreamOffset(vbuuid, seqno, seqno, seqno) if seqno else StreamOffset.fresh()


def resume_offset(
    boundary_seqno: Seqno, staged_seqno: Seqno, open_snapshot: SnapshotRange | None, failover_log: FailoverLog
) -> StreamOffset:
    """Return the offset after the newest complete boundary and, if resumable, the staged part of the next snapshot.

    Inside a snapshot the history is that of its *end*, from which the rows came. The source would answer an older
    history with a rollback to its branch point, although no change was lost.
    """
    if not is_resumable(boundary_seqno, staged_seqno, open_snapshot):
        return StreamOffset.between_snapshots(boundary_seqno, failover_log.vbuuid_at(boundary_seqno))
    assert open_snapshot is not None  # is_resumable said so
    end_seqno = open_snapshot.end_seqno
    return StreamOffset(failover_log.vbuuid_at(end_seqno), staged_seqno, boundary_seqno, end_seqno)


def is_resumable(boundary_seqno: Seqno, staged_seqno: Seqno, open_snapshot: SnapshotRange | None) -> bool:
    """Return True if the staged rows may be continued: part of a snapshot is held and its end is known and ahead."""
    return open_snapshot is not None and boundary_seqno < staged_seqno < open_snapshot.end_seqno
