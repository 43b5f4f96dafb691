"""The look at the store: followers hear of what is served again, and of nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror.serve.dcp import watch as dcp_watch
from mirror.serve.dcp.watch import Watch
from storage.errors import StorageError
from storage.read.view import View, open_view
from tests.serve.dcp_rig import until
from tests.serve.kv_rig import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path, vbuckets=2)
    made.logs()
    yield made
    made.close()


@pytest.fixture
def view(store: Store) -> Iterator[View]:
    with open_view(store.path) as opened:
        yield opened


def test_changes_are_sent_to_followers(store: Store, view: View) -> None:
    watch = Watch(lambda: view)
    notified: list[int] = []
    watch.follow(0, notified.append)
    watch.look()
    notified.clear()
    assert watch.look() == 0
    seqno = 0
    vbids: set[int] = set()
    while len(vbids) < 2:
        seqno += 1
        vbids.add(store.put(b"k%d" % seqno, b"1", seqno))
    assert watch.look() == 2
    assert notified == [0]
    watch.leave(0, notified.append)
    assert watch.look() == 0


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


async def test_it_looks_by_itself_while_somebody_follows(store: Store, view: View) -> None:
    watch = Watch(lambda: view)
    watch.start()
    notified: list[int] = []
    watch.follow(0, notified.append)
    await until(lambda: notified == [0])
    store.writer.vbuckets[0].begin_resync()
    await until(lambda: notified == [0, 0])
    await watch.stop()
    assert notified == [0, 0]


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
