"""The point from which a stream is requested, derived from the stored state.

There are three kinds of offset; all have snap_start_seqno <= start_seqno <= snap_end_seqno (a source answers anything
else with ERANGE; docs/protocol.md 2.4):
- fresh: all zero, without a vbuuid;
- between snapshots: all three seqnos are E, the newest complete boundary;
- inside a snapshot: start is the last staged seqno, the range is [E, end of the open snapshot]. The range begins at E,
  because the start that the source sent is unreliable (2.6), and could equal the last staged seqno. The source would
  then assume that the mirror has nothing of the snapshot, and after a failover might accept the request on a history
  that forked inside the snapshot. The staged part lacks each document with a newer version later in the snapshot. If
  the new history lacks that version, the mirror would never get the document.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.model import NO_VBUUID, FailoverLog, Seqno, SnapshotRange, Vbuuid


class OffsetInvalid(ValueError):
    """The three seqnos contradict each other."""


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The point from which a stream is requested: the mirror holds the history `vbuuid` up to `start_seqno`."""

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
        """True if the mirror holds part of the snapshot, and requests the rest."""
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
    """Return the offset after the staged part of the open snapshot if that is resumable, else after the boundary.

    Inside a snapshot, the range begins at our own boundary, never at the start in the source's marker (above). `vbuuid`
    is the history at the snapshot's *end*, because the staged rows came from that history. If the request named an
    older one, the source would answer ROLLBACK, although no change was lost.
    """
    if not is_resumable(boundary_seqno, staged_seqno, open_snapshot):
        return StreamOffset.between_snapshots(boundary_seqno, failover_log.vbuuid_at(boundary_seqno))
    assert open_snapshot is not None  # checked by is_resumable
    end_seqno = open_snapshot.end_seqno
    return StreamOffset(failover_log.vbuuid_at(end_seqno), staged_seqno, boundary_seqno, end_seqno)


def is_resumable(boundary_seqno: Seqno, staged_seqno: Seqno, open_snapshot: SnapshotRange | None) -> bool:
    """Return True if a stream can continue the staged rows: they end inside a snapshot whose end is known."""
    return open_snapshot is not None and boundary_seqno < staged_seqno < open_snapshot.end_seqno
