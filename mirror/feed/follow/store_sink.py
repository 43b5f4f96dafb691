"""The sink of a mirrored vbucket: passes instructions to the writer, and holds snapshots until they are persisted.

A rollback or a resync changes the staging branch, to which rows are staged. Before that, published snapshots are
committed and the machines get Published.
"""

from __future__ import annotations

from typing import Protocol

from mirror.feed.host import Staging
from mirror.ingest import instructions as ins
from mirror.ingest.events import Abandoned, NoBoundary, ResyncOpened, ResyncRefused, RolledBack, StagingRefused
from storage.errors import SeqnoOrder
from storage.model import SourceFacts, VbucketState
from storage.write.writer import RollbackResult, VbucketWriter

FREE_BYTES_MIN = 64 * 1024 * 1024
"""Space that a resync leaves free on the disk, so that commits of other vbuckets do not fail."""


POLLS_MIN = 2
"""Polls after which the high seqno is known: the first poll's answer may be older than the stream's acceptance."""

HELD_MAX = 64
"""Limit of held snapshots. Above the limit, every second snapshot is forgotten: a later publish covers its rows."""

Held = tuple[int, int]
"""End and start of a snapshot."""


class PersistenceGate:
    """Holds the complete snapshots of one vbucket until the source has persisted them.

    A persisted seqno releases only snapshots that were held when it arrived. For later snapshots the source is queried
    again, because replicas or history may have changed.
    """

    def __init__(self) -> None:
        self.persisted_seqno = 0
        """The persisted seqno that the source last reported; for status."""
        self.held_by = ""
        """The copy that holds the snapshots up; empty until it is known."""
        self.held_at = 0.0
        """Time since when a copy is known to hold snapshots up."""
        self._held: list[Held] = []
        self._highs: list[int] = []
        """The last high seqnos that were polled since the stream was accepted, at most POLLS_MIN."""

    @property
    def waiting(self) -> int:
        return len(self._held)

    def hold(self, seqno: int, snap_start_seqno: int) -> None:
        self._held.append((seqno, snap_start_seqno))
        if len(self._held) > HELD_MAX:
            del self._held[1:-1:2]  # keep the oldest, for an early release, and the newest

    def stream_accepted(self) -> None:
        self._highs = []

    def polled(self, high_seqno: int, state: VbucketState) -> None:
        """Note a polled high seqno. During a deferred rollback, if neither the source nor the staging branch has rows
        above the staging branch's boundary, hold the boundary like a snapshot: otherwise nothing would be released.
        """
        self._highs = [*self._highs, high_seqno][-POLLS_MIN:]
        boundary, end_seqno = state.staging_published_seqno, self._end_seqno(state)
        if state.rollback_deferred and end_seqno is not None and end_seqno <= boundary and not self._held:
            self.hold(boundary, boundary)

    def _end_seqno(self, state: VbucketState) -> int | None:
        """Return the end of the source's history; None while it is unknown.

        For a filtered stream the source's high seqno does not count dropped collections: it may be below the staged
        rows.
        """
        return max(self._highs[-1], state.staged_seqno) if len(self._highs) == POLLS_MIN else None

    def release(self, persisted_seqno: int, state: VbucketState) -> Held | None:
        """Return the newest persisted snapshot, and forget all held snapshots up to it. Return None if none qualifies.

        While a rollback is deferred, the snapshot must reach the seqno that readers see. If the new history is shorter,
        the snapshot must reach the end of that history.
        """
        self.persisted_seqno = persisted_seqno
        at_least = state.published_seqno if state.rollback_deferred else 0
        if (end_seqno := self._end_seqno(state)) is not None:
            at_least = min(at_least, end_seqno)
        ready = [held for held in self._held if held[0] <= persisted_seqno]
        if not ready or ready[-1][0] < at_least:
            return None
        self._held = self._held[len(ready) :]
        self.held_by = ""
        return ready[-1]

    def wait_for(self, copy: str, now: float) -> None:
        if not self.held_by:
            self.held_at = now
        self.held_by = copy

    def drop(self) -> None:
        self._held = []
        self.held_by = ""
        self.persisted_seqno = 0


class GroupCommit(Protocol):
    def commit(self) -> None: ...

    def schedule(self) -> None: ...


class StoreSink:
    def __init__(self, writer: VbucketWriter, group: GroupCommit, gate: PersistenceGate | None = None) -> None:
        """`gate` holds complete snapshots until the source has persisted them; None: publish them at once."""
        self.writer = writer
        self.gate = gate
        self.requested_again_bytes = 0
        """Bytes of staged rows that were published when the process began, and not rolled back or resynced since."""
        self.last_rollback: tuple[int, int] | None = None
        """The seqnos before and after the last rollback since the worker began."""
        self.resyncs_begun = 0
        self.resync_why: str | None = None
        self._group = group
        self._held_seqno: int = writer.base.published_seqno
        """Rows up to this seqno count in `requested_again_bytes`."""

    def state(self) -> VbucketState:
        return self.writer.state

    def row_prefix(self) -> bytes:
        return self.writer.prefix

    def stage(self, staging: Staging) -> StagingRefused | None:
        writer = self.writer
        try:
            match staging:
                case ins.StageRows():
                    writer.stage(staging.rows, staging.byte_count, staging.open_snapshot)
                    held = self._held_seqno
                    if held and int.from_bytes(staging.rows[0][0][4:12]) <= held:
                        again = (len(value) for key, value in staging.rows if int.from_bytes(key[4:12]) <= held)
                        self.requested_again_bytes += sum(again)
                case ins.Advance():
                    writer.advance(staging.seqno, staging.open_snapshot)
                case ins.StageSystemEvent(seqno=seqno, row_value=value):
                    writer.system_event(seqno, value, staging.manifest, staging.open_snapshot, staging.change)
        except SeqnoOrder as error:
            return StagingRefused(self.state(), str(error))
        return None

    def publish(self, snapshot: ins.PublishSnapshot) -> None:
        if self.gate is not None:
            self.gate.hold(snapshot.seqno, snapshot.snap_start_seqno)
        else:
            self.writer.publish(snapshot.seqno, snapshot.snap_start_seqno)

    def save(self, facts: SourceFacts) -> None:
        self.writer.save(**facts)

    def forget(self) -> None:
        if self.gate is not None:
            self.gate.drop()

    def roll_back(self, target: ins.RollbackTo) -> RolledBack | NoBoundary:
        """Go back to the newest kept boundary at or below a seqno. With `publish=persisted`, defer the rollback, unless
        readers have seen none of the lost rows.
        """
        self._group.commit()  # so that the machines learn of published snapshots
        held = self.gate is not None and self.gate.waiting
        state = self.state()
        if not state.has_served_log and not state.rollback_deferred:
            # The new copy of a resync has no boundary yet, and the old copy's boundaries are of another history.
            return NoBoundary()
        if held and state.published_seqno <= target.seqno and not state.rollback_deferred:
            # The lost rows were held back, so no reader has seen them.
            self.forget()
            self.writer.abandon(keep_complete=False)
            return RolledBack(self._went_back())
        result = self.writer.rollback(target.seqno, deferred=self.gate is not None)
        if result.boundary_seqno == 0:
            return NoBoundary()
        self.forget()
        self.note_rollback(result)
        return RolledBack(self.state())

    def note_rollback(self, result: RollbackResult) -> None:
        self.last_rollback = (int(result.from_seqno), int(result.boundary_seqno))
        self._went_back()

    def _went_back(self) -> VbucketState:
        """Schedule a commit. Rows above the position do not count as requested again. Return the new state."""
        state = self.state()
        self._held_seqno = min(self._held_seqno, state.staged_seqno)
        self._group.schedule()
        return state

    def abandon(self, staged: ins.AbandonStaged) -> Abandoned | None:
        """Drop open and held snapshots. Return None if a complete snapshot waits for its key rows."""
        self._group.commit()
        self.forget()
        if not self.writer.abandon():
            return None
        self._group.schedule()
        return Abandoned(self.state())

    def begin_resync(self, cause: str) -> ResyncOpened | ResyncRefused:
        """Open an empty branch next to the served copy, if the disk has space for both."""
        if self.state().published_seqno:  # the old copy is kept until the new one is complete
            share_bytes = self.writer.copy_bytes()
            free_bytes = self.writer.owner.free_bytes()
            if free_bytes < share_bytes + FREE_BYTES_MIN:
                return ResyncRefused(
                    f"a resync needs about {(share_bytes + FREE_BYTES_MIN) >> 20} MiB next to the old copy, "
                    f"{free_bytes >> 20} MiB are free"
                )
        self._group.commit()
        self.forget()
        self.writer.begin_resync()
        self.resyncs_begun += 1
        self.resync_why = cause
        return ResyncOpened(self._went_back())
