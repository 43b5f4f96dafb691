"""Notifications of newly published data of vbuckets, in one process.

Each change after `follow` is reported at least once. `look` reads the commits of a group once, however many followers
the group's vbuckets have.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

from mirror.log import get_logger
from storage.errors import StorageError
from storage.read.stream_reads import Commits
from storage.read.view import View
from storage.read.wait import POLL_MIN_S, next_delay_s

FAILED_DELAY_S = 1.0
"""Pause after a failed read of a group, or of the view."""

log = get_logger("dcp")

News = Callable[[int], None]
"""A follower's callback; takes the vbid of a vbucket with new data."""


class Watch:
    def __init__(self, view: Callable[[], View], pause_s: float = POLL_MIN_S) -> None:
        """`pause_s` follows a look that found news."""
        self._view = view
        self._pause_s = pause_s
        self._viewed: View | None = None
        self._commits: defaultdict[int, Commits] = defaultdict(Commits)
        """The commits last seen, by group."""
        self._retry_at: dict[int, float] = {}
        """For each unreadable group, the time of its next read (`time.monotonic`)."""
        self._followers: dict[int, list[News]] = {}
        self._task: asyncio.Task[None] | None = None
        """Looks at the store while there are followers."""

    def follow(self, vbid: int, news: News) -> None:
        self._followers.setdefault(vbid, []).append(news)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="watch")

    def leave(self, vbid: int, news: News) -> None:
        """Remove a follower; call this once for each `follow`."""
        followers = self._followers[vbid]
        followers.remove(news)
        if not followers:
            del self._followers[vbid]
        if not self._followers and self._task is not None:
            self._task.cancel()
            self._task = None

    def wake(self) -> None:
        for vbid in self._followers:
            self._notify(vbid)

    def _notify(self, vbid: int) -> None:
        for news in tuple(self._followers.get(vbid, ())):
            news(vbid)

    def look(self) -> int:
        """Notify the followers of each vbucket that changed since the last call, or that cannot be read. Return the
        number of these vbuckets.
        """
        view = self._view()
        if view is not self._viewed:  # a group was recreated: notify all followers
            self._viewed = view
            self._commits.clear()
            self._retry_at.clear()
        group_count = view.identity.group_count
        found: list[int] = []
        failed: StorageError | None = None
        now = time.monotonic()
        for group, vbid in {vbid % group_count: vbid for vbid in self._followers}.items():
            if now < self._retry_at.get(group, 0.0):
                continue
            try:
                found += self._commits[group].news(view.groups.reader(vbid))
            except StorageError as error:  # notify its followers: their next read raises the error
                failed = error
                self._retry_at[group] = now + FAILED_DELAY_S
                found += [each for each in self._followers if each % group_count == group]
        if failed is not None:  # log only one of several unreadable groups
            log.error("store-unreadable", error=str(failed))
        for vbid in found:
            self._notify(vbid)
        return len(found)

    async def _run(self) -> None:
        delay_s = self._pause_s
        while True:
            try:
                delay_s = self._pause_s if self.look() else max(self._pause_s, next_delay_s(delay_s))
            except StorageError as error:
                log.error("store-unreadable", error=str(error))
                delay_s = FAILED_DELAY_S
            await asyncio.sleep(delay_s)
