"""The look at the store: followers hear of what is served again, and of nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror.clock import SystemClock
from mirror.serve import watch as serve_watch
from mirror.serve.watch import Watch
from storage.env import directory
from storage.errors import CorruptedError, StorageError
from storage.format import records
from storage.model import Identity, Seqno, SnapshotRange
from storage.read.vbucket_reader import VbucketReader
from storage.read.view import View, open_view
from storage.write.owner import WriterOptions
from storage.write.writer import GroupWriter
from tests.serve.kv_rig import Store


@pytest.fixture
def view(store: Store) -> Iterator[View]:
    with open_view(store.path) as opened:
        yield opened


async def test_a_store_that_was_opened_again_is_reported(store: Store, view: View) -> None:
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


async def test_an_unreadable_group_does_not_delay_news_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers of the lost group hear of it, too: their next read fails, which ends their streams. A client that takes
    nothing keeps its stream of that group: it is read once a second, the others go on at their pace.
    """
    path, identity = str(tmp_path / "data"), Identity("cluster", "orders", "0123456789abcdef", 3, 3)
    directory.create(path, identity)
    options = [WriterOptions(group=each, identity=identity, clock_ms=SystemClock().wall_ms) for each in range(3)]
    writers = [GroupWriter(directory.group_path(path, each.group), each) for each in options]
    notified: list[int] = []
    with open_view(path) as view:
        watch = Watch(lambda: view)
        for vbid in range(3):
            watch.follow(vbid, notified.append)
        watch.look()
        notified.clear()
        reader = view.groups.reader
        reads_of_lost = 0

        def lost(vbid: int) -> VbucketReader:
            nonlocal reads_of_lost
            if vbid == 1:
                reads_of_lost += 1
                raise CorruptedError("the group's data file is missing")
            return reader(vbid)

        monkeypatch.setattr(view.groups, "reader", lost)
        monkeypatch.setattr(serve_watch, "FAILED_DELAY_S", 600.0)
        for seqno, expected in ((1, [0, 1, 2]), (2, [0, 2])):
            for vbid in (0, 2):
                vbucket = writers[vbid].vbuckets[vbid]
                row = vbucket.prefix + seqno.to_bytes(8), records.encode_mutation(b"a", b"v", seqno)
                vbucket.stage([row], 0, SnapshotRange(Seqno(seqno), Seqno(seqno)))
                vbucket.publish(seqno, 1)
                writers[vbid].commit()
            assert watch.look() == len(expected)
            assert sorted(notified) == expected
            notified.clear()
        assert reads_of_lost == 1
    for writer in writers:
        writer.close()


async def test_a_store_that_cannot_be_read_is_tried_again(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_watch, "FAILED_DELAY_S", 0.01)
    failures = [StorageError("not now"), StorageError("nor now")]

    def viewed() -> View:
        if failures:
            raise failures.pop()
        return view

    watch = Watch(viewed)
    notified = asyncio.Event()
    watch.follow(0, lambda _vbid: notified.set())
    async with asyncio.timeout(10):
        await notified.wait()
    assert not failures
