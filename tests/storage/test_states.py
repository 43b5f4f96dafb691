"""Where vbuckets stand: published positions, the floor, and resyncs."""

from __future__ import annotations

from storage.read.view import View, open_view
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of
from tests.storage.one_vbucket import A, commit, put
from tests.storage.test_writer import Clock, publish


def test_states_speak_of_all_vbuckets(path: str, writer: GroupWriter, view: View) -> None:
    publish(writer, 2, [(keys_of(2, 1)[0], b"x", 5)])
    assert [(s.vbid, s.published_seqno) for s in view.states()] == [(0, 0), (1, 0), (2, 5), (3, 0)]


def test_what_is_published_and_how_far_back_it_goes(writer: GroupWriter, view: View, clock: Clock) -> None:
    assert view.history(0).floor_ms is None
    clock.now = 5_000
    put(writer, A, 1)
    commit(writer, 1)
    first = view.published()
    assert [each.seqno for each in first] == [1, 0, 0, 0]
    past = view.history(0)
    assert (past.floor_seqno, past.floor_ms, past.resyncs_ms) == (1, view.boundaries(0)[-1].time_ms, ())
    writer.begin_resync(0)
    writer.commit()
    assert [each.stale for each in view.published()] == [True, False, False, False]
    clock.now = 6_000
    put(writer, A, 7)
    commit(writer, 7)
    assert view.published()[0].seqno == 7
    assert view.published()[0].branch > first[0].branch
    assert len(view.history(0).resyncs_ms) == 1
    assert view.history(0).resyncs_ms[0] >= 6_000


def test_a_view_that_remembers_positions_says_what_a_new_one_says(path: str, writer: GroupWriter, view: View) -> None:
    """After a publish, a rollback, and a resync."""

    def compare() -> None:
        with open_view(path) as fresh:
            assert view.published() == fresh.published()

    compare()
    for seqno in (1, 2, 3):
        put(writer, A, seqno)
        commit(writer, seqno)
        compare()
    writer.rollback(0, 2)
    writer.commit()
    compare()
    publish(writer, 2, [(keys_of(2, 1)[0], b"x", 5)])
    compare()
    writer.begin_resync(2)
    writer.commit()
    compare()
    before = view.published()
    assert view.published() == before
