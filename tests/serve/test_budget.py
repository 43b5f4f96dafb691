"""The bound on the memory that answers take."""

from __future__ import annotations

from mirror.serve.budget import Budget


def test_the_budget_lets_a_first_answer_through_however_large() -> None:
    budget = Budget(10)
    assert budget.try_take(100)
    assert not budget.try_take(1)
    budget.give_back(100)
    assert budget.try_take(10)
    assert budget.out_bytes == 10


async def test_what_is_requested_of_the_budget_is_granted_in_order_and_given_back() -> None:
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
