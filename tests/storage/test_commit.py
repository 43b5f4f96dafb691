"""What a commit makes visible: out-of-order snapshots, empty sources, and logs that go with the first rows."""

from __future__ import annotations

import pytest

from storage.check import check
from storage.model import Manifest, ManifestUid
from storage.view import open_view
from storage.writer import GroupWriter
from tests.storage.model import keys_of, log, row, span
from tests.storage.test_writer import (
    crash,
    open_writer,
    publish,
    settle,
    staged,
    system_event_frame,
)

pytestmark = pytest.mark.usefixtures("small_limits")


def test_an_oso_snapshot_appears_whole_and_a_broken_one_never(path: str, writer: GroupWriter) -> None:
    a, b, c = keys_of(0, 3)
    for round_number, finish in enumerate([False, True]):
        writer.begin_oso(0)
        prefix = writer.row_prefix(0)
        rows = [row(prefix, b, b"b", 7), row(prefix, a, b"a", 3)]
        writer.stage(0, rows, 10, span(0, 2**64 - 1), unordered=True)
        writer.commit(flush_open=True)
        writer.stage(0, [row(prefix, c, b"c", 5)], 10, span(0, 2**64 - 1), unordered=True)
        assert writer.state(0).staged_seqno == 7
        with open_view(path) as view:
            assert list(view.scan(0)) == []
        if finish:
            writer.publish(0, 7, 0)
            while not writer.commit().published:
                writer.step()
        elif round_number == 0:
            crash(writer)
            writer = open_writer(path)  # writes nothing: what is left of the snapshot is the vbucket's to give up
            assert writer.state(0).staged_seqno == 7
            assert writer.state(0).open_snapshot is not None
            writer.abandon(0)
            assert writer.state(0).staged_seqno == 0
    with open_view(path) as view:
        assert {d.key: d.seqno for d in view.scan(0)} == {a: 3, b: 7, c: 5}
    publish(writer, 0, [(a, None, 8)])
    with open_view(path) as view:
        assert {d.key: d.seqno for d in view.scan(0)} == {b: 7, c: 5}
    assert check(path).problems == []
    writer.close()


def test_a_complete_snapshot_without_its_key_rows_is_published_by_the_next_writer(path: str) -> None:
    writer = open_writer(path)
    events = [(seqno, b"k%d" % seqno, b"v") for seqno in range(1, 10)]
    rows = [row(writer.row_prefix(0), key, value, seqno) for seqno, key, value in events]
    writer.stage(0, rows[:5], 5, span(0, 9))
    writer.commit(flush_open=True)
    writer.stage(0, rows[5:], 5, span(0, 9))
    writer.publish(0, 9, 0)
    assert writer.commit().published == []
    crash(writer)
    again = open_writer(path)
    assert (again.state(0).staged_seqno, again.state(0).published_seqno) == (9, 0)
    assert again.publishing(0)
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
    writer.begin_resync(0)
    writer.save_failover_log(0, log(9))
    writer.publish(0, 0, 0)
    assert writer.commit().published == [(0, 0)]
    state = writer.state(0)
    assert (state.branch, state.published_seqno, state.staged_seqno) == (state.staging_branch, 0, 0)
    with open_view(path) as view:
        assert list(view.scan(0)) == []
        assert not view.stale(0)
    publish(writer, 0, [(key, b"new", 1)])
    assert check(path).problems == []


def test_system_events_inside_an_oso_snapshot_come_in_any_order(path: str, writer: GroupWriter) -> None:
    """They were refused as not rising, and the vbucket requested the same snapshot for ever."""
    writer.begin_oso(0)
    staged(writer, 0, 9, 9, 0, unordered=True)
    manifests = [Manifest(ManifestUid(uid), {0: "_default"}, Manifest.initial().collections) for uid in (1, 2)]
    for seqno, manifest in zip((4, 2), manifests, strict=True):
        writer.system_event(0, seqno, system_event_frame(seqno), manifest, span(0, 0), unordered=True)
    writer.publish(0, 9, 0)
    settle(writer)
    with open_view(path) as view:
        assert view.manifest(0) == manifests[1], "the last that came holds, at whatever seqno"
    assert check(path).problems == []


def test_rows_of_an_oso_snapshot_that_came_in_several_commits_all_get_key_rows(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the last commit lie among those of earlier ones; the search for the earlier was cut short by them."""
    monkeypatch.setattr("storage.commit.INLINE_INDEX_ROWS", 2)
    writer = open_writer(path)
    writer.begin_oso(0)
    staged(writer, 0, 14, 14, 0, unordered=True)
    writer.commit(flush_open=True)
    assert check(path).problems == []
    staged(writer, 0, 5, 13, 0, unordered=True)
    writer.publish(0, 14, 0)
    settle(writer)
    with open_view(path) as view:
        assert sorted(int(each.seqno) for each in view.scan(0)) == list(range(5, 15))
    assert check(path).problems == []
    writer.close()


def test_that_the_source_has_nothing_is_known_only_once_it_was_said(path: str) -> None:
    """A stream that was accepted may bring everything yet: its log alone must not make an absent document of it."""
    writer = open_writer(path)
    writer.save_failover_log(0, log(77))
    writer.commit()
    assert writer.state(0).failover_log == log(77)
    with open_view(path) as view:
        assert not view.state(0).is_whole
        writer.publish(0, 0, 0)
        writer.commit()
        assert view.state(0).is_whole
        assert view.boundaries(0) == []
        writer.save_failover_log(0, log(78))
        writer.commit()
        assert view.state(0).is_whole
    crash(writer)
    writer = open_writer(path)
    assert writer.state(0).is_whole
    assert writer.state(0).failover_log == log(78)
    (key,) = keys_of(0, 1)
    writer.stage(0, [row(writer.row_prefix(0), key, b"1", 3)], 0, span(3, 9))
    writer.commit(flush_open=True)
    assert not writer.state(0).is_whole
    assert writer.state(0).failover_log == log(78)
    writer.abandon(0)
    assert not writer.state(0).is_whole
    writer.close()


def test_rows_of_the_first_snapshot_bring_its_log_along(path: str) -> None:
    writer = open_writer(path)
    (key,) = keys_of(0, 1)
    writer.save_failover_log(0, log(77))
    writer.stage(0, [row(writer.row_prefix(0), key, b"1", 3)], 0, span(3, 9))
    writer.commit()
    with open_view(path) as view:
        assert view.state(0).failover_log == ()
        writer.commit(flush_open=True)
        assert view.state(0).failover_log == log(77)
        assert not view.state(0).is_whole
        writer.publish(0, 9, 3)
        writer.commit()
        assert view.state(0).is_whole
    writer.close()
