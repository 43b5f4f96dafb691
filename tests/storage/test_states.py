"""Positions: what is published, the floor, resyncs, and the boundaries that readers of changes stop at."""

from __future__ import annotations

from dataclasses import replace

from storage.history.purge import Window
from storage.model import Branch
from storage.read import states
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter
from tests.storage.model import A, B, keys_of, log
from tests.storage.rig import Clock, open_writer, publish, purge, put, stage


def test_the_published_seqnos_and_the_floor_are_shown(writer: GroupWriter, view: View, clock: Clock) -> None:
    assert view.history(0).floor_ms is None
    clock.now = 5_000
    put(writer, A, 1, publish=True)
    first = view.published()
    assert (
        [each.pub.seqno for each in first.values()] == [each.published_seqno for each in view.states()] == [1, 0, 0, 0]
    )
    past = view.history(0)
    assert (past.floor_seqno, past.floor_ms, past.resyncs_ms) == (1, view.boundaries(0)[-1].time_ms, ())
    writer.vbuckets[0].begin_resync()
    writer.commit()
    assert [each.pub.is_stale for _, each in sorted(view.published().items())] == [True, False, False, False]
    clock.now = 6_000
    put(writer, A, 7, publish=True)
    assert view.published()[0].pub.seqno == 7
    assert view.published()[0].pub.branch > first[0].pub.branch
    assert len(view.history(0).resyncs_ms) == 1
    assert view.history(0).resyncs_ms[0] >= 6_000


def test_a_view_with_cached_positions_agrees_with_a_new_one(path: str, writer: GroupWriter, view: View) -> None:
    """After a publish, a rollback, and a resync."""

    def compare() -> None:
        with open_view(path) as fresh:
            assert view.published() == fresh.published()

    compare()
    for seqno in (1, 2, 3):
        put(writer, A, seqno, publish=True)
        compare()
    writer.vbuckets[0].rollback(2)
    writer.commit()
    compare()
    publish(writer, 2, [(keys_of(2, 1)[0], b"x", 5)])
    compare()
    writer.vbuckets[2].begin_resync()
    writer.commit()
    compare()
    before = view.published()
    assert view.published() == before


def fill(writer: GroupWriter, first_seqno: int, *lengths: int) -> None:
    """Snapshots of so many mutations each."""
    seqno = first_seqno
    for length in lengths:
        publish(writer, 0, [(A if at % 2 else B, b"%d" % at, at) for at in range(seqno, seqno + length)])
        seqno += length


def ends(view: View) -> list[int]:
    """Every boundary, one after the other."""
    found: list[int] = []
    position = 0
    while (boundary := states.following(view.reader(0), position)) is not None:
        position = boundary.seqno
        found.append(position)
    return found


def test_an_empty_vbucket_has_no_boundary(view: View) -> None:
    assert states.published_since(view.reader(0), None) == (None, 0)
    assert states.following(view.reader(0), 0) is None
    assert states.newest(view.reader(0), 99) is None


def test_boundaries_follow_each_other_over_long_snapshots_rollbacks_and_purges(writer: GroupWriter, view: View) -> None:
    fill(writer, 1, 3, 250, 1, 2)
    assert ends(view) == [3, 253, 254, 256] == [each.seqno for each in reversed(view.boundaries(0))]
    assert states.newest(view.reader(0), 255).seqno == 254  # type: ignore[union-attr]
    assert states.newest(view.reader(0), 252).seqno == 3  # type: ignore[union-attr]
    writer.vbuckets[0].rollback(254)
    fill(writer, 255, 120, 2)
    assert ends(view) == [3, 253, 254, 374, 376]
    assert [each.seqno for each in states.boundaries_between(view.reader(0), 1, 3, 256)] == [253, 254, 256]
    assert [each.seqno for each in states.boundaries_between(view.reader(0), 2, 253, 376)] == [254, 374, 376]
    purge(writer, Window(boundaries=2))
    assert ends(view) == [374, 376]
    assert states.newest(view.reader(0), 373) is None


def test_the_published_position_is_compared_with_a_position_of_a_reader(writer: GroupWriter, view: View) -> None:
    fill(writer, 1, 3, 4)
    boundary, common_seqno = states.published_since(view.reader(0), view.token(0, 1, 3))
    assert boundary is not None
    assert (boundary.branch, boundary.seqno, common_seqno) == (1, 7, 3)
    writer.vbuckets[0].rollback(3)
    known = [view.token(0, *at) for at in ((1, 3), (1, 7), (2, 3))]
    strange = [replace(known[0], history_id=5), replace(known[0], branch=Branch(9))]
    assert [states.published_since(view.reader(0), at)[1] for at in (None, *known, *strange)] == [
        0,
        3,
        3,
        3,
        None,
        None,
    ]


KEYS = keys_of(0, 4)


def test_figures_follow_the_stored_history(path: str) -> None:
    now = 1_000
    writer = open_writer(path, clock=lambda: now)
    writer.vbuckets[0].save(failover_log=log())
    with open_view(path) as view:
        empty = view.history(0)
        assert (empty.floor_seqno, empty.floor_ms, empty.boundaries, empty.versions) == (0, None, 0, 0)
        for seqno in range(1, 11):
            now = 1_000 * seqno
            publish(writer, 0, [(KEYS[seqno % 4], b"v", seqno)])
        full = view.history(0)
        assert full == writer.histories()[0]
        assert (full.floor_seqno, full.floor_ms) == (1, 1_000)
        assert full.boundaries == len(view.boundaries(0)) == 10
        assert full.versions == 10
        assert full.versions - view.count(0) == 6  # what history takes
        assert full.row_bytes >= 4096
        assert full.key_bytes >= 4096
        stage(writer, 12, (KEYS[0], b"v", 11), flush=True)
        assert view.history(0).boundaries is None  # a staged row has no key row yet: indistinguishable
        writer.vbuckets[0].abandon()
        window = Window(boundaries=1, time_ms=0)
        writer.background.window = writer.background.purger.window = window
        while writer.step():
            pass
        purged = view.history(0)
        assert (purged.floor_seqno, purged.floor_ms, purged.purged_seqno) == (10, 10_000, 10)
        assert purged.versions == view.count(0) == 4
        assert purged.local_purge_seqno == writer.vbuckets[0].state.local_purge_seqno
    writer.close()
