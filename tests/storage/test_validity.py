"""What ends a read: a rollback, the purger, or a merge has taken what it began with."""

from __future__ import annotations

import pytest

from storage.errors import ViewInvalidated
from storage.history.purge import Window
from storage.read import validity
from storage.read.vbucket_reader import Served
from storage.read.view import View
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of
from tests.storage.test_writer import Clock, publish

A = keys_of(0, 1)[0]


def check(view: View, pinned: Served) -> None:
    reader = view.reader(0)
    with reader.environment.read() as txn:
        validity.check(reader, txn, pinned)


def served_and_pinned(view: View) -> tuple[Served, Served]:
    """The positions of a scan and of a reader that survives rollbacks."""
    reader = view.reader(0)
    with reader.environment.read() as txn:
        return reader.served(txn), validity.served_at(reader, txn, view.pin(0))


def fill(writer: GroupWriter) -> None:
    for seqno in (1, 2, 3):
        publish(writer, 0, [(A, b"%d" % seqno, seqno)])


def test_a_later_snapshot_ends_no_read(writer: GroupWriter, view: View) -> None:
    fill(writer)
    served, pinned = served_and_pinned(view)
    publish(writer, 0, [(A, b"4", 4)])
    check(view, served)
    check(view, pinned)


def test_a_rollback_ends_a_scan_above_its_boundary_but_not_a_position(writer: GroupWriter, view: View) -> None:
    fill(writer)
    served, pinned = served_and_pinned(view)
    writer.vbuckets[0].rollback(2)
    with pytest.raises(ViewInvalidated, match="a rollback or resync passed seqno 3"):
        check(view, served)
    check(view, pinned)
    for each in served_and_pinned(view):
        check(view, each)


def test_the_purger_ends_every_read_below_the_floor(writer: GroupWriter, view: View, clock: Clock) -> None:
    fill(writer)
    both = served_and_pinned(view)
    publish(writer, 0, [(A, b"4", 4)])
    writer.background.purger.window = Window(boundaries=1)
    while (vbid := writer.background.purger.plan(clock.now)) is not None:
        writer.background.purge(vbid, clock.now)
    for each in both:
        with pytest.raises(ViewInvalidated, match="history before seqno 4 is gone"):
            check(view, each)


def test_a_branch_that_is_not_there_any_more_ends_a_read(writer: GroupWriter, view: View) -> None:
    fill(writer)
    reader = view.reader(0)
    with reader.environment.read() as txn:
        links = reader.served(txn).links
        validity.check_unmoved(reader, txn, links)
        for other in ((links[0], links[0]), (type(links[0])(9, 0, 3),)):
            with pytest.raises(ViewInvalidated, match="merged or removed"):
                validity.check_unmoved(reader, txn, other)
