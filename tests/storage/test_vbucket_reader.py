"""One vbucket through its reader: reads as of a boundary, and what is remembered between transactions."""

from __future__ import annotations

import pytest

from storage.errors import NoSuchBoundary
from storage.view import Time, View
from storage.writer import GroupWriter
from tests.storage.one_vbucket import A, commit, put
from tests.storage.test_writer import Clock


def test_as_of_takes_the_newest_boundary_not_after_a_seqno_or_a_time(
    writer: GroupWriter, view: View, clock: Clock
) -> None:
    for seqno, now in ((10, 1_000_000), (20, 2_000_000), (30, 3_000_000)):
        clock.now = now
        put(writer, A, seqno, b"%d" % seqno)
        commit(writer, seqno)

    def read(as_of: int | Time) -> bytes:
        document = view.get(A, as_of=as_of)
        assert document is not None
        return document.value

    assert [read(seqno) for seqno in (10, 19, 20, 29, 30, 99)] == [b"10", b"10", b"20", b"20", b"30", b"30"]
    assert [read(Time(ms)) for ms in (1_500_000, 2_500_000, 9_000_000)] == [b"10", b"20", b"30"]
    for too_early in (9, 0, Time(999_999)):
        with pytest.raises(NoSuchBoundary, match="history begins at seqno 10"):
            view.get(A, as_of=too_early)
    assert [b.seqno for b in view.boundaries(0)] == [30, 20, 10]
