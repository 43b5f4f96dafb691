"""Open sync writes: found by their commits, bounded, and taken back with the snapshot that settled them."""

from __future__ import annotations

import pytest

from mirror.ingest import prepares as room
from mirror.ingest.prepares import Prepares, PreparesOverflow, committed_row_value
from mirror.wire.codec_dcp import decode
from mirror.wire.events import Deletion, Mutation, Prepare
from mirror.wire.frame import decode as decode_frame


def prepare(seqno: int, key: bytes = b"\0k", value: bytes = b"{}", deleted: int = 0) -> Prepare:
    return Prepare(5, key, seqno, 3, 77, flags=9, expiry=11, datatype=1, value=value, deleted=deleted)


def test_a_commit_finds_its_prepare_once() -> None:
    open_writes = Prepares()
    open_writes.prepared(prepare(1))
    assert open_writes.settled(b"\0k") == prepare(1)
    assert open_writes.settled(b"\0k") is None


def test_a_repeated_prepare_replaces_the_one_before() -> None:
    open_writes = Prepares()
    open_writes.prepared(prepare(1))
    open_writes.prepared(prepare(2))
    assert len(open_writes) == 1
    assert open_writes.settled(b"\0k") == prepare(2)


def test_what_was_settled_since_the_boundary_comes_back_when_it_is_undone() -> None:
    open_writes = Prepares()
    open_writes.prepared(prepare(1))
    open_writes.boundary_reached()
    open_writes.settled(b"\0k")
    open_writes.prepared(prepare(4))
    open_writes.undo_to(2)
    assert open_writes.settled(b"\0k") == prepare(1)


def test_what_was_prepared_above_the_boundary_is_forgotten_when_it_is_undone() -> None:
    open_writes = Prepares()
    open_writes.prepared(prepare(4))
    open_writes.undo_to(2)
    assert len(open_writes) == 0
    assert open_writes.byte_count == 0


def test_past_the_boundary_a_settled_write_is_settled() -> None:
    open_writes = Prepares()
    open_writes.prepared(prepare(1))
    open_writes.settled(b"\0k")
    open_writes.boundary_reached()
    open_writes.undo_to(2)
    assert open_writes.settled(b"\0k") is None
    assert open_writes.byte_count == 0


def test_their_count_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "COUNT_MAX", 2)
    open_writes = Prepares()
    open_writes.prepared(prepare(1, b"\0a"))
    open_writes.prepared(prepare(2, b"\0b"))
    open_writes.prepared(prepare(3, b"\0b"))
    with pytest.raises(PreparesOverflow):
        open_writes.prepared(prepare(4, b"\0c"))


def test_their_bytes_are_bounded_also_those_that_may_come_back() -> None:
    open_writes = Prepares()
    open_writes.prepared(prepare(1, value=b"x" * (room.BYTES_MAX - 200)))
    open_writes.settled(b"\0k")
    with pytest.raises(PreparesOverflow):
        open_writes.prepared(prepare(2, value=b"x" * 200))
    open_writes.boundary_reached()
    open_writes.prepared(prepare(2, value=b"x" * 200))


def test_a_commit_becomes_the_mutation_that_it_would_have_been() -> None:
    frame, _ = decode_frame(committed_row_value(prepare(1), 8, b""))
    assert decode(frame) == Mutation(5, b"\0k", 8, 3, 77, flags=9, expiry=11, datatype=1, value=b"{}")


def test_without_collections_its_key_gets_the_default_collections_prefix() -> None:
    frame, _ = decode_frame(committed_row_value(prepare(1, key=b"k"), 8, b"\0"))
    assert frame.key == b"\0k"


def test_a_committed_deletion_becomes_a_deletion() -> None:
    frame, _ = decode_frame(committed_row_value(prepare(1, value=b"", deleted=1), 8, b""))
    assert decode(frame) == Deletion(5, b"\0k", 8, 3, 77, datatype=1, delete_time=0)
