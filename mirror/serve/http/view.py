"""One HTTP process's view of the mirror, and a watch for publishes.

Knows the data directory and the store's `View`; never a request. Invariants: the view is opened when first needed,
never before; after a group was recreated, `refresh` closes the view, and the next use opens another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from mirror.clock import Clock
from storage.env import directory
from storage.errors import StorageError
from storage.read.states import Unreadable
from storage.read.view import View, open_view

WATCH_INTERVAL_S = 0.05
"""Interval at which publishes are noticed, for streams of changes."""


class Mirror:
    def __init__(self, data: Path, *, verify_reads: bool = True) -> None:
        self.data = data
        self._verify_reads = verify_reads
        self._view: View | None = None
        self._files: list[tuple[int, int]] = []

    @property
    def view(self) -> View:
        """Raises NotAMirror while there is no mirror, and StorageError if it cannot be opened."""
        if self._view is None:
            opened = open_view(str(self.data), verify_reads=self._verify_reads)
            self._files = directory.group_files(opened.path, opened.identity.group_count)
            self._view = opened
        return self._view

    def refresh(self) -> None:
        """Release a view whose files were replaced. Call this from time to time."""
        view = self._view
        if view is not None and directory.group_files(view.path, view.identity.group_count) != self._files:
            self.close()

    def manifest_vbids(self) -> Iterable[int]:
        """Return one vbucket for each manifest uid in use. Raises StorageError if no group can be read."""
        unreadable: Unreadable = {}
        uids = self.view.manifest_uids(unreadable)
        if not uids:
            raise next(iter(unreadable.values()))
        return {uid: vbid for vbid, uid in uids.items()}.values()

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None


class PublishWatch:
    def __init__(self, mirror: Mirror, clock: Clock) -> None:
        self._mirror = mirror
        self._clock = clock
        self.moved: asyncio.Future[None]
        """Done at the next publish or `wake`, then replaced. Fetch it after `enter`, before reading positions."""
        self._task: asyncio.Task[None] | None = None
        self._readers = 0

    def enter(self) -> None:
        self._readers += 1
        if self._task is None:
            self.moved = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._look())

    def leave(self) -> None:
        self._readers -= 1
        if not self._readers and self._task is not None:
            self._task.cancel()
            self._task = None

    def wake(self) -> None:
        if self._task is not None:
            self.moved.set_result(None)
            self.moved = asyncio.get_running_loop().create_future()

    async def _look(self) -> None:
        before: object = None
        while True:
            unreadable: Unreadable = {}
            now: object
            try:
                now = self._mirror.view.published(unreadable), set(unreadable)
            except StorageError as error:
                now = str(error)
            if now != before:  # an error is news, too: a woken stream meets and reports it
                before = now
                self.wake()
            await self._clock.sleep(WATCH_INTERVAL_S)
