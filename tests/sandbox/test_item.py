"""Versions are DCP frames that can be read back."""

from __future__ import annotations

from mirror.sandbox.data import item as it
from mirror.sandbox.data.item import CommitItem, Item
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire import frame as fr


def event(frame: bytes) -> object:
    decoded, end = fr.decode(frame)
    assert end == len(frame)
    return codec_dcp.decode(decoded)


def test_a_mutation_is_read_back_field_by_field() -> None:
    frame = it.mutation_frame(7, b"\x08k", 5, 2, 99, b"body", flags=3, expiry=4, datatype=1)
    assert event(frame) == ev.Mutation(7, b"\x08k", 5, 2, 99, 3, 4, 0, 1, b"body", it.NRU)
    item = Item(5, b"\x08k", frame)
    assert (item.rev_seqno, item.cas, item.flags, item.expiry, item.datatype) == (2, 99, 3, 4, 1)
    assert (item.value, item.deleted, item.collection_id, item.kind) == (b"body", False, 8, it.MUTATION)
    assert "MUTATION" in repr(item)


def test_tombstones_carry_their_time() -> None:
    frame = it.deletion_frame(7, b"\0k", 5, 2, 99, b"", delete_time=1000)
    assert event(frame) == ev.Deletion(7, b"\0k", 5, 2, 99, 0, b"", 1000)
    assert (Item(5, b"\0k", frame).expiry, Item(5, b"\0k", frame).flags) == (1000, 0)
    frame = it.expiration_frame(7, b"\0k", 5, 2, 99, b"x", delete_time=1000, datatype=4)
    assert event(frame) == ev.Expiration(7, b"\0k", 5, 2, 99, 4, b"x", 1000)
    assert Item(5, b"\0k", frame).deleted


def test_durable_writes() -> None:
    frame = it.prepare_frame(7, b"\0k", 5, 2, 99, b"v", flags=1, expiry=2, datatype=1, deleted=False, level=3)
    prepare = event(frame)
    assert isinstance(prepare, ev.Prepare)
    assert (prepare.seqno, prepare.flags, prepare.expiry, prepare.durability) == (5, 1, 2, 3)
    assert event(it.commit_frame(7, b"\0k", 5, 6)) == ev.Commit(7, b"\0k", 5, 6)
    assert event(it.abort_frame(7, b"\0k", 5, 6)) == ev.Abort(7, b"\0k", 5, 6)
    assert CommitItem(6, b"\0k", frame, 5).prepared_seqno == 5
    assert not Item(6, b"\0k", it.abort_frame(7, b"\0k", 5, 6)).is_document


def test_system_events_and_large_collection_ids() -> None:
    frame = it.system_event_frame(7, 5, 3, 0, b"name", b"body")
    assert event(frame) == ev.SystemEvent(7, 5, 3, 0, b"name", b"body")
    assert Item(5, b"x", frame).event == 3
    assert Item(1, b"\xb4\x24k", b"").collection_id == 0x1234
