"""The collector leaves alone what a worker begins with, and rows; cycles are still found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mirror.supervise.processes.worker import NEW_CONTAINERS_MAX, settle_collector


class Node:
    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def collections() -> int:
    return sum(int(each["collections"]) for each in gc.get_stats())


def collections_of(count: int) -> int:
    before = collections()
    rows = [(b"key", b"frame", [number]) for number in range(count)]
    assert len(rows) == count
    return collections() - before


def test_rows_of_a_batch_cause_no_collection() -> None:
    assert collections_of(20_000) > 20
    settle_collector()
    assert gc.get_freeze_count() > 0
    assert collections_of(20_000) == 0


def test_cycles_are_found_before_they_are_more_than_the_policy_says() -> None:
    settle_collector()
    first, second = Node(), Node()
    first.other, second.other = second, first
    gone = weakref.ref(first)
    del first, second
    assert gone() is not None
    assert collections_of(NEW_CONTAINERS_MAX) >= 1
    assert gone() is None
