"""The writer of a vbucket group: staging, group commit, publishing.

Knows the parts that do the work and joins them: `owner` (environment, fence, write transactions), `pending` (what is
accepted), `commit` (what is written), `background` (key rows, purge, leases) and `leaving` (rollback, abandon, resync).
Never sockets, time (clocks are given) or what a source is. One process owns a group for life, one thread calls this
class.

Invariants, of all parts together: what `state()` says is the last commit plus the operations accepted since; a vbucket
becomes visible at a new published_seqno only in a transaction that also holds its boundary, manifest and state, and
after which every row up to it has its key row; on any failed commit but a full map everything pending is dropped and
the states are read again from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from storage.env.environment import MAP_SIZE, Environment, storage_error
from storage.env.transaction import Transaction
from storage.errors import StorageError
from storage.history import branches, extent
from storage.history.leases import Leases
from storage.history.purge import Window
from storage.model import (
    Boundary,
    FailoverLog,
    Identity,
    Manifest,
    ManifestChange,
    Seqno,
    SnapshotRange,
    Vbid,
    VbucketState,
)
from storage.write import commit
from storage.write.background import KEEP_ALL, Background
from storage.write.leaving import Leaving, RollbackResult
from storage.write.owner import GroupOwner
from storage.write.pending import PendingBytes, PendingVbucket

__all__ = ["CommitResult", "GroupWriter", "RollbackResult"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit made visible: (vbid, published_seqno) of each vbucket that moved."""

    published: list[tuple[Vbid, Seqno]]


def _contained(
    method: Callable[Concatenate[GroupWriter, Parameters], Result],
) -> Callable[Concatenate[GroupWriter, Parameters], Result]:
    """Let no exception but a StorageError leave: whatever damaged pages make of this code concerns this group alone.

    What they make of LMDB can be a signal, and the end of the process: `at_work` then names the group.
    """

    @wraps(method)
    def call(writer: GroupWriter, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        at_work = writer.at_work
        before = at_work[0]
        at_work[0] = writer.group + 1
        try:
            return method(writer, *args, **kwargs)
        except StorageError:
            raise
        except Exception as error:
            raise storage_error(error, writer.path) from error
        finally:
            at_work[0] = before

    return call


class GroupWriter:
    """Owner of one group's environment. Not thread safe: one thread for life."""

    def __init__(
        self,
        path: str,
        *,
        group: int,
        vbids: Sequence[int],
        identity: Identity,
        sync: str,
        clock_ms: Callable[[], int],
        monotonic_ms: Callable[[], int] | None = None,
        map_size: int = MAP_SIZE,
        window: Window = KEEP_ALL,
        resync_reads: str = "stale",
    ) -> None:
        """Use `open`."""
        self.path = path
        self.group = group
        self.at_work: MutableSequence[int] | memoryview[int] = [0]
        """Holds the group's number and 1 while a method of this object works."""
        self.vbids = [Vbid(vbid) for vbid in vbids]
        self.identity = identity
        self.clock_ms = clock_ms
        self.resync_reads = resync_reads
        self._bytes = PendingBytes()
        self._vbuckets: dict[int, PendingVbucket] = {}
        self.owner = self._new_owner(
            path,
            group=group,
            vbids=self.vbids,
            identity=identity,
            sync=sync,
            map_size=map_size,
            clock_ms=clock_ms,
            monotonic_ms=clock_ms if monotonic_ms is None else monotonic_ms,
            downtime_max_ms=(window.time_ms or 0) // 2,
            load=self._load,
            forget=self._forget,
        )
        self.background = self._new_background(window)
        self._leaving = Leaving(self.owner, self._vbuckets, self._bytes, self.background)
        try:
            self.owner.open(claim=True)
        except BaseException:
            self.owner.unlock()
            raise

    @classmethod
    def open(
        cls,
        path: str,
        *,
        group: int,
        vbids: Sequence[int],
        identity: Identity,
        sync: str = "safe",
        clock_ms: Callable[[], int],
        monotonic_ms: Callable[[], int] | None = None,
        map_size: int = MAP_SIZE,
        window: Window = KEEP_ALL,
        resync_reads: str = "stale",
    ) -> GroupWriter:
        """Take the group's lock and read its states. `clock_ms`: the wall clock; `monotonic_ms`: one that is never set
        (without it `clock_ms`, whose steps ahead then age history). `window`: how much
        history to keep. `resync_reads`: what readers get of a vbucket that is being resynced: its old copy
        (`stale`), or an error (`unavailable`).

        Raises Locked, ReadOnly, CorruptedError, FormatTooNew, WrongBucket.
        """
        return cls(
            path,
            group=group,
            vbids=vbids,
            identity=identity,
            sync=sync,
            clock_ms=clock_ms,
            monotonic_ms=monotonic_ms,
            map_size=map_size,
            window=window,
            resync_reads=resync_reads,
        )

    def _new_owner(self, path: str, **options: Any) -> GroupOwner:
        return GroupOwner(path, **options)

    def _new_background(self, window: Window) -> Background:
        return Background(self.owner, self._vbuckets, window, self.clock_ms)

    # -- opening and closing --------------------------------------------------------------------------------------

    def _load(self) -> bool:
        """Read every vbucket's state from the newest commit; True where readers have seen a newer one."""
        before = {vbid: vbucket.base for vbid, vbucket in self._vbuckets.items()}
        self._bytes.count = 0
        with self.environment.read() as txn:
            for vbid in self.vbids:
                self._vbuckets[vbid] = PendingVbucket.load(txn, vbid, self._bytes)
        self.background.restart()
        self.background.finish_complete(self._vbuckets.values())
        if not before:
            self.owner.write_while_opening(self._settle_resync_reads)
        now = {vbid: vbucket.base for vbid, vbucket in self._vbuckets.items()}
        return any(
            (now[vbid].branch, now[vbid].published_seqno) < (known.branch, known.published_seqno)
            for vbid, known in before.items()
        )

    def _settle_resync_reads(self, txn: Transaction) -> None:
        """Resyncs that are under way follow the setting as it is now."""
        for vbid in self.vbids:
            branches.set_unavailable(txn, vbid, self.resync_reads == "unavailable")

    def _forget(self) -> None:
        self.background.cancel_jobs()
        self._bytes.count = 0

    @_contained
    def reopen(self) -> None:
        """Open what a failed commit has closed and could not open again; nothing where it is open."""
        self.owner.check_not_closed()
        if self.owner.lost:
            self.owner.reload()

    def close(self) -> None:
        """Commit what is complete, sync, and give the group up. Rows of open snapshots in memory are fetched again."""
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
        """Close without another write: the group is damaged."""
        if not self.owner.closed:
            self._forget()
            self.owner.release()

    # -- states ---------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> Environment:
        """What is open now."""
        return self.owner.environment

    @property
    def lost(self) -> bool:
        """True where the environment was closed after a failed commit and cannot be opened."""
        return self.owner.lost

    @property
    def leases(self) -> Leases:
        """The leases of the group."""
        return self.background.leases

    @property
    def pending_bytes(self) -> int:
        """Bytes of rows and manifests that wait in memory."""
        return self._bytes.count

    def state(self, vbid: int) -> VbucketState:
        """The vbucket as it is after everything accepted so far; `published_seqno` counts commits only."""
        return self._vbuckets[vbid].state

    def staged_seqno(self, vbid: int) -> int:
        """The position up to which everything was accepted: that of `state`."""
        return self._vbuckets[vbid].staged_seqno

    def served(self, vbid: int) -> VbucketState:
        """The vbucket as readers see it; what is staged, and the open snapshot, as of some time before."""
        return self._vbuckets[vbid].base

    def states(self) -> list[VbucketState]:
        """All states of the group."""
        return [self._vbuckets[vbid].state for vbid in self.vbids]

    def row_prefix(self, vbid: int) -> bytes:
        """The first 4 bytes of the keys of rows that may be staged now: the staging branch."""
        return self._vbuckets[vbid].prefix

    def publishing(self, vbid: int) -> bool:
        """True while a complete snapshot waits for its key rows or for the next commit."""
        return self._vbuckets[vbid].complete_seqno is not None

    def publishable(self, vbid: int) -> bool:
        """True when the next commit makes a complete snapshot visible, or begins to make its key rows."""
        vbucket = self._vbuckets[vbid]
        return vbucket.complete_seqno is not None and vbucket.job is None

    @property
    def has_pending(self) -> bool:
        """True when a commit would change something that readers or a restart could see. What a vbucket receives while
        an IndexJob makes its key rows waits for that.
        """
        return any(
            vbucket.dirty and vbucket.job is None and vbucket.commit_worthy for vbucket in self._vbuckets.values()
        )

    @_contained
    def figures(self) -> dict[str, int]:
        """Sizes for status: bytes of the file, of the map, commits and pending bytes."""
        info = self.environment.env.info()
        return {
            "file_bytes": self.environment.file_bytes(),
            "map_bytes": int(info["map_size"]),
            "commits": self.owner.commit_count,
            "pending_bytes": self.pending_bytes,
            "indexing": len(self.background.jobs),
            "purged_rows": self.background.purger.removed_rows,
        }

    @_contained
    def readers(self) -> list[tuple[int, int]]:
        """(process, transaction) of each reader in another process that keeps pages from being used again."""
        return self.environment.readers()

    def clock_steps(self) -> tuple[int, int]:
        """How often the wall clock was seen to be set since this writer began, and by how many ms the last time."""
        return self.owner.clock.step_count, self.owner.clock.last_step_ms

    @_contained
    def histories(self) -> dict[int, extent.History]:
        """How far back each vbucket's history reaches and what it takes, as of the last commit."""
        with self.environment.read() as txn:
            return {vbid: extent.of(txn, vbid) for vbid in self.vbids}

    # -- accepting ------------------------------------------------------------------------------------------------

    @_contained
    def stage(
        self,
        vbid: int,
        rows: list[tuple[bytes, bytes]],
        byte_count: int,
        open_snapshot: SnapshotRange,
    ) -> None:
        """Accept rows ((staging branch + seqno, frame) pairs) of the open snapshot, above what is staged.

        Raises SeqnoOrder, and accepts none of them, unless they strictly rise above staged_seqno.
        """
        if rows:
            self._vbuckets[vbid].stage(rows, byte_count, open_snapshot)

    def advance(self, vbid: int, seqno: int) -> None:
        """Move the position without a row (SeqnoAdvanced). Raises SeqnoOrder when it would fall."""
        self._vbuckets[vbid].advance(seqno)

    def set_open_snapshot(self, vbid: int, open_snapshot: SnapshotRange | None) -> None:
        """Record the range of the open snapshot (it may grow while it is open)."""
        self._vbuckets[vbid].set_open_snapshot(open_snapshot)

    @_contained
    def system_event(
        self,
        vbid: int,
        seqno: int,
        row_value: bytes,
        manifest: Manifest,
        open_snapshot: SnapshotRange,
        change: ManifestChange | None = None,
    ) -> None:
        """Accept a system event: its row, and the manifest that holds from its seqno on. `change` is what it makes of
        the one before, where the caller knows; otherwise the two are compared.
        """
        self._vbuckets[vbid].system_event(seqno, row_value, manifest, open_snapshot, change)

    @_contained
    def publish(
        self, vbid: int, boundary_seqno: int, snap_start_seqno: int, source_purge_seqno: int | None = None
    ) -> None:
        """The snapshot that ends at `boundary_seqno` is complete; it becomes visible with a coming commit.

        `boundary_seqno` is the staged seqno, or above it where the source skipped the end; or below it, where a
        complete snapshot was held back for a while: then what was staged after it stays staged.
        """
        self._vbuckets[vbid].publish(boundary_seqno, snap_start_seqno, source_purge_seqno)

    def save_failover_log(
        self,
        vbid: int,
        log: FailoverLog,
        source_purge_seqno: int | None = None,
        missing_seqno: int | None = None,
    ) -> None:
        """Replace the failover log, with the next commit and never later than the first rows of its stream. That of a
        vbucket of which nothing is stored yet waits for those rows, or until it is known that there are none (`publish`
        at 0).
        """
        self._vbuckets[vbid].save_failover_log(log, source_purge_seqno, missing_seqno)

    def save_filter(self, vbid: int, text: str) -> None:
        """Keep what the streams of the staging branch are filtered to, never later than their first rows."""
        vbucket = self._vbuckets[vbid]
        vbucket.change(stream_filter=text)
        vbucket.dirty = True

    # -- committing -----------------------------------------------------------------------------------------------

    @_contained
    def commit(self, *, flush_open: bool = False) -> CommitResult:
        """One transaction with everything that is complete; rows of open snapshots too when `flush_open` is set.

        A full map is grown and the batch replayed. On any other failure everything pending is dropped, the states are
        read again (so machines and streams must start again) and the error is raised: Full, ReadOnly, CorruptedError...
        """
        self.owner.check_open()
        touched = [each for each in self._vbuckets.values() if each.dirty and (flush_open or each.commit_worthy)]
        if not touched:
            return CommitResult([])

        def write(txn: Transaction) -> list[commit.Plan]:
            moment = self.owner.moment()
            return [commit.put(txn, each, moment, flush_open=flush_open) for each in touched]

        published = []
        for vbucket, plan in zip(touched, self.owner.write(write), strict=True):
            commit.settle(vbucket, plan)
            self.background.after_commit(vbucket, plan)
            if plan.published:
                published.append((vbucket.base.vbid, vbucket.base.published_seqno))
        return CommitResult(published)

    # -- background -----------------------------------------------------------------------------------------------

    @property
    def is_indexing(self) -> bool:
        """True while a complete snapshot waits for `step` to make its key rows."""
        return bool(self.background.jobs)

    @_contained
    def step(self) -> bool:
        """One bounded slice of background work. True while more waits; a finished index is published by `commit`."""
        self.owner.check_open()
        self.owner.check_file()
        return self.background.step()

    @_contained
    def lease(self, name: str, positions: Mapping[int, tuple[int, int]], until_ms: int) -> None:
        """Keep history from these positions (vbid: branch, seqno) on until then, by the wall clock as it is now: to set
        it later changes nothing. Raises NoSuchBoundary for one that is no longer kept; then nothing is held.
        """
        self.background.lease(name, positions, until_ms)

    def renew_lease(self, name: str, positions: Mapping[int, tuple[int, int]], until_ms: int) -> bool:
        """Extend a lease. False: no such lease holds these (any more); what one that ended held may be gone since."""
        return self.background.renew_lease(name, positions, until_ms)

    # -- branches -------------------------------------------------------------------------------------------------

    @_contained
    def check_rollback(self, vbid: int, to_seqno: int) -> Boundary:
        """Where a rollback that an operator requests would go. Raises NoSuchBoundary below the floor, StorageError in
        a resync.
        """
        return self._leaving.check_rollback(vbid, to_seqno)

    @_contained
    def rollback(self, vbid: int, to_seqno: int, *, deferred: bool = False) -> RollbackResult:
        """Truncate to the newest kept boundary <= `to_seqno`: one transaction, the same cost at any size.

        `deferred`: readers stay at what they see until the first publish of the new branch. When no boundary above 0
        qualifies nothing is changed and the result's boundary is 0: the caller then resyncs.
        """
        self.commit()
        return self._leaving.rollback(vbid, to_seqno, deferred=deferred)

    @_contained
    def abandon(self, vbid: int, *, keep_complete: bool = True) -> bool:
        """Give up the staged rows of the open snapshot: they can never become visible. One transaction at most.

        A complete snapshot before them that waits for its key rows stays, and is published like any other, unless
        `keep_complete` is not set. False: it stays, and rows of the open snapshot lie above it on the disk. No branch
        can begin at its end before that is published: call again then.
        """
        self.commit()
        return self._leaving.abandon(vbid, keep_complete=keep_complete)

    @_contained
    def begin_resync(self, vbid: int) -> None:
        """Start again from 0 on a branch without parent; the served copy stays until the new one is published."""
        self.commit()
        self._leaving.begin_resync(vbid, unavailable=self.resync_reads == "unavailable")
