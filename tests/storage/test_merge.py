"""Branches of old failovers merge: reads then cost as much as before the failover, and the records go."""

from __future__ import annotations

from typing import Any

import pytest

import storage.history.merge
from storage.admin.check import check
from storage.errors import ViewInvalidated
from storage.format import keys, records
from storage.history import branches, chain, purge
from storage.history.purge import Window
from storage.model import Collection, Seqno
from storage.read import states
from storage.read import stream_reads as stream
from storage.read.view import Token, View
from storage.write.writer import GroupWriter, VbucketWriter
from tests.storage.model import DEFAULT, SCOPES, events, keys_of
from tests.storage.rig import HOUR_MS, Clock, publish, purge_steps, put, scan_page, system_event
from tests.storage.rig import purge as purge_all

NAMES = keys_of(0, 1_000)
WINDOW = Window(boundaries=1)


def fail_over(writer: GroupWriter, number: int, *, lost: bool = True) -> None:
    """Progress of one document, progress that is lost, and the rollback that loses it."""
    seqno = writer.vbuckets[0].state.published_seqno
    publish(writer, 0, [(NAMES[number], b"%d" % number, seqno + 1)])
    if lost:
        publish(writer, 0, [(NAMES[number], b"lost", seqno + 2), (NAMES[-1], b"lost", seqno + 3)])
        assert writer.vbuckets[0].rollback(seqno + 1).boundary_seqno == seqno + 1
    else:
        publish(writer, 0, [(NAMES[0], b"again", seqno + 2)])
        assert writer.vbuckets[0].rollback(seqno + 2).boundary_seqno == seqno + 2


def stored(writer: GroupWriter) -> dict[str, int]:
    """Rows of the trees that speak of branches, and of the row tree."""
    names = (keys.DB_BRANCH, keys.DB_ROLLBACK, keys.DB_SPAN, b"v0", b"k0")
    with writer.environment.read() as txn:
        return {name.decode(): txn.stat(name)["entries"] for name in names}


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of branch rows that were read."""
    counted = [0]
    original = records.decode_branch

    def counting(data: bytes | None) -> records.BranchRow:
        counted[0] += 1
        return original(data)

    monkeypatch.setattr(records, "decode_branch", counting)
    return counted


def test_reads_cost_the_same_after_many_failovers(writer: GroupWriter, path: str, visits: list[int]) -> None:
    def cost() -> list[int]:
        found = []
        with View(path) as view:
            for read in (
                lambda: view.get(NAMES[0]),
                lambda: list(view.scan(0)),
                lambda: list(view.changes(0)),
                lambda: writer.histories(),
            ):
                view.groups.readers.clear()
                visits[0] = 0
                read()
                found.append(visits[0])
            found.append(len(stream.served_state(view.reader(0)).links))
        return found

    costs = []
    sizes = []
    for number in range(70):
        fail_over(writer, number)
        purge_all(writer, WINDOW)
        if number in (40, 69):
            costs.append(cost())
            sizes.append(stored(writer))
    assert costs[0] == costs[1]
    chains = 2  # of the served branch, on which nothing was published, and of its parent
    assert max(costs[1][:3]) <= chains * (storage.history.merge.LINKS_MAX + 2)
    assert sizes[1]["branch"] == sizes[0]["branch"]
    assert sizes[1]["rollback"] == sizes[0]["rollback"] == storage.history.merge.ROLLBACKS_KEPT
    assert sizes[1]["span"] == 0
    assert sizes[1]["k0"] - sizes[0]["k0"] == sizes[1]["v0"] - sizes[0]["v0"] == 69 - 40
    with View(path) as view:
        assert {each.key: each.value for each in view.scan(0)} == {NAMES[n]: b"%d" % n for n in range(70)}
        assert all(view.get(NAMES[n]) is not None for n in range(70))
        assert [each.document.key for each in view.changes(0) if each.document] == NAMES[:70]
        assert len(view.rollbacks(0)) == storage.history.merge.ROLLBACKS_KEPT


def shown(view: View) -> dict[bytes, bytes]:
    return {each.key: each.value for each in view.scan(0)}


def test_every_position_ever_returned_is_followed_correctly_or_refused(
    writer: GroupWriter, view: View, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All branches have one writer's history id, yet the store distinguishes lost rows and moved ones."""
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", 1)
    seen: list[tuple[Token, dict[bytes, bytes]]] = []
    original = VbucketWriter.rollback

    def remember(*_: Any) -> None:
        seen.append((view.token(0), shown(view)))

    def noting(vbucket: VbucketWriter, to_seqno: int) -> Any:
        remember()
        return original(vbucket, to_seqno)

    monkeypatch.setattr(VbucketWriter, "rollback", noting)
    outcomes: dict[str, int] = {"followed": 0, "refused": 0}
    for number in range(12):
        fail_over(writer, number)
        remember()
        clock.now += HOUR_MS
        purge_all(writer, Window(boundaries=2, time_ms=3 * HOUR_MS))
        for token, contents in seen:
            copy = dict(contents)
            try:
                changes = list(view.changes(0, since=token))
            except ViewInvalidated as error:
                outcomes["refused"] += bool(error.hint)
                continue
            outcomes["followed"] += 1
            for change in changes:
                if change.document is not None and change.kind == "retraction":
                    copy.pop(change.document.key, None)
                elif change.document is not None:
                    copy[change.document.key] = change.document.value
            assert copy == shown(view), token
    assert outcomes["followed"] > 20
    assert outcomes["refused"] > 20
    assert len(stream.served_state(view.reader(0)).links) < 6


def test_a_merge_can_be_interrupted_between_any_two_steps(
    writer: GroupWriter, path: str, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader meanwhile sees all of it, or hears that it must begin again."""
    fail_over(writer, 0)
    monkeypatch.setattr(storage.history.purge, "STEP_ROWS", 2)
    for number in range(1, 4):
        seqno = writer.vbuckets[0].state.published_seqno
        publish(writer, 0, [(NAMES[100 * number + each], b"x", seqno + 1 + each) for each in range(7)])
        writer.vbuckets[0].rollback(seqno + 7)
    publish(writer, 0, [(NAMES[0], b"newest", 100)])
    purge_all(writer, WINDOW)
    expected = shown(view)
    pins = [view.pin(0)]
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", 0)
    steps = 0
    writer.background.purger = purge.Purger(writer.environment, writer.vbids, WINDOW)
    while (vbid := writer.background.purger.plan(writer.options.clock_ms())) is not None:
        half_read = view.scan(0)
        started = [next(half_read)]
        writer.background.purge(vbid, writer.options.clock_ms())
        steps += 1
        assert shown(view) == expected
        assert all(view.get(key) is not None for key in expected)
        assert [each.document.seqno for each in view.changes(0) if each.document] == sorted(
            each.seqno for each in view.scan(0)
        )
        assert check(path).problems == []
        assert {each.key: each.value for each in started + list(half_read)} == expected
        pins.append(view.pin(0))
        for pin in pins:
            assert {each.key: each.value for each in scan_page(view, pin)[0]} == expected
        writer.background.purger = purge.Purger(writer.environment, writer.vbids, WINDOW)  # another process goes on
    assert steps > 9
    assert [(link.branch, link.base_seqno) for link in stream.served_state(view.reader(0)).links[1:]] == [(1, 0)]


def test_a_scan_across_moved_rows_begins_again(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        fail_over(writer, number)
    publish(writer, 0, [(NAMES[0], b"newest", 100)])
    purge_all(writer, WINDOW)
    monkeypatch.setattr("storage.read.scan.CHUNK_ROWS", 1)
    half_read = view.scan(0)
    pinned = stream.served_state(view.reader(0))
    next(half_read)
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", 0)
    assert purge_all(writer, WINDOW)
    with pytest.raises(ViewInvalidated, match="merged"):
        list(half_read)
    with pytest.raises(ViewInvalidated, match="merged"):
        stream.rows(view.reader(0), pinned, 0, bytes_max=1000)


def test_manifests_move_with_their_rows(
    writer: GroupWriter, path: str, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests of the lost history, at the same seqnos, do not return with them."""
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", 0)
    publish(writer, 0, [(NAMES[0], b"1", 1)])
    system_event(writer, 2, DEFAULT, Collection(9, 8, "lost", Seqno(2)), scopes=SCOPES)
    put(writer, NAMES[1], 3, cid=9)
    put(writer, NAMES[5], 5, publish=True)
    assert sorted(view.manifest(0).collections) == [0, 9]
    writer.vbuckets[0].rollback(1)
    system_event(writer, 2, DEFAULT, Collection(8, 8, "orders", Seqno(2)), scopes=SCOPES)
    put(writer, NAMES[1], 3, cid=8)
    put(writer, NAMES[5], 6, publish=True)
    put(writer, NAMES[4], 7, publish=True)
    assert sorted(view.manifest(0).collections) == [0, 8]
    writer.vbuckets[0].rollback(7)
    put(writer, NAMES[6], 8, publish=True)
    purge_all(writer, WINDOW)
    assert [link.branch for link in stream.served_state(view.reader(0)).links] == [3, 1]
    for each in (view, View(path)):
        assert sorted(each.manifest(0).collections) == [0, 8]
        assert each.get(NAMES[1], "shop.orders") is not None
    assert check(path).problems == []


def test_branches_of_a_replaced_copy_are_removed_with_its_last_row(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    for number in range(5):
        fail_over(writer, number)
    held = view.token(0)
    clock.now += HOUR_MS
    writer.background.lease("job", {0: (int(held.branch), int(held.seqno))}, clock.now + 10 * HOUR_MS)
    writer.vbuckets[0].begin_resync()
    publish(writer, 0, [(NAMES[0], b"new", 1)])
    for expected in (7, 1):
        purge_all(writer, Window(time_ms=HOUR_MS))
        assert stored(writer)["branch"] - 1 == expected, "and one of the other vbucket"
        if expected == 7:
            assert shown(view) == {NAMES[0]: b"new"}
        writer.background.leases.release("job")
        clock.now += 2 * HOUR_MS
    with pytest.raises(ViewInvalidated, match="no branch"):
        list(view.changes(0, since=held))
    writer.vbuckets[0].begin_resync()
    publish(writer, 0, [(NAMES[0], b"newer", 1)])
    clock.now += 2 * HOUR_MS
    purge_all(writer, Window(time_ms=HOUR_MS))
    assert (len(view.history(0).resyncs_ms), view.history(0).resync_count) == (1, 2)
    publish(writer, 0, [(NAMES[1], b"new", 2)])
    assert writer.vbuckets[0].state.branch == 8


def test_branches_removed_in_several_steps_never_lack_a_parent(
    writer: GroupWriter, clock: Clock, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    for number in range(5):
        fail_over(writer, number)
    writer.vbuckets[0].begin_resync()
    publish(writer, 0, [(NAMES[0], b"new", 1)])
    clock.now += 2 * HOUR_MS
    monkeypatch.setattr(purge.AdaptiveStepSize, "rows", 2)
    counted = []
    for _ in purge_steps(writer, Window(time_ms=HOUR_MS)):
        assert check(path).problems == []
        counted.append(stored(writer)["branch"])
    assert {8 - 2, 8 - 4, 8 - 6} <= set(counted), "two at a time"


def test_lost_rows_prevent_the_merge_of_a_link_until_purged(
    writer: GroupWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent has other rows at the same seqnos."""
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", 0)
    for number in range(4):
        fail_over(writer, number)
    with writer.environment.read() as txn:
        links = chain.load(txn, 0, writer.vbuckets[0].state.branch, writer.vbuckets[0].state.published_seqno)
        known = branches.all_branches(txn, 0)
        assert storage.history.merge.next_pair(txn, 0, links, 100, known) is None
        monkeypatch.setattr(chain, "has_rows", lambda *_: False)
        assert storage.history.merge.next_pair(txn, 0, links, 100, known) is not None


def test_rows_are_not_moved_below_the_base_of_an_empty_branch(
    writer: GroupWriter, view: View, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers in the order of seqnos look on a branch above its base alone: they missed what was moved there."""
    for seqno in range(1, 11):
        publish(writer, 0, [(NAMES[seqno], b"x", seqno)])
    writer.vbuckets[0].rollback(8)  # nothing comes on this branch
    writer.vbuckets[0].rollback(2)
    for seqno in (3, 4):
        publish(writer, 0, [(NAMES[seqno], b"y", seqno)])
    writer.vbuckets[0].rollback(3)
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", 1)
    for newest in (5, 12):  # the second floor lies above all that was lost
        publish(writer, 0, [(NAMES[0], b"newest", newest)])
        for _ in purge_steps(writer, WINDOW):
            assert check(path).problems == []
            assert {each.document.key for each in view.changes(0) if each.document} == set(shown(view))
            assert {each.key for each in events(view)} == set(shown(view)) == {*NAMES[:4]}
    assert [link.branch for link in stream.served_state(view.reader(0)).links] == [4, 1]


def test_the_boundary_at_the_floor_stays_if_a_rollback_went_back_to_it(
    writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        fail_over(writer, number, lost=False)
    monkeypatch.setattr("storage.history.merge.LINKS_MAX", 0)
    purge_all(writer, WINDOW)
    floor = writer.vbuckets[0].state.history_floor_seqno
    assert floor == stream.served_state(view.reader(0)).links[0].cut
    found = states.following(view.reader(0), 0)
    assert found is not None
    assert found.seqno == floor


def test_a_branch_of_a_replaced_copy_stays_until_its_last_row_is_removed() -> None:
    rows = {
        1: records.BranchRow(None, 0, 0, 1, 9),
        2: records.BranchRow(1, 5, 0, 2, 9),
        3: records.BranchRow(None, 0, 0, 3, 9),
    }
    assert purge.forgettable(rows, 3, 3, {1}) == []
    assert purge.forgettable(rows, 3, 3, {2}) == []
    assert purge.forgettable(rows, 3, 3, set()) == [2, 1]
