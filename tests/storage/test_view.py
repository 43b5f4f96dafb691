"""The API of readers: what it has, what it remembers, and what ends a read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from storage.errors import Closed, NoSuchBoundary, ViewInvalidated
from storage.format import keys
from storage.history.chain import ChainLink
from storage.history.purge import Window
from storage.read import validity
from storage.read.vbucket_reader import Served, VbucketReader, Visible
from storage.read.view import Time, View, open_view
from storage.write.writer import GroupWriter
from tests.storage.model import A, B
from tests.storage.rig import Clock, publish, purge, put, snapshots

READS = {
    "boundaries", "changes", "changes_between", "check_followed", "check_readable", "check_since", "check_way",
    "close", "count", "exists", "find", "get", "get_many", "history", "key_at", "manifest", "manifest_uids", "pin",
    "published", "reading", "retracted_by", "rollbacks", "scan", "stale", "state", "states", "token", "unfilled",
    "vbid_of", "wait_for",
}  # fmt: skip


def test_a_view_has_the_reads_that_are_documented_and_no_others() -> None:
    assert {name for name in dir(View) if not name.startswith("_")} == READS
    assert all(getattr(View, name).__doc__ for name in READS)


def test_a_closed_view_raises_closed(path: str, writer: GroupWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of a read."""
    monkeypatch.setattr("storage.read.scan.CHUNK_ROWS", 1)
    publish(writer, 0, [(A, b"1", 1), (B, b"1", 2)])
    writer.close()
    with open_view(path) as view:
        assert view.exists(A)
        assert view.vbid_of(A) == 0
        reads = [view.scan(0), view.changes(0)]
        for read in reads:
            next(read)
    for ended in (lambda: view.get(A), *(read.__next__ for read in reads)):
        with pytest.raises(Closed, match="the view is closed"):
            ended()
    view.close()


def test_as_of_takes_the_newest_boundary_up_to_a_seqno_or_time(writer: GroupWriter, view: View, clock: Clock) -> None:
    for seqno, now in ((10, 1_000_000), (20, 2_000_000), (30, 3_000_000)):
        clock.now = now
        put(writer, A, seqno, b"%d" % seqno, publish=True)

    def read(as_of: int | Time) -> bytes:
        document = view.get(A, as_of=as_of)
        assert document is not None
        return document.value

    assert [read(seqno) for seqno in (10, 19, 20, 29, 30, 99)] == [b"10", b"10", b"20", b"20", b"30", b"30"]
    assert [read(Time(ms)) for ms in (1_500_000, 2_500_000, 9_000_000)] == [b"10", b"20", b"30"]
    for too_early in (9, 0, Time(999_999)):
        with pytest.raises(NoSuchBoundary, match="history begins at seqno 10"):
            view.get(A, as_of=too_early)
    assert [b.seqno for b in view.boundaries(0)] == [30, 20, 10]


def test_the_served_state_is_read_once_for_each_commit(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = VbucketReader.look

    def counted(reader: VbucketReader, txn: Any) -> Visible:
        nonlocal looks
        looks += 1
        return look(reader, txn)

    monkeypatch.setattr(VbucketReader, "look", counted)

    ways: list[Callable[[], Any]] = [
        lambda: view.get(A),
        lambda: view.get_many([A])[A],
        lambda: view.find(keys.encode_collection_id(0) + A),
    ]

    def read(first: int) -> set[bytes | None]:
        """Read by key in each way, twice, beginning with one of them; return the answers."""
        found = [way() for way in (ways[first:] + ways[:first]) * 2]
        return {each and each.value for each in found}

    for seqno in range(1, 7):
        put(writer, A, seqno, b"%d" % seqno, publish=True)
        assert read(seqno % 3) == {b"%d" % seqno}
        assert looks == seqno
    writer.vbuckets[0].rollback(1)
    assert read(1) == {b"1"}
    assert looks == 7


def test_an_invalidated_read_names_the_cause(writer: GroupWriter, view: View) -> None:
    """A later snapshot ends none, a rollback that of what is served alone, the purger all."""
    snapshots(writer, [(A, b"1", 1)], [(A, b"2", 2)], [(A, b"3", 3)])
    reader = view.reader(0)
    with reader.environment.read() as txn:
        served, pinned = reader.served(txn), validity.served_at(reader, txn, view.pin(0))

    def check(read: Served) -> None:
        with reader.environment.read() as txn:
            validity.check(reader, txn, read)

    publish(writer, 0, [(A, b"4", 4)])
    check(served)
    writer.vbuckets[0].rollback(2)
    with pytest.raises(ViewInvalidated, match="a rollback or resync passed seqno 3"):
        check(served)
    check(pinned)
    publish(writer, 0, [(A, b"4", 4)])
    purge(writer, Window(boundaries=1))
    removed = replace(pinned, links=(ChainLink(9, 0, 3),))
    for read, words in ((pinned, "history before seqno 4 is gone"), (removed, "merged or removed")):
        with pytest.raises(ViewInvalidated, match=words):
            check(read)
