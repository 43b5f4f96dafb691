"""The queue of a read: whole items in order, waiting on either side, and no more in it than was agreed."""

from __future__ import annotations

import pytest

from mirror.feed.read.reading import Outbox
from mirror.feed.read.snapshot import Position, ReadEnded


def outbox(memory_bytes: int = 1000) -> tuple[Outbox, list[str]]:
    reported: list[str] = []
    return Outbox(memory_bytes, lambda: reported.append("room")), reported


def test_an_error_comes_after_the_complete_items() -> None:
    box, _ = outbox()
    box.put(ReadEnded(1, Position()))
    box.finish(ValueError("why"))
    box.finish()
    assert box.take() == ReadEnded(1, Position())
    with pytest.raises(ValueError, match="why"):
        box.take()


@pytest.mark.parametrize(("memory_bytes", "disk_bytes"), [(500, 0), (0, 16_000)])
def test_a_full_queue_is_reported_once_and_free_space_once(memory_bytes: int, disk_bytes: int) -> None:
    box, reported = outbox()
    box.put(ReadEnded(1, Position()), memory_bytes // 2, disk_bytes // 2)
    assert not box.full
    box.put(ReadEnded(2, Position()), memory_bytes // 2, disk_bytes // 2)
    assert box.full
    box.take()
    assert box.full, "what was taken is held until it is closed"
    box.gave_back(memory_bytes // 2, disk_bytes // 2)
    assert not box.full
    box.gave_back(memory_bytes // 2, disk_bytes // 2)
    assert reported == ["room"]


def test_a_source_resumes_even_if_an_item_arrives_while_it_waits() -> None:
    """An item that was under way when the source had to wait neither ends the waiting nor prevents its end."""
    box, reported = outbox()
    for vbid in (1, 2):
        box.put(ReadEnded(vbid, Position()), memory_bytes=250)
    box.take()
    box.gave_back(240, 0)
    box.put(ReadEnded(3, Position()), memory_bytes=10)
    assert box.full
    for _ in range(2):
        box.take()
    box.gave_back(270, 0)
    assert not box.full
    assert len(reported) == 1
