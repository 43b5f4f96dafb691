"""The newest seqno of a collection: found from the end, on the served chain alone, in bounded steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from storage.errors import UnknownCollection, ViewInvalidated
from storage.history import merge
from storage.history.purge import Window
from storage.model import Collection, Seqno
from storage.read import states
from storage.read.view import View
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of
from tests.storage.rig import commit, purge, put, system_event
from tests.storage.test_merge import fail_over

A, B, C = keys_of(0, 3)


@pytest.fixture
def writer(writer: GroupWriter) -> GroupWriter:
    system_event(writer, 1, Collection(0, 0, "_default", Seqno(0)), Collection(300, 0, "c", Seqno(1)), scopes={0: "s"})
    commit(writer, 1)
    return writer


def newest(view: View, collection_id: int, rows_max: int = 2) -> tuple[int, int]:
    """The seqno, and in how many steps it was found."""
    pin = view.pin(0)
    found, below = states.newest_of(view.reader(0), pin, collection_id, rows_max=rows_max)
    steps = 1
    while below:
        found, below = states.newest_of(view.reader(0), pin, collection_id, below=below, rows_max=rows_max)
        steps += 1
    return int(found), steps


def test_rows_of_others_are_passed_in_bounded_steps(writer: GroupWriter, view: View) -> None:
    assert newest(view, 300) == (1, 1)
    assert newest(view, 0) == (0, 1)
    put(writer, A, 2, cid=300, publish=True)
    for seqno in range(3, 13):
        put(writer, B, seqno, publish=True)
    assert newest(view, 300) == (2, 6)
    assert newest(view, 300, 100) == (2, 1)
    assert newest(view, 0) == (12, 1)


def test_staged_and_rolled_back_rows_do_not_count(writer: GroupWriter, view: View) -> None:
    put(writer, A, 2, cid=300, publish=True)
    put(writer, A, 5, cid=300, publish=True)
    put(writer, B, 6, cid=300)
    writer.commit(flush_open=True)
    assert newest(view, 300) == (5, 1)
    pin = view.pin(0)
    writer.vbuckets[0].rollback(2)
    with pytest.raises(ViewInvalidated):
        states.newest_of(view.reader(0), pin, 300)
    assert newest(view, 300) == (2, 1)
    put(writer, C, 4, publish=True)
    assert newest(view, 300, 1) == (2, 2)
    assert newest(view, 0) == (4, 1)


@pytest.mark.parametrize("read", [lambda view: newest(view, 300, 100) == (5, 1), lambda view: view.key_at(0, 5)])
def test_rows_that_move_to_another_branch_meanwhile_are_found(
    read: Callable[[View], object], writer: GroupWriter, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branches and the rows are read in two transactions, which must be of one commit."""
    monkeypatch.setattr(merge, "LINKS_MAX", 1)
    for number in range(6):
        fail_over(writer, number)
        if number == 2:
            put(writer, A, 5, cid=300, publish=True)
    assert read(view)
    environment = view.reader(0).environment
    begin = environment.begin
    merged: list[int] = []

    def begin_behind_a_merge(*, write: bool = False, buffers: bool = False) -> Any:
        if buffers and not merged:
            merged.append(writer.vbuckets[0].state.published_seqno)
            purge(writer, Window(boundaries=1))
        return begin(write=write, buffers=buffers)

    monkeypatch.setattr(environment, "begin", begin_behind_a_merge)
    assert read(view)
    assert merged


def test_an_unknown_collection_is_an_error(view: View) -> None:
    with pytest.raises(UnknownCollection):
        states.newest_of(view.reader(0), view.pin(0), 9)
