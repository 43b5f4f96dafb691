"""Requests that wait for writes: one look at a vbucket for all of them, each time it changes.

Each waiter looked at all its tokens every 25 ms once: 200 of one user kept other users waiting for seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from mirror.serve.watch import Watch
from storage.errors import StorageError
from storage.read.view import View
from storage.read.wait import MutationToken, WriteState, WriteStatus, status_in

Waiter = tuple[MutationToken, asyncio.Future[None]]


class WriteWaits:
    def __init__(self, view: Callable[[], View]) -> None:
        self.watch = Watch(view)
        self._view = view
        self._waiting: dict[int, list[Waiter]] = {}

    def look(self, tokens: Iterable[MutationToken]) -> tuple[MutationToken, WriteStatus] | None:
        """Return the first token whose write is not published, with its status. Raises StorageError."""
        seen: dict[int, WriteState] = {}
        for token in tokens:
            state = seen.get(token.vbid)
            if state is None:
                state = seen[token.vbid] = WriteState.of(self._view().reader(token.vbid))
            if (status := status_in(state, token)) is not WriteStatus.PUBLISHED:
                return token, status
        return None

    async def wait(self, token: MutationToken, timeout_s: float) -> None:
        """Wait until the write may no longer be awaited, but at most `timeout_s`."""
        waiter = token, asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(token.vbid, [])
        if not waiting:
            self.watch.follow(token.vbid, self._changed)
        waiting.append(waiter)
        try:
            if self.look((token,)) == (token, WriteStatus.WAITING):  # else it changed before it was followed
                await asyncio.wait({waiter[1]}, timeout=timeout_s)
        finally:
            waiting.remove(waiter)
            if not waiting:
                self.watch.leave(token.vbid, self._changed)
                del self._waiting[token.vbid]

    def wake(self) -> None:
        for vbid in self._waiting:
            for _, woken in self._waiting[vbid]:
                _wake(woken)

    def _changed(self, vbid: int) -> None:
        try:
            state = WriteState.of(self._view().reader(vbid))
        except StorageError:  # the waiters meet the error
            state = None
        for token, woken in self._waiting[vbid]:
            if state is None or status_in(state, token) is not WriteStatus.WAITING:
                _wake(woken)


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
