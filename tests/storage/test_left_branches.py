"""Rollbacks, abandoned snapshots and resyncs: what goes, and what stays with the copy that is served."""

from __future__ import annotations

import pytest

from storage.admin.check import check
from storage.errors import ViewInvalidated
from storage.model import Collection, FailoverLog, Seqno
from storage.read.view import open_view
from storage.write.writer import GroupWriter
from tests.storage.model import DEFAULT, SCOPES, keys_of, log
from tests.storage.rig import crash, open_writer, publish, settle, snapshots, staged, system_event

pytestmark = pytest.mark.usefixtures("small_limits")


def test_a_rollback_prunes_the_failover_log_and_keeps_the_vbuuid_of_the_boundary(writer: GroupWriter) -> None:
    key = keys_of(0, 1)[0]
    writer.vbuckets[0].save(failover_log=log(5))
    publish(writer, 0, [(key, b"1", 10)])
    writer.vbuckets[0].save(failover_log=FailoverLog.of([(6, 12)]))
    publish(writer, 0, [(key, b"2", 20)])
    assert writer.vbuckets[0].rollback(15).boundary_seqno == 10
    assert writer.vbuckets[0].state.failover_log == FailoverLog.of([(5, 10)])


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on the disk"])
def test_a_complete_snapshot_stays_when_the_next_one_is_abandoned(
    path: str, writer: GroupWriter, on_disk: bool
) -> None:
    """A first snapshot of any size was fetched again because one row of the next one was given up."""
    staged(writer, 0, 1, 9, 9)
    writer.commit(flush_open=True)
    writer.vbuckets[0].publish(9, 0)
    writer.commit()
    assert writer.vbuckets[0].complete_seqno is not None
    staged(writer, 0, 10, 12, 15)
    if on_disk:
        writer.commit(flush_open=True)
    assert writer.vbuckets[0].abandon() is not on_disk
    state = writer.vbuckets[0].state
    assert (state.staged_seqno, state.open_snapshot is None) == ((12, False) if on_disk else (9, True))
    assert writer.pending_bytes == 0
    settle(writer)
    assert writer.vbuckets[0].state.published_seqno == 9
    assert writer.vbuckets[0].abandon()
    state = writer.vbuckets[0].state
    assert (state.staged_seqno, state.open_snapshot) == (9, None)
    staged(writer, 0, 10, 11, 11)
    writer.vbuckets[0].publish(11, 10)
    settle(writer)
    with open_view(path) as view:
        assert sorted(int(each.seqno) for each in view.scan(0)) == list(range(1, 12))
    assert check(path).problems == []


def test_a_complete_snapshot_is_abandoned_on_request(writer: GroupWriter) -> None:
    """A rollback below its end: it is no longer the source's history."""
    staged(writer, 0, 1, 9, 9)
    writer.commit(flush_open=True)
    writer.vbuckets[0].publish(9, 0)
    writer.commit()
    assert writer.vbuckets[0].abandon(keep_complete=False)
    assert (writer.vbuckets[0].state.staged_seqno, (writer.vbuckets[0].complete_seqno is not None)) == (0, False)


@pytest.mark.parametrize("leave", ["nothing", "resync", "resync again", "deferred rollback"])
def test_the_served_collections_stay_when_staged_rows_are_abandoned(path: str, writer: GroupWriter, leave: str) -> None:
    """A copy beside it has no manifest yet. That was taken over, so all collections vanished for readers."""
    publish(writer, 0, [(keys_of(0, 1)[0], b"x", 1)])
    system_event(writer, 2, DEFAULT, Collection(8, 8, "orders", Seqno(2)), scopes=SCOPES, publish=True)
    publish(writer, 0, [(keys_of(0, 1)[0], b"y", 3)])
    if leave.startswith("resync"):
        writer.vbuckets[0].begin_resync()
    elif leave == "deferred rollback":
        writer.vbuckets[0].rollback(2, deferred=True)
    for _ in range(1 + (leave == "resync again")):
        staged(writer, 0, 5, 7, 9)
        writer.commit(flush_open=True)
        writer.vbuckets[0].abandon()
        assert (writer.vbuckets[0].state.staging_branch == writer.vbuckets[0].state.branch) is (leave == "nothing")
    crash(writer)
    writer = open_writer(path)
    with open_view(path) as view:
        assert sorted(view.manifest(0).collections) == [0, 8]
        assert [document.seqno for document in view.scan(0)] == [3]
    assert check(path).problems == []
    writer.close()


def test_the_stream_filter_belongs_to_the_staging_branch(path: str, writer: GroupWriter) -> None:
    """A reader must know what was left out: a resync begins again, what is served next to it claims nothing."""
    assert writer.vbuckets[0].state.stream_filter is None
    writer.vbuckets[0].save(stream_filter="collections 8")
    snapshots(writer, [(keys_of(0, 1)[0], b"x", 1)], [(keys_of(0, 1)[0], b"y", 2)])
    assert writer.vbuckets[0].rollback(1).boundary_seqno == 1
    assert writer.vbuckets[0].state.stream_filter == "collections 8"
    writer.vbuckets[0].begin_resync()
    assert writer.vbuckets[0].state.stream_filter is None
    writer.vbuckets[0].save(stream_filter="collections 8,9")
    writer.commit()
    crash(writer)
    writer = open_writer(path)
    assert writer.vbuckets[0].state.stream_filter == "collections 8,9"
    assert writer.vbuckets[0].rollback(1).boundary_seqno == 1
    assert writer.vbuckets[0].state.stream_filter == "", "the filter of the served copy is unknown"
    writer.close()


def test_the_copy_served_during_a_resync_keeps_its_own_failover_log(path: str, writer: GroupWriter) -> None:
    """A rollback on command during a resync gave the old copy the failover log of the resync's stream: the source took
    its documents for its own past, and they stayed for ever.
    """
    key = keys_of(0, 1)[0]
    writer.vbuckets[0].save(failover_log=log(77))
    snapshots(writer, [(key, b"1", 5)], [(key, b"2", 9)])
    writer.vbuckets[0].begin_resync()
    writer.vbuckets[0].save(failover_log=log(88))
    writer.commit()
    writer.vbuckets[0].rollback(6)
    assert [entry.vbuuid for entry in writer.vbuckets[0].state.failover_log] == [77]
    with open_view(path) as view:
        assert [boundary.vbuuid for boundary in view.boundaries(0)] == [77]
        assert [(each.from_vbuuid, each.to_vbuuid) for each in view.rollbacks(0)] == [(77, 77)]


def test_the_boundary_of_an_empty_copy_is_not_a_rollback_target(writer: GroupWriter) -> None:
    """A resync from an empty source is published at 0; "went to 0" means that nothing was changed."""
    writer.vbuckets[0].save(failover_log=log(77))
    publish(writer, 0, [(keys_of(0, 1)[0], b"1", 5)])
    writer.vbuckets[0].begin_resync()
    writer.vbuckets[0].publish(0, 0)
    settle(writer)
    branch = writer.vbuckets[0].state.branch
    assert writer.vbuckets[0].rollback(0).boundary_seqno == 0
    assert writer.vbuckets[0].state.branch == branch


def test_a_token_of_a_resynced_vbucket_is_refused(path: str, writer: GroupWriter) -> None:
    key = keys_of(0, 1)[0]
    publish(writer, 0, [(key, b"1", 5)])
    with open_view(path) as view:
        token = view.token(0)
        writer.vbuckets[0].begin_resync()
        assert view.stale(0)
        assert list(view.changes(0, since=token)) == []
        publish(writer, 0, [(key, b"2", 3)])
        assert not view.stale(0)
        with pytest.raises(ViewInvalidated, match="resynced"):
            list(view.changes(0, since=token))
