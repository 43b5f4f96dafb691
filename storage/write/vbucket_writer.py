"""The writer of one vbucket: adds rollback, abandon and resync to the operations of `pending`.

Knows when a branch may be opened and which pending rows to drop; `branches` writes the records. Rollback, abandon and
resync first commit the group, so that complete snapshots are not lost. Invariants:
- after this commit, each of the three takes at most one more transaction;
- after that transaction, the state is read again from disk;
- `abandon` needs no transaction if no row of the open snapshot is on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from storage.history import branches, chain
from storage.model import Boundary, Branch, Seqno, VbucketState
from storage.write.owner import contained
from storage.write.pending import PendingVbucket


@dataclass(frozen=True, slots=True)
class RollbackResult:
    """A rollback, and the position before it. `boundary_seqno` 0: no boundary qualified, so nothing was rolled back."""

    boundary_seqno: Seqno
    from_seqno: Seqno
    branch: Branch
    from_branch: Branch


class VbucketWriter(PendingVbucket):
    def __init__(self, *pending: Any, commit: Callable[[], object]) -> None:
        """`pending` are the arguments of PendingVbucket. `commit` commits the whole group."""
        super().__init__(*pending)
        self._commit = commit

    @contained
    def check_rollback(self, to_seqno: int) -> Boundary:
        """See `branches.rollback_boundary`."""
        with self.owner.environment.read() as txn:
            return branches.rollback_boundary(txn, self.base, to_seqno)

    def _boundary_at(self, state: VbucketState, to_seqno: int) -> Boundary | None:
        with self.owner.environment.read() as txn:
            return chain.boundary_at(txn, self.vbid, state.branch, min(to_seqno, state.published_seqno))

    @contained
    def rollback(self, to_seqno: int, *, deferred: bool = False) -> RollbackResult:
        """Go back to the newest kept boundary at or below `to_seqno`. The cost does not depend on the number of rows.

        `deferred`: readers stay on the old branch until the first publish of the new branch. If no boundary above 0
        qualifies, nothing is rolled back, and the result's `boundary_seqno` is 0.
        """
        self._commit()
        state = self.state
        if state.rollback_deferred:  # the source has lost the served rows above that rollback's boundary
            to_seqno = min(to_seqno, state.staging_published_seqno)
        boundary = self._boundary_at(state, to_seqno)
        if boundary is None or boundary.seqno < max(1, state.history_floor_seqno):
            return RollbackResult(Seqno(0), state.published_seqno, state.branch, state.branch)
        left = self._boundary_at(state, state.published_seqno)
        assert left is not None, "an older one is kept"
        self._discard_pending()
        moment = self.owner.moment()
        if deferred:
            self.owner.write(lambda txn: branches.defer_rollback(txn, state, boundary))
        else:
            self.owner.write(lambda txn: branches.roll_back(txn, state, boundary, moment))
        self._reread()
        return RollbackResult(boundary.seqno, state.published_seqno, self.base.staging_branch, left.branch)

    @contained
    def abandon(self, *, keep_complete: bool = True) -> bool:
        """Give up the staged rows of the open snapshot. These rows never become visible.

        With `keep_complete`, keep an earlier complete snapshot that waits for its key rows; a commit publishes it
        later. Return False if rows of the open snapshot are on disk above the kept snapshot. Only a new branch hides
        these rows, and a branch can begin only at a published end. So call `abandon` again after the publish.
        """
        self._commit()
        if keep_complete and self.complete_seqno is not None:
            self._drop_rows()
            if self.flushed_seqno == self.complete_seqno:
                self.open_snapshot = None
            self._drop_above(self.flushed_seqno)
            return self.open_snapshot is None
        self._discard_pending()
        state = self.state
        if self.flushed_seqno == state.staging_published_seqno:  # no row of the open snapshot is on disk
            self.open_snapshot = None
            self._drop_above(state.staging_published_seqno)
            return True
        moment = self.owner.moment()
        self.owner.write(lambda txn: branches.abandon(txn, state, moment))
        self._reread()
        return True

    @contained
    def begin_resync(self) -> None:
        """Stage again from seqno 0, on a branch without parent. Until the new copy is published, readers get the old
        copy. With `resync_reads = unavailable` readers are refused instead.
        """
        self._commit()
        self._discard_pending()
        state = self.state
        withheld = self.owner.options.resync_reads == "unavailable" and state.published_seqno > 0
        self.owner.write(lambda txn: branches.begin_resync(txn, state, unavailable=withheld))
        self._reread()

    @contained
    def copy_bytes(self) -> int:
        """Estimate the bytes of a second copy: the vbucket's share of the group's file."""
        return self.owner.environment.file_bytes() // max(1, len(self.owner.vbids))

    def _discard_pending(self) -> None:
        """Forget the rows in memory. Rows on disk above the newest published end stay invisible."""
        self.cancel_job()
        self._drop_rows()
        self.complete_seqno = None
