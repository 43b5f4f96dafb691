"""Visibility after a commit: empty sources, and failover logs that come with the first rows."""

from __future__ import annotations

from random import Random

import pytest

import storage.history.index
from storage.admin.check import check
from storage.errors import SeqnoOrder
from storage.model import Collection, Seqno
from storage.read.view import open_view
from storage.write.writer import GroupWriter
from tests.storage.model import DEFAULT, SCOPES, keys_of, log, manifest_at, row, span
from tests.storage.rig import crash, open_writer, publish, settle, stage, staged, system_event

pytestmark = pytest.mark.usefixtures("small_limits")


def test_a_resync_from_an_empty_source_is_published_at_zero(path: str, writer: GroupWriter) -> None:
    key = keys_of(0, 1)[0]
    publish(writer, 0, [(key, b"gone", 5)])
    writer.vbuckets[0].begin_resync()
    writer.vbuckets[0].save(failover_log=log(9))
    writer.vbuckets[0].publish(0, 0)
    assert writer.commit().published == [(0, 0)]
    state = writer.vbuckets[0].state
    assert (state.branch, state.published_seqno, state.staged_seqno) == (state.staging_branch, 0, 0)
    with open_view(path, partial=True) as view:
        assert list(view.scan(0)) == []
        assert not view.stale(0)
    publish(writer, 0, [(key, b"new", 1)])
    assert check(path).problems == []


def test_an_empty_source_is_known_only_after_its_confirmation(path: str) -> None:
    """A stream that was accepted may bring everything yet: its log alone must not make an absent document of it."""
    writer = open_writer(path)
    writer.vbuckets[0].save(failover_log=log(77))
    writer.commit()
    assert writer.vbuckets[0].state.failover_log == log(77)
    with open_view(path, partial=True) as view:
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
    stage(writer, 9, (key, b"1", 3), flush=True)
    assert not writer.vbuckets[0].state.is_whole
    assert writer.vbuckets[0].state.failover_log == log(78)
    writer.vbuckets[0].abandon()
    assert not writer.vbuckets[0].state.is_whole
    writer.close()


def test_rows_of_the_first_snapshot_are_committed_with_its_failover_log(path: str) -> None:
    writer = open_writer(path)
    (key,) = keys_of(0, 1)
    writer.vbuckets[0].save(failover_log=log(77))
    stage(writer, 9, (key, b"1", 3))
    writer.commit()
    with open_view(path, partial=True) as view:
        assert view.state(0).failover_log == ()
        writer.commit(flush_open=True)
        assert view.state(0).failover_log == log(77)
        assert not view.state(0).is_whole
        writer.vbuckets[0].publish(9, 3)
        writer.commit()
        assert view.state(0).is_whole
    writer.close()


def test_the_collections_of_an_open_snapshot_are_written_with_its_rows(path: str) -> None:
    """After a crash its seqnos may be other events; a manifest that was there already would hold from them on."""
    key = keys_of(0, 1)[0]
    writer = open_writer(path)
    stage(writer, 1, (key, b"1", 1))
    writer.vbuckets[0].publish(1, 1)
    system_event(writer, 2, DEFAULT, Collection(8, 8, "lost", Seqno(2)), scopes=SCOPES)
    assert writer.commit().published == [(0, 1)]
    crash(writer)
    writer = open_writer(path)
    assert writer.vbuckets[0].state.staged_seqno == 1
    publish(writer, 0, [(key, b"2", 2)])
    with open_view(path, partial=True) as view:
        assert sorted(manifest_at(view, 1, 2).collections) == [0]
    writer.close()


# --- what is accepted and not yet committed


@pytest.mark.parametrize("seqnos", [[3, 2], [2, 2], [1, 5, 4, 6], [0]])
def test_rows_out_of_order_are_refused_and_other_vbuckets_are_unaffected(
    path: str, writer: GroupWriter, seqnos: list[int]
) -> None:
    key = keys_of(0, 1)[0]
    prefix = writer.vbuckets[0].prefix
    rows = [row(prefix, key, b"x", seqno) for seqno in seqnos]
    with pytest.raises(SeqnoOrder):
        writer.vbuckets[0].stage(rows, 0, span(0, 9))
    other = keys_of(2, 1)[0]
    publish(writer, 2, [(other, b"y", 1)])
    with open_view(path, partial=True) as view:
        assert view.get(other) is not None
        assert view.get(key) is None


def test_bytes_wait_until_they_are_committed_or_dropped(writer: GroupWriter) -> None:
    one, two = keys_of(0, 2)
    first, second = (row(writer.vbuckets[0].prefix, key, b"v", seqno) for seqno, key in enumerate((one, two), 1))
    writer.vbuckets[0].stage([first], len(first[1]), span(1, 1))
    writer.vbuckets[0].publish(1, 1)
    writer.vbuckets[0].stage([second], len(second[1]), span(2, 3))
    assert writer.pending_bytes == len(first[1]) + len(second[1])
    writer.commit()
    assert writer.pending_bytes == len(second[1])
    writer.vbuckets[0].abandon()
    assert (writer.pending_bytes, writer.vbuckets[0].state.staged_seqno) == (0, 1)


@pytest.mark.parametrize("inline_rows", [2, 1000], ids=["by a job", "in the commit"])
@pytest.mark.parametrize("seed", range(15))
def test_any_complete_end_may_be_published_later(
    path: str, seed: int, inline_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", inline_rows)
    monkeypatch.setattr(storage.history.index, "SLICE_ROWS", 3)
    rng = Random(seed)
    names = keys_of(0, 6)
    writer = open_writer(path)
    writer.vbuckets[0].save(failover_log=log())
    events: list[tuple[int, bytes]] = []
    ends: list[int] = []
    published = 0
    with open_view(path, partial=True) as view:
        for _ in range(60):
            start = writer.vbuckets[0].state.staged_seqno + 1
            end = start + rng.randrange(4)
            batch = [(seqno, rng.choice(names)) for seqno in range(start, end + 1)]
            events += batch
            rows = [row(writer.vbuckets[0].prefix, key, b"%d" % seqno, seqno) for seqno, key in batch]
            writer.vbuckets[0].stage(rows, 9 * len(rows), span(start, end))
            ends.append(end)
            if rng.random() < 0.3:
                writer.commit(flush_open=rng.random() < 0.7)
            if rng.random() < 0.4 and not (writer.vbuckets[0].complete_seqno is not None):
                published = rng.choice([each for each in ends if each >= published])
                writer.vbuckets[0].publish(published, 0)
                writer.commit(flush_open=rng.random() < 0.3)
                while writer.vbuckets[0].complete_seqno is not None:
                    writer.step()
                    writer.commit()
                state = writer.vbuckets[0].state
                assert (state.published_seqno, state.staged_seqno) == (published, end)
                assert (state.open_snapshot is None) == (published == end)
            contents = {key: seqno for seqno, key in events if seqno <= published}
            assert {document.key: int(document.seqno) for document in view.scan(0)} == contents
    writer.commit(flush_open=True)
    if published < ends[-1]:
        assert writer.vbuckets[0].state.open_snapshot is not None  # else the next writer would take it for complete
    writer.close()
    assert check(path).problems == []
    writer = open_writer(path)
    assert not (writer.vbuckets[0].complete_seqno is not None)
    assert writer.vbuckets[0].state.published_seqno == published
    writer.vbuckets[0].publish(ends[-1], 0)
    writer.commit()
    while writer.vbuckets[0].complete_seqno is not None:
        writer.step()
        writer.commit()
    writer.close()
    assert check(path).problems == []
    with open_view(path, partial=True) as view:
        assert {document.key: int(document.seqno) for document in view.scan(0)} == {key: at for at, key in events}


# --- key rows of large snapshots, made between commits


def test_the_map_grows_while_key_rows_are_made_and_none_is_left_out(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 0)
    monkeypatch.setattr(storage.history.index, "SLICE_ROWS", 100)
    writer = open_writer(path, map_size=1 << 20)
    count = 2_500
    stage(writer, count, *((b"%0240d" % seqno, b"v", seqno) for seqno in range(1, count + 1)), flush=True)
    writer.vbuckets[0].publish(count, 1)
    writer.commit()
    before = writer.figures()["map_bytes"]
    while writer.vbuckets[0].complete_seqno is not None:
        writer.step()
        writer.commit()
    assert writer.figures()["map_bytes"] > before, "it became full while key rows were written"
    writer.close()
    assert check(path).problems == []
    with open_view(path, partial=True) as view:
        assert len(list(view.scan(0))) == count


@pytest.mark.parametrize("dies", [False, True])
def test_rows_of_the_next_snapshot_flushed_during_an_index_job_get_their_key_rows(
    path: str, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """A snapshot is complete and waits for its key rows; memory pressure writes down rows of the next one; a commit
    without anything to write counted those as not on disk. They were published without key rows: documents that no read
    could find. After a crash they lay above what the state said was staged, and could not be appended again.
    """
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 2)
    writer = open_writer(path)
    staged(writer, 0, 1, 9, 10)
    writer.commit(flush_open=True)
    staged(writer, 0, 10, 10, 10)
    writer.vbuckets[0].publish(10, 0)
    staged(writer, 0, 11, 12, 18)
    writer.commit(flush_open=True)
    staged(writer, 0, 13, 14, 18)
    writer.vbuckets[0].save(failover_log=log())
    writer.commit()
    if dies:
        crash(writer)
        writer = open_writer(path)
        assert writer.vbuckets[0].state.staged_seqno == 12
        staged(writer, 0, 13, 14, 18)
    else:
        settle(writer)
        assert writer.vbuckets[0].state.published_seqno == 10
    staged(writer, 0, 15, 18, 18)
    writer.vbuckets[0].publish(18, 10)
    settle(writer)
    with open_view(path, partial=True) as view:
        assert sorted(int(each.seqno) for each in view.scan(0)) == list(range(1, 19))
    assert check(path).problems == []
    writer.close()
