"""Events in order: tokens that resume, ranges between two positions, pieces that are returned again."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import GeneratorType
from typing import Any

import pytest

from storage.errors import ViewInvalidated
from storage.history.purge import Window
from storage.model import Branch, Seqno
from storage.read.changes import manifest_at, resolve_range
from storage.read.vbucket_reader import VbucketReader
from storage.read.view import Pieces, Token, View
from storage.write.writer import GroupWriter
from tests.storage.model import A, B, C, D, log
from tests.storage.rig import commit, publish, purge, put, snapshots


def test_a_token_of_no_known_event_is_refused(writer: GroupWriter, view: View) -> None:
    for seqno in range(1, 7):
        publish(writer, 0, [(A, b"1", seqno)])
    writer.vbuckets[0].rollback(5)
    writer.vbuckets[0].rollback(3)
    ahead, below = view.token(0, 3, 5), replace(view.token(0, 2, 6), seqno=Seqno(4))
    unknown = Token(0, Branch(9), Seqno(1), 5)
    for token, words in (
        (ahead, "ahead of the published seqno"),
        (below, "history that this mirror does not have"),
        (unknown, "no branch 9"),
    ):
        with pytest.raises(ViewInvalidated, match=words):
            list(view.changes(0, since=token))
        with pytest.raises(ViewInvalidated, match=words):
            view.check_since(token)
    view.check_since(view.token(0))


def test_the_reported_rollback_is_the_one_that_took_place(writer: GroupWriter, view: View) -> None:
    """Found by the simulation: after an abandoned snapshot at the same seqno another branch was named."""
    put(writer, A, 1, publish=True)
    put(writer, A, 2)
    writer.commit(flush_open=True)
    writer.vbuckets[0].abandon()
    put(writer, A, 3, publish=True)
    token = view.token(0, writer.vbuckets[0].state.branch, 3)
    writer.vbuckets[0].rollback(2)
    assert next(view.changes(0, since=token)).rollback == view.rollbacks(0)[0]


def test_the_changes_between_two_positions_are_the_same_after_a_rollback(writer: GroupWriter, view: View) -> None:
    snapshots(writer, [(A, b"a1", 1), (B, b"b1", 2)], [(A, b"a2", 3), (B, None, 4)], [(C, b"c1", 5)])
    start, end = (view.token(0, 1, seqno) for seqno in (2, 4))
    before = list(view.changes_between(start, end))
    assert [(each.kind, each.document and each.document.seqno) for each in before] == [("mutation", 3), ("deletion", 4)]
    writer.vbuckets[0].rollback(2)
    publish(writer, 0, [(D, b"d1", 3)])
    assert list(view.changes_between(start, end)) == before
    assert list(view.changes_between(None, start)) == list(view.changes_between(None, end))[:2]
    reported = [each.kind for each in view.changes_between(end, view.token(0, 2, 3))]
    assert reported == ["rollback", "retraction", "restoration", "retraction", "restoration", "mutation"]
    again = list(view.changes_between(end, view.token(0, 2, 3)))
    writer.vbuckets[0].rollback(2)
    assert list(view.changes_between(end, view.token(0, 2, 3))) == again


def test_a_range_between_two_positions_is_refused_once_it_is_purged(writer: GroupWriter, view: View) -> None:
    for seqno in range(1, 5):
        publish(writer, 0, [(A, b"%d" % seqno, seqno)])
    end = view.token(0, 1, 4)
    writer.vbuckets[0].rollback(2)
    publish(writer, 0, [(B, b"b", 3)])
    assert [each.token.seqno for each in view.changes_between(None, end)] == [1, 2, 3, 4]
    purge(writer, Window(boundaries=1))
    with pytest.raises(ViewInvalidated, match="gone"):
        list(view.changes_between(None, end))
    with pytest.raises(ViewInvalidated, match="no branch 9"):
        list(view.changes_between(None, Token(0, Branch(9), Seqno(4), 5)))


@pytest.mark.parametrize("purged_before", [False, True])
@pytest.mark.parametrize("since", [0, 3])
def test_a_tombstone_that_was_purged_before_its_reader_saw_it_ends_the_read(
    writer: GroupWriter, view: View, since: int, purged_before: bool
) -> None:
    versions = [(D, b"1"), (D, None), (A, b"1"), (B, b"1"), (A, None), (C, b"1")]
    for seqno, (key, value) in enumerate(versions, 1):
        publish(writer, 0, [(key, value, seqno)])
    if purged_before:
        purge(writer, Window(boundaries=4))
        assert view.state(0).local_purge_seqno == 2
    token = view.token(0, 1, since) if since else None
    way = resolve_range(view.reader(0), token, None)
    assert manifest_at(view.reader(0), way, 1, 4).collections
    changes = view.changes(0, since=token, pieces=Pieces(1))
    while next(changes).token.seqno < 4:
        pass
    purge(writer, Window(boundaries=1))
    assert view.state(0).local_purge_seqno == 5
    with pytest.raises(ViewInvalidated, match="tombstones above seqno 4 are gone") as refused:
        next(changes)
    with pytest.raises(ViewInvalidated, match="are gone"):
        manifest_at(view.reader(0), way, 1, 4)
    assert "lease" in (refused.value.hint or "")
    assert [change.token.seqno for change in view.changes(0)] == [4, 6]


def test_a_range_of_a_replaced_copy_is_refused_if_a_tombstone_in_it_is_purged(writer: GroupWriter, view: View) -> None:
    for seqno, (key, value) in enumerate([(A, b"1"), (B, b"1"), (A, None), (C, b"1"), (B, b"2")], 1):
        publish(writer, 0, [(key, value, seqno)])
    before, floor, end = (view.token(0, 1, seqno) for seqno in (2, 4, 5))
    purge(writer, Window(boundaries=2))
    ways = [list(view.changes_between(start, end)) for start in (None, floor)]
    half = view.changes_between(None, end)
    next(half)
    writer.vbuckets[0].begin_resync()
    writer.vbuckets[0].save(failover_log=log(88))
    publish(writer, 0, [(D, b"9", 1)])
    with pytest.raises(ViewInvalidated, match="tombstones above seqno 2 are gone"):
        list(view.changes_between(before, end))
    assert [list(view.changes_between(start, end)) for start in (None, floor)] == ways
    assert list(half) == ways[0][1:]


def test_changes_in_pieces_are_not_cached_and_can_be_read_again(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seqno, key in enumerate((A, B, C, D), 1):
        put(writer, key, seqno, b"x" * 1000)
    commit(writer, 4)
    read_count = 0
    known = VbucketReader.verify

    def counted(*found: Any) -> None:
        nonlocal read_count
        read_count += 1
        known(*found)

    monkeypatch.setattr(VbucketReader, "verify", counted)
    pieces = Pieces(2500)
    changes = view.changes(0, pieces=pieces)
    first = next(changes)
    assert first.token.seqno == 1
    assert not any(isinstance(holder, GeneratorType) for holder in gc.get_referrers(first, first.document))
    seqnos = []
    for change in changes:
        seqnos.append(change.token.seqno)
        pieces.again = len(seqnos) in (2, 3, 5)
    assert seqnos == [2, 3, 3, 3, 4, 4]
    assert read_count == 7
    assert [change.token.seqno for change in view.changes(0, pieces=Pieces(1))] == [1, 2, 3, 4]
