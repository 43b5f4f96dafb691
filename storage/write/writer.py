"""The writer of a vbucket group: staging, commits, publishing.

Joins the modules that do the work and state the invariants: `owner` (environment, write transactions), `vbucket`
(staging, rollback, abandon, resync), `commit` (the rows of a transaction) and `background` (key rows, purge, leases).
Never knows sockets, the time (the options have clocks) or the kind of source.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.history import branches, extent
from storage.model import Seqno
from storage.write import commit
from storage.write.background import Background
from storage.write.owner import KEEP_ALL, GroupOwner, WriterOptions, contained
from storage.write.pending import GroupPending, Plan
from storage.write.vbucket_writer import RollbackResult, VbucketWriter

__all__ = ["KEEP_ALL", "CommitResult", "GroupWriter", "RollbackResult", "VbucketWriter", "WriterOptions"]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """(vbid, published_seqno) of each vbucket that a commit published."""

    published: list[tuple[int, Seqno]]


class GroupWriter:
    """The writer of one group. Only one thread may use it."""

    def __init__(self, path: str, options: WriterOptions) -> None:
        """Take the group's lock, open the environment and read the states.

        Raises StorageError: Locked, ReadOnly, Full, CorruptedError, UnknownFormat, WrongBucket.
        """
        self.path = path
        self.options = options
        self.group = options.group
        self.vbids = options.identity.group_vbids(options.group)
        self.vbuckets: dict[int, VbucketWriter] = {}
        """The vbuckets' writers by vbid. They are never replaced."""
        self._pending = GroupPending()
        self.owner = self._new_owner()
        self.background = self._new_background()
        try:
            self.owner.open(claim=True)
        except BaseException:
            self.owner.unlock()
            raise

    def _new_owner(self) -> GroupOwner:
        return GroupOwner(self.path, self.options, load=self._load, forget=self._forget)

    def _new_background(self) -> Background:
        return Background(self.owner, self.vbuckets, self._pending)

    def _new_vbucket(self, txn: Transaction, vbid: int) -> VbucketWriter:
        return VbucketWriter(txn, vbid, self.owner, self._pending, commit=self.commit)

    def _load(self) -> bool:
        """Read every vbucket's state from the newest commit. Return True if readers have seen a newer state."""
        before = {vbid: vbucket.base for vbid, vbucket in self.vbuckets.items()}
        self._pending.byte_count = 0
        with self.environment.read() as txn:
            for vbid in self.vbids:
                if before:
                    self.vbuckets[vbid].load(txn)
                else:
                    self.vbuckets[vbid] = self._new_vbucket(txn, vbid)
        self.background.restart()
        self.background.finish_complete()
        if not before:
            self.owner.write_while_opening(self._settle_resync_reads)
        now = {vbid: vbucket.base for vbid, vbucket in self.vbuckets.items()}
        return any(
            (now[vbid].branch, now[vbid].published_seqno) < (known.branch, known.published_seqno)
            for vbid, known in before.items()
        )

    def _settle_resync_reads(self, txn: Transaction) -> None:
        """Apply the setting `resync_reads` to running resyncs."""
        for vbid in self.vbids:
            branches.set_unavailable(txn, vbid, self.options.resync_reads == "unavailable")

    def _forget(self) -> None:
        for vbucket in list(self.background.jobs):
            vbucket.cancel_job()
        self._pending.byte_count = 0

    @contained
    def reopen(self) -> None:
        """Open the environment again if a failed commit left it closed."""
        self.owner.check_not_closed()
        if self.owner.lost:
            self.owner.reload()

    def close(self) -> None:
        """Commit complete snapshots, sync, and release the group. The next writer fetches open snapshots again."""
        if self.owner.closed:
            return
        try:
            if not self.owner.lost:
                self.commit()
                if self.owner.durability != "unsafe":
                    self.owner.sync()
        finally:
            self.give_up()

    def give_up(self) -> None:
        if not self.owner.closed:
            self._forget()
            self.owner.release()

    @property
    def environment(self) -> Environment:
        """The open environment; another object after a failed commit."""
        return self.owner.environment

    @property
    def pending_bytes(self) -> int:
        return self._pending.byte_count

    @property
    def has_pending(self) -> bool:
        """True if readers or the next writer would notice a commit. Vbuckets with an IndexJob do not count."""
        return any(
            vbucket.dirty and vbucket.job is None and vbucket.commit_worthy for vbucket in self.vbuckets.values()
        )

    @contained
    def figures(self) -> dict[str, int]:
        info = self.environment.env.info()
        return {
            "file_bytes": self.environment.file_bytes(),
            "map_bytes": int(info["map_size"]),
            "commits": self.owner.commit_count,
            "pending_bytes": self.pending_bytes,
            "indexing": len(self.background.jobs),
            "purged_rows": self.background.purger.removed_rows,
        }

    @contained
    def readers(self) -> list[tuple[int, int]]:
        return self.environment.readers()

    @contained
    def histories(self) -> dict[int, extent.History]:
        with self.environment.read() as txn:
            return {vbid: extent.of(txn, vbid) for vbid in self.vbids}

    @contained
    def commit(self, *, flush_open: bool = False) -> CommitResult:
        """Commit all complete snapshots in one transaction. `flush_open` adds the rows of open snapshots.

        If LMDB's map is full, it is grown and the transaction repeated. Any other failure drops all pending work, loads
        the states again and raises the error: Full, ReadOnly, and so on. The caller must then start machines and
        streams again.
        """
        self.owner.check_open()
        touched = [each for each in self.vbuckets.values() if each.dirty and (flush_open or each.commit_worthy)]
        if not touched:
            return CommitResult([])

        def write(txn: Transaction) -> list[Plan]:
            moment = self.owner.moment()
            return [commit.put(txn, each, moment, flush_open=flush_open) for each in touched]

        published = []
        for vbucket, plan in zip(touched, self.owner.write(write), strict=True):
            vbucket.settle(plan)
            self.background.after_commit(vbucket, plan)
            if plan.published is not None:
                published.append((vbucket.vbid, plan.published.published_seqno))
        return CommitResult(published)

    @property
    def is_indexing(self) -> bool:
        return bool(self.background.jobs)

    @contained
    def step(self) -> bool:
        """Do a bounded amount of background work. Return True if more work waits. Once a snapshot has all its key rows,
        the next `commit` publishes the snapshot.
        """
        self.owner.check_open()
        self.owner.check_file()
        return self.background.step()
