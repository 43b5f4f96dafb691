"""The writer of a vbucket group: staging, group commit, publishing.

Knows rows, seqnos and LMDB; never sockets, time (a clock is given) or what a source is. One process owns a group for
life (GroupLock), one thread calls this class, and every write transaction checks the fencing number.

Invariants: what `state()` says is the last commit plus the operations accepted since; a commit writes rows, key rows,
`state`, `pub`, boundary and manifest of all touched vbuckets in ONE transaction; a vbucket becomes visible at a new
published_seqno only in a transaction after which every row up to it has its key row; on any failed commit but a full
map everything pending is dropped and the states are read again from disk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import islice
from operator import attrgetter, itemgetter, lt
from typing import Any, NamedTuple, ParamSpec, TypeVar

import lmdb

from storage import branches, chain, directory, history, index, keys, records, seal
from storage.environment import MAP_SIZE, SHARED, Environment, storage_error
from storage.errors import Closed, CorruptedError, Locked, NoSuchBoundary, SeqnoOrder, StorageError
from storage.history_clock import HistoryClock
from storage.leases import LEASE_MAX_MS, Leases, check_kept
from storage.model import (
    Boundary,
    Branch,
    BranchReason,
    FailoverEntry,
    Identity,
    Manifest,
    ManifestChange,
    Seqno,
    SnapshotRange,
    Vbid,
    VbucketState,
)
from storage.prepares import Prepares, committed_row
from storage.purge import Purger, Window
from storage.transaction import Transaction

INLINE_INDEX_ROWS = 20_000
"""Deferred rows up to this count get their key rows in the publishing transaction itself; more go to an IndexJob."""
MANIFEST_DEPTH_MIN = 16
"""A manifest is never written whole before it is made of more rows than this, and than twice its collections."""
GROW_TRIES_MAX = 16
"""Doublings of the map for one commit; 16 of them are 65,536 times the size."""
PURGE_INTERVAL_MS = 1_000
"""Pause after a look at every vbucket that found no history to remove, milliseconds."""
READER_CHECK_INTERVAL_MS = 5_000
"""Between two searches for readers that were killed in a transaction: until then the file grows with each commit."""
KEEP_ALL = Window()
IDLE_SYNC_MS = 200
"""With `safe`, the meta page of the last commit is synced when the group was idle for this long, milliseconds."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit made visible: (vbid, published_seqno) of each vbucket that moved."""

    published: list[tuple[Vbid, Seqno]]


@dataclass(frozen=True, slots=True)
class RollbackResult:
    """A rollback: the boundary it went to and where it came from. Boundary 0: none qualified, nothing was changed."""

    boundary_seqno: Seqno
    from_seqno: Seqno
    branch: Branch
    from_branch: Branch


class Plan(NamedTuple):
    """What a commit wrote of one vbucket."""

    row_count: int
    published: bool
    staged_seqno: int
    time_ms: int
    counters: branches.Counters
    manifest_count: int


class Vbucket:
    """The writer's memory of one vbucket: its state, and what is pending above the last commit.

    What moves with every snapshot (staged seqno, open snapshot) is kept beside `base` and joined to it when somebody
    asks for the state: live snapshots hold two or three mutations, and a new VbucketState for each would cost more than
    writing them.
    """

    __slots__ = (
        "base",
        "complete_count",
        "complete_seqno",
        "complete_start",
        "counters",
        "dirty",
        "flushed_seqno",
        "indexed_bytes",
        "indexed_seqno",
        "job",
        "known_empty",
        "manifest_changes",
        "manifest_depth",
        "manifest_key",
        "manifest_keys",
        "open_snapshot",
        "pending_bytes",
        "prefix",
        "prepares",
        "rows",
        "staged_seqno",
        "unindexed_count",
        "unordered",
    )

    def __init__(self, loaded: branches.Loaded, prepares: Prepares) -> None:
        """Nothing is pending yet."""
        state = loaded.state
        self.base = state
        self.prepares = prepares
        self.staged_seqno: int = state.staged_seqno
        self.open_snapshot = state.open_snapshot
        self.prefix = keys.PREFIX.pack(state.staging_branch)
        self.rows: list[tuple[bytes, bytes]] = []
        self.pending_bytes = 0
        self.complete_count = 0  # how many of `rows` belong to complete snapshots
        self.complete_seqno: int | None = None  # newest complete end that is not published yet
        self.complete_start = 0
        self.flushed_seqno: int = state.staged_seqno
        self.indexed_seqno = loaded.indexed_seqno
        self.indexed_bytes = 0  # of rows above what is published that an IndexJob has read
        self.counters = loaded.counters  # of the newest published boundary
        self.unindexed_count: int | None = 0 if self.indexed_seqno >= self.flushed_seqno else None  # None: not counted
        self.manifest_key = loaded.manifest_key  # of the newest manifest row at or below what is published
        self.manifest_keys = loaded.manifest_keys  # of those above it that are on the disk, rising
        self.manifest_changes: list[tuple[int, ManifestChange]] = []  # (seqno, change), rising, that are not yet
        self.manifest_depth = loaded.manifest_depth
        self.job: index.IndexJob | None = None
        self.dirty = False
        self.unordered = False
        self.known_empty = bool(state.failover_log)  # matters only while nothing is held: it was published at 0

    @property
    def state(self) -> VbucketState:
        """Everything accepted so far; published_seqno counts commits only."""
        return replace(self.base, staged_seqno=Seqno(self.staged_seqno), open_snapshot=self.open_snapshot)

    def change(self, **fields: Any) -> None:
        """Replace fields of the state that change rarely."""
        self.base = replace(self.base, **fields)

    def change_manifest(self, seqno: int, manifest: Manifest, change: ManifestChange, *, unordered: bool) -> int:
        """Take a manifest in that holds from `seqno` on; returns the bytes that it costs until it is written.

        A row holds what has changed, and now and then all: so that reading a manifest takes no more rows than it has
        collections, times a constant.
        """
        whole = self.manifest_depth > MANIFEST_DEPTH_MIN + 2 * len(manifest.collections)
        if unordered:
            written = self.manifest_keys[-1][1] if self.manifest_keys else 0
            seqno = max([seqno, written, *(at for at, _ in self.manifest_changes[-1:])])
            whole = whole or seqno == written  # it takes the place of that row
        if whole:
            change = change.as_whole(manifest)
        counted = 0
        if self.manifest_changes and self.manifest_changes[-1][0] == seqno:
            before = self.manifest_changes.pop()[1]
            counted = before.byte_count
            change = before.then(change)
        self.manifest_changes.append((seqno, change))
        self.manifest_depth = 1 if change.whole else self.manifest_depth + 1
        self.change(manifest=manifest)
        return change.byte_count - counted


def _contained(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let nothing but a StorageError leave: whatever damaged pages make of this code concerns this group alone.

    What they make of LMDB can be a signal, and the end of the process: `at_work` names the group to who looks then.
    """

    @wraps(method)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        writer = args[0]
        assert isinstance(writer, GroupWriter)
        at_work = writer.at_work
        before = at_work[0]
        at_work[0] = writer.group + 1
        try:
            return method(*args, **kwargs)
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
        refill_reads: str = "stale",
    ) -> None:
        """Use `open`."""
        self.path = path
        self.group = group
        self.at_work: MutableSequence[int] | memoryview[int] = [0]
        """Holds the group's number and 1 while a method of this object works."""
        self.vbids = [Vbid(vbid) for vbid in vbids]
        self.identity = identity
        self.sync = sync
        self.clock_ms = clock_ms
        self._monotonic_ms = clock_ms if monotonic_ms is None else monotonic_ms
        self.map_size = map_size
        self.window = window
        self.refill_reads = refill_reads
        self.pending_bytes = 0
        self.commit_count = 0
        self.leases = Leases()
        self._jobs: list[Vbucket] = []
        self._unsynced_since: int | None = None
        self._check_readers_ms = 0
        self._closed = False
        self.lost = False
        """The environment was closed after a failed commit and cannot be opened."""
        self._lock = directory.GroupLock(path)
        try:
            self._open_environment(claim=True)
        except BaseException:
            self._lock.release()
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
        refill_reads: str = "stale",
    ) -> GroupWriter:
        """Take the group's lock and read its states. `clock_ms`: the wall clock; `monotonic_ms`: one that is never set
        (without it `clock_ms`, whose steps ahead then age history). `window`: how much
        history to keep. `refill_reads`: what readers get of a vbucket that is being resynced: its old copy
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
            refill_reads=refill_reads,
        )

    # -- opening and states ---------------------------------------------------------------------------------------

    def _open_environment(self, *, claim: bool) -> None:
        self.environment = Environment(self.path, self.vbids, writable=True, sync=self.sync, map_size=self.map_size)
        try:
            self.environment.open_all()
            with self.environment.read() as txn:
                directory.check_identity(txn.get(keys.DB_META, b"identity"), self.identity, self.group, self.path)
                fence = int.from_bytes(txn.get(keys.DB_META, b"fence") or b"", "big")
                here = directory.place(self.path)
                moved = txn.get(keys.DB_META, b"place") != here
            if claim:
                self._fence = fence + 1
                self._while_opening(lambda txn: txn.put(keys.DB_META, b"fence", self._fence.to_bytes(8, "big")))
            if moved:
                self._while_opening(lambda txn: self._begin_history(txn, here))
            seen = [] if claim else [vbucket.base for vbucket in self._vbuckets.values()]
            self._load()
            for each in seen:  # the newest meta page was lost with a sync that failed
                now = self._vbuckets[each.vbid].base
                if (now.branch, now.published_seqno) < (each.branch, each.published_seqno):
                    self._while_opening(lambda txn: self._begin_history(txn, here))
                    break
            if claim:
                self._clock = self._open_clock()
            self._purger = Purger(self.environment, self.vbids, self.window, self.leases)
            self._purge_after_ms = 0
            if claim:
                self._settle_refill_reads()
            SHARED.announce(self.environment)
        except Exception as error:
            self.environment.close()
            raise storage_error(error, self.path) from error
        except BaseException:
            self.environment.close()
            raise

    def _open_clock(self) -> HistoryClock:
        """The history clock, going on from the newest time that is stored in the group.

        The time between two writers counts for half of the window at most: a wall clock that is wrong when the writer
        starts costs no more.
        """
        newest = branches.Moment(0, 0)
        with self.environment.read() as txn:
            for vbid in self.vbids:
                newest = max(newest, branches.newest_moment(txn, vbid), key=attrgetter("history_ms"))
        return HistoryClock(
            self.clock_ms,
            self._monotonic_ms,
            stored_ms=newest.history_ms,
            stored_wall_ms=newest.wall_ms,
            downtime_max_ms=(self.window.time_ms or 0) // 2,
        )

    def _begin_history(self, txn: Transaction, here: bytes) -> None:
        for vbid in self.vbids:
            branches.begin_history(txn, vbid)
        txn.put(keys.DB_META, b"place", here)

    def _settle_refill_reads(self) -> None:
        """Refills that are under way follow the setting as it is now."""
        unavailable = self.refill_reads == "unavailable"

        def write(txn: Transaction) -> None:
            for vbid in self.vbids:
                branches.set_unavailable(txn, vbid, unavailable)

        self._while_opening(write)

    def _while_opening(self, work: Callable[[Transaction], Any]) -> None:
        """A small write of its own. A file that has outgrown the map it is opened with is full at once."""
        for _ in range(GROW_TRIES_MAX):
            try:
                with self.environment.begin(write=True) as txn:
                    work(Transaction(self.environment, txn))
            except lmdb.MapFullError:
                self.environment.grow()
            else:
                return
        raise storage_error(lmdb.MapFullError("map full"), self.path)

    def _load(self) -> None:
        """Read every vbucket's state from the newest commit."""
        self.pending_bytes = 0
        self._jobs = []
        self._vbuckets: dict[int, Vbucket] = {}
        with self.environment.read() as txn:
            for vbid in self.vbids:
                self._vbuckets[vbid] = self._read_vbucket(txn, vbid)
        for vbid in self.vbids:
            self._finish_complete(vbid)

    def _read_vbucket(self, txn: Transaction, vbid: Vbid) -> Vbucket:
        loaded = branches.load(txn, vbid)
        return Vbucket(loaded, Prepares.load(txn, loaded.state))

    def _finish_complete(self, vbid: Vbid) -> None:
        """A snapshot that was complete on disk when the last writer ended lacks its key rows alone: make them now.

        The marker's start is not stored; the boundary gets the one below it, as a stream request would.
        """
        vbucket = self._vbuckets[vbid]
        state = vbucket.state
        if state.open_snapshot is None and state.staged_seqno > state.staging_published_seqno:
            vbucket.complete_seqno = state.staged_seqno
            vbucket.complete_start = state.staging_published_seqno
            self._begin_job(vbucket)

    def _reload(self) -> None:
        """After a failed commit: open the environment again and forget what was pending. Where that fails, too, the
        group is `lost` until `reopen` succeeds.
        """
        for vbucket in list(self._jobs):
            self._cancel_job(vbucket)
        self.pending_bytes = 0
        if not self.lost:
            self.lost = True
            SHARED.release(self.environment)
        self._open_environment(claim=False)
        self.lost = False

    def _moment(self) -> branches.Moment:
        return branches.Moment(self.clock_ms(), self._clock.now_ms())

    @_contained
    def reopen(self) -> None:
        """Open what a failed commit has closed and could not open again; nothing where it is open."""
        self._check_not_closed()
        if self.lost:
            self._reload()

    def give_up(self) -> None:
        """Close without another write: the group is damaged."""
        if self._closed:
            return
        self._closed = True
        for vbucket in list(self._jobs):
            self._cancel_job(vbucket)
        self.pending_bytes = 0
        if not self.lost:
            SHARED.release(self.environment)
        self._lock.release()

    def state(self, vbid: int) -> VbucketState:
        """The vbucket as it is after everything accepted so far; `published_seqno` counts commits only."""
        return self._vbuckets[vbid].state

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
            vbucket.dirty and vbucket.job is None and self._commit_worthy(vbucket)
            for vbucket in self._vbuckets.values()
        )

    @_contained
    def figures(self) -> dict[str, int]:
        """Sizes for status: bytes of the file, of the map, commits and pending bytes."""
        info = self.environment.env.info()
        return {
            "file_bytes": self.environment.file_bytes(),
            "map_bytes": int(info["map_size"]),
            "commits": self.commit_count,
            "pending_bytes": self.pending_bytes,
            "indexing": len(self._jobs),
            "purged_rows": self._purger.removed_rows,
        }

    @_contained
    def readers(self) -> list[tuple[int, int]]:
        """(process, transaction) of each reader in another process that keeps pages from being used again."""
        return self.environment.readers()

    def clock_steps(self) -> tuple[int, int]:
        """How often the wall clock was seen to be set since this writer began, and by how many ms the last time."""
        return self._clock.step_count, self._clock.last_step_ms

    @_contained
    def histories(self) -> dict[int, history.History]:
        """How far back each vbucket's history reaches and what it takes, as of the last commit."""
        with self.environment.read() as txn:
            return {vbid: history.of(txn, vbid) for vbid in self.vbids}

    # -- accepting ------------------------------------------------------------------------------------------------

    @_contained
    def stage(
        self,
        vbid: int,
        rows: list[tuple[bytes, bytes]],
        byte_count: int,
        open_snapshot: SnapshotRange,
        unordered: bool = False,
    ) -> None:
        """Accept rows ((staging branch + seqno, frame) pairs) of the open snapshot, above what is staged.

        Raises SeqnoOrder, and accepts none of them, unless they strictly rise above staged_seqno. `unordered` (OSO)
        lifts the rule.
        """
        if not rows:
            return
        vbucket = self._vbuckets[vbid]
        row_keys = [row[0] for row in rows]
        last = int.from_bytes(row_keys[-1][4:], "big")
        if row_keys[0][:4] != vbucket.prefix or row_keys[-1][:4] != vbucket.prefix:
            raise SeqnoOrder("rows were made for another branch", path=self.path, vbid=vbid)
        if unordered:
            last = max(vbucket.staged_seqno, int.from_bytes(max(row_keys)[4:], "big"))
            vbucket.unordered = True
        elif row_keys[0] <= vbucket.prefix + vbucket.staged_seqno.to_bytes(8, "big") or not all(
            map(lt, row_keys, islice(row_keys, 1, None))
        ):
            first = int.from_bytes(row_keys[0][4:], "big")
            raise SeqnoOrder(
                f"{len(rows)} rows from {first} to {last} do not rise above staged seqno {vbucket.staged_seqno}",
                path=self.path,
                vbid=vbid,
            )
        vbucket.prepares.settled_by_rows(rows)
        vbucket.rows += seal.sealed_rows(row_keys, rows)
        vbucket.pending_bytes += byte_count
        self.pending_bytes += byte_count
        vbucket.staged_seqno = last
        vbucket.open_snapshot = open_snapshot
        vbucket.dirty = True

    def advance(self, vbid: int, seqno: int) -> None:
        """Move the position without a row (SeqnoAdvanced). Raises SeqnoOrder when it would fall."""
        vbucket = self._vbuckets[vbid]
        if seqno < vbucket.staged_seqno:
            raise SeqnoOrder(f"advance to {seqno} below {vbucket.staged_seqno}", path=self.path, vbid=vbid)
        vbucket.staged_seqno = seqno
        vbucket.dirty = True

    def set_open_snapshot(self, vbid: int, open_snapshot: SnapshotRange | None) -> None:
        """Record the range of the open snapshot (it may grow while it is open)."""
        vbucket = self._vbuckets[vbid]
        vbucket.open_snapshot = open_snapshot
        vbucket.dirty = True

    @_contained
    def system_event(
        self,
        vbid: int,
        seqno: int,
        row_value: bytes,
        manifest: Manifest,
        open_snapshot: SnapshotRange,
        unordered: bool = False,
        change: ManifestChange | None = None,
    ) -> None:
        """Accept a system event: its row, and the manifest that holds from its seqno on. `change` is what it makes of
        the one before, where the caller knows; otherwise the two are compared.

        Inside an OSO snapshot (`unordered`) each manifest holds from the largest seqno so far: no boundary lies within.
        """
        vbucket = self._vbuckets[vbid]
        branch = vbucket.base.staging_branch
        self.stage(vbid, [(keys.ROW.pack(branch, seqno), row_value)], len(row_value), open_snapshot, unordered)
        if change is None:
            change = ManifestChange.between(vbucket.base.manifest, manifest)
        self.pending_bytes += vbucket.change_manifest(seqno, manifest, change, unordered=unordered)
        vbucket.prepares.settled_by_manifest(manifest, (branch, seqno))

    @_contained
    def prepare(self, vbid: int, seqno: int, frame: bytes, open_snapshot: SnapshotRange) -> None:
        """Accept the first half of a sync write: the PREPARE message in stored form. Raises SeqnoOrder."""
        vbucket = self._vbuckets[vbid]
        self._check_rises(vbucket, seqno)
        self.pending_bytes += vbucket.prepares.prepared((vbucket.base.staging_branch, seqno), frame)
        vbucket.staged_seqno = seqno
        vbucket.open_snapshot = open_snapshot
        vbucket.dirty = True

    @_contained
    def commit_prepare(self, vbid: int, seqno: int, key: bytes, open_snapshot: SnapshotRange) -> bool:
        """Accept the commit of a sync write: a row with what was prepared. False: nothing is prepared of that key.

        Raises SeqnoOrder.
        """
        vbucket = self._vbuckets[vbid]
        frame = vbucket.prepares.frame(self.environment, vbid, key)
        if frame is None:
            return False
        row = committed_row(frame, seqno)
        self.stage(vbid, [(keys.ROW.pack(vbucket.base.staging_branch, seqno), row)], len(row), open_snapshot)
        return True

    @_contained
    def abort_prepare(self, vbid: int, seqno: int, frame: bytes, open_snapshot: SnapshotRange) -> None:
        """Accept the abort of a sync write, whose prepare may be unknown: the ABORT message in stored form.

        Raises SeqnoOrder.
        """
        vbucket = self._vbuckets[vbid]
        self._check_rises(vbucket, seqno)
        self.pending_bytes += vbucket.prepares.aborted((vbucket.base.staging_branch, seqno), frame)
        vbucket.staged_seqno = seqno
        vbucket.open_snapshot = open_snapshot
        vbucket.dirty = True

    def _check_rises(self, vbucket: Vbucket, seqno: int) -> None:
        if seqno <= vbucket.staged_seqno:
            raise SeqnoOrder(
                f"seqno {seqno} does not rise above {vbucket.staged_seqno}", path=self.path, vbid=vbucket.base.vbid
            )

    def open_prepares(self, vbid: int) -> dict[bytes, int]:
        """Sync writes that are neither committed nor aborted as of what is staged: prefixed key -> seqno."""
        return {key: at[1] for key, at in self._vbuckets[vbid].prepares.open.items()}

    @_contained
    def publish(
        self, vbid: int, boundary_seqno: int, snap_start_seqno: int, source_purge_seqno: int | None = None
    ) -> None:
        """The snapshot that ends at `boundary_seqno` is complete; it becomes visible with a coming commit.

        `boundary_seqno` is the staged seqno, or above it where the source skipped the end; or below it, where a
        complete snapshot was held back for a while: then what was staged after it stays staged.
        """
        vbucket = self._vbuckets[vbid]
        assert boundary_seqno >= vbucket.base.staging_published_seqno, (vbid, boundary_seqno)
        vbucket.complete_seqno = boundary_seqno
        vbucket.complete_start = snap_start_seqno
        if boundary_seqno >= vbucket.staged_seqno:
            vbucket.complete_count = len(vbucket.rows)
            vbucket.staged_seqno = boundary_seqno
            vbucket.open_snapshot = None
        else:
            if vbucket.unordered:
                vbucket.rows.sort()
            vbucket.complete_count = bisect_left(
                vbucket.rows, vbucket.prefix + (boundary_seqno + 1).to_bytes(8, "big"), key=itemgetter(0)
            )
        if source_purge_seqno is not None:
            vbucket.change(source_purge_seqno=Seqno(source_purge_seqno))
        vbucket.dirty = True

    def save_failover_log(self, vbid: int, log: Sequence[FailoverEntry], source_purge_seqno: int | None = None) -> None:
        """Replace the failover log, with the next commit and never later than the first rows of its stream. That of a
        vbucket of which nothing is held yet waits for those rows, or for the word that there are none (`publish` at 0).
        """
        vbucket = self._vbuckets[vbid]
        vbucket.change(failover_log=tuple(log))
        if source_purge_seqno is not None:
            vbucket.change(source_purge_seqno=Seqno(source_purge_seqno))
        vbucket.dirty = True

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
        self._check_open()
        touched = [v for v in self._vbuckets.values() if v.dirty and (flush_open or self._commit_worthy(v))]
        if not touched:
            return CommitResult([])
        plans = self._write(lambda txn: [self._put_vbucket(txn, vbucket, flush_open) for vbucket in touched])
        published = []
        for vbucket, plan in zip(touched, plans, strict=True):
            if self._settle(vbucket, plan):
                published.append((vbucket.base.vbid, vbucket.base.published_seqno))
        return CommitResult(published)

    @staticmethod
    def _commit_worthy(vbucket: Vbucket) -> bool:
        """False while all that is pending are rows of an open snapshot: they wait in memory for its end."""
        return vbucket.complete_seqno is not None or not vbucket.rows

    def _write(self, work: Callable[[Transaction], Any]) -> Any:
        """Run `work(txn)` in a write transaction under the fence; grow the map and run it again when it is full."""
        fence = self._fence.to_bytes(8, "big")
        for _ in range(GROW_TRIES_MAX):
            txn = Transaction(self.environment, self.environment.begin(write=True))
            try:
                if txn.get(keys.DB_META, b"fence") != fence:
                    raise Locked("another process took this group over", path=self.path)
                result = work(txn)
                txn.raw.commit()
            except lmdb.MapFullError:
                txn.raw.abort()
                try:
                    self.environment.grow()
                except lmdb.Error as error:
                    self._reload()
                    raise storage_error(error, self.path) from error
            except Exception as error:
                txn.raw.abort()
                self._reload()
                raise storage_error(error, self.path) from error
            except BaseException:
                txn.raw.abort()
                raise
            else:
                self.commit_count += 1
                self._unsynced_since = self._clock.now_ms()
                return result
        self._reload()
        raise storage_error(lmdb.MapFullError("map full"), self.path)

    def _put_vbucket(self, txn: Transaction, vbucket: Vbucket, flush_open: bool) -> Plan:
        """Write one vbucket's part. Changes nothing in memory."""
        state = vbucket.state
        vbid = state.vbid
        count = len(vbucket.rows) if flush_open else vbucket.complete_count
        if vbucket.unordered:
            vbucket.rows.sort()
        rows = vbucket.rows if count == len(vbucket.rows) else vbucket.rows[:count]
        if rows:
            cursor = txn.cursor(keys.rows_db(vbid))
            consumed, added = cursor.putmulti(rows, append=not vbucket.unordered)
            if consumed != added or consumed != len(rows):
                raise SeqnoOrder(f"of {len(rows)} rows {added} rise in seqno", path=self.path, vbid=vbid)
        publish = False
        counters = vbucket.counters
        if vbucket.complete_seqno is not None and vbucket.job is None:
            complete = rows if vbucket.complete_count == len(rows) else rows[: vbucket.complete_count]
            until = vbucket.complete_seqno if vbucket.unordered else min(vbucket.complete_seqno, vbucket.flushed_seqno)
            few = vbucket.unindexed_count is not None and vbucket.unindexed_count <= INLINE_INDEX_ROWS
            if few or vbucket.indexed_seqno >= until:
                key_rows = records.key_rows(complete)
                row_bytes = vbucket.indexed_bytes + sum([len(frame) for _, frame in complete])
                if vbucket.unindexed_count and vbucket.indexed_seqno < until:
                    # Rows of an OSO snapshot lie among each other: those of this commit are found with the earlier.
                    earlier, _, _, earlier_bytes = index.key_rows_between(
                        txn, vbid, vbucket.prefix, vbucket.indexed_seqno, until,
                        vbucket.unindexed_count + (len(complete) if vbucket.unordered else 0),
                    )  # fmt: skip
                    key_rows = earlier if vbucket.unordered else earlier + key_rows
                    row_bytes = earlier_bytes if vbucket.unordered else earlier_bytes + row_bytes
                index.sort_key_rows(key_rows)
                index.put_key_rows(txn, vbid, key_rows)
                publish = True
                counters = branches.Counters(counters.ordinal, counters.row_bytes + row_bytes)
        now = self._moment()
        manifest_count = 0
        for seqno, change in vbucket.manifest_changes:
            if flush_open or seqno <= (vbucket.complete_seqno or 0):
                manifest_count += 1
                key = keys.MANIFEST_KEY.pack(vbid, state.staging_branch, seqno)
                txn.put(keys.DB_MANIFEST, key, records.encode_manifest(change))
        if publish:
            counters = self._put_publish(txn, vbucket, now, counters)
        staged_seqno = self._put_state(txn, vbucket, rows, publish, now.wall_ms)
        vbucket.prepares.put(txn, state, staged_seqno, vbucket.complete_seqno if publish else None)
        return Plan(len(rows), publish, staged_seqno, now.wall_ms, counters, manifest_count)

    def _put_publish(
        self, txn: Transaction, vbucket: Vbucket, now: branches.Moment, counters: branches.Counters
    ) -> branches.Counters:
        """Returns what counts from the new boundary on."""
        state = vbucket.state
        assert vbucket.complete_seqno is not None
        return branches.put_published(
            txn,
            state,
            state.staging_branch,
            vbucket.complete_seqno,
            vbucket.complete_start,
            self._manifest_key_at(vbucket, vbucket.complete_seqno),
            now,
            counters,
        )

    @staticmethod
    def _manifest_key_at(vbucket: Vbucket, seqno: int) -> tuple[int, int]:
        branch = vbucket.base.staging_branch
        staged = [at for _, at in vbucket.manifest_keys] + [at for at, _ in vbucket.manifest_changes]
        below = [at for at in staged if at <= seqno]
        return (branch, below[-1]) if below else vbucket.manifest_key

    def _put_state(
        self, txn: Transaction, vbucket: Vbucket, rows: list[tuple[bytes, bytes]], publish: bool, now_ms: int
    ) -> int:
        """The `state` row; returns the staged seqno that it says. What stays in memory (rows of an open snapshot) must
        not be counted as staged.
        """
        state = vbucket.state
        staged = state.staged_seqno
        open_snapshot = state.open_snapshot
        if len(rows) < len(vbucket.rows):
            if vbucket.complete_seqno is not None and vbucket.complete_seqno >= vbucket.flushed_seqno:
                staged, open_snapshot = Seqno(vbucket.complete_seqno), None
            else:  # rows of the open snapshot are on disk, perhaps while a complete one before it waits for key rows
                staged, open_snapshot = Seqno(vbucket.flushed_seqno), state.open_snapshot
                if staged == state.staging_published_seqno:
                    open_snapshot = None
        if publish:
            assert vbucket.complete_seqno is not None
            published, indexed = vbucket.complete_seqno, vbucket.complete_seqno
        else:
            published = indexed = state.staging_published_seqno  # a crash repeats the key rows of a job
        rolled_back = publish and state.rollback_deferred
        # A log on disk without anything of its history says that the source has nothing: not before that is known.
        log = state.failover_log if staged or published or publish or vbucket.known_empty else ()
        row = records.StateRow(
            state.staging_branch,
            staged,
            published,
            indexed,
            open_snapshot,
            log,
            state.source_purge_seqno,
            state.rollback_count + rolled_back,
            now_ms if rolled_back else state.last_rollback_ms,
            state.stream_filter,
        )
        txn.put_state_row(state.vbid, row)
        return staged

    def _settle(self, vbucket: Vbucket, plan: Plan) -> bool:
        """Bring memory up to date after the commit. True when the vbucket was published."""
        count, published, staged_seqno, now_ms, vbucket.counters, manifest_count = plan
        self.pending_bytes -= vbucket.prepares.written(staged_seqno)
        written = vbucket.manifest_changes[:manifest_count]
        del vbucket.manifest_changes[:manifest_count]
        self.pending_bytes -= sum(change.byte_count for _, change in written)
        vbucket.manifest_keys += [
            (vbucket.base.staging_branch, seqno)
            for seqno, _ in written
            if (vbucket.base.staging_branch, seqno) not in vbucket.manifest_keys[-1:]
        ]
        if count == len(vbucket.rows):
            flushed = vbucket.staged_seqno
            dropped = vbucket.pending_bytes
            vbucket.rows = []
        else:
            flushed = max(vbucket.flushed_seqno, vbucket.complete_seqno or 0)
            dropped = min(sum(len(value) for _, value in vbucket.rows[:count]), vbucket.pending_bytes)
            vbucket.rows = vbucket.rows[count:]
        vbucket.pending_bytes -= dropped
        self.pending_bytes -= dropped
        indexed_rows = 0
        beyond = published and vbucket.flushed_seqno > (vbucket.complete_seqno or 0)
        if published:
            assert vbucket.complete_seqno is not None
            indexed_rows = vbucket.complete_count
            seqno = Seqno(vbucket.complete_seqno)
            base = vbucket.base
            if base.rollback_deferred:
                vbucket.change(rollback_count=base.rollback_count + 1, last_rollback_ms=now_ms)
            vbucket.manifest_key = self._manifest_key_at(vbucket, seqno)
            vbucket.manifest_keys = [key for key in vbucket.manifest_keys if key[1] > seqno]
            vbucket.change(
                branch=base.staging_branch,
                published_seqno=seqno,
                history_floor_seqno=base.history_floor_seqno if base.staging_published_seqno else seqno,
                staging_published_seqno=seqno,
            )
            vbucket.known_empty = True
            vbucket.indexed_seqno = seqno
            vbucket.indexed_bytes = 0
            vbucket.unindexed_count = 0
            vbucket.complete_seqno = None
            vbucket.unordered = False
        if vbucket.unindexed_count is not None:
            vbucket.unindexed_count += count - indexed_rows
        vbucket.complete_count = 0
        vbucket.flushed_seqno = flushed
        if beyond:  # earlier commits had written rows of the next snapshot
            vbucket.unindexed_count = self._count_unindexed(vbucket)
        vbucket.dirty = bool(vbucket.rows)
        if vbucket.complete_seqno is not None and vbucket.job is None:
            self._begin_job(vbucket)
        return published

    def _begin_job(self, vbucket: Vbucket) -> None:
        """Have the key rows of a complete snapshot made by `step`."""
        assert vbucket.complete_seqno is not None
        vbucket.job = index.IndexJob(
            self.environment, vbucket.base.vbid, vbucket.prefix, vbucket.indexed_seqno, vbucket.complete_seqno
        )
        self._jobs.append(vbucket)

    # -- background -----------------------------------------------------------------------------------------------

    @_contained
    def step(self) -> bool:
        """One bounded slice of background work. True while more waits; a finished index is published by `commit`."""
        self._check_open()
        self._look_around()
        if self._jobs:
            self._index_step(self._jobs[0])
            return bool(self._jobs)
        if self._purge_step():
            return True
        idle_since = self._unsynced_since
        if self.sync == "safe" and idle_since is not None and self._clock.now_ms() - idle_since >= IDLE_SYNC_MS:
            self._sync()
        return False

    def _look_around(self) -> None:
        """Refuse to go on in a file that is not at its path any more; free what dead readers keep from being reused."""
        if self.environment.look():
            raise CorruptedError(
                "the group's file was moved, removed or replaced while the service runs",
                path=self.path,
                hint="put it back, or leave it away to have the group filled again, and restart the service",
            )
        now_ms = self._clock.now_ms()
        if now_ms >= self._check_readers_ms:
            self._check_readers_ms = now_ms + READER_CHECK_INTERVAL_MS
            self.environment.env.reader_check()

    @_contained
    def lease(self, name: str, positions: Mapping[int, tuple[int, int]], until_ms: int) -> None:
        """Keep history from these positions (vbid: branch, seqno) on until then, by the wall clock as it is now: to set
        it later changes nothing. Raises NoSuchBoundary for one that is no longer kept; then nothing is held.
        """
        self.leases.prune(self._clock.now_ms())
        if self.leases.full:
            raise StorageError("too many leases are held", path=self.path, hint="release some, or wait")
        with self.environment.read() as txn:
            for vbid, position in positions.items():
                check_kept(txn, Vbid(vbid), position)
        self.leases.put(name, positions, self._lease_end_ms(until_ms))

    def renew_lease(self, name: str, positions: Mapping[int, tuple[int, int]], until_ms: int) -> bool:
        """Go on holding. False: no such lease holds these (any more); what one that ended held may be gone since."""
        return self.leases.renew(name, positions, self._lease_end_ms(until_ms), self._clock.now_ms())

    def _lease_end_ms(self, until_ms: int) -> int:
        """A time of the wall clock by the history clock."""
        return self._clock.now_ms() + min(max(0, until_ms - self.clock_ms()), LEASE_MAX_MS)

    def _purge_step(self) -> bool:
        """Remove a little history that nobody may look at any more. True when something was done."""
        now_ms = self._clock.now_ms()
        if self.window == KEEP_ALL or now_ms < self._purge_after_ms:
            return False
        vbid = self._purger.plan(now_ms)
        if vbid is None:
            if self._purger.round_is_over:
                self._purge_after_ms = now_ms + PURGE_INTERVAL_MS
            return False
        self._purge(vbid, now_ms)
        return True

    def _purge(self, vbid: Vbid, now_ms: int) -> None:
        purger = self._purger
        removed_rows = self._write(lambda txn: purger.step(txn, vbid, now_ms))
        purger.settle(removed_rows, self._clock.now_ms() - now_ms)
        with self.environment.read() as txn:
            floor_seqno, local_purge_seqno = branches.purge_state(txn, vbid)
        vbucket = self._vbuckets[vbid]
        vbucket.change(history_floor_seqno=Seqno(floor_seqno), local_purge_seqno=Seqno(local_purge_seqno))
        if purger.moved is not None:
            branch, parent, to_seqno = purger.moved
            vbucket.prepares.moved(branch, parent, to_seqno)
            if vbucket.manifest_key[0] == branch and vbucket.manifest_key[1] <= to_seqno:
                vbucket.manifest_key = (parent, vbucket.manifest_key[1])

    def _sync(self) -> None:
        try:
            self.environment.env.sync(True)
        except lmdb.Error as error:
            self._reload()
            raise storage_error(error, self.path) from error
        self._unsynced_since = None

    def _index_step(self, vbucket: Vbucket) -> None:
        job = vbucket.job
        assert job is not None
        try:
            if job.read_slice():
                return
        except OSError as error:  # the temporary file of a spilled run found no room
            self._reload()
            raise storage_error(error, self.path) from error
        job.next_slice()
        if self._write(job.write_slice):
            return
        job.close()
        self._jobs.remove(vbucket)
        vbucket.job = None
        vbucket.indexed_seqno = job.to_seqno
        vbucket.indexed_bytes += job.row_bytes
        # Rows that came while the job ran are few against what it has done; commit indexes them, or starts another job.
        vbucket.unindexed_count = self._count_unindexed(vbucket)
        vbucket.dirty = True

    def _count_unindexed(self, vbucket: Vbucket) -> int | None:
        """Rows on disk that lack their key rows; None: too many for one commit."""
        with self.environment.read() as txn:
            _, count, _, _ = index.key_rows_between(
                txn, vbucket.base.vbid, vbucket.prefix, vbucket.indexed_seqno,
                vbucket.flushed_seqno, INLINE_INDEX_ROWS + 1,
            )  # fmt: skip
        return count if count <= INLINE_INDEX_ROWS else None

    def _cancel_job(self, vbucket: Vbucket) -> None:
        if vbucket.job is not None:
            vbucket.job.close()
            vbucket.job = None
            self._jobs.remove(vbucket)

    # -- branches -------------------------------------------------------------------------------------------------

    @_contained
    def check_rollback(self, vbid: int, to_seqno: int) -> Boundary:
        """Where a rollback that an operator asks for would go. Raises NoSuchBoundary below the floor, StorageError in a
        refill.
        """
        state = self._vbuckets[vbid].state
        if state.staging_branch != state.branch:
            raise StorageError(
                "it is being resynced", path=self.path, vbid=vbid, hint="roll back when that is published"
            )
        boundary = self._boundary_at(state, to_seqno)
        if boundary is None or boundary.seqno < state.history_floor_seqno:
            raise NoSuchBoundary(
                f"nothing is kept at or below seqno {to_seqno}; history begins at seqno {state.history_floor_seqno}",
                path=self.path,
                vbid=vbid,
                hint="give a later seqno; `dcp-mirror state` shows the kept boundaries",
            )
        return boundary

    def _boundary_at(self, state: VbucketState, to_seqno: int) -> Boundary | None:
        with self.environment.read() as txn:
            served = chain.load(txn, state.vbid, state.branch, state.published_seqno)
            return chain.newest_boundary(txn, state.vbid, served, to_seqno)

    @_contained
    def rollback(self, vbid: int, to_seqno: int, *, deferred: bool = False) -> RollbackResult:
        """Truncate to the newest kept boundary <= `to_seqno`: one transaction, the same cost at any size.

        `deferred`: readers stay at what they see until the first publish of the new branch. When no boundary above 0
        qualifies nothing is changed and the result's boundary is 0: the caller then refills.
        """
        self.commit()
        vbucket = self._vbuckets[vbid]
        state = vbucket.state
        if state.rollback_deferred:  # what is served above that is not on the history that is staged
            to_seqno = min(to_seqno, state.staging_published_seqno)
        boundary = self._boundary_at(state, to_seqno)
        if boundary is None or boundary.seqno < max(1, state.history_floor_seqno):
            return RollbackResult(Seqno(0), state.published_seqno, state.branch, state.branch)
        self._discard_pending(vbucket)
        now = self._moment()
        if deferred:
            self._write(lambda txn: branches.defer_rollback(txn, state, boundary))
        else:
            self._write(lambda txn: branches.roll_back(txn, state, boundary, now))
        self._reread(vbid)
        after = self._vbuckets[vbid].state
        return RollbackResult(boundary.seqno, state.published_seqno, after.staging_branch, state.branch)

    @_contained
    def abandon(self, vbid: int, *, keep_complete: bool = True) -> bool:
        """Give up the staged rows of the open snapshot: they can never become visible. One transaction at most.

        A complete snapshot before them that waits for its key rows stays, and is published like any other, unless
        `keep_complete` is not set. False: it stays, and rows of the open snapshot lie above it on the disk. No branch
        can begin at its end before that is published: call again then.
        """
        self.commit()
        vbucket = self._vbuckets[vbid]
        if keep_complete and vbucket.complete_seqno is not None:
            return self._abandon_above(vbucket, vbucket.complete_seqno)
        self._discard_pending(vbucket)
        state = vbucket.state
        if vbucket.flushed_seqno == state.staging_published_seqno:  # nothing of it reached the disk
            vbucket.staged_seqno, vbucket.open_snapshot = state.staging_published_seqno, None
            vbucket.dirty = True
            self._forget_manifests(vbucket, state.staging_published_seqno)
            self._read_prepares(vbucket)
            return True
        now = self._moment()
        self._write(lambda txn: branches.abandon(txn, state, vbucket.manifest_key, now))
        self._reread(vbid)
        return True

    def _abandon_above(self, vbucket: Vbucket, complete_seqno: int) -> bool:
        """Forget what is staged above a complete end; False where some of it is on the disk."""
        self._drop_rows(vbucket)
        vbucket.staged_seqno = vbucket.flushed_seqno
        self._forget_manifests(vbucket, vbucket.flushed_seqno)
        if vbucket.flushed_seqno == complete_seqno:
            vbucket.open_snapshot = None
        vbucket.dirty = True
        self._read_prepares(vbucket)
        return vbucket.open_snapshot is None

    @_contained
    def begin_refill(self, vbid: int, reason: BranchReason = BranchReason.REFILL) -> None:
        """Start again from 0 on a branch without parent; the served copy stays until the new one is published."""
        self.commit()
        vbucket = self._vbuckets[vbid]
        self._discard_pending(vbucket)
        state = vbucket.state
        unavailable = self.refill_reads == "unavailable" and state.published_seqno > 0
        self._write(lambda txn: branches.begin_refill(txn, state, reason, unavailable=unavailable))
        self._reread(vbid)

    def begin_oso(self, vbid: int) -> None:
        """Start an out-of-sequence snapshot: a branch of its own that is published whole or never."""
        self.begin_refill(vbid, BranchReason.OSO)

    def _forget_manifests(self, vbucket: Vbucket, above_seqno: int) -> None:
        kept = [(seqno, change) for seqno, change in vbucket.manifest_changes if seqno <= above_seqno]
        if len(kept) == len(vbucket.manifest_changes) and all(at <= above_seqno for _, at in vbucket.manifest_keys):
            return
        self.pending_bytes -= sum(change.byte_count for _, change in vbucket.manifest_changes[len(kept) :])
        vbucket.manifest_changes = kept
        vbucket.manifest_keys = [key for key in vbucket.manifest_keys if key[1] <= above_seqno]
        newest = vbucket.manifest_keys[-1] if vbucket.manifest_keys else vbucket.manifest_key
        with self.environment.read() as txn:
            manifest, depth = branches.read_manifest(txn, vbucket.base.vbid, newest)
        vbucket.manifest_depth = depth + len(kept)
        vbucket.change(manifest=manifest.changed(*(change for _, change in kept)))

    def _read_prepares(self, vbucket: Vbucket) -> None:
        with self.environment.read() as txn:
            vbucket.prepares = Prepares.load(txn, vbucket.state)

    def _discard_pending(self, vbucket: Vbucket) -> None:
        """Forget rows in memory; what is on disk above the newest complete end stays hidden."""
        self._cancel_job(vbucket)
        self._drop_rows(vbucket)
        vbucket.complete_seqno = None
        vbucket.unordered = False

    def _drop_rows(self, vbucket: Vbucket) -> None:
        self.pending_bytes -= vbucket.pending_bytes + vbucket.prepares.pending_bytes
        vbucket.rows = []
        vbucket.pending_bytes = 0
        vbucket.complete_count = 0

    def _reread(self, vbid: int) -> None:
        self.pending_bytes -= sum(change.byte_count for _, change in self._vbuckets[vbid].manifest_changes)
        with self.environment.read() as txn:
            self._vbuckets[vbid] = self._read_vbucket(txn, Vbid(vbid))

    # -- end ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        self._check_not_closed()
        if self.lost:
            raise StorageError("the group could not be opened again after a failed commit", path=self.path)

    def _check_not_closed(self) -> None:
        if self._closed:
            raise Closed("the writer is closed", path=self.path)

    def close(self) -> None:
        """Commit what is complete, sync, and give the group up. Rows of open snapshots in memory are fetched again."""
        if self._closed:
            return
        try:
            if not self.lost:
                self.commit()
                if self.sync != "unsafe":
                    self._sync()
        finally:
            self.give_up()
