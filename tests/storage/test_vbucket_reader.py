"""One vbucket through its reader: reads as of a boundary, and what is remembered between transactions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage.errors import NoSuchBoundary
from storage.format import keys
from storage.read.vbucket_reader import VbucketReader, Visible
from storage.read.view import Time, View
from storage.write.writer import GroupWriter
from tests.storage.one_vbucket import A, commit, put
from tests.storage.test_writer import Clock


def test_as_of_takes_the_newest_boundary_not_after_a_seqno_or_a_time(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    for seqno, now in ((10, 1_000_000), (20, 2_000_000), (30, 3_000_000)):
        clock.now = now
        put(writer, A, seqno, b"%d" % seqno)
        commit(writer, seqno)

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


def test_what_a_vbucket_serves_is_looked_at_once_a_commit_and_never_used_in_another(
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
        lambda: view.find(keys.encode_collection_id(0) + A).document,
    ]

    def read(first: int) -> set[bytes | None]:
        """Read by key in each way, twice, beginning with one of them; return the answers."""
        found = [way() for way in (ways[first:] + ways[:first]) * 2]
        return {each and each.value for each in found}

    for seqno in range(1, 7):
        put(writer, A, seqno, b"%d" % seqno)
        commit(writer, seqno)
        assert read(seqno % 3) == {b"%d" % seqno}
        assert looks == seqno
    writer.vbuckets[0].rollback(1)
    assert read(1) == {b"1"}
    assert looks == 7
