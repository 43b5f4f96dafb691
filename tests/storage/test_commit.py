"""What a commit makes visible: empty sources, and logs that go with the first rows."""

from __future__ import annotations

import pytest

from storage.admin.check import check
from storage.model import Collection, Seqno
from storage.read.view import open_view
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of, log, manifest_at, row, span
from tests.storage.one_vbucket import DEFAULT, SCOPES, system_event
from tests.storage.test_writer import crash, open_writer, publish

pytestmark = pytest.mark.usefixtures("small_limits")


def test_a_complete_snapshot_without_its_key_rows_is_published_by_the_next_writer(path: str) -> None:
    writer = open_writer(path)
    events = [(seqno, b"k%d" % seqno, b"v") for seqno in range(1, 10)]
    rows = [row(writer.vbuckets[0].prefix, key, value, seqno) for seqno, key, value in events]
    writer.vbuckets[0].stage(rows[:5], 5, span(0, 9))
    writer.commit(flush_open=True)
    writer.vbuckets[0].stage(rows[5:], 5, span(0, 9))
    writer.vbuckets[0].publish(9, 0)
    assert writer.commit().published == []
    crash(writer)
    again = open_writer(path)
    assert (again.vbuckets[0].state.staged_seqno, again.vbuckets[0].state.published_seqno) == (9, 0)
    assert again.vbuckets[0].complete_seqno is not None
    published: list[object] = []
    for _ in range(100):
        again.step()
        published += again.commit().published
    assert published == [(0, 9)]
    again.close()
    assert check(path).clean
    with open_view(path) as view:
        assert [int(boundary.seqno) for boundary in view.boundaries(0)] == [9]
        assert len(list(view.scan(0))) == 9


def test_a_resync_from_an_empty_source_is_published_at_zero(path: str, writer: GroupWriter) -> None:
    key = keys_of(0, 1)[0]
    publish(writer, 0, [(key, b"gone", 5)])
    writer.vbuckets[0].begin_resync()
    writer.vbuckets[0].save(failover_log=log(9))
    writer.vbuckets[0].publish(0, 0)
    assert writer.commit().published == [(0, 0)]
    state = writer.vbuckets[0].state
    assert (state.branch, state.published_seqno, state.staged_seqno) == (state.staging_branch, 0, 0)
    with open_view(path) as view:
        assert list(view.scan(0)) == []
        assert not view.stale(0)
    publish(writer, 0, [(key, b"new", 1)])
    assert check(path).problems == []


def test_that_the_source_has_nothing_is_known_only_once_it_was_said(path: str) -> None:
    """A stream that was accepted may bring everything yet: its log alone must not make an absent document of it."""
    writer = open_writer(path)
    writer.vbuckets[0].save(failover_log=log(77))
    writer.commit()
    assert writer.vbuckets[0].state.failover_log == log(77)
    with open_view(path) as view:
        assert not view.state(0).is_whole
        writer.vbuckets[0].publish(0, 0)
        writer.commit()
        assert view.state(0).is_whole
        assert view.boundaries(0) == []
        writer.vbuckets[0].save(failover_log=log(78))
        writer.commit()
        assert view.state(0).is_whole
    crash(writer)
    writer = open_writer(path)
    assert writer.vbuckets[0].state.is_whole
    assert writer.vbuckets[0].state.failover_log == log(78)
    (key,) = keys_of(0, 1)
    writer.vbuckets[0].stage([row(writer.vbuckets[0].prefix, key, b"1", 3)], 0, span(3, 9))
    writer.commit(flush_open=True)
    assert not writer.vbuckets[0].state.is_whole
    assert writer.vbuckets[0].state.failover_log == log(78)
    writer.vbuckets[0].abandon()
    assert not writer.vbuckets[0].state.is_whole
    writer.close()


def test_rows_of_the_first_snapshot_bring_its_log_along(path: str) -> None:
    writer = open_writer(path)
    (key,) = keys_of(0, 1)
    writer.vbuckets[0].save(failover_log=log(77))
    writer.vbuckets[0].stage([row(writer.vbuckets[0].prefix, key, b"1", 3)], 0, span(3, 9))
    writer.commit()
    with open_view(path) as view:
        assert view.state(0).failover_log == ()
        writer.commit(flush_open=True)
        assert view.state(0).failover_log == log(77)
        assert not view.state(0).is_whole
        writer.vbuckets[0].publish(9, 3)
        writer.commit()
        assert view.state(0).is_whole
    writer.close()


def test_the_collections_of_an_open_snapshot_are_written_with_its_rows_and_not_before(path: str) -> None:
    """After a crash its seqnos may be other events; a manifest that was there already would hold from them on."""
    key = keys_of(0, 1)[0]
    writer = open_writer(path)
    writer.vbuckets[0].stage([row(writer.vbuckets[0].prefix, key, b"1", 1)], 1, span(1, 1))
    writer.vbuckets[0].publish(1, 1)
    system_event(writer, 2, DEFAULT, Collection(8, 8, "lost", Seqno(2)), scopes=SCOPES)
    assert writer.commit().published == [(0, 1)]
    crash(writer)
    writer = open_writer(path)
    assert writer.vbuckets[0].state.staged_seqno == 1
    publish(writer, 0, [(key, b"2", 2)])
    with open_view(path) as view:
        assert sorted(manifest_at(view, 1, 2).collections) == [0]
    writer.close()
