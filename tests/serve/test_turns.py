"""Large work: one step in each turn of the event loop, and the bound on the memory that answers take."""

from __future__ import annotations

import asyncio

import pytest

from mirror.server.turns import Budget, Turns


async def test_one_step_is_granted_in_each_turn_of_the_loop() -> None:
    """Ten clients with ten steps each, and one that counts how many were done each time the loop came round."""
    turns, done = Turns(), [0]

    async def client() -> None:
        for _ in range(10):
            await turns.turn()
            done[-1] += 1

    clients = [asyncio.create_task(client()) for _ in range(10)]
    while not all(each.done() for each in clients):
        done.append(0)
        await asyncio.sleep(0)
    assert sum(done) == 100
    assert max(done) == 1


async def test_steps_come_in_the_order_of_their_requests() -> None:
    turns, seen = Turns(), list[int]()

    def first() -> None:
        seen.append(1)
        turns.call(lambda: seen.append(4))

    turns.call(first)
    turns.call(lambda: seen.append(2))
    turns.call(lambda: seen.append(3))
    assert seen == [], "never at once"
    for expected in (1, 2, 3, 4):
        await asyncio.sleep(0)
        assert seen == [*range(1, expected + 1)]
    await asyncio.sleep(0)
    assert len(seen) == 4


async def test_a_cancelled_or_failed_step_does_not_block_the_next() -> None:
    turns, seen = Turns(), list[int]()
    received: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: received.append(context["exception"]))
    gone = asyncio.create_task(turns.turn())
    await asyncio.sleep(0)
    gone.cancel()
    error = RuntimeError("broken")

    def fail() -> None:
        raise error

    turns.call(fail)
    turns.call(lambda: seen.append(1))
    with pytest.raises(asyncio.CancelledError):
        await gone
    for _ in range(3):
        await asyncio.sleep(0)
    assert (seen, received) == ([1], [error])


def test_the_budget_allows_a_first_answer_of_any_size() -> None:
    budget = Budget(10)
    assert budget.try_take(100)
    assert not budget.try_take(1)
    budget.give_back(100)
    assert budget.try_take(10)
    assert budget.out_bytes == 10


async def test_requests_to_the_budget_are_granted_in_order_and_returned() -> None:
    budget = Budget(10)
    assert budget.try_take(8)
    first, second, third = (budget.request(size) for size in (6, 2, 4))
    assert not any(each.done() for each in (first, second, third)), "none overtakes the first"
    budget.withdraw(6, first)
    assert (second.done(), third.done()) == (True, False)
    assert budget.out_bytes == 10
    budget.give_back(8)
    assert (third.done(), budget.out_bytes) == (True, 6)
    budget.withdraw(4, third)
    budget.give_back(2)
    assert (budget.out_bytes, budget.waiting_count) == (0, 0)
