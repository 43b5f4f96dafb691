"""Leaving what was staged or served: rollback, abandoned snapshots, and resyncs.

Knows when a branch may be opened and what of memory goes with it; `branches` knows what is written. The writer commits
first, so that what was complete before is not lost. Invariant: each operation is one transaction at most, after which
memory is read again from disk; where it needs none, nothing of the open snapshot had reached the disk.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from storage.errors import NoSuchBoundary, StorageError
from storage.history import branches, chain
from storage.model import Boundary, Branch, Seqno, Vbid, VbucketState
from storage.write.background import Background
from storage.write.owner import GroupOwner
from storage.write.pending import PendingBytes, PendingVbucket


@dataclass(frozen=True, slots=True)
class RollbackResult:
    """A rollback: the boundary it went to and where it came from. Boundary 0: none qualified, nothing was changed."""

    boundary_seqno: Seqno
    from_seqno: Seqno
    branch: Branch
    from_branch: Branch


class Leaving:
    """Opens branches of one group's vbuckets."""

    def __init__(
        self,
        owner: GroupOwner,
        vbuckets: MutableMapping[int, PendingVbucket],
        byte_count: PendingBytes,
        background: Background,
    ) -> None:
        """`vbuckets` is the writer's own mapping, in which a vbucket is replaced."""
        self._owner = owner
        self._vbuckets = vbuckets
        self._bytes = byte_count
        self._background = background

    def check_rollback(self, vbid: int, to_seqno: int) -> Boundary:
        """Where a rollback would go. Raises NoSuchBoundary below the floor, StorageError in a resync."""
        state = self._vbuckets[vbid].state
        if state.staging_branch != state.branch:
            raise StorageError(
                "it is being resynced", path=self._owner.path, vbid=vbid, hint="roll back when that is published"
            )
        boundary = self._boundary_at(state, to_seqno)
        if boundary is None or boundary.seqno < state.history_floor_seqno:
            raise NoSuchBoundary(
                f"nothing is kept at or below seqno {to_seqno}; history begins at seqno {state.history_floor_seqno}",
                path=self._owner.path,
                vbid=vbid,
                hint="give a later seqno; `dcp-mirror state` shows the kept boundaries",
            )
        return boundary

    def _boundary_at(self, state: VbucketState, to_seqno: int) -> Boundary | None:
        with self._owner.environment.read() as txn:
            served = chain.load(txn, state.vbid, state.branch, state.published_seqno)
            return chain.newest_boundary(txn, state.vbid, served, to_seqno)

    def rollback(self, vbid: int, to_seqno: int, *, deferred: bool) -> RollbackResult:
        """Truncate to the newest kept boundary <= `to_seqno` (see `GroupWriter.rollback`)."""
        vbucket = self._vbuckets[vbid]
        state = vbucket.state
        if state.rollback_deferred:  # what is served above that is not on the history that is staged
            to_seqno = min(to_seqno, state.staging_published_seqno)
        boundary = self._boundary_at(state, to_seqno)
        if boundary is None or boundary.seqno < max(1, state.history_floor_seqno):
            return RollbackResult(Seqno(0), state.published_seqno, state.branch, state.branch)
        self._discard_pending(vbucket)
        moment = self._owner.moment()
        if deferred:
            self._owner.write(lambda txn: branches.defer_rollback(txn, state, boundary))
        else:
            self._owner.write(lambda txn: branches.roll_back(txn, state, boundary, moment))
        after = self._reread(vbid).state
        return RollbackResult(boundary.seqno, state.published_seqno, after.staging_branch, state.branch)

    def abandon(self, vbid: int, *, keep_complete: bool) -> bool:
        """Give up the staged rows of the open snapshot (see `GroupWriter.abandon`)."""
        vbucket = self._vbuckets[vbid]
        if keep_complete and vbucket.complete_seqno is not None:
            return self._abandon_above(vbucket, vbucket.complete_seqno)
        self._discard_pending(vbucket)
        state = vbucket.state
        if vbucket.flushed_seqno == state.staging_published_seqno:  # nothing of it reached the disk
            vbucket.open_snapshot = None
            self._drop_above(vbucket, state.staging_published_seqno)
            return True
        moment = self._owner.moment()
        self._owner.write(lambda txn: branches.abandon(txn, state, moment))
        self._reread(vbid)
        return True

    def _abandon_above(self, vbucket: PendingVbucket, complete_seqno: int) -> bool:
        """Forget what is staged above a complete end; False where some of it is on the disk."""
        vbucket.drop_rows()
        if vbucket.flushed_seqno == complete_seqno:
            vbucket.open_snapshot = None
        self._drop_above(vbucket, vbucket.flushed_seqno)
        return vbucket.open_snapshot is None

    def _drop_above(self, vbucket: PendingVbucket, seqno: int) -> None:
        with self._owner.environment.read() as txn:
            vbucket.drop_above(txn, seqno)

    def begin_resync(self, vbid: int, *, unavailable: bool) -> None:
        """Start again from 0 on a branch without parent. `unavailable`: readers wait for its first publish."""
        vbucket = self._vbuckets[vbid]
        self._discard_pending(vbucket)
        state = vbucket.state
        withheld = unavailable and state.published_seqno > 0
        self._owner.write(lambda txn: branches.begin_resync(txn, state, unavailable=withheld))
        self._reread(vbid)

    def _discard_pending(self, vbucket: PendingVbucket) -> None:
        """Forget rows in memory; what is on disk above the newest complete end stays hidden."""
        self._background.cancel_job(vbucket)
        vbucket.drop_complete()

    def _reread(self, vbid: int) -> PendingVbucket:
        self._vbuckets[vbid].drop_manifests()
        with self._owner.environment.read() as txn:
            self._vbuckets[vbid] = PendingVbucket.load(txn, Vbid(vbid), self._bytes)
        return self._vbuckets[vbid]
