"""The commits of a worker's groups, and recovery when a group's store fails.

Waiting groups commit one after the other, one in each turn of the event loop. The more there is to receive or to
commit, the longer is a turn, and the more snapshots are in a commit. A failed group drops its machines; after a pause
new machines start from the stored state, except after a permanent error.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

from mirror.clock import happens
from mirror.config import Settings
from mirror.feed.host import VbucketHost
from mirror.ingest.events import Published
from mirror.ingest.instructions import VbucketStatus
from mirror.log import get_logger
from storage.errors import CorruptedError, Full, Locked, SeqnoOrder, StorageError
from storage.write.writer import GroupWriter

log = get_logger("feed")

STEP_IDLE_S = 0.1
"""Longest pause between checks for background work. A new job ends the pause."""
STEP_SHARE_S = 0.002
STORE_RETRY_S = 1.0
"""Pause of a failed group, such as one that waits for space on a full disk."""
REOPEN_FACTOR_MAX = 16
"""Longest pause of a group that cannot reopen, in units of `STORE_RETRY_S`."""
FREE_BYTES_TO_RESUME = 2
"""Free space required before a group retries a full disk, in units of `batch_bytes_max`."""


def unusable(error: StorageError) -> VbucketStatus:
    return VbucketStatus.DAMAGED if isinstance(error, CorruptedError) else VbucketStatus.REFUSED


class Group:
    def __init__(self, writer: GroupWriter, commits: GroupCommits) -> None:
        self.writer = writer
        self.commits = commits
        self.hosts: dict[int, VbucketHost] = {}
        self.violations: Counter[int | None] = Counter()
        """Number of failures because rows were out of order, by vbid."""
        self.commit_waits = False
        self.retry_timer: asyncio.TimerHandle | None = None
        self.error: StorageError | None = None
        self.reopen_count = 0
        self.count = 0
        """Commits since the worker began."""

    @property
    def may_be_retried(self) -> bool:
        """False for a permanent error. A plain StorageError is one, unless a failed commit left the store closed."""
        assert self.error is not None
        if isinstance(self.error, Locked):  # another process has claimed the group
            return False
        return self.error.retryable or (self.writer.owner.lost and type(self.error) is StorageError)

    def schedule(self) -> None:
        if not self.commit_waits and self.error is None:
            self.commit_waits = True
            self.commits.enqueue(self)

    def commit(self, *, flush_open: bool = False) -> None:
        result = self.writer.commit(flush_open=flush_open)
        self.count += 1
        if self.writer.is_indexing:
            self.commits.has_work.set()
        for vbid, seqno in result.published:
            self.hosts[vbid].handle(Published(seqno))

    def failed(self, error: StorageError) -> None:
        """Stop the group's streams; restart them from the stored state after a pause."""
        if self.error is not None:
            return
        self.error = error
        if self.commit_waits:
            self.commit_waits = False
            # The store has failed: a commit that was due would fail, too.
            self.commits.queue.remove(self)
        log.error("store-failed", group=self.writer.group, error=str(error))
        for host in self.hosts.values():
            host.drop_machine()
            host.owner.report(VbucketStatus.WAITING, f"the store failed: {error}")
        delay_s = STORE_RETRY_S
        if isinstance(error, SeqnoOrder):
            self.violations[error.vbid] += 1
            # The source is at fault, not the disk, so begin with a short pause.
            delay_s = min(delay_s, 0.1 * 2 ** min(self.violations[error.vbid], 10))
        elif not self.may_be_retried:
            self._give_up()
            return
        self._retry_later(delay_s)

    def _give_up(self) -> None:
        """Stop the group for good, after a permanent error such as damage. Other groups continue."""
        assert self.error is not None
        for host in self.hosts.values():
            host.owner.report(unusable(self.error), f"the store failed: {self.error}")
        self.writer.give_up()

    def _retry_later(self, delay_s: float) -> None:
        self.retry_timer = asyncio.get_running_loop().call_later(delay_s, self._retry)

    def _retry(self) -> None:
        self.retry_timer = None
        try:
            self.writer.reopen()
            free_bytes = self.writer.owner.free_bytes()
        except StorageError as error:
            self.error = error
            self.reopen_count += 1
            log.warning("store-not-reopened", group=self.writer.group, error=str(error))
            if self.may_be_retried:
                self._retry_later(STORE_RETRY_S * min(2**self.reopen_count, REOPEN_FACTOR_MAX))
            else:
                self._give_up()
            return
        self.reopen_count = 0
        if isinstance(self.error, Full) and free_bytes < FREE_BYTES_TO_RESUME * self.commits.settings.batch_bytes_max:
            self._retry_later(STORE_RETRY_S)
            return
        log.info("store-retried", group=self.writer.group)
        self.error = None
        for vbid, host in self.hosts.items():
            host.start_machine()
            self.commits.on_reopened(vbid)

    def step(self) -> bool:
        """Do part of the group's background work; return True if there is more."""
        if self.error is not None:
            return False
        try:
            waiting = self.writer.step()
            if self.writer.has_pending:
                self.schedule()
        except StorageError as error:
            self.failed(error)
            return False
        return waiting


class GroupCommits:
    """The commits of one worker's groups. Call everything on one event loop."""

    def __init__(
        self,
        writers: Sequence[GroupWriter],
        settings: Settings,
        on_reopened: Callable[[int], None],
    ) -> None:
        """`on_reopened` requests a vbucket's stream, after its group's store works again."""
        self.groups = [Group(writer, self) for writer in writers]
        self.queue: deque[Group] = deque()
        self.free_bytes = 0
        """Bytes that may still be received before the groups' pending bytes must be summed again."""
        self.on_reopened = on_reopened
        self.settings = settings
        self._turn: asyncio.Handle | None = None
        self.has_work = asyncio.Event()

    def enqueue(self, group: Group) -> None:
        self.queue.append(group)
        self._schedule_next()

    def flush_over_budget(self) -> None:
        """Write the fullest group's rows to the file if the rows of all groups reach `batch_bytes_max`."""
        limit_bytes = self.settings.batch_bytes_max
        pending_bytes = sum(group.writer.pending_bytes for group in self.groups)
        self.free_bytes = limit_bytes - pending_bytes
        if pending_bytes >= limit_bytes:
            # One commit frees the most memory.
            fullest = max(self.groups, key=lambda group: group.writer.pending_bytes)
            try:
                fullest.commit(flush_open=True)
            except StorageError as error:
                fullest.failed(error)

    def close(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
        for group in self.groups:
            if group.retry_timer is not None:
                group.retry_timer.cancel()
            if group.error is None:
                try:
                    group.writer.commit()
                except StorageError as error:
                    log.error("last-commit-failed", group=group.writer.group, error=str(error))

    def _schedule_next(self) -> None:
        if self._turn is None and self.queue:
            self._turn = asyncio.get_running_loop().call_soon(self._commit_next)

    def _commit_next(self) -> None:
        self._turn = None
        if not self.queue:
            return
        group = self.queue.popleft()
        group.commit_waits = False
        try:
            group.commit()
        except StorageError as error:
            group.failed(error)
        finally:
            self._schedule_next()

    async def work_in_background(self) -> None:
        while True:
            # any() stops at the first group with more work: mostly one job at a time holds a snapshot's keys in memory.
            if any(group.step() for group in self.groups):
                await asyncio.sleep(STEP_SHARE_S)
                continue
            self.has_work.clear()
            await happens(self.has_work, STEP_IDLE_S)
