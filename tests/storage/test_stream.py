"""Rows for those who follow a vbucket: pieces, newest versions, what is gone, and what is new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from storage.env.transaction import Transaction
from storage.errors import Closed, StorageError, ViewInvalidated
from storage.history import branches
from storage.history.branches import PurgeRow
from storage.history.purge import Window
from storage.model import SEQNO_MAX, Branch, Collection, FailoverLog, Seqno
from storage.read import changes
from storage.read import stream_reads as stream
from storage.read.stream_reads import Commits
from storage.read.view import View, open_view
from tests.serve.kv_rig import DEFAULT, Store


@pytest.fixture
def clock() -> list[int]:
    return [1_000_000]


@pytest.fixture
def store(tmp_path: Path, clock: list[int]) -> Iterator[Store]:
    made = Store(tmp_path, vbuckets=1, clock_ms=lambda: clock[0])
    made.log(0, (7, 0))
    yield made
    made.close()


@pytest.fixture
def view(store: Store) -> Iterator[View]:
    with open_view(store.path) as opened:
        yield opened


def seqnos(rows: list[tuple[bytes, bytes]]) -> list[int]:
    return [int.from_bytes(key[4:]) for key, _ in rows]


def all_rows(view: View, *, rows_max: int, after: int = 0, **options: object) -> list[int]:
    """Every piece up to what is served now."""
    pinned = stream.served_state(view.reader(0))
    found: list[int] = []
    while after < pinned.pub.seqno:
        rows, after, _ = stream.rows(view.reader(0), pinned, after, bytes_max=1 << 20, rows_max=rows_max, **options)  # type: ignore[arg-type]
        found += seqnos(rows)
    return found


@pytest.mark.parametrize("rows_max", [1, 2, 3, 100])
def test_a_key_comes_once_in_its_newest_version_in_any_pieces(store: Store, view: View, rows_max: int) -> None:
    for seqno, key in enumerate((b"a", b"b", b"a", b"c", b"b", b"a", b"d"), start=1):
        store.put(key, b"v", seqno)
    store.delete(b"c", 8)
    store.put(b"d", b"staged", 9, publish=False)
    assert all_rows(view, rows_max=rows_max) == [5, 6, 7, 8]
    assert all_rows(view, rows_max=rows_max, after=5) == [6, 7, 8]


@pytest.mark.parametrize("rows_max", [1, 100])
def test_versions_of_a_lost_history_replace_nothing(store: Store, view: View, rows_max: int) -> None:
    for seqno, key in enumerate((b"a", b"b", b"c"), start=1):
        store.put(key, b"v", seqno)
    store.put(b"a", b"lost", 4)
    store.put(b"b", b"lost", 5)
    store.writer.vbuckets[0].rollback(3)
    assert all_rows(view, rows_max=rows_max) == [1, 2, 3]
    store.put(b"c", b"new", 4)
    assert all_rows(view, rows_max=rows_max) == [1, 2, 4]


def test_a_piece_fits_into_its_bytes(store: Store, view: View) -> None:
    for seqno in range(1, 11):
        store.put(b"k%d" % seqno, b"x" * 1000, seqno)
    pinned = stream.served_state(view.reader(0))
    rows, position, _ = stream.rows(view.reader(0), pinned, 0, bytes_max=2500)
    assert (seqnos(rows), position) == ([1, 2], 2)
    rows, position, _ = stream.rows(view.reader(0), pinned, 9, bytes_max=1)
    assert (seqnos(rows), position) == ([10], 10)


def test_rows_come_only_from_live_selected_collections(store: Store, view: View) -> None:
    store.put(b"a", b"v", 1)
    store.put(b"c", b"flushed", 2, cid=9)
    store.put(b"x", b"dropped", 3, cid=300)
    store.collections(4, {8: "shop"}, DEFAULT, Collection(9, 8, "carts", Seqno(4)))
    store.put(b"c", b"v", 5, cid=9)
    assert all_rows(view, rows_max=2) == [1, 4, 5]
    assert all_rows(view, rows_max=2, begins={9: 4}) == [4, 5]
    assert all_rows(view, rows_max=2, begins={300: 0}) == [3, 4]


def test_the_last_document_is_found_backwards(store: Store, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_ROWS", 2)
    store.put(b"a", b"v", 1)
    for seqno in range(2, 8):
        store.put(b"c%d" % seqno, b"v", seqno, cid=9)
    pinned = stream.served_state(view.reader(0))
    assert stream.last_document_seqno(view.reader(0), pinned, 0, {0: 0}) == 1
    assert stream.last_document_seqno(view.reader(0), pinned, 0, {0: 0, 9: 0}) == 7
    assert stream.last_document_seqno(view.reader(0), pinned, 1, {0: 0}) == 1
    store.writer.vbuckets[0].rollback(4)
    with pytest.raises(ViewInvalidated):
        stream.last_document_seqno(view.reader(0), pinned, 0, {0: 0})
    assert stream.last_document_seqno(view.reader(0), stream.served_state(view.reader(0)), 0, {0: 0}) == 1


def test_a_rollback_below_the_read_position_is_reported_and_one_above_is_not(store: Store, view: View) -> None:
    for seqno in (1, 2, 3):
        store.put(b"k%d" % seqno, b"v", seqno)
    high = stream.served_state(view.reader(0))
    store.writer.vbuckets[0].rollback(2)
    low = stream.served_state(view.reader(0))
    with pytest.raises(ViewInvalidated) as caught:
        stream.rows(view.reader(0), high, 0, bytes_max=1 << 20)
    assert caught.value.rolled_back
    assert low.has(high.pub.branch, 2)
    assert not low.has(high.pub.branch, 3)
    store.put(b"other", b"v", 3)
    assert seqnos(stream.rows(view.reader(0), low, 0, bytes_max=1 << 20)[0]) == [1, 2]


def test_a_resync_is_incomplete_and_shares_no_history(store: Store, view: View) -> None:
    store.put(b"a", b"v", 5)
    before = stream.served_state(view.reader(0))
    assert before.whole
    store.writer.vbuckets[0].begin_resync()
    assert not stream.served_state(view.reader(0)).whole
    assert seqnos(stream.rows(view.reader(0), before, 0, bytes_max=1 << 20)[0]) == [5], "the old copy is still there"
    store.log(0, (9, 0))
    store.put(b"b", b"v", 9)
    after = stream.served_state(view.reader(0))
    assert after.whole
    assert not after.has(before.pub.branch, 5)
    with pytest.raises(ViewInvalidated):
        stream.rows(view.reader(0), before, 0, bytes_max=1 << 20)


def test_a_fresh_vbucket_is_complete_once_its_source_is_known_to_be_empty(tmp_path: Path) -> None:
    store = Store(tmp_path, vbuckets=1)
    with open_view(store.path) as view:
        assert not stream.served_state(view.reader(0)).whole
        store.log(0, (7, 0))
        assert not stream.served_state(view.reader(0)).whole, "its stream was accepted: all may be yet to come"
        store.writer.vbuckets[0].publish(0, 0)
        store.writer.commit()
        assert stream.served_state(view.reader(0)).whole
        store.put(b"a", b"v", 1, publish=False)
        assert not stream.served_state(view.reader(0)).whole
        with pytest.raises(StorageError):
            stream.served_state(view.reader(1))
    store.close()


@pytest.mark.parametrize(("missing", "first"), [(SEQNO_MAX, 50), (20, 20), (0, 0)])
def test_the_purge_seqno_for_followers_does_not_move_with_the_floor(tmp_path: Path, missing: int, first: int) -> None:
    now_ms = 1_000_000
    store = Store(tmp_path, vbuckets=1, window=Window(time_ms=10), clock_ms=lambda: now_ms)
    log = FailoverLog.of([(7, 0)])
    store.writer.vbuckets[0].save(failover_log=log, source_purge_seqno=Seqno(missing), missing_seqno=missing)
    store.put(b"a", b"v", 50)
    with open_view(store.path) as view:
        assert stream.served_state(view.reader(0)).purge_seqno == first
        for seqno, purge_seqno in ((60, 5), (70, 65)):
            store.writer.vbuckets[0].save(failover_log=log, source_purge_seqno=Seqno(purge_seqno))
            store.put(b"b", b"v", seqno)
            now_ms += 1000
            while store.writer.step():
                pass
            served = stream.served_state(view.reader(0))
            assert (served.pub.floor_seqno, served.purge_seqno) == (seqno, first)
        store.delete(b"b", 80)
        now_ms += 1000
        while store.writer.step():
            pass
        assert stream.served_state(view.reader(0)).purge_seqno == 80, "the newest tombstone that was purged here"
    store.close()


def test_a_resync_that_is_given_up_keeps_the_missing_seqno_of_the_served_copy(store: Store, view: View) -> None:
    store.writer.vbuckets[0].save(failover_log=store.writer.vbuckets[0].state.failover_log, missing_seqno=30)
    store.put(b"a", b"v", 50)
    store.writer.vbuckets[0].begin_resync()
    store.writer.vbuckets[0].rollback(50)
    assert 30 <= stream.served_state(view.reader(0)).purge_seqno <= 50


def test_a_missing_tombstone_is_reported(store: Store, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(b"a", b"v", 1)
    store.put(b"b", b"v", 2)
    monkeypatch.setattr("storage.history.branches.purge_row", lambda *_: PurgeRow(2, 2))
    pinned = stream.served_state(view.reader(0))
    assert pinned.purge_seqno == 2
    with pytest.raises(ViewInvalidated) as caught:
        stream.rows(view.reader(0), pinned, 1, bytes_max=1, tombstones_from=1)
    assert not caught.value.rolled_back
    stream.rows(view.reader(0), pinned, 1, bytes_max=1, tombstones_from=2)


def test_changes_are_reported_once(store: Store, view: View) -> None:
    commits = Commits()
    assert commits.news(view.reader(0)) == [0]
    assert commits.news(view.reader(0)) == []
    store.log(0, (8, 0), (7, 0))
    assert commits.news(view.reader(0)) == [], "nothing that is served changed"
    store.put(b"a", b"v", 1)
    assert commits.news(view.reader(0)) == [0]


def test_changes_of_a_closed_file_raise_the_error_of_a_read(tmp_path: Path) -> None:
    """LMDB's own error passed the handlers of StorageError."""
    store = Store(tmp_path, vbuckets=1)
    store.close()
    with open_view(store.path) as view:
        reader = view.reader(0)
    with pytest.raises(Closed):
        Commits().news(reader)


def test_a_publish_is_reported_even_to_a_reader_that_looks_during_its_write(tmp_path: Path) -> None:
    """LMDB counts a commit before readers see it; with `full` it syncs the meta page in between."""
    store = Store(tmp_path, vbuckets=1, sync="full")
    with open_view(store.path) as view:
        commits = Commits()
        commits.news(view.reader(0))
        for seqno in range(1, 101):
            publish = Thread(target=store.put, args=(b"a", b"v", seqno))
            publish.start()
            found = []
            while publish.is_alive():
                found += commits.news(view.reader(0))
            found += commits.news(view.reader(0))
            assert found == [0], seqno
    store.close()


def test_the_next_snapshots_of_a_follower_end_at_the_next_boundaries(store: Store, view: View) -> None:
    def ends(after: int, least: int = 0, ends_max: int = 3) -> list[tuple[int, int]]:
        now, found = stream.next_ends(view.reader(0), after, least, ends_max)
        assert now == stream.served_state(view.reader(0))
        return [(each.pub.seqno, each.links[0].cut) for each in found]

    assert ends(0) == []
    for seqno in (1, 4, 6, 9, stream.PIECE_ROWS + 4, stream.PIECE_ROWS + 9):
        store.put(b"k%d" % seqno, b"v", seqno)
    assert ends(1) == [(4, 4), (6, 6), (9, 9)]
    assert ends(4, least=8, ends_max=1) == [(9, 9)]
    at = stream.PIECE_ROWS + 4
    assert ends(4) == [(6, 6), (9, 9), (at, at)]
    assert ends(4, ends_max=9) == [(6, 6), (9, 9), (at, at)], "looked no further"
    assert ends(at) == [(at + 5, at + 5)]
    assert ends(at + 5) == []


def test_a_follower_of_a_lost_history_shares_the_boundary_of_the_rollback(
    store: Store, view: View, clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seqno in (1, 4, 9):  # 4 lies in the newer half of the kept history, where no first snapshot ends
        store.put(b"k%d" % seqno, b"v", seqno)
        clock[0] += 10_000 // seqno
    assert [
        stream.shared_seqno(view.reader(0), stream.served_state(view.reader(0)), 7, seqno) for seqno in (3, 4, 8, 9)
    ] == [1, 4, 4, 9]
    store.writer.vbuckets[0].rollback(4)
    for seqno in (6, 8):
        store.put(b"k%d" % seqno, b"v", seqno)
    pinned = stream.served_state(view.reader(0))
    assert [stream.shared_seqno(view.reader(0), pinned, 7, seqno) for seqno in (0, 3, 4, 7, 8)] == [0, 1, 4, 4, 4]
    raised = replace(pinned, pub=pinned.pub._replace(floor_seqno=Seqno(4)))
    monkeypatch.setattr(changes, "rollbacks", lambda _: [])
    assert stream.shared_seqno(view.reader(0), raised, 7, 3) == 0
    monkeypatch.undo()
    found = [stream.shared_seqno(view.reader(0), raised, 7, seqno) for seqno in (3, 4, 7, 8)]
    assert found == [0, 4, 4, 4], "what is not kept is no boundary any more"


@pytest.fixture
def windowed(tmp_path: Path, clock: list[int]) -> Iterator[Store]:
    made = Store(tmp_path, vbuckets=1, clock_ms=lambda: clock[0], window=Window(time_ms=60_000))
    made.log(0, (7, 0))
    yield made
    made.close()


def put_all(store: Store, *seqnos: int) -> None:
    for seqno in seqnos:
        store.put(b"k", b"v", seqno)


def fail_over(store: Store, to_seqno: int, *log: tuple[int, int]) -> None:
    store.writer.vbuckets[0].rollback(to_seqno)
    store.log(0, *log)


def shared_seqno(store: Store, vbuuid: int, seqno: int) -> int:
    with open_view(store.path) as view:
        return stream.shared_seqno(view.reader(0), stream.served_state(view.reader(0)), vbuuid, seqno)


def test_a_follower_of_a_copy_that_a_resync_replaced_begins_again(windowed: Store) -> None:
    """The follower got (10, 30] as one snapshot, on a branch that the replaced copy had left before the resync."""
    put_all(windowed, 10, 30)
    windowed.writer.vbuckets[0].rollback(10)
    windowed.writer.vbuckets[0].begin_resync()
    windowed.log(0, (7, 0))
    put_all(windowed, 15, 40)
    fail_over(windowed, 15, (8, 20), (7, 0))
    assert shared_seqno(windowed, 7, 15) == 0


def test_a_follower_of_a_replaced_copy_that_is_forgotten_begins_again(windowed: Store, clock: list[int]) -> None:
    put_all(windowed, 10, 30)
    windowed.writer.vbuckets[0].begin_resync()
    windowed.log(0, (7, 0))
    put_all(windowed, 5)
    for _ in range(20):
        clock[0] += 120_000
        windowed.writer.step()
    with windowed.writer.environment.read() as txn:
        assert len(branches.all_branches(txn, 0)) == 1
    put_all(windowed, 15, 40)
    fail_over(windowed, 15, (8, 20), (7, 0))
    assert shared_seqno(windowed, 7, 15) == 0


def test_a_follower_across_a_rollback_on_command_begins_again(windowed: Store) -> None:
    """The follower got (71, 79] and resumed there after the mirror had published 79 again: 76 lies inside."""
    put_all(windowed, 55, 71, 79)
    windowed.writer.vbuckets[0].rollback(55)
    windowed.log(0, (9, 82), (7, 0))
    put_all(windowed, 67, 76, 86)
    fail_over(windowed, 76, (11, 84), (9, 82), (7, 0))
    assert shared_seqno(windowed, 9, 84) == 0


@pytest.mark.parametrize(("first", "second"), [(10, 20), (20, 10)])
def test_a_follower_goes_back_below_every_rollback_from_above(windowed: Store, first: int, second: int) -> None:
    put_all(windowed, 10, 20, 40)
    windowed.writer.vbuckets[0].rollback(first)
    put_all(windowed, *range(first + 10, 21, 10), 45)
    fail_over(windowed, second, (8, 30), (7, 0))
    assert shared_seqno(windowed, 7, 30) == 10
    assert shared_seqno(windowed, 7, 40) == 10


def test_a_rollback_that_ended_at_or_below_the_boundary_concerns_no_follower(windowed: Store) -> None:
    put_all(windowed, 10, 20)
    fail_over(windowed, 10, (8, 12), (7, 0))
    put_all(windowed, 20, 30)
    fail_over(windowed, 20, (9, 25), (8, 12), (7, 0))
    assert shared_seqno(windowed, 8, 25) == 20


def test_a_boundary_at_the_end_of_the_shared_history_is_of_that_history(windowed: Store) -> None:
    """A follower that another producer served may hold a snapshot of the newer history around it."""
    put_all(windowed, 10, 20)
    windowed.log(0, (9, 20), (8, 20), (7, 0))
    assert [shared_seqno(windowed, vbuuid, 20) for vbuuid in (7, 8)] == [20, 10]
    put_all(windowed, 30)
    fail_over(windowed, 20, (11, 20), (9, 20), (8, 20), (7, 0))
    assert shared_seqno(windowed, 9, 20) == 20, "this mirror served the follower"


def test_lost_rows_that_are_being_purged_may_have_been_settled(
    windowed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(windowed, 10, 20, 30)
    fail_over(windowed, 10, (8, 15), (7, 0))
    assert shared_seqno(windowed, 7, 15) == 10

    def begin(txn: Transaction) -> None:
        branches.put_branch(txn, 0, 1, branches.get_branch(txn, 0, 1)._replace(kept_seqno=10))

    known = changes.recorded_rollbacks
    monkeypatch.setattr(changes, "recorded_rollbacks", lambda *_: [replace(known(*_)[0], from_branch=Branch(99))])
    assert shared_seqno(windowed, 7, 15) == 0, "its branch is gone"
    monkeypatch.undo()
    windowed.writer.owner.write(begin)
    assert shared_seqno(windowed, 7, 15) == 0


def test_a_first_snapshot_to_a_boundary_settled_on_a_lost_branch_is_not_cut(windowed: Store, clock: list[int]) -> None:
    """A follower was sent [0, 48] as one while 90 was the newest."""
    put_all(windowed, 37, 48)
    clock[0] += 10_000
    put_all(windowed, 90)
    windowed.writer.vbuckets[0].rollback(48)
    fail_over(windowed, 37, (8, 40), (7, 0))
    assert shared_seqno(windowed, 7, 37) == 0


@pytest.mark.parametrize("interval_ms", [1, 2_000, 10_000, 60_000])
def test_a_follower_of_a_quiet_vbucket_keeps_the_history_that_a_failover_leaves(
    windowed: Store, clock: list[int], interval_ms: int
) -> None:
    """With one change in 10 s, followers began from 0 after each failover, because lost boundaries were 10 s apart."""
    seqnos = list(range(10, 200, 10))
    for seqno in seqnos:
        put_all(windowed, seqno)
        clock[0] += interval_ms
    for kept in (seqnos[-2], seqnos[-4], seqnos[-6]):
        fail_over(windowed, kept, (kept, kept + 5), (7, 0))
        assert shared_seqno(windowed, 7, kept + 5) == kept


def test_a_first_snapshot_ends_in_the_middle_of_the_kept_history(windowed: Store, clock: list[int]) -> None:
    for seqno in range(10, 210, 10):
        put_all(windowed, seqno)
        clock[0] += 3_000
    with open_view(windowed.path) as view:
        _, ends = stream.next_ends(view.reader(0), 0, 0, 100)
    assert [each.pub.seqno for each in ends] == [100]
