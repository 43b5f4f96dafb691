"""The order of large work: one step of one client for each turn of a process's event loop.

Knows the event loop and callbacks; never a client or its work. Fast requests do not come here: they wait for one step
of large work at most, for any number of clients. Invariant: steps are granted in order, one in each turn, so the loop
looks at sockets between any two.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def call(self, step: Callable[[], object]) -> None:
        """Call `step` in its turn, never at once."""
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
