"""What is accepted and not yet committed: the order of rows, and how many bytes wait."""

from __future__ import annotations

import pytest

from storage.errors import SeqnoOrder
from storage.read.view import open_view
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of, row, span
from tests.storage.test_writer import KEYS, publish

pytestmark = pytest.mark.usefixtures("small_limits")


@pytest.mark.parametrize("seqnos", [[3, 2], [2, 2], [1, 5, 4, 6], [0]])
def test_rows_that_do_not_rise_are_refused_and_harm_nobody(path: str, writer: GroupWriter, seqnos: list[int]) -> None:
    key = keys_of(0, 1)[0]
    prefix = writer.vbuckets[0].prefix
    rows = [row(prefix, key, b"x", seqno) for seqno in seqnos]
    with pytest.raises(SeqnoOrder):
        writer.vbuckets[0].stage(rows, 0, span(0, 9))
    other = keys_of(2, 1)[0]
    publish(writer, 2, [(other, b"y", 1)])
    with open_view(path) as view:
        assert view.get(other) is not None
        assert view.get(key) is None


def test_bytes_wait_until_they_are_committed_or_dropped(writer: GroupWriter) -> None:
    one, two = KEYS[0][:2]
    first, second = (row(writer.vbuckets[0].prefix, key, b"v", seqno) for seqno, key in enumerate((one, two), 1))
    writer.vbuckets[0].stage([first], len(first[1]), span(1, 1))
    writer.vbuckets[0].publish(1, 1)
    writer.vbuckets[0].stage([second], len(second[1]), span(2, 3))
    assert writer.pending_bytes == len(first[1]) + len(second[1])
    writer.commit()
    assert writer.pending_bytes == len(second[1])
    writer.vbuckets[0].abandon()
    assert (writer.pending_bytes, writer.vbuckets[0].state.staged_seqno) == (0, 1)


def test_rows_of_another_branch_are_refused_and_change_nothing(writer: GroupWriter) -> None:
    before = writer.vbuckets[0].state
    with pytest.raises(SeqnoOrder, match="made for another branch"):
        writer.vbuckets[0].stage([row(b"\0\0\0\7", KEYS[0][0], b"v", 1)], 1, span(1, 1))
    assert (writer.vbuckets[0].state, writer.pending_bytes) == (before, 0)


def test_a_position_does_not_fall(writer: GroupWriter) -> None:
    publish(writer, 0, [(KEYS[0][0], b"v", 5)])
    with pytest.raises(SeqnoOrder, match="advance to 4 below 5"):
        writer.vbuckets[0].advance(4, None)
    assert writer.vbuckets[0].state.staged_seqno == 5
