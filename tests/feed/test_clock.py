"""The clock of the machine."""

from __future__ import annotations

import asyncio

from mirror.clock import Clock, SystemClock, happens


async def test_system_clock_does_not_go_back_and_names_are_unique() -> None:
    clock: Clock = SystemClock()
    first = clock.monotonic()
    await clock.sleep(0)
    assert clock.monotonic() >= first
    assert clock.wall_ms() > 1_600_000_000_000
    assert 0 <= clock.jitter() < 1
    assert clock.unique() != clock.unique()


async def test_an_event_is_waited_for_no_longer_than_is_said() -> None:
    event = asyncio.Event()
    assert not await happens(event, 0.001)
    event.set()
    assert await happens(event, None)
