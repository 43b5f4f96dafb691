"""The look at the store: followers hear of what is served again, and of nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mirror.serve.dcp import watch as dcp_watch
from mirror.serve.dcp.watch import Watch
from storage.errors import StorageError
from storage.read.view import View, open_view
from tests.serve.kv_rig import Store


@pytest.fixture
def view(store: Store) -> Iterator[View]:
    with open_view(store.path) as opened:
        yield opened


def test_a_store_that_was_opened_again_is_news(store: Store, view: View) -> None:
    views = [view]
    watch = Watch(lambda: views[-1])
    notified: list[int] = []
    watch.follow(1, notified.append)
    watch.look()
    notified.clear()
    with open_view(store.path) as other:
        views.append(other)
        watch.look()
        assert notified == [1]


async def test_a_store_that_cannot_be_read_is_tried_again(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_watch, "FAILED_DELAY_S", 0.01)
    failures = [StorageError("not now"), StorageError("nor now")]

    def viewed() -> View:
        if failures:
            raise failures.pop()
        return view

    watch = Watch(viewed)
    watch.start()
    notified = asyncio.Event()
    watch.follow(0, lambda _vbid: notified.set())
    async with asyncio.timeout(10):
        await notified.wait()
    await watch.stop()
    assert not failures
