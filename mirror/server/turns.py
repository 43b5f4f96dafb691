"""Bounds on large work, to protect other clients: turns of the event loop, a worker thread, and a budget for memory.

In a turn, the event loop runs one step of work; between two turns it looks at its sockets. So a fast request waits for
one step at most, whatever the number of clients. Work that is too large for a step runs in the worker thread, one piece
after the other. Steps, and requests for memory, are granted in order. A single answer may exceed the budget, if no
other holds memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

LARGE_BYTES = 256 * 1024
"""Answers from larger documents are made in the worker thread."""

T = TypeVar("T")


class Turns:
    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def call(self, step: Callable[[], object]) -> None:
        """Call `step` after all waiting steps, never at once."""
        self._waiting.append(step)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._grant)

    async def turn(self) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def grant() -> None:
            if not granted.done():
                granted.set_result(None)

        self.call(grant)
        await granted

    def _grant(self) -> None:
        step = self._waiting[0]
        try:
            step()
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._grant)


class Budget:
    """A bound on the memory of a process's answers. Each counts from before it is made until the client took it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.out_bytes = 0
        self._requests: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, byte_count: int) -> bool:
        """Take the bytes if they fit into the bound, or if none are taken yet. Return False otherwise."""
        if self.out_bytes and self.out_bytes + byte_count > self._bytes_max:
            return False
        self.out_bytes += byte_count
        return True

    @property
    def waiting_count(self) -> int:
        return len(self._requests)

    def request(self, byte_count: int) -> asyncio.Future[None]:
        """Return a future that is done once the budget has granted the bytes. Requests are granted in order."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests.append((byte_count, granted))
        self._grant()
        return granted

    def withdraw(self, byte_count: int, granted: asyncio.Future[None]) -> None:
        """Cancel a request, or give its bytes back if it was granted."""
        if granted.done():
            self.give_back(byte_count)
        else:
            self._requests.remove((byte_count, granted))
            self._grant()

    def give_back(self, byte_count: int) -> None:
        self.out_bytes -= byte_count
        assert self.out_bytes >= 0, "given back more than was taken"
        self._grant()

    def _grant(self) -> None:
        while self._requests and self.try_take(self._requests[0][0]):
            self._requests.popleft()[1].set_result(None)


class Worker:
    """A thread for large work, and the budget for its memory. A single thread, because each busy one takes the
    interpreter's lock from the event loop for a while.
    """

    def __init__(self, bytes_max: int) -> None:
        self.budget = Budget(bytes_max)
        self._thread = ThreadPoolExecutor(1, "large work")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @asynccontextmanager
    async def memory(self, byte_count: int) -> AsyncIterator[None]:
        """Wait for memory; give it back at the end of the block."""
        granted = self.budget.request(byte_count)
        try:
            await asyncio.wait({granted})
            yield
        finally:
            self.budget.withdraw(byte_count, granted)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
