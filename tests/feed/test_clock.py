"""The clock of the machine."""

from __future__ import annotations

import asyncio

from mirror.clock import Clock, SystemClock, happens


async def test_the_system_clock_never_goes_back_and_its_names_are_unique() -> None:
    clock: Clock = SystemClock()
    first = clock.monotonic()
    await clock.sleep(0)
    assert clock.monotonic() >= first
    assert clock.wall_ms() > 1_600_000_000_000
    assert 0 <= clock.jitter() < 1
    assert clock.unique() != clock.unique()


async def test_a_wait_for_an_event_ends_at_its_timeout() -> None:
    event = asyncio.Event()
    assert not await happens(event, 0.001)
    event.set()
    assert await happens(event, None)
