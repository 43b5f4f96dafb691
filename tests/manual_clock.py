"""A clock that tests move by hand."""

from __future__ import annotations

import asyncio
import random


class ManualClock:
    """A `mirror.clock.Clock` that moves only on request, with random numbers from a seed."""

    def __init__(self, *, start_ms: int = 1_700_000_000_000, seed: int = 0) -> None:
        """Start at `start_ms`, wall and monotonic alike."""
        self._now_ms = float(start_ms)
        self._random = random.Random(seed)
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back."""
        return self._now_ms / 1000

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        return int(self._now_ms)

    async def sleep(self, seconds: float) -> None:
        """Return once `advance` has moved the clock that far."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now_ms + seconds * 1000, waiter))
        await waiter

    def advance(self, seconds: float) -> None:
        """Move on, and wake anyone who is due."""
        assert seconds >= 0, "time does not go back"
        self._now_ms += seconds * 1000
        due = [waiter for at, waiter in self._sleepers if at <= self._now_ms]
        self._sleepers = [(at, waiter) for at, waiter in self._sleepers if at > self._now_ms]
        for waiter in due:
            if not waiter.done():
                waiter.set_result(None)

    def jitter(self) -> float:
        """A number in [0, 1) from the seed."""
        return self._random.random()

    def unique(self) -> str:
        """A name from the seed."""
        return f"{self._random.getrandbits(64):016x}"
