"""Opening branches, one transaction each: nothing in between can be seen, and numbers are never used twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.admin.check import check
from storage.env import directory
from storage.errors import ViewInvalidated
from storage.history import branches
from storage.model import FailoverLog
from storage.read import bulk, states
from storage.read.view import Token, View, open_view
from storage.write.writer import GroupWriter
from tests.storage.model import IDENTITY, keys_of, log
from tests.storage.rig import open_writer, publish, scan_page, snapshots, stage

KEY = keys_of(0, 1)[0]


def entries(*pairs: tuple[int, int]) -> FailoverLog:
    return FailoverLog.of(pairs)


def test_branch_numbers_rise_through_everything_that_opens_one(path: str) -> None:
    writer = open_writer(path)
    seen = [writer.vbuckets[0].state.staging_branch]
    writer.vbuckets[0].save(failover_log=log())
    snapshots(writer, [(KEY, b"1", 1)], [(KEY, b"2", 2)])
    writer.vbuckets[0].rollback(1)
    seen.append(writer.vbuckets[0].state.staging_branch)
    stage(writer, 9, (KEY, b"3", 5), flush=True)
    writer.vbuckets[0].abandon()
    seen.append(writer.vbuckets[0].state.staging_branch)
    writer.vbuckets[0].begin_resync()
    seen.append(writer.vbuckets[0].state.staging_branch)
    writer.vbuckets[0].abandon()  # nothing was written to it: it stays
    assert writer.vbuckets[0].state.staging_branch == seen[-1]
    stage(writer, 9, (KEY, b"4", 1), flush=True)
    writer.vbuckets[0].abandon()
    seen.append(writer.vbuckets[0].state.staging_branch)
    writer.vbuckets[0].rollback(1)  # gives the resync up
    seen.append(writer.vbuckets[0].state.staging_branch)
    assert seen == sorted(set(seen))
    assert writer.vbuckets[0].state.branch == writer.vbuckets[0].state.staging_branch
    writer.close()


def test_a_rollback_record_has_its_start_and_its_target(path: str) -> None:
    writer: GroupWriter = open_writer(path)
    writer.vbuckets[0].save(failover_log=entries((5, 0)))
    publish(writer, 0, [(KEY, b"1", 10)])
    writer.vbuckets[0].save(failover_log=entries((6, 10), (5, 0)))
    publish(writer, 0, [(KEY, b"2", 20)])
    writer.vbuckets[0].rollback(15)
    with open_view(path) as view:
        record = view.rollbacks(0)[-1]
    assert (record.from_branch, record.from_seqno, record.to_branch, record.to_seqno) == (1, 20, 2, 10)
    assert (record.from_vbuuid, record.to_vbuuid) == (6, 6)
    assert record.time_ms > 0
    writer.close()


def fill(path: str, seqnos: range) -> None:
    writer = open_writer(path)
    if seqnos.start == 1:
        writer.vbuckets[0].save(failover_log=log())
    for seqno in seqnos:
        publish(writer, 0, [(KEY, b"%d" % seqno, seqno)])
    writer.close()


def data_of(path: str) -> Path:
    return Path(directory.group_path(path, 0), "data.mdb")


def refused(path: str, *tokens: Token) -> list[bool]:
    """Which tokens are not followed, though a boundary with these numbers is there."""
    found = []
    with open_view(path) as view:
        for token in tokens:
            try:
                list(view.changes(0, since=token))
            except ViewInvalidated:
                found.append(True)
            else:
                found.append(False)
    return found


def test_positions_of_a_group_that_was_set_aside_are_refused_by_the_new_one(path: str) -> None:
    """The repair that an error recommends: numbers begin again at branch 1, and mean something else."""
    fill(path, range(1, 4))
    with open_view(path) as view:
        tokens = [view.token(0, 1, seqno) for seqno in (1, 2, 3)]
        pin = view.pin(0)
    folder = directory.group_path(path, 0)
    os.rename(folder, folder + ".damaged")
    os.mkdir(folder)
    directory.create_environment(folder, 0, IDENTITY)
    fill(path, range(1, 4))
    assert refused(path, *tokens) == [True] * 3
    with open_view(path) as view:
        assert view.token(0).seqno == 3
        for read in (view.reading(pins=[pin]).manifest, lambda _: scan_page(view, pin)):
            with pytest.raises(ViewInvalidated, match="of a history that this mirror does not have"):
                read(0)


def test_a_rollback_that_a_power_cut_undid_leaves_no_position_behind(path: str) -> None:
    """The branch number of the rollback is taken again, by another rollback."""
    fill(path, range(1, 4))
    before = data_of(path).read_bytes()
    writer = open_writer(path)
    writer.vbuckets[0].rollback(2)
    publish(writer, 0, [(KEY, b"seen, then lost", 3)])
    writer.close()
    with open_view(path) as view:
        seen = [view.token(0, 1, 2), view.token(0, 2, 2), view.token(0, 2, 3)]
    data_of(path).write_bytes(before)
    writer = open_writer(path)
    writer.vbuckets[0].rollback(2)
    publish(writer, 0, [(KEY, b"another", 3)])
    writer.close()
    with open_view(path) as view:
        assert view.token(0, 2, 3).seqno == view.token(0).seqno == 3
    assert refused(path, *seen) == [False, False, True], "the second is the first: branch 2 begins behind 2"


@pytest.mark.parametrize("event", ["power cut", "copy in the same file", "copy by another name"])
def test_a_commit_that_was_undone_leaves_no_position_behind(path: str, event: str) -> None:
    """Positions published before stay valid; those seen above never name later commits."""
    fill(path, range(1, 3))
    before = data_of(path).read_bytes()
    if event == "power cut":  # in the middle of what one writer publishes
        writer = open_writer(path)
        publish(writer, 0, [(KEY, b"2", 3)])
        before = data_of(path).read_bytes()
        publish(writer, 0, [(KEY, b"2", 5)])
        writer.close()
    else:
        fill(path, range(3, 6))
    kept = 3 if event == "power cut" else 2
    with open_view(path) as view:
        seen = [view.token(0, 1, seqno) for seqno in (1, 2, 3, 5)]
    if event == "copy by another name":
        data_of(path).with_name("copy").write_bytes(before)
        os.rename(data_of(path).with_name("copy"), data_of(path))
    else:
        data_of(path).write_bytes(before)
    assert refused(path, *seen) == [False, False, kept < 3, True], "before there is another writer"
    fill(path, range(kept + 1, 6))
    assert refused(path, *seen) == [False, False, kept < 3, True]
    assert check(path).problems == []
    with open_view(path) as view:
        now = view.token(0, 1, 4)
    fill(path, range(6, 8))
    assert refused(path, seen[1], now) == [False, False]


def test_a_lease_does_not_make_a_lost_position_valid_again(path: str) -> None:
    """A lease names branch and seqno alone: it holds what is there under these numbers, and its reader is refused."""
    fill(path, range(1, 3))
    before = data_of(path).read_bytes()
    fill(path, range(3, 6))
    with open_view(path) as view:
        token, pin = view.token(0), view.pin(0)
    data_of(path).write_bytes(before)
    fill(path, range(3, 6))
    writer = open_writer(path)
    writer.background.lease("reader", {0: (token.branch, token.seqno)}, 2**50)
    assert refused(path, token) == [True]
    with open_view(path) as view, pytest.raises(ViewInvalidated, match="of a history that this mirror does not have"):
        list(bulk.documents(view.reader(pin.vbid), pin))
    writer.close()


def test_a_reader_that_stays_open_returns_positions_of_the_new_history(writer: GroupWriter, view: View) -> None:
    publish(writer, 0, [(KEY, b"1", 1)])
    assert view.token(0).history_id == writer.environment.history_id
    writer.environment.history_id = 7  # as the next owner draws its own
    writer.owner.write(lambda txn: branches.begin_history(txn, 0))
    publish(writer, 0, [(KEY, b"2", 2)])
    assert view.token(0).history_id == 7


def test_many_restarts_keep_the_history_ids_of_a_branch_bounded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "HISTORY_IDS_MAX", 8)
    for start in range(branches.HISTORY_IDS_MAX + 10):
        fill(path, range(2 * start + 1, 2 * start + 3))
        fill(path, range(2 * start + 3, 2 * start + 3))  # nothing is published between two starts: one more id, not two
        fill(path, range(2 * start + 3, 2 * start + 3))
    with open_view(path) as view:
        assert len(states.history_ids(view.reader(0), 1)) == branches.HISTORY_IDS_MAX
        newest = view.token(0)
    assert refused(path, newest) == [False]
