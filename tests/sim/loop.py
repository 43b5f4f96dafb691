"""An event loop without tasks: timers and callbacks on a clock that only the simulation moves.

Production code asks asyncio for the running loop to set timers and to make futures; here it finds this one. Nothing
ever runs by itself: the simulation decides when the clock moves and runs what is due, in order.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from tests.manual_clock import ManualClock


class Timer:
    __slots__ = ("args", "callback", "cancelled")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class SimLoop:
    """The part of an event loop that sessions, actors and the consumer use."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0

    def time(self) -> float:
        return self.clock.monotonic()

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer:
        timer = Timer(callback, args)
        self._count += 1
        heapq.heappush(self._timers, (self.clock.monotonic() + delay, self._count, timer))
        return timer

    def call_soon(self, callback: Callable[..., object], *args: Any, context: object = None) -> Timer:
        return self.call_later(0.0, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise AssertionError(f"an error that was never retrieved: {context}")

    # --- for the simulation

    def run_due(self) -> int:
        """Run the timers that are due; return their number."""
        count = 0
        while self._timers and self._timers[0][0] <= self.clock.monotonic():
            _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled:
                timer.callback(*timer.args)
                count += 1
        return count

    def next_due_in(self) -> float | None:
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - self.clock.monotonic()) if self._timers else None

    def forget(self) -> None:
        """Drop the timers of a process that is gone."""
        self._timers.clear()

    @contextmanager
    def running(self) -> Iterator[None]:
        asyncio._set_running_loop(self)  # type: ignore[arg-type]
        try:
            yield
        finally:
            asyncio._set_running_loop(None)


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that waits for nothing but its turn."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as end:
        return end.value
