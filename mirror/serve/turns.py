"""Whose large work is done next: one step of one client for each turn of a process's event loop.

Knows the event loop and callbacks; never a client or what is done. A client whose request is answered in no time does
not come here: it waits for one step of large work at most, however many clients want more. Invariant: steps are granted
in the order of their requests, one in each turn, so what arrived at a socket is looked at between any two.
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
