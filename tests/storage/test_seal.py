"""A flipped bit of a stored row is noticed by the reader, and named; without a cost that grows with anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storage.admin.check import check
from storage.errors import CorruptedError
from storage.format import keys, seal
from storage.read import bulk, stream
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter
from tests.storage.frames import sealed
from tests.storage.model import keys_of, log
from tests.storage.rig import open_writer, publish

A, B, C = keys_of(0, 3)


def flip(writer: GroupWriter, seqno: int, at: int, bit: int = 0) -> None:
    """Flip a bit of a stored row; a negative `at` counts from the end."""
    key = keys.ROW.pack(1, seqno)
    with writer.environment.begin(write=True) as txn:
        tree = writer.environment.db(keys.rows_db(0))
        stored = bytearray(txn.get(key, db=tree))
        stored[at] ^= 1 << bit
        txn.put(key, bytes(stored), db=tree)


READS: dict[str, Callable[[View], object]] = {
    "get": lambda view: view.get(B),
    "get of a collection": lambda view: view.get(B, 0),
    "get_many": lambda view: view.get_many([A, B]),
    "find": lambda view: view.find(b"\0" + B),
    "scan": lambda view: list(view.scan(0)),
    "changes": lambda view: list(view.changes(0)),
    "documents in bulk": lambda view: list(bulk.documents(view, view.pin(0))),
    "documents in bulk by key": lambda view: list(
        bulk.documents(view, view.pin(0), key_range=bulk.KeyRange(start=b"\0"))
    ),
    "rows for DCP": lambda view: stream.rows(view.reader(0), stream.served_state(view.reader(0)), 0, bytes_max=1 << 20),
}


@pytest.mark.parametrize("read", READS)
def test_a_flipped_bit_of_a_value_is_an_error_that_names_the_row(path: str, read: str) -> None:
    writer = open_writer(path)
    writer.vbuckets[0].save(failover_log=log())
    publish(writer, 0, [(A, b"one", 1), (B, b"two", 2), (C, b"three", 3)])
    with open_view(path) as view, open_view(path, verify_reads=False) as careless:
        READS[read](view)
        flip(writer, 2, -seal.SIZE - 1)
        with pytest.raises(CorruptedError, match=r"vbucket 0: the row of seqno 2") as caught:
            READS[read](view)
        assert repr(B) in str(caught.value)
        assert "verify --repair" in str(caught.value)
        READS[read](careless)
        found = careless.get(B)
        assert found is not None
        assert found.value == b"twn"
    writer.close()
    assert any("row 1:2: the row of seqno 2" in each for each in check(path).problems)


def test_every_bit_is_covered(path: str) -> None:
    frame = bytes(range(120))
    stored = sealed(frame)
    key = keys.ROW.pack(1, 7)
    assert seal.frame_of(stored, key, 0, path) == frame
    for at in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptedError, match="vbucket 3: the row of seqno 7"):
                seal.frame_of(bytes(damaged), key, 3, path)
    for length in range(len(stored)):
        with pytest.raises(CorruptedError):
            seal.frame_of(stored[:length], key, 3, path)


def test_rows_are_sealed_in_their_order() -> None:
    rows = [(keys.ROW.pack(1, number), bytes([number]) * number) for number in range(1, 9)]
    assert seal.sealed_rows([key for key, _ in rows], rows) == [(key, sealed(frame)) for key, frame in rows]
    seal.check_all([sealed(frame) for _, frame in rows], 0, "")
    seal.check_all([], 0, "")
