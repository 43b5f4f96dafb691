"""What a writer does between commits: key rows of large snapshots, removal of old history, leases, and syncs.

Knows jobs, the purger and leases of one group; never what is being received. One call of `step` is one bounded slice.
Invariants: key rows come before everything else, since a snapshot waits for them; history that a lease holds stays; a
vbucket's memory says what the last slice has changed on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from storage.env.environment import storage_error
from storage.errors import StorageError
from storage.history import branches, index
from storage.history.leases import LEASE_MAX_MS, Leases, check_kept
from storage.history.purge import Purger, Window
from storage.model import Seqno, Vbid
from storage.write import commit
from storage.write.owner import GroupOwner
from storage.write.pending import PendingVbucket

PURGE_INTERVAL_MS = 1_000
"""Pause after a look at every vbucket that found no history to remove, milliseconds."""
KEEP_ALL = Window()


class Background:
    """The background work of one group. `restart` comes before the first `step`."""

    purger: Purger

    def __init__(
        self, owner: GroupOwner, vbuckets: Mapping[int, PendingVbucket], window: Window, clock_ms: Callable[[], int]
    ) -> None:
        """`vbuckets` is the writer's own mapping. `clock_ms`: the wall clock, in which leases are given."""
        self.window = window
        self.leases = Leases()
        self.jobs: list[PendingVbucket] = []
        """Vbuckets whose key rows are being made, the one at work first."""
        self._owner = owner
        self._vbuckets = vbuckets
        self._clock_ms = clock_ms
        self._purge_after_ms = 0

    def restart(self) -> None:
        """Begin again with an environment that was just opened."""
        self.jobs = []
        self.purger = self.new_purger()
        self._purge_after_ms = 0

    def new_purger(self) -> Purger:
        """The purger of the environment that is open."""
        return Purger(self._owner.environment, self._owner.vbids, self.window, self.leases)

    def step(self) -> bool:
        """One slice of work. True while more waits; a finished index is published by the next commit."""
        if self.jobs:
            self.index_step(self.jobs[0])
            return bool(self.jobs)
        if self.purge_step():
            return True
        self._owner.sync_when_idle()
        return False

    # -- key rows -------------------------------------------------------------------------------------------------

    def finish_complete(self, vbuckets: Iterable[PendingVbucket]) -> None:
        """Make key rows for snapshots that were complete on disk when the last writer ended: they lack nothing else.

        The marker's start is not stored; the boundary gets the one below it, as a stream request would.
        """
        for vbucket in vbuckets:
            state = vbucket.base
            if state.open_snapshot is None and state.staged_seqno > state.staging_published_seqno:
                vbucket.complete_seqno = state.staged_seqno
                vbucket.complete_start = state.staging_published_seqno
                self.begin_job(vbucket)

    def after_commit(self, vbucket: PendingVbucket, plan: commit.Plan) -> None:
        """Begin a job for a complete snapshot that the commit could not publish."""
        if plan.has_rows_above:
            vbucket.unindexed_count = self._count_unindexed(vbucket)
        if vbucket.complete_seqno is not None and vbucket.job is None:
            self.begin_job(vbucket)

    def begin_job(self, vbucket: PendingVbucket) -> None:
        """Have the key rows of a complete snapshot made by `step`."""
        assert vbucket.complete_seqno is not None
        vbucket.job = index.IndexJob(
            self._owner.environment, vbucket.base.vbid, vbucket.prefix, vbucket.indexed_seqno, vbucket.complete_seqno
        )
        self.jobs.append(vbucket)

    def index_step(self, vbucket: PendingVbucket) -> None:
        """Read or write one slice of key rows."""
        job = vbucket.job
        assert job is not None
        try:
            if job.read_slice():
                return
        except OSError as error:  # there was no space for the temporary file of a spilled run
            self._owner.reload()
            raise storage_error(error, self._owner.path) from error
        job.next_slice()
        if self._owner.write(job.write_slice):
            return
        job.close()
        self.jobs.remove(vbucket)
        vbucket.job = None
        vbucket.indexed_seqno = job.to_seqno
        vbucket.indexed_bytes += job.row_bytes
        # Rows that came while the job ran are few against what it has done; commit indexes them, or starts another job.
        vbucket.unindexed_count = self._count_unindexed(vbucket)
        vbucket.dirty = True

    def _count_unindexed(self, vbucket: PendingVbucket) -> int | None:
        """Rows on disk that lack their key rows; None: too many for one commit."""
        with self._owner.environment.read() as txn:
            _, count, _, _ = index.key_rows_between(
                txn, vbucket.base.vbid, vbucket.prefix, vbucket.indexed_seqno,
                vbucket.flushed_seqno, commit.INLINE_INDEX_ROWS + 1,
            )  # fmt: skip
        return count if count <= commit.INLINE_INDEX_ROWS else None

    def cancel_job(self, vbucket: PendingVbucket) -> None:
        """Give up the key rows that are being made; those that are written stay, unseen."""
        if vbucket.job is not None:
            vbucket.job.close()
            vbucket.job = None
            self.jobs.remove(vbucket)

    def cancel_jobs(self) -> None:
        """Give up all of them."""
        for vbucket in list(self.jobs):
            self.cancel_job(vbucket)

    # -- history --------------------------------------------------------------------------------------------------

    def purge_step(self) -> bool:
        """Remove a little history that readers may not read any more. True when something was done."""
        now_ms = self._owner.clock.now_ms()
        if self.window == KEEP_ALL or now_ms < self._purge_after_ms:
            return False
        vbid = self.purger.plan(now_ms)
        if vbid is None:
            if self.purger.round_is_over:
                self._purge_after_ms = now_ms + PURGE_INTERVAL_MS
            return False
        self.purge(vbid, now_ms)
        return True

    def purge(self, vbid: Vbid, now_ms: int) -> None:
        """Do a bounded part of what the purger has to do in a vbucket."""
        purger = self.purger
        removed_rows = self._owner.write(lambda txn: purger.step(txn, vbid, now_ms))
        purger.settle(removed_rows, self._owner.clock.now_ms() - now_ms)
        with self._owner.environment.read() as txn:
            floor_seqno, local_purge_seqno = branches.purge_state(txn, vbid)
        vbucket = self._vbuckets[vbid]
        vbucket.change(history_floor_seqno=Seqno(floor_seqno), local_purge_seqno=Seqno(local_purge_seqno))
        if purger.moved is not None:
            branch, parent, to_seqno = purger.moved
            if vbucket.manifest_key[0] == branch and vbucket.manifest_key[1] <= to_seqno:
                vbucket.manifest_key = (parent, vbucket.manifest_key[1])

    # -- leases ---------------------------------------------------------------------------------------------------

    def lease(self, name: str, positions: Mapping[int, tuple[int, int]], until_ms: int) -> None:
        """Keep history from these positions on (see `GroupWriter.lease`)."""
        owner = self._owner
        self.leases.prune(owner.clock.now_ms())
        if self.leases.full:
            raise StorageError("too many leases are held", path=owner.path, hint="release some, or wait")
        with owner.environment.read() as txn:
            for vbid, position in positions.items():
                check_kept(txn, Vbid(vbid), position)
        self.leases.put(name, positions, self._lease_end_ms(until_ms))

    def renew_lease(self, name: str, positions: Mapping[int, tuple[int, int]], until_ms: int) -> bool:
        """Extend a lease. False: no such lease holds these."""
        return self.leases.renew(name, positions, self._lease_end_ms(until_ms), self._owner.clock.now_ms())

    def _lease_end_ms(self, until_ms: int) -> int:
        """A time of the wall clock by the history clock."""
        return self._owner.clock.now_ms() + min(max(0, until_ms - self._clock_ms()), LEASE_MAX_MS)
