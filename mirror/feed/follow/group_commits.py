"""The commits of a worker's groups, and what follows when the store of one fails.

Knows groups, their writers and vbuckets, when a commit is due (`pace`), and background work of the store; must never
know connections or maps. Invariants:
- groups with something that waits commit in turn, at once while commits take less than their share of the time, after
  `commit_interval_ms` at the latest, or at once when all groups together have `batch_bytes_max` staged;
- what a commit published is reported to the vbuckets' machines before anything else happens to the group;
- a failure of one group never touches another: its machines are dropped and started again from what is stored, later
  where the disk is full, and never where waiting changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import deque
from collections.abc import Callable, Sequence

from mirror.clock import Clock
from mirror.config import Settings
from mirror.feed.follow.pace import CommitPace
from mirror.feed.follow.vbucket import MirroredVbucket
from mirror.ingest.instructions import VbucketStatus
from mirror.log import get_logger
from storage.errors import CorruptedError, Full, Locked, SeqnoOrder, StorageError
from storage.write.writer import GroupWriter

log = get_logger("feed")

STEP_IDLE_S = 0.1
"""Pause between looks for background work when there was none, unless a commit begins to make key rows; the store's
idle sync is as late as this.
"""
STEP_SHARE_S = 0.002
"""Pause between two slices of background work, in which sockets are served."""
REOPEN_FACTOR_MAX = 16
"""Times `storage_retry_interval_s` that a group waits at most which cannot be opened again."""
FREE_BYTES_TO_RESUME = 2
"""Times `batch_bytes_max` that must be free before a group whose disk was full tries again."""


class Group:
    """A group environment of this worker, and what waits in it."""

    __slots__ = (
        "commit_waits",
        "commits",
        "error",
        "full_count",
        "reopen_count",
        "retry_timer",
        "vbuckets",
        "waiting_since",
        "writer",
    )

    def __init__(self, writer: GroupWriter) -> None:
        """A healthy group without vbuckets."""
        self.writer = writer
        self.vbuckets: dict[int, MirroredVbucket] = {}
        self.commit_waits = False
        self.waiting_since = 0.0
        self.retry_timer: asyncio.TimerHandle | None = None
        self.error: StorageError | None = None
        self.full_count = 0
        self.reopen_count = 0
        self.commits = 0

    @property
    def may_be_retried(self) -> bool:
        """False for an error that no waiting changes. One of no known kind is waited for if the file is not open."""
        assert self.error is not None
        if isinstance(self.error, Locked):  # another process has claimed the group
            return False
        return self.error.retryable or (self.writer.lost and type(self.error) is StorageError)


class GroupCommits:
    """Commits the groups of one worker. Everything is to be called on one event loop."""

    def __init__(
        self, groups: Sequence[Group], settings: Settings, clock: Clock, on_reopened: Callable[[MirroredVbucket], None]
    ) -> None:
        """`on_reopened` is called for each vbucket of a group that works again: its stream is to be requested."""
        self.groups = groups
        self.free_bytes = 0
        """How much may be received before the groups' pending bytes must be summed: never too much."""
        self.on_committed: Callable[[Group], None] | None = None
        """Called after each commit of a group."""
        self._settings = settings
        self._clock = clock
        self._on_reopened = on_reopened
        self._pace = CommitPace(settings.commit_interval_ms / 1000)
        self._queue: deque[Group] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._has_work = asyncio.Event()

    # -- commits --------------------------------------------------------------------------------------------------

    def schedule(self, group: Group) -> None:
        """Something waits in the group: commit before long."""
        if not group.commit_waits and group.error is None:
            group.commit_waits = True
            group.waiting_since = self._clock.monotonic()
            self._queue.append(group)
            self._schedule_next()

    def commit(self, group: Group, *, flush_open: bool = False) -> None:
        """Commit now. Raises what the store raises."""
        result = group.writer.commit(flush_open=flush_open)
        group.commits += 1
        group.full_count = 0
        if group.writer.is_indexing:
            self._has_work.set()
        if self.on_committed is not None:
            self.on_committed(group)
        for vbid, seqno in result.published:
            group.vbuckets[vbid].published(seqno)

    def flush_over_budget(self) -> None:
        """Write the fullest group's rows to the file when all groups together hold as much as the worker may."""
        limit_bytes = self._settings.batch_bytes_max
        pending_bytes = sum(group.writer.pending_bytes for group in self.groups)
        self.free_bytes = limit_bytes - pending_bytes
        if pending_bytes >= limit_bytes:
            fullest = max(self.groups, key=lambda group: group.writer.pending_bytes)
            try:
                self.commit(fullest, flush_open=True)
            except StorageError as error:
                self.failed(fullest, error)

    def close(self) -> None:
        """Commit what is complete, and schedule nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        for group in self.groups:
            if group.retry_timer is not None:
                group.retry_timer.cancel()
            if group.error is None:
                try:
                    group.writer.commit()
                except StorageError as error:
                    log.error("last-commit-failed", group=group.writer.group, error=str(error))

    def _schedule_next(self) -> None:
        """Have the group commit that has waited longest."""
        if self._timer is None and self._queue:
            delay_s = self._pace.delay_s(self._clock.monotonic(), self._queue[0].waiting_since)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._commit_due)

    def _commit_due(self) -> None:
        self._timer = None
        if self._queue:
            group = self._queue.popleft()
            group.commit_waits = False
            started = self._clock.monotonic()
            try:
                self.commit(group)
            except StorageError as error:
                self.failed(group, error)
            finally:
                self._pace.committed(started, self._clock.monotonic())
                self._schedule_next()

    # -- background work ------------------------------------------------------------------------------------------

    async def work_in_background(self) -> None:
        """Background work of the store (key rows, syncs), in slices between which sockets are served."""
        while True:
            if any(self.step(group) for group in self.groups):  # one at a time: memory has space for one snapshot's
                await asyncio.sleep(STEP_SHARE_S)
                continue
            self._has_work.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STEP_IDLE_S):
                    await self._has_work.wait()

    def step(self, group: Group) -> bool:
        """Do a slice of a group's background work; returns whether more of it waits."""
        if group.error is not None:
            return False
        try:
            waiting = group.writer.step()
            if group.writer.has_pending:
                self.schedule(group)
        except StorageError as error:
            self.failed(group, error)
            return False
        return waiting

    # -- failures of the store ------------------------------------------------------------------------------------

    def failed(self, group: Group, error: StorageError) -> None:
        """Stop the group's streams; start them again from what is stored, later where the disk is full."""
        if group.error is not None:
            return
        group.error = error
        if group.commit_waits:
            group.commit_waits = False
            self._queue.remove(group)
        log.error("store-failed", group=group.writer.group, error=str(error))
        guilty: MirroredVbucket | None = None
        for vbucket in group.vbuckets.values():
            vbucket.drop_machine()
            vbucket.report(VbucketStatus.WAITING, f"the store failed: {error}")
            vbucket.last_error = str(error)
            if isinstance(error, SeqnoOrder) and error.vbid == vbucket.vbid:
                guilty = vbucket
        delay_s = self._settings.storage_retry_interval_s
        if isinstance(error, Full):
            group.full_count += 1
        elif guilty is not None:
            guilty.violations += 1
            delay_s = min(delay_s, 0.1 * 2 ** min(guilty.violations, 10))
        elif not group.may_be_retried:
            self._give_up(group)
            return
        self._retry_later(group, delay_s)

    def _give_up(self, group: Group) -> None:
        """The group is damaged, locked or taken over, which no waiting changes. The others go on."""
        status = VbucketStatus.DAMAGED if isinstance(group.error, CorruptedError) else VbucketStatus.REFUSED
        for vbucket in group.vbuckets.values():
            vbucket.report(status, f"the store failed: {group.error}")
        group.writer.give_up()

    def _retry_later(self, group: Group, delay_s: float) -> None:
        group.retry_timer = asyncio.get_running_loop().call_later(delay_s, self._retry, group)

    def _retry(self, group: Group) -> None:
        group.retry_timer = None
        try:
            group.writer.reopen()
        except StorageError as error:
            group.error = error
            group.reopen_count += 1
            log.warning("store-not-reopened", group=group.writer.group, error=str(error))
            if not group.may_be_retried:
                self._give_up(group)
                return
            factor = min(2**group.reopen_count, REOPEN_FACTOR_MAX)
            self._retry_later(group, self._settings.storage_retry_interval_s * factor)
            return
        group.reopen_count = 0
        if isinstance(group.error, Full):
            free_bytes = shutil.disk_usage(group.writer.path).free
            if free_bytes < FREE_BYTES_TO_RESUME * self._settings.batch_bytes_max:
                self._retry_later(group, self._settings.storage_retry_interval_s)
                return
        log.info("store-retried", group=group.writer.group)
        group.error = None
        for vbucket in group.vbuckets.values():
            vbucket.start_machine()
            self._on_reopened(vbucket)
