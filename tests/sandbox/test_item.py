"""Versions are DCP frames that can be read back."""

from __future__ import annotations

from mirror.sandbox.data import item as it
from mirror.sandbox.data.item import Item
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
    for kind in (ev.Deletion, ev.Expiration):
        item = Item(5, b"\0k", codec_dcp.encode(kind(7, b"\0k", 5, 2, 99, 4, b"x", 1000)))
        assert (item.expiry, item.flags, item.value, item.datatype, item.deleted) == (1000, 0, b"x", 4, True)


def test_durable_writes() -> None:
    prepare = Item(5, b"\0k", codec_dcp.encode(ev.Prepare(7, b"\0k", 5, 2, 99, 1, 2, 0, 1, b"v", it.NRU, 1, 3)))
    assert (prepare.flags, prepare.expiry, prepare.value, prepare.deletes) == (1, 2, b"v", True)
    assert not Item(6, b"\0k", codec_dcp.encode(ev.Abort(7, b"\0k", 5, 6))).is_document


def test_system_events_and_large_collection_ids() -> None:
    item = Item(5, b"x", codec_dcp.encode(ev.SystemEvent(7, 5, 3, 0, b"name", b"body")))
    assert (item.event, item.value) == (3, b"body")
    assert Item(1, b"\xb4\x24k", b"").collection_id == 0x1234
