"""Time and random numbers behind one interface: a test passes its own `Clock`, with simulated time and a seed."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds from an arbitrary start."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def jitter(self) -> float: ...

    def unique(self) -> str:
        """A short unique name."""
        ...


class SystemClock:
    monotonic = staticmethod(time.monotonic)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def jitter(self) -> float:
        return random.random()

    def unique(self) -> str:
        return uuid.uuid4().hex[:16]


async def happens(event: asyncio.Event, within_s: float | None) -> bool:
    """Wait for an event. Return False if it takes more than `within_s` seconds; None waits for ever."""
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False
