"""The clocks: the machine's, and the one that moves only on call."""

from __future__ import annotations

import asyncio

from mirror.clock import Clock, SystemClock
from tests.manual_clock import ManualClock


async def test_system_clock_does_not_go_back_and_names_are_unique() -> None:
    clock: Clock = SystemClock()
    first = clock.monotonic()
    await clock.sleep(0)
    assert clock.monotonic() >= first
    assert clock.wall_ms() > 1_600_000_000_000
    assert 0 <= clock.jitter() < 1
    assert clock.unique() != clock.unique()


async def test_manual_clock_wakes_those_who_are_due_and_nobody_else() -> None:
    clock = ManualClock(start_ms=1000, seed=1)
    woken: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    tasks = [asyncio.create_task(sleeper("short", 1)), asyncio.create_task(sleeper("long", 5))]
    await asyncio.sleep(0)
    clock.advance(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert woken == ["short"]
    assert (clock.wall_ms(), clock.monotonic()) == (2000, 2.0)
    clock.advance(4)
    await asyncio.gather(*tasks)
    assert woken == ["short", "long"]


def test_manual_clock_gives_the_same_chance_for_the_same_seed() -> None:
    one, other = ManualClock(seed=7), ManualClock(seed=7)
    assert [one.jitter(), one.unique()] == [other.jitter(), other.unique()]
    assert ManualClock(seed=8).unique() != ManualClock(seed=7).unique()
