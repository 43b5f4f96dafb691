"""Ownership of a group's environment: the lock, the fence, the clock and write transactions.

Knows LMDB and the directory; never rows or vbuckets' states. Invariants:
- one process owns a group until `release` (GroupLock);
- every write transaction after `open` checks the fence, a stored number that each new owner raises;
- if LMDB's memory map is full, the owner grows the map and repeats the transaction;
- after any other failed commit, the owner drops all pending work, opens the environment again and loads the states;
  then it raises the error.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, MutableSequence
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import lmdb

from storage.env import directory
from storage.env.environment import MAP_SIZE, SHARED, Environment, storage_error
from storage.env.transaction import Transaction
from storage.errors import SET_ASIDE, Closed, CorruptedError, Locked, StorageError
from storage.format import keys
from storage.history import branches
from storage.history.purge import Window
from storage.model import Identity

GROW_TRIES_MAX = 16
"""Maximum number of times that one commit doubles the map, to 65,536 times its size."""
READER_CHECK_INTERVAL_MS = 5_000
"""Pause between searches for killed readers. The file grows while a killed reader still holds LMDB pages."""
IDLE_SYNC_MS = 200
"""With `sync = safe`, the last commit is synced after this many milliseconds without another commit."""
CLOCK_STEP_MIN_MS = 10_000
"""The wall clock counts as set (a step) if its distance from the monotonic clock has changed by this much since the
start or the last step.
"""

KEEP_ALL = Window()

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    group: int
    identity: Identity
    clock_ms: Callable[[], int]
    monotonic_ms: Callable[[], int] | None = None
    """A clock that cannot be set. None: use `clock_ms`; setting the wall clock ahead then makes history older."""
    sync: str = "safe"
    """The setting `sync`: `safe`, `full` or `unsafe`."""
    map_size: int = MAP_SIZE
    window: Window = KEEP_ALL
    """The limits of kept history. Time without a writer makes history older by at most half of `time_ms`."""
    resync_reads: str = "stale"
    """During a resync, readers of the vbucket get its old copy (`stale`) or an error (`unavailable`)."""


class HistoryClock:
    """The clock that measures the age of history, in milliseconds. It began at the wall time of the group's first
    writer.

    It advances with the machine's monotonic clock. The time between two writers is known only from the wall clock,
    which may be wrong. So this time counts for at most `downtime_max_ms`. `now_ms` never falls, not even below the
    stored time.
    """

    def __init__(
        self,
        wall_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        *,
        stored_ms: int = 0,
        stored_wall_ms: int = 0,
        downtime_max_ms: int = 0,
    ) -> None:
        """Continue from `stored_ms`, which was stored at wall time `stored_wall_ms`. Both 0: a new clock."""
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms
        now_ms, wall_now_ms = monotonic_ms(), wall_ms()
        self._ahead_ms = wall_now_ms - now_ms
        self.step_count = 0
        """The number of times that the wall clock was set."""
        self.last_step_ms = 0
        """Size of the last step; negative if the wall clock was set back."""
        downtime_ms = wall_now_ms - stored_wall_ms
        if not stored_ms:
            self._last_ms = wall_now_ms
        else:
            self._last_ms = stored_ms + min(max(0, downtime_ms), downtime_max_ms)
            if downtime_ms < -CLOCK_STEP_MIN_MS:
                self._note_step(downtime_ms)
        self._seen_ms = now_ms

    def now_ms(self) -> int:
        now_ms = self._monotonic_ms()
        ahead_ms = self._wall_ms() - now_ms
        if abs(ahead_ms - self._ahead_ms) >= CLOCK_STEP_MIN_MS:
            self._note_step(ahead_ms - self._ahead_ms)
            self._ahead_ms = ahead_ms
        self._last_ms += max(0, now_ms - self._seen_ms)  # `monotonic_ms` can be a wall clock, which can be set back
        self._seen_ms = now_ms
        return self._last_ms

    def _note_step(self, step_ms: int) -> None:
        self.step_count += 1
        self.last_step_ms = step_ms


class Contained(Protocol):
    owner: GroupOwner


Each = TypeVar("Each", bound=Contained)


def contained(
    method: Callable[Concatenate[Each, Parameters], Result],
) -> Callable[Concatenate[Each, Parameters], Result]:
    """Turn every exception into a StorageError: damaged LMDB pages can cause any, and must stop only this group.

    They can also make LMDB end the process by a signal; `GroupOwner.at_work` then shows the group.
    """

    @wraps(method)
    def call(each: Each, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        owner = each.owner
        at_work = owner.at_work
        before = at_work[0]
        at_work[0] = owner.options.group + 1
        try:
            return method(each, *args, **kwargs)
        except StorageError:
            raise
        except Exception as error:
            raise storage_error(error, owner.path) from error
        finally:
            at_work[0] = before

    return call


class GroupOwner:
    """Owns one group's environment from the constructor until `release`. Only one thread may use it."""

    environment: Environment
    clock: HistoryClock

    def __init__(
        self, path: str, options: WriterOptions, *, load: Callable[[], bool], forget: Callable[[], None]
    ) -> None:
        """Take the group's lock; the caller then calls `open`.

        `load` reads the states from the environment, and returns True if they are older than the states in memory.
        `forget` drops all pending work.
        """
        self.path = path
        self.options = options
        self.vbids = options.identity.group_vbids(options.group)
        self.at_work: MutableSequence[int] | memoryview[int] = [0]
        """Element 0: the group's number plus 1 while a `contained` method runs, else 0."""
        self.commit_count = 0
        self.lost = False
        """True if the environment was closed after a failed commit and could not be opened again."""
        self.closed = False
        self.unsynced_since: int | None = None
        """Time of the last commit on the history clock; None if the commit is synced."""
        self.fence = 0
        self.durability = options.sync
        self._load = load
        self._forget = forget
        self.check_readers_ms = 0
        """Time of the next search for killed readers, on the history clock."""
        self._lock = directory.GroupLock(path)

    # -- opening and closing --------------------------------------------------------------------------------------

    def open(self, *, claim: bool) -> None:
        """Open the environment and load the states. `claim`: raise the fence, as every new owner must."""
        self.environment = Environment(
            self.path, self.vbids, writable=True, sync=self.durability, map_size=self.options.map_size
        )
        try:
            self.environment.open_all()
            with self.environment.read() as txn:
                directory.check_identity(
                    txn.get(keys.DB_META, b"identity"), self.options.identity, self.options.group, self.path
                )
            if claim:
                self.write_while_opening(self._claim)
            if self._load():  # a failed sync lost a published commit
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

    def _claim(self, txn: Transaction) -> None:
        self.fence = int.from_bytes(txn.get(keys.DB_META, b"fence") or b"", "big") + 1
        txn.put(keys.DB_META, b"fence", self.fence.to_bytes(8, "big"))
        self._begin_history(txn)

    def _begin_history(self, txn: Transaction) -> None:
        for vbid in self.vbids:
            branches.begin_history(txn, vbid)

    def _open_clock(self) -> HistoryClock:
        """Return the history clock, continued from the newest time that is stored in the group."""
        newest = branches.NEVER
        with self.environment.read() as txn:
            for vbid in self.vbids:
                newest = max(newest, branches.newest_moment(txn, vbid), key=attrgetter("history_ms"))
        return HistoryClock(
            self.options.clock_ms,
            self.options.monotonic_ms or self.options.clock_ms,
            stored_ms=newest.history_ms,
            stored_wall_ms=newest.wall_ms,
            downtime_max_ms=(self.options.window.time_ms or 0) // 2,
        )

    def reload(self) -> None:
        """After a failed commit, forget pending work and open the environment again. If opening fails, the group is
        `lost` until another `reload` succeeds.
        """
        self._forget()
        if not self.lost:
            self.lost = True
            SHARED.release(self.environment)
        self.open(claim=False)
        self.lost = False

    def release(self) -> None:
        self.closed = True
        if not self.lost:
            SHARED.release(self.environment)
        self.unlock()

    def unlock(self) -> None:
        self._lock.release()

    def check_open(self) -> None:
        """Raise Closed, or StorageError if a failed commit left the group closed."""
        self.check_not_closed()
        if self.lost:
            raise StorageError("the group could not be opened again after a failed commit", path=self.path)

    def check_not_closed(self) -> None:
        if self.closed:
            raise Closed("the writer is closed", path=self.path)

    # -- writing --------------------------------------------------------------------------------------------------

    def write(self, work: Callable[[Transaction], Result]) -> Result:
        """Run `work(txn)` in a write transaction and return the result of `work`. If the map is full, grow it and try
        again. Raises StorageError: Locked if another owner raised the fence.
        """
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
        """Run `work` in a write transaction without a check of the fence. If the map is full, grow it and try again."""
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
        return branches.Moment(self.options.clock_ms(), self.clock.now_ms())

    # -- care -----------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self.path).free
        except OSError as error:
            raise storage_error(error, self.path) from error

    def check_file(self) -> None:
        """Raise CorruptedError if the file is no longer at its path. Search for killed readers if it is time."""
        if self.environment.look():
            raise CorruptedError(
                "the group's file was moved, removed or replaced while the service runs",
                path=self.path,
                hint=f"put the file back and restart the service; or {SET_ASIDE}",
            )
        now_ms = self.clock.now_ms()
        if now_ms >= self.check_readers_ms:
            self.check_readers_ms = now_ms + READER_CHECK_INTERVAL_MS
            self.environment.env.reader_check()

    def sync_when_idle(self) -> None:
        idle_since = self.unsynced_since
        if self.durability == "safe" and idle_since is not None and self.clock.now_ms() - idle_since >= IDLE_SYNC_MS:
            self.sync()

    def sync(self) -> None:
        try:
            self.environment.env.sync(True)
        except lmdb.Error as error:
            self.reload()
            raise storage_error(error, self.path) from error
        self.unsynced_since = None
