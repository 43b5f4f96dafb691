"""The environment of a group in the hands of its one writer: the lock, the fence, the clock and write transactions.

Knows LMDB and the directory; never rows or vbuckets' states (it asks its owner to load and to forget them). Invariants:
one process owns a group for life (GroupLock); every write transaction checks the fencing number; a full map is grown
and the work done again; after any other failed commit everything pending is dropped, the environment is opened again
and the states are read from disk, before the error is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import lmdb

from storage.env import directory
from storage.env.environment import SHARED, Environment, storage_error
from storage.env.transaction import Transaction
from storage.errors import Closed, CorruptedError, Locked, StorageError
from storage.format import keys
from storage.history import branches
from storage.model import Identity, Vbid
from storage.write.history_clock import HistoryClock

GROW_TRIES_MAX = 16
"""Doublings of the map for one commit; 16 of them are 65,536 times the size."""
READER_CHECK_INTERVAL_MS = 5_000
"""Between two searches for readers that were killed in a transaction: until then the file grows with each commit."""
IDLE_SYNC_MS = 200
"""With `safe`, the meta page of the last commit is synced when the group was idle for this long, milliseconds."""

Result = TypeVar("Result")


class GroupOwner:
    """Owns one group's environment from the constructor until `release`. One thread for life."""

    environment: Environment
    clock: HistoryClock

    def __init__(
        self,
        path: str,
        *,
        group: int,
        vbids: list[Vbid],
        identity: Identity,
        sync: str,
        map_size: int,
        clock_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        downtime_max_ms: int,
        load: Callable[[], bool],
        forget: Callable[[], None],
    ) -> None:
        """Take the group's lock; `open` follows.

        `load` reads the states from the environment, and returns True where they are older than those in memory.
        `forget` drops everything that is pending. `downtime_max_ms`: what the time between two writers counts at most.
        """
        self.path = path
        self.group = group
        self.vbids = vbids
        self.commit_count = 0
        self.lost = False
        """The environment was closed after a failed commit and cannot be opened."""
        self.closed = False
        self.unsynced_since: int | None = None
        """When the first commit was made that is not synced; None: all are."""
        self.fence = 0
        self._identity = identity
        self.durability = sync
        """The setting `sync`: `safe`, `full` or `unsafe`."""
        self._map_size = map_size
        self._clock_ms = clock_ms
        self._monotonic_ms = monotonic_ms
        self._downtime_max_ms = downtime_max_ms
        self._load = load
        self._forget = forget
        self.check_readers_ms = 0
        """When readers that were killed are searched for next, by the history clock."""
        self._lock = directory.GroupLock(path)

    # -- opening and closing --------------------------------------------------------------------------------------

    def open(self, *, claim: bool) -> None:
        """Open the environment and load. `claim`: raise the fence, as each new owner does."""
        self.environment = Environment(
            self.path, self.vbids, writable=True, sync=self.durability, map_size=self._map_size
        )
        try:
            self.environment.open_all()
            self._check_file()
            if claim:
                self.write_while_opening(self._claim)
            if self._load():  # the newest meta page was lost with a sync that failed
                self.write_while_opening(self._begin_history)
            if claim:
                self.clock = self._open_clock()
            SHARED.announce(self.environment)
        except Exception as error:
            self.environment.close()
            raise storage_error(error, self.path) from error
        except BaseException:
            self.environment.close()
            raise

    def _check_file(self) -> None:
        with self.environment.read() as txn:
            directory.check_identity(txn.get(keys.DB_META, b"identity"), self._identity, self.group, self.path)

    def _claim(self, txn: Transaction) -> None:
        self.fence = int.from_bytes(txn.get(keys.DB_META, b"fence") or b"", "big") + 1
        txn.put(keys.DB_META, b"fence", self.fence.to_bytes(8, "big"))
        self._begin_history(txn)

    def _begin_history(self, txn: Transaction) -> None:
        for vbid in self.vbids:
            branches.begin_history(txn, vbid)

    def _open_clock(self) -> HistoryClock:
        """The history clock, continued from the newest time that is stored in the group.

        The time between two writers is limited: so a wall clock that is wrong when the writer starts costs little.
        """
        newest = branches.Moment(0, 0)
        with self.environment.read() as txn:
            for vbid in self.vbids:
                newest = max(newest, branches.newest_moment(txn, vbid), key=attrgetter("history_ms"))
        return HistoryClock(
            self._clock_ms,
            self._monotonic_ms,
            stored_ms=newest.history_ms,
            stored_wall_ms=newest.wall_ms,
            downtime_max_ms=self._downtime_max_ms,
        )

    def reload(self) -> None:
        """After a failed commit: open the environment again and forget what was pending. Where that fails, too, the
        group is `lost` until another `reload` succeeds.
        """
        self._forget()
        if not self.lost:
            self.lost = True
            SHARED.release(self.environment)
        self.open(claim=False)
        self.lost = False

    def release(self) -> None:
        """Close without another write, and give up the lock."""
        self.closed = True
        if not self.lost:
            SHARED.release(self.environment)
        self.unlock()

    def unlock(self) -> None:
        """Give up the lock."""
        self._lock.release()

    def check_open(self) -> None:
        """Raise Closed, or StorageError where a failed commit has left the group closed."""
        self.check_not_closed()
        if self.lost:
            raise StorageError("the group could not be opened again after a failed commit", path=self.path)

    def check_not_closed(self) -> None:
        """Raise Closed after `release`."""
        if self.closed:
            raise Closed("the writer is closed", path=self.path)

    # -- writing --------------------------------------------------------------------------------------------------

    def write(self, work: Callable[[Transaction], Result]) -> Result:
        """Run `work(txn)` in a write transaction under the fence; grow the map and run it again when it is full."""
        fence = self.fence.to_bytes(8, "big")
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
                    self.reload()
                    raise storage_error(error, self.path) from error
            except Exception as error:
                txn.raw.abort()
                self.reload()
                raise storage_error(error, self.path) from error
            except BaseException:
                txn.raw.abort()
                raise
            else:
                self.commit_count += 1
                self.unsynced_since = self.clock.now_ms()
                return result
        self.reload()
        raise storage_error(lmdb.MapFullError("map full"), self.path)

    def write_while_opening(self, work: Callable[[Transaction], Any]) -> None:
        """A small write of its own, not yet under the fence. A file that has outgrown the map it is opened with is
        full at once.
        """
        for _ in range(GROW_TRIES_MAX):
            try:
                with self.environment.begin(write=True) as txn:
                    work(Transaction(self.environment, txn))
            except lmdb.MapFullError:
                self.environment.grow()
            else:
                return
        raise storage_error(lmdb.MapFullError("map full"), self.path)

    def moment(self) -> branches.Moment:
        """Now, by both clocks."""
        return branches.Moment(self._clock_ms(), self.clock.now_ms())

    # -- care -----------------------------------------------------------------------------------------------------

    def check_file(self) -> None:
        """Raise CorruptedError where the file is not at its path any more; free what dead readers keep from reuse."""
        if self.environment.look():
            raise CorruptedError(
                "the group's file was moved, removed or replaced while the service runs",
                path=self.path,
                hint="put it back, or leave it away to have the group filled again, and restart the service",
            )
        now_ms = self.clock.now_ms()
        if now_ms >= self.check_readers_ms:
            self.check_readers_ms = now_ms + READER_CHECK_INTERVAL_MS
            self.environment.env.reader_check()

    def sync_when_idle(self) -> None:
        """With `safe`, sync the meta page of the last commit once the group was idle for a while."""
        idle_since = self.unsynced_since
        if self.durability == "safe" and idle_since is not None and self.clock.now_ms() - idle_since >= IDLE_SYNC_MS:
            self.sync()

    def sync(self) -> None:
        """Force everything that was committed to the disk."""
        try:
            self.environment.env.sync(True)
        except lmdb.Error as error:
            self.reload()
            raise storage_error(error, self.path) from error
        self.unsynced_since = None
