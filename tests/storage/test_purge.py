"""History goes step by step: what each limit keeps, what a step may cost, and that nothing visible is ever lost.

That views and as-of reads stay right through any mix of purging, rollbacks and crashes is `test_writer.py`'s to prove.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest

import storage.history.purge
from storage.admin.check import check
from storage.env.transaction import Transaction
from storage.errors import NoSuchBoundary, ViewInvalidated
from storage.format import keys
from storage.history import branches, chain
from storage.history.purge import Purger, Step, Window, dead_ranges
from storage.history.removal import deal, marks_of
from storage.model import Branch, Collection, Seqno
from storage.read import stream_reads as stream
from storage.read.view import View
from storage.write.writer import GroupWriter
from tests.storage.model import DEFAULT, SCOPES, A, B, C, events, keys_of
from tests.storage.rig import HOUR_MS, Clock, commit, publish, purge, put, scan_page, snapshots, stage, system_event


def seqnos(view: View) -> list[int]:
    return [int(document.seqno) for document in events(view)]


def test_the_window_by_time_keeps_the_versions_current_at_its_start(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    for seqno in range(1, 6):
        clock.now = seqno * HOUR_MS
        publish(writer, 0, [(A, b"%d" % seqno, seqno)])
    clock.now = 5 * HOUR_MS + HOUR_MS // 2
    purge(writer, Window(time_ms=2 * HOUR_MS))  # it begins at 3:30, when the snapshot of 3:00 was current
    assert writer.vbuckets[0].state.history_floor_seqno == 3
    assert seqnos(view) == [3, 4, 5]
    assert [b.seqno for b in view.boundaries(0)] == [5, 4, 3]
    with pytest.raises(NoSuchBoundary, match="history begins at seqno 3"):
        view.get(A, as_of=2)
    old = view.get(A, as_of=3)
    assert old is not None
    assert old.value == b"3"
    assert writer.vbuckets[0].rollback(2).boundary_seqno == 0  # below the floor nothing may be pretended
    assert writer.vbuckets[0].rollback(3).boundary_seqno == 3


def test_the_window_is_bounded_by_count_and_by_size(writer: GroupWriter, view: View) -> None:
    for seqno in range(1, 11):
        publish(writer, 0, [(A, b"x" * 1000, seqno)])
    purge(writer, Window(boundaries=4))
    assert [b.seqno for b in view.boundaries(0)] == [10, 9, 8, 7]
    purge(writer, Window(size_bytes=2500))
    assert [b.seqno for b in view.boundaries(0)] == [10, 9, 8]
    assert seqnos(view) == [8, 9, 10]
    assert purge(writer, Window(size_bytes=2500)) == 0


@pytest.mark.parametrize("position", range(1, 6))
def test_a_follower_from_any_position_has_a_purged_deletion_or_is_refused(
    writer: GroupWriter, view: View, position: int
) -> None:
    """The event right before the deletion is a position like any other."""
    for seqno, (key, value) in enumerate([(B, b"1"), (A, b"1"), (C, b"1"), (B, None), (C, b"2")], 1):
        publish(writer, 0, [(key, value, seqno)])
    token = view.token(0, 1, position)
    purge(writer, Window(boundaries=1))  # the tombstone of B at 4 went
    begins_again = position < 4
    assert (position < stream.served_state(view.reader(0)).purge_seqno) == begins_again, "a follower over DCP"
    if begins_again:
        with pytest.raises(ViewInvalidated, match=f"tombstones above seqno {position} are gone"):
            list(view.changes(0, since=token))
    else:
        assert [change.token.seqno for change in view.changes(0, since=token)] == [5][position - 4 :]


def test_a_purged_tombstone_below_a_newer_version_refuses_no_reader(writer: GroupWriter, view: View) -> None:
    snapshots(writer, [(A, b"1", 1), (B, b"1", 2)], [(A, None, 3)], [(A, b"2", 4)], [(B, b"2", 5)])
    purge(writer, Window(boundaries=1))  # floor 5: the tombstone went, what replaced it did not
    assert seqnos(view) == [4, 5]
    assert writer.vbuckets[0].state.local_purge_seqno == 0
    assert [c.token.seqno for c in view.changes(0, since=view.token(0, Branch(1), 2))] == [4, 5]


def test_tombstones_of_a_first_backfill_stay_for_the_window_too(writer: GroupWriter, view: View, clock: Clock) -> None:
    publish(writer, 0, [(A, b"1", 1), (B, None, 2), (C, b"1", 3)])
    purge(writer, Window(time_ms=HOUR_MS))
    assert [d.key for d in view.scan(0, deletions=True)] == sorted([A, B, C])
    clock.now += 2 * HOUR_MS
    purge(writer, Window(time_ms=HOUR_MS))
    assert [d.key for d in view.scan(0, deletions=True)] == sorted([A, C])
    assert writer.vbuckets[0].state.local_purge_seqno == 2


def test_rows_of_a_dropped_collection_are_purged_below_the_floor(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.history.purge, "STEP_ROWS", 2)
    system_event(writer, 1, DEFAULT, Collection(9, 8, "orders", Seqno(1)), scopes=SCOPES)
    put(writer, A, 2, b"default")
    for seqno in range(3, 10):
        put(writer, b"order-%d" % seqno, seqno, cid=9)
    commit(writer, 9)
    system_event(writer, 10, DEFAULT, scopes=SCOPES, publish=True)
    purge(writer, Window(boundaries=2))
    assert len(seqnos(view)) == 10
    put(writer, B, 11, publish=True)
    purge(writer, Window(boundaries=2))
    assert seqnos(view) == [1, 2, 10, 11]
    assert [d.key for d in view.scan(0)] == sorted([A, B])


def test_retracted_rows_wait_for_the_window_and_abandoned_ones_do_not(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    snapshots(writer, [(A, b"1", 1)], [(A, b"2", 2), (B, b"2", 3)])
    token = view.token(0, 1, 3)
    clock.now = HOUR_MS
    writer.vbuckets[0].rollback(1)
    stage(writer, 9, (C, b"staged", 7), flush=True)
    writer.vbuckets[0].abandon()
    with writer.environment.read() as txn:
        assert [(d.branch, d.after_seqno, d.since_ms is None) for d in dead_ranges(txn, 0)] == [
            (1, 1, False),
            (2, 1, True),
        ]
    purge(writer, Window(time_ms=HOUR_MS))
    with writer.environment.read() as txn:
        assert len(list(txn.cursor(b"v0"))) == 3 + 2  # rows and boundaries
    for _ in range(2):  # a purger of another process, after the branch that the abandonment left was forgotten
        assert [c.kind for c in view.changes(0, since=token)] == ["rollback", "retraction", "restoration", "retraction"]
        writer.background.restart()
        purge(writer, Window(time_ms=HOUR_MS))
    clock.now = 3 * HOUR_MS
    purge(writer, Window(time_ms=HOUR_MS))
    with pytest.raises(ViewInvalidated, match="rows of a rollback are gone"):
        list(view.changes(0, since=token))
    assert seqnos(view) == [1]


@pytest.mark.parametrize("time_ms", [24 * HOUR_MS, None])
def test_retracted_rows_go_when_another_limit_moves_the_floor_past_their_rollback(
    writer: GroupWriter, view: View, time_ms: int | None
) -> None:
    """They stayed until the window by time ended too, or for ever without one."""
    snapshots(writer, [(A, b"1", 1)], [(A, b"2", 2), (B, b"2", 3)])
    token = view.token(0, 1, 3)
    writer.vbuckets[0].rollback(1)
    snapshots(writer, [(C, b"3", 2)])
    purge(writer, Window(time_ms, boundaries=2))
    assert writer.vbuckets[0].state.history_floor_seqno == 1  # a read as of the rollback's boundary is still possible
    assert [c.kind for c in view.changes(0, since=token)][:2] == ["rollback", "retraction"]
    snapshots(writer, [(C, b"4", 3)])
    purge(writer, Window(time_ms, boundaries=2))
    assert writer.vbuckets[0].state.history_floor_seqno == 2
    with writer.environment.read() as txn:
        assert not chain.has_rows(txn, 0, 1, 1)
    with pytest.raises(ViewInvalidated, match="rows of a rollback are gone"):
        list(view.changes(0, since=token))
    assert seqnos(view) == [1, 2, 3]


@pytest.mark.parametrize("time_ms", [24 * HOUR_MS, None])
def test_failovers_with_few_kept_boundaries_leave_a_sound_mirror(
    writer: GroupWriter, view: View, time_ms: int | None
) -> None:
    """Rows were merged into a branch that still had retracted rows at their positions."""
    names, seqno = keys_of(0, 7), 0
    for failover in range(40):
        for _ in range(3):
            seqno += 1
            publish(writer, 0, [(names[(seqno + failover) % 7], b"%d" % seqno, seqno)])
        seqno = writer.vbuckets[0].rollback(seqno - 1).boundary_seqno
        purge(writer, Window(time_ms, boundaries=2))
    assert branch_count(writer) < 40, "some were merged"
    assert check(view.path).problems == []


def test_a_snapshot_larger_than_many_steps_does_not_hide_the_boundary_behind_it(
    writer: GroupWriter, view: View, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.history.purge, "STEP_ROWS", 3)
    snapshots(writer, [(A, b"1", 1)], [(A, b"x", seqno) for seqno in range(2, 60)], [(B, b"y", 60)])
    clock.now += 2 * HOUR_MS
    writer.background.purger = Purger(writer.environment, writer.vbids, Window(time_ms=HOUR_MS))
    while not writer.background.purger.round_is_over:  # each look takes the walk a little further
        if (vbid := writer.background.purger.plan(clock.now)) is not None:
            writer.background.purge(vbid, clock.now)
    assert writer.vbuckets[0].state.history_floor_seqno == 60
    assert seqnos(view) == [59, 60]


def broken_backfill(writer: GroupWriter) -> None:
    """Some rows of a snapshot reach the disk; then the source will not continue it."""
    seqno = writer.vbuckets[0].state.published_seqno
    stage(writer, seqno + 9, (C, b"staged", seqno + 1), flush=True)
    writer.vbuckets[0].abandon()


def branch_count(writer: GroupWriter) -> int:
    with writer.environment.read() as txn:
        return len(branches.all_branches(txn, 0))


def test_broken_snapshots_leave_no_branches_behind(writer: GroupWriter, view: View) -> None:
    publish(writer, 0, [(A, b"1", 1), (B, b"1", 2)])
    tokens = [view.token(0, writer.vbuckets[0].state.branch, 2)]
    for _ in range(60):
        broken_backfill(writer)
        tokens.append(view.token(0, writer.vbuckets[0].state.branch, 2))
    assert len(stream.served_state(view.reader(0)).links) == 1
    pinned = view.pin(0)
    half_read = view.scan(0)
    first = next(half_read)
    broken_backfill(writer)
    assert branch_count(writer) == 62
    purge(writer, Window(time_ms=HOUR_MS))
    assert branch_count(writer) == 2
    publish(writer, 0, [(A, b"3", 3)])
    assert [first.key, *(each.key for each in half_read)] == sorted([A, B])
    assert {each.key for each in scan_page(view, pinned)[0]} == {A, B}
    for token in tokens:  # nothing was lost, so followers go on as if nothing had been
        assert [(each.kind, each.token.seqno) for each in view.changes(0, since=token)] == [("mutation", 3)]
    newest = writer.vbuckets[0].state.branch
    broken_backfill(writer)
    broken_backfill(writer)
    assert writer.vbuckets[0].state.branch > newest
    assert writer.vbuckets[0].rollback(2).boundary_seqno == 2
    for token in tokens:
        assert list(view.changes(0, since=token)) == []
    assert [each.kind for each in view.changes(0, since=view.token(0, newest, 3))] == [
        "rollback",
        "retraction",
        "restoration",
    ]


def test_resyncs_that_are_given_up_leave_no_rows_behind(writer: GroupWriter, view: View) -> None:
    publish(writer, 0, [(A, b"1", 1), (B, b"1", 2)])
    for _ in range(50):
        writer.vbuckets[0].begin_resync()
        stage(writer, 9, (C, b"staged", 1), flush=True)
    purge(writer, Window(time_ms=HOUR_MS))
    assert writer.vbuckets[0].state.staged_seqno == 1, "the last one goes on"
    newest = writer.vbuckets[0].state.staging_branch
    writer.vbuckets[0].rollback(2)
    assert writer.vbuckets[0].state.branch == newest + 1
    purge(writer, Window(time_ms=HOUR_MS))
    assert branch_count(writer) == 2
    with writer.environment.read() as txn:
        assert {key[:4] for key, _ in txn.cursor(b"v0") if len(key) == keys.ROW_KEY_SIZE} == {keys.PREFIX.pack(1)}
    assert seqnos(view) == [1, 2]


def test_a_lookup_costs_the_same_after_any_number_of_failovers() -> None:
    looked = []

    class Counted(tuple[chain.ChainLink, ...]):
        __slots__ = ()

        def __getitem__(self, index: Any) -> Any:
            looked.append(index)
            return super().__getitem__(index)

        def __iter__(self) -> Any:
            raise AssertionError("it looks at each link")

    links = Counted(chain.ChainLink(number, 10 * number, 10 * number + 10) for number in range(3_000, 0, -1))
    only_version = Mock(**{"value.return_value": keys.DUP.pack(1, 5, 0x57)})  # on the oldest branch
    assert chain.newest_version(only_version, A, links) == keys.DUP.pack(1, 5, 0x57)
    assert 0 < len(looked) < 20


class Looked(Transaction):
    """A transaction that counts what its cursors look at."""

    def __init__(self, txn: Transaction) -> None:
        super().__init__(txn.environment, txn.raw)
        self.entries = 0

    def cursor(self, tree: bytes) -> Any:
        looked, cursor = self, super().cursor(tree)

        class Cursor:
            def __getattr__(self, name: str) -> Any:
                looked.entries += 1
                return getattr(cursor, name)

            def iternext(self, **options: Any) -> Iterator[Any]:
                for entry in cursor.iternext(**options):
                    looked.entries += 1
                    yield entry

            def iterprev(self, **options: Any) -> Iterator[Any]:
                for entry in cursor.iterprev(**options):
                    looked.entries += 1
                    yield entry

        return Cursor()


def test_a_search_for_work_costs_the_same_with_any_amount_of_history(writer: GroupWriter) -> None:
    window = Window(time_ms=HOUR_MS, boundaries=100_000, size_bytes=1 << 30)
    looks = []
    for count in (10, 500):
        first = int(writer.vbuckets[0].state.published_seqno) + 1
        for seqno in range(first, first + count):
            publish(writer, 0, [(A, b"x" * 100, seqno)])
        purge(writer, window)
        purger = Purger(writer.environment, writer.vbids, window)
        with writer.environment.read() as txn:
            looked = Looked(txn)
            assert purger.next_work(looked, 0, writer.options.clock_ms()) is None
        looks.append(looked.entries)
    assert looks[1] <= looks[0] + 5, looks


def test_the_counters_of_boundaries_are_correct_after_every_kind_of_publish(writer: GroupWriter, view: View) -> None:
    snapshots(writer, [(A, b"1", 1), (B, b"1", 2)], [(A, b"2" * 50, 3)])
    broken_backfill(writer)
    stage(writer, 6, (A, b"4", 4), flush=True)
    stage(writer, 6, (A, b"6", 6))
    writer.vbuckets[0].publish(6, 4)
    writer.commit()
    assert view.boundaries(0)[0].ordinal == 3
    writer.vbuckets[0].rollback(3)
    publish(writer, 0, [(C, b"7" * 9, 7)])
    with writer.environment.read() as txn:
        sizes = {
            keys.ROW.unpack(key)[1]: len(frame)
            for key, frame in txn.cursor(keys.rows_db(0)).iternext()
            if len(key) == keys.ROW_KEY_SIZE
        }
    found = view.boundaries(0)
    assert [(b.seqno, b.ordinal) for b in found] == [(7, 3), (3, 2), (2, 1)]
    two = sizes[1] + sizes[2]
    assert [b.row_bytes for b in found] == [two + sizes[3] + sizes[7], two + sizes[3], two]


def test_a_flushed_and_resynced_collection_is_purged_in_bounded_steps_of_linear_total_work(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.history.purge, "STEP_ROWS", 40)
    count = 400
    names = [b"order-%05d" % number for number in range(count)]
    system_event(writer, 1, DEFAULT, Collection(9, 8, "orders", Seqno(1)), scopes=SCOPES)
    for seqno, name in enumerate(names, 2):
        put(writer, name, seqno, b"old", cid=9)
    commit(writer, count + 1)
    system_event(writer, count + 2, DEFAULT, Collection(9, 8, "orders", Seqno(count + 2)), scopes=SCOPES)
    for seqno, name in enumerate(reversed(names), count + 3):
        put(writer, name, seqno, b"new", cid=9)
    commit(writer, 2 * count + 2)
    writer.background.purger = purger = Purger(writer.environment, writer.vbids, Window(boundaries=1))
    looks: list[int] = []

    def step(txn: Transaction, planned: Step) -> int:
        looked = Looked(txn)
        removed = purger.step(looked, planned)
        looks.append(looked.entries)
        return removed

    removed = 0
    while (planned := purger.plan(writer.options.clock_ms())) is not None:
        went = writer.owner.write(partial(step, planned=planned))
        purger.settle(went, 1)
        removed += went
        assert len(looks) < 1_000
    assert removed == count
    assert max(looks) < 600
    assert sum(looks) < 20 * count
    assert {each.value for each in view.scan(0, collection=9)} == {b"new"}
    assert len(list(view.scan(0, collection=9))) == count


def test_a_resynced_copy_begins_its_own_purge_record(writer: GroupWriter, view: View) -> None:
    """With that of the old copy, tombstones would stay for ever, and new tokens would be refused for what is there."""
    snapshots(writer, [(A, b"1", 1), (B, b"1", 2)], [(A, None, 8)], [(B, b"2", 9)])
    purge(writer, Window(boundaries=1))
    assert view.state(0).local_purge_seqno == 8
    writer.vbuckets[0].begin_resync()
    snapshots(writer, [(A, b"1", 3), (B, None, 4)], [(C, b"1", 5)])
    assert view.state(0).local_purge_seqno == 0
    token = next(change.token for change in view.changes(0) if change.token.seqno == 4)
    assert [change.token.seqno for change in view.changes(0, since=token)] == [5]
    purge(writer, Window(boundaries=1))
    assert seqnos(view) == [3, 5]
    assert view.state(0).local_purge_seqno == 4


def test_batches_of_a_removal_do_not_overlap_and_keep_their_size() -> None:
    rng = Random(3)
    slices = [sorted(b"%06d" % rng.randrange(10**6) for _ in range(1000)) for _ in range(20)]
    marks = marks_of(slices, 500)
    batches: list[list[list[bytes]]] = [[] for _ in range(len(marks) + 1)]
    for each in slices:
        deal(each, marks, batches)
    joined = itertools.chain.from_iterable
    flat = [sorted(joined(batch)) for batch in batches]
    assert list(joined(flat)) == sorted(joined(slices))
    assert max(map(len, flat)) <= 1500
    assert marks_of([[], []], 5) == []
