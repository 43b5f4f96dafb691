"""The store behind a vbucket: what each instruction does to it, what it refuses, and what it answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirror.feed.follow.store_sink import PersistenceGate
from mirror.ingest import events
from mirror.ingest import instructions as ins
from storage.model import FailoverLog, Manifest, Seqno, SnapshotRange
from tests.feed.executor_rig import FakeVbucket, open_writer, publish, stage


@pytest.fixture
def vbucket(tmp_path: Path) -> Iterator[FakeVbucket]:
    writer = open_writer(tmp_path)
    yield FakeVbucket(writer)
    writer.close()


def test_rows_log_and_publish_become_one_commit(vbucket: FakeVbucket) -> None:
    log = FailoverLog.of([(7, 0)])
    vbucket.execute([ins.SaveFacts({"failover_log": log}), stage(vbucket, 1, 2, 5), publish(5)])
    assert vbucket.writer.commit().published == [(0, 5)]
    state = vbucket.writer.vbuckets[0].state
    assert (state.published_seqno, state.failover_log, state.open_snapshot) == (5, log, None)
    assert vbucket.answers_given == []


def test_refused_rows_end_their_list_and_the_machine_is_notified(vbucket: FakeVbucket) -> None:
    vbucket.execute([stage(vbucket, 1, 5), publish(5)])
    vbucket.answers[events.StagingRefused] = [ins.ReportStatus(ins.VbucketStatus.WAITING, "so what")]
    for bad in (
        stage(vbucket, 4, 6),
        stage(vbucket, 6, 7, prefix=b"\0\0\0\x63"),  # made for another branch
        ins.Advance(Seqno(3), None),
        ins.StageSystemEvent(Seqno(2), b"row", Manifest.initial(), SnapshotRange(Seqno(0), Seqno(9))),
    ):
        vbucket.answers_given.clear()
        vbucket.done.clear()
        vbucket.execute([bad, publish(9), ins.RefreshMap()])
        (refused,) = vbucket.answers_given
        assert isinstance(refused, events.StagingRefused)
        assert refused.state.staged_seqno == 5
        assert vbucket.done == [("report", ins.VbucketStatus.WAITING)], "nothing after what was refused"


def test_advance_moves_the_position_and_the_open_snapshot(vbucket: FakeVbucket) -> None:
    snapshot = SnapshotRange(Seqno(0), Seqno(9))
    vbucket.execute([ins.Advance(Seqno(7), snapshot)])
    assert (vbucket.writer.vbuckets[0].state.staged_seqno, vbucket.writer.vbuckets[0].state.open_snapshot) == (
        7,
        snapshot,
    )


def test_rollback_is_answered_with_the_state_or_with_no_boundary(vbucket: FakeVbucket) -> None:
    vbucket.execute([stage(vbucket, 1, 2), publish(2)])
    vbucket.writer.commit()
    vbucket.execute([stage(vbucket, 3, 4), publish(4)])
    vbucket.writer.commit()
    vbucket.execute([ins.RollbackTo(Seqno(3))])
    (answer,) = vbucket.answers_given
    assert isinstance(answer, events.RolledBack)
    assert answer.state.published_seqno == 2
    assert vbucket.done[0] == "commit", "else the machines would miss what is published on the way"
    vbucket.answers_given.clear()
    vbucket.execute([ins.RollbackTo(Seqno(1))])
    assert vbucket.answers_given == [events.NoBoundary()]


def test_what_a_gate_holds_stays_staged_and_a_rollback_of_it_alone_is_none_to_readers(vbucket: FakeVbucket) -> None:
    vbucket.execute([stage(vbucket, 1, 2), publish(2)])
    vbucket.writer.commit()
    gate = vbucket.sink.gate = PersistenceGate()
    vbucket.execute([stage(vbucket, 3, 4), publish(4), stage(vbucket, 5), publish(5)])
    vbucket.writer.commit()
    assert (vbucket.writer.vbuckets[0].state.published_seqno, vbucket.writer.vbuckets[0].state.staged_seqno) == (2, 5)
    vbucket.execute([ins.RollbackTo(Seqno(3))])
    (answer,) = vbucket.answers_given
    assert isinstance(answer, events.RolledBack)
    assert (answer.state.published_seqno, answer.state.staged_seqno, answer.state.rollback_count) == (2, 2, 0)
    assert gate.waiting == 0
    vbucket.execute([stage(vbucket, 3), publish(3), ins.RollbackTo(Seqno(1))])
    assert (
        vbucket.answers_given[-1] == events.NoBoundary()
    )  # what readers have seen was lost, and nothing older is kept


def test_a_resync_that_is_complete_but_not_yet_seen_has_no_boundary_to_go_back_to(
    vbucket: FakeVbucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation: while its key rows were made, the source rolled back; the copy that was still served, of
    another history, went back to a boundary of its own, and its documents were taken for those of the source.
    """
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 0)
    vbucket.execute([stage(vbucket, 1, 2), publish(2)])
    vbucket.writer.commit()
    vbucket.writer.vbuckets[0].begin_resync()
    vbucket.execute([stage(vbucket, 5, 6)])
    vbucket.writer.commit(flush_open=True)
    vbucket.execute([publish(6)])
    vbucket.writer.commit()
    assert vbucket.writer.vbuckets[0].complete_seqno is not None
    vbucket.execute([ins.RollbackTo(Seqno(4))])
    assert vbucket.answers_given == [events.NoBoundary()]
    assert vbucket.writer.vbuckets[0].state.rollback_count == 0


def test_what_streams_are_filtered_to_is_kept(vbucket: FakeVbucket) -> None:
    vbucket.execute([ins.SaveFacts({"stream_filter": "collections 8"})])
    vbucket.writer.commit()
    assert vbucket.writer.vbuckets[0].state.stream_filter == "collections 8"


def test_staged_rows_are_abandoned_and_the_published_stay(vbucket: FakeVbucket) -> None:
    vbucket.execute([stage(vbucket, 1, 2), publish(2), stage(vbucket, 3, 4), ins.AbandonStaged()])
    (answer,) = vbucket.answers_given
    assert isinstance(answer, events.Abandoned)
    assert (answer.state.published_seqno, answer.state.staged_seqno) == (2, 2)


def test_abandoning_waits_for_a_complete_snapshot_where_the_next_one_is_on_the_disk(
    vbucket: FakeVbucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 0)
    vbucket.execute([stage(vbucket, 1, 4)])
    vbucket.writer.commit(flush_open=True)
    vbucket.execute([publish(4)])
    vbucket.writer.commit()
    vbucket.execute([stage(vbucket, 5, 6), ins.AbandonStaged()])
    (answer,) = vbucket.answers_given
    assert isinstance(answer, events.Abandoned)
    assert answer.state.staged_seqno == 4
    vbucket.answers_given.clear()
    vbucket.execute([stage(vbucket, 5, 6)])
    vbucket.writer.commit(flush_open=True)
    vbucket.execute([ins.AbandonStaged()])
    assert vbucket.answers_given == []
    assert vbucket.sink.abandon_due
    while vbucket.writer.vbuckets[0].complete_seqno is not None:
        vbucket.writer.step()
        vbucket.writer.commit()
    vbucket.execute([ins.AbandonStaged()])
    (answer,) = vbucket.answers_given
    assert (answer.state.published_seqno, answer.state.staged_seqno) == (4, 4)


@pytest.mark.parametrize("instruction", [ins.BeginResync("t"), ins.AbandonStaged()])
def test_ends_that_were_held_are_forgotten_with_what_was_staged(vbucket: FakeVbucket, instruction: Any) -> None:
    """A resync or an abandoned snapshot: an end of what is gone would be published on the branch that follows."""
    vbucket.execute([stage(vbucket, 1, 2), publish(2)])
    vbucket.writer.commit()
    gate = vbucket.sink.gate = PersistenceGate()
    vbucket.execute([stage(vbucket, 3, 4), publish(4), instruction])
    assert gate.waiting == 0
    assert gate.release(9) is None


def test_resync_needs_space_next_to_the_old_copy(vbucket: FakeVbucket, monkeypatch: pytest.MonkeyPatch) -> None:
    vbucket.execute([stage(vbucket, 1, 2), publish(2)])
    vbucket.writer.commit()
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1024))
    vbucket.execute([ins.BeginResync("t")])
    assert isinstance(vbucket.answers_given[-1], events.ResyncRefused)
    assert vbucket.writer.vbuckets[0].state.staging_branch == vbucket.writer.vbuckets[0].state.branch
    monkeypatch.setattr(shutil, "disk_usage", usage)
    vbucket.execute([ins.BeginResync("t")])
    assert isinstance(vbucket.answers_given[-1], events.ResyncOpened)
    assert vbucket.writer.vbuckets[0].state.published_seqno == 2, "the old copy is served on"
