"""The newest events of the service, numbered from 1: logged, kept, and given to clients that wait for the next ones.

Knows how an event is logged and kept; never how it is noticed. Invariants: one line in the log for each event, at its
level; the number kept is bounded, and a client that was too slow sees by the numbers that it has missed some.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from mirror.clock import Clock
from mirror.log import get_logger
from mirror.supervise.events import Event, fields_of, to_json

EVENTS_KEPT = 1_000
WAIT_MAX_S = 20.0
"""Longest wait for the next event: less than the control socket's own limit."""

log = get_logger("events")


class EventLog:
    """The events of one service."""

    def __init__(self, clock: Clock, forward: Callable[[dict[str, Any]], None]) -> None:
        """No event yet. `forward` gets each one, in the shape of cli/JSON.md."""
        self._clock = clock
        self._forward = forward
        self._kept: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        self._count = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def add(self, event: Event) -> None:
        """An event has happened."""
        self._count += 1
        shown = to_json(event, self._count, self._clock.wall_ms())
        getattr(log, event.level)(event.name, **fields_of(event))
        self._kept.append(shown)
        self._forward(shown)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def newest(self, count: int) -> list[dict[str, Any]]:
        """The newest events, newest first."""
        return [each for _, each in zip(range(count), reversed(self._kept), strict=False)]

    async def after(self, number: int, wait_s: float) -> list[dict[str, Any]]:
        """The kept events above a number, oldest first; where there is none the next one, or none within `wait_s`."""
        if self._count <= number and wait_s > 0:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            await asyncio.wait([waiter], timeout=min(wait_s, WAIT_MAX_S))
            self._waiters.discard(waiter)
        return [each for each in self._kept if each["number"] > number]
