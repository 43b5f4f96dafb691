"""A writer's work between commits: inserts key rows of large snapshots, removes old history, grants leases, syncs.

Knows the jobs (`IndexJob`), the purger and the leases of one group; never received rows. Invariants:
- key rows are inserted before history is removed, because a snapshot cannot be published without its key rows;
- history that a lease holds is not removed;
- a call of `step` does a bounded amount of work, after which the `PendingVbucket` objects match the disk.
"""

from __future__ import annotations

from collections.abc import Mapping

from storage.env.environment import storage_error
from storage.errors import StorageError
from storage.history import branches
from storage.history.leases import LEASE_MAX_MS, Leases, check_kept
from storage.history.purge import Purger, Step
from storage.write.owner import KEEP_ALL, GroupOwner, contained
from storage.write.pending import GroupPending, PendingVbucket, Plan

PURGE_INTERVAL_MS = 1_000
"""Pause in milliseconds after the purger has found no work in any vbucket."""


class Background:
    """The background work of one group. Call `restart` before the first `step`."""

    purger: Purger

    def __init__(self, owner: GroupOwner, vbuckets: Mapping[int, PendingVbucket], pending: GroupPending) -> None:
        self.window = owner.options.window
        self.leases = Leases()
        self.jobs = pending.jobs
        self.owner = owner
        self._vbuckets = vbuckets
        self._purge_after_ms = 0

    def restart(self) -> None:
        self.purger = self.new_purger()
        self._purge_after_ms = 0

    def new_purger(self) -> Purger:
        return Purger(self.owner.environment, self.owner.vbids, self.window, self.leases)

    def step(self) -> bool:
        if self.jobs:
            self.index_step(self.jobs[0])
            return bool(self.jobs)
        if self.purge_step():
            return True
        self.owner.sync_when_idle()
        return False

    def finish_complete(self) -> None:
        """Begin a job for each snapshot that is complete on disk but lacks key rows."""
        for vbucket in self._vbuckets.values():
            if vbucket.complete_on_disk():
                vbucket.begin_job()

    def after_commit(self, vbucket: PendingVbucket, plan: Plan) -> None:
        """Begin a job if the commit could not publish a complete snapshot because too many key rows are missing."""
        if plan.has_rows_above:
            vbucket.count_unindexed()
        if vbucket.publishable:
            vbucket.begin_job()

    def index_step(self, vbucket: PendingVbucket) -> None:
        job = vbucket.job
        assert job is not None
        try:
            if job.read_slice():
                return
        except OSError as error:  # the temporary file failed: a full disk, for example
            self.owner.reload()
            raise storage_error(error, self.owner.path) from error
        job.next_slice()
        if not self.owner.write(job.write_slice):
            vbucket.end_job()

    def purge_step(self) -> bool:
        """Do one step of the purger; return True if it had work."""
        now_ms = self.owner.clock.now_ms()
        if self.window == KEEP_ALL or now_ms < self._purge_after_ms:
            return False
        step = self.purger.plan(now_ms)
        if step is None:
            if self.purger.round_is_over:
                self._purge_after_ms = now_ms + PURGE_INTERVAL_MS
            return False
        self.purge(step, now_ms)
        return True

    def purge(self, step: Step, now_ms: int) -> None:
        purger, vbid = self.purger, step.vbid
        removed_rows = self.owner.write(lambda txn: purger.step(txn, step))
        purger.settle(removed_rows, self.owner.clock.now_ms() - now_ms)
        with self.owner.environment.read() as txn:
            floor_seqno, purged = txn.pub(vbid).floor_seqno, branches.purge_row(txn, vbid)
        self._vbuckets[vbid].purged(floor_seqno, purged.local_purge_seqno, purger.moved)

    @contained
    def lease(self, name: str, positions: Mapping[int, tuple[int, int]], until_ms: int) -> None:
        """Hold the history from `positions` (branch and seqno by vbid) on. The lease ends at `until_ms` of the wall
        clock, but LEASE_MAX_MS from now at the latest. Setting the wall clock during the lease does not move the end.
        Raises NoSuchBoundary if a position is no longer kept, StorageError if there are too many leases.
        """
        owner = self.owner
        self.leases.prune(owner.clock.now_ms())
        if self.leases.full:
            raise StorageError("too many leases are held", path=owner.path, hint="release some, or wait")
        with owner.environment.read() as txn:
            for vbid, position in positions.items():
                check_kept(txn, vbid, position)
        self.leases.put(name, positions, self._lease_end_ms(until_ms))

    def renew_lease(self, name: str, positions: Mapping[int, tuple[int, int]], until_ms: int) -> bool:
        """Extend a lease. Return False if no lease `name` has these positions: their history may be gone."""
        return self.leases.renew(name, positions, self._lease_end_ms(until_ms), self.owner.clock.now_ms())

    def _lease_end_ms(self, until_ms: int) -> int:
        return self.owner.clock.now_ms() + min(max(0, until_ms - self.owner.options.clock_ms()), LEASE_MAX_MS)
