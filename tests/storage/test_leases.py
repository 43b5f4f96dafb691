"""The limits of a lease. `test_writer.py` proves that it holds through any mix of events."""

from __future__ import annotations

from typing import NoReturn

import pytest

from storage.errors import NoSuchBoundary, StorageError, Unavailable, ViewInvalidated
from storage.history import leases as leases_module
from storage.history.leases import Leases
from storage.history.purge import Window
from storage.read.view import View
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of, log
from tests.storage.rig import HOUR_MS, Clock, publish, purge, snapshots

A, B, C = keys_of(0, 3)


def test_a_position_between_boundaries_holds_the_one_below_it(writer: GroupWriter, clock: Clock) -> None:
    snapshots(writer, [(A, b"1", 1)], [(A, b"4", 4), (B, b"5", 5)], [(A, b"6", 6)])
    writer.background.lease("job", {0: (1, 4)}, clock.now + HOUR_MS)
    purge(writer, Window(boundaries=1))
    assert writer.vbuckets[0].state.history_floor_seqno == 1


def test_a_released_lease_holds_nothing_and_an_unknown_one_cannot_be_renewed(writer: GroupWriter, clock: Clock) -> None:
    for seqno in range(1, 4):
        publish(writer, 0, [(A, b"%d" % seqno, seqno)])
    writer.background.lease("job", {0: (1, 1)}, clock.now + HOUR_MS)
    assert writer.background.renew_lease("job", {0: (1, 1)}, clock.now + 2 * HOUR_MS)
    purge(writer, Window(boundaries=1))
    assert writer.vbuckets[0].state.history_floor_seqno == 1
    writer.background.leases.release("job")
    assert not writer.background.renew_lease("job", {0: (1, 1)}, clock.now + HOUR_MS)
    purge(writer, Window(boundaries=1))
    assert writer.vbuckets[0].state.history_floor_seqno == 3


def test_an_expired_lease_is_not_renewed_but_checked_again(writer: GroupWriter, clock: Clock) -> None:
    for seqno in range(1, 4):
        publish(writer, 0, [(A, b"%d" % seqno, seqno)])
    writer.background.lease("job", {0: (1, 1)}, clock.now + 1_000)
    clock.now += 2_000
    purge(writer, Window(boundaries=1))
    assert writer.vbuckets[0].state.history_floor_seqno == 3
    assert not writer.background.renew_lease("job", {0: (1, 1)}, clock.now + HOUR_MS)
    with pytest.raises(NoSuchBoundary, match="1:1 is not kept"):
        writer.background.lease("job", {0: (1, 1)}, clock.now + HOUR_MS)


def test_a_refused_lease_invalidates_a_read_only_if_its_boundary_is_gone(writer: GroupWriter, view: View) -> None:
    """256 other readers once made a reader believe that its history was gone."""
    publish(writer, 0, [(A, b"1", 1)])
    pins = [view.pin(0)]

    def refused(_: object) -> NoReturn:
        raise Unavailable("no lease: too many leases are held")

    with pytest.raises(Unavailable, match="too many leases"):
        view.reading([0], pins=pins, lease=refused).hold()
    publish(writer, 0, [(A, b"2", 2)])
    purge(writer, Window(boundaries=1))
    with pytest.raises(ViewInvalidated, match="no longer kept"):
        view.reading([0], pins=pins, lease=refused).hold()


def test_other_positions_under_a_name_are_a_new_lease(writer: GroupWriter, clock: Clock) -> None:
    for seqno in range(1, 4):
        publish(writer, 0, [(A, b"%d" % seqno, seqno)])
    writer.background.lease("job", {0: (1, 3)}, clock.now + HOUR_MS)
    assert not writer.background.renew_lease("job", {0: (1, 2)}, clock.now + HOUR_MS)
    writer.background.lease("job", {0: (1, 2)}, clock.now + HOUR_MS)
    purge(writer, Window(boundaries=1))
    assert writer.vbuckets[0].state.history_floor_seqno == 2


def test_retracted_rows_stay_while_a_lease_holds_them(writer: GroupWriter, view: View, clock: Clock) -> None:
    snapshots(writer, [(A, b"1", 1)], [(A, b"2", 2), (B, b"2", 3)])
    token = view.token(0, 1, 3)
    writer.background.lease("stream", {0: (1, 3)}, clock.now + 10 * HOUR_MS)
    writer.vbuckets[0].rollback(1)
    snapshots(writer, [(C, b"3", 2)], [(C, b"4", 3)])
    clock.now += 5 * HOUR_MS
    window = Window(time_ms=HOUR_MS, boundaries=1)
    purge(writer, window)
    assert writer.vbuckets[0].state.history_floor_seqno == 1  # where the two histories part
    reported = [c.kind for c in view.changes(0, since=token)]
    assert reported == ["rollback", "retraction", "restoration", "retraction", "mutation", "mutation"]
    clock.now += 5 * HOUR_MS
    purge(writer, window)
    with pytest.raises(ViewInvalidated, match="gone from history"):
        list(view.changes(0, since=token))
    with pytest.raises(NoSuchBoundary, match="1:3 is not kept"):
        writer.background.lease("late", {0: (1, 3)}, clock.now + HOUR_MS)


def test_a_lease_at_seqno_0_holds_nothing(writer: GroupWriter, clock: Clock) -> None:
    for seqno in range(1, 4):
        publish(writer, 0, [(A, b"%d" % seqno, seqno)])
    writer.background.lease("job", {0: (1, 0)}, clock.now + HOUR_MS)
    purge(writer, Window(boundaries=1))
    assert writer.vbuckets[0].state.history_floor_seqno == 3


def test_a_lease_on_purged_history_is_refused(writer: GroupWriter, clock: Clock) -> None:
    for seqno in range(1, 4):
        publish(writer, 0, [(A, b"%d" % seqno, seqno)])
    purge(writer, Window(boundaries=2))
    for position in ((1, 1), (7, 3)):
        with pytest.raises(NoSuchBoundary, match="is not kept; history begins at 1:2"):
            writer.background.lease("job", {0: position}, clock.now + HOUR_MS)
    assert writer.background.leases.of(0, clock.now) == []


def test_a_lease_holds_a_copy_that_a_resync_replaced_and_nothing_of_the_new_one(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    publish(writer, 0, [(A, b"1", 1)])
    pin = view.pin(0)
    writer.background.lease("job", {0: (1, 1)}, clock.now + HOUR_MS)
    writer.vbuckets[0].begin_resync()
    writer.vbuckets[0].save(failover_log=log(88))
    snapshots(writer, [(A, b"2", 1)], [(A, None, 2), (B, b"2", 3)])
    window = Window(boundaries=1, time_ms=HOUR_MS)
    purge(writer, window)
    assert [d.key for d in view.scan(0)] == [B]
    assert writer.vbuckets[0].state.history_floor_seqno == 3
    assert [len(rows.stored) for rows in view.reading(pins=[pin]).rows(0)] == [1]
    writer.background.leases.release("job")
    purge(writer, window)
    with pytest.raises(ViewInvalidated):
        next(view.reading(pins=[pin]).rows(0))


def test_the_number_of_leases_is_bounded(writer: GroupWriter, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_module, "LEASES_MAX", 2)
    publish(writer, 0, [(A, b"1", 1)])
    for name in "ab":
        writer.background.lease(name, {0: (1, 1)}, clock.now + 1000)
    with pytest.raises(StorageError, match="too many leases"):
        writer.background.lease("c", {0: (1, 1)}, clock.now + 1000)
    clock.now += 1000
    writer.background.lease("c", {0: (1, 1)}, clock.now + 1000)  # the others ended
    assert Leases().of(0, clock.now) == []
