"""Large documents in pieces: the value as it is stored, whatever it is, and no transaction between two pieces."""

from __future__ import annotations

from mmap import mmap

import cramjam
import pytest

from storage.errors import CorruptedError, ViewInvalidated
from storage.format import keys, records
from storage.read.large import PIECE_BYTES, LargeDocument
from storage.read.view import View
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of, span

A, B, C = keys_of(0, 3)


def put(writer: GroupWriter, key: bytes, seqno: int, value: bytes, metadata: int = 0, **more: int) -> None:
    """A mutation; `metadata` bytes of extended metadata stand behind its value."""
    frame = bytearray(records.encode_mutation(key, value, seqno, **more) + bytes(metadata))
    frame[8:12] = (len(frame) - 24).to_bytes(4, "big")
    frame[52:54] = metadata.to_bytes(2, "big")
    writer.vbuckets[0].stage(
        [(writer.vbuckets[0].prefix + seqno.to_bytes(8, "big"), bytes(frame))], 0, span(seqno, seqno)
    )
    writer.vbuckets[0].publish(seqno, seqno)
    writer.commit()


def large_of(view: View, key: bytes, *, as_of: int | None = None, bytes_max: int) -> LargeDocument | None:
    found = view.get_or_large(key, as_of=as_of, bytes_max=bytes_max)
    if not isinstance(found, LargeDocument):
        assert found == view.get(key, as_of=as_of)
        return None
    return found


@pytest.mark.parametrize("metadata", [0, 77])
@pytest.mark.parametrize("size", [1001, PIECE_BYTES - 60, PIECE_BYTES, 3 * PIECE_BYTES - 5, 3 * PIECE_BYTES + 9])
def test_all_pieces_are_the_value(writer: GroupWriter, view: View, size: int, metadata: int) -> None:
    value = bytes(range(251)) * (size // 251 + 1)
    put(writer, A, 1, value[:size], metadata, datatype=1, flags=7, cas=9)
    whole = view.get(A, raw=True)
    assert whole is not None
    assert large_of(view, A, bytes_max=size) is None
    large = large_of(view, A, bytes_max=size - 1)
    assert large is not None
    assert large.document == whole._replace(value=b"")
    assert (large.stored_bytes, large.value_bytes) == (size, size)
    pieces = list(large.pieces())
    assert b"".join(pieces) == whole.value
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert len(pieces) <= size // PIECE_BYTES + 2


def test_nothing_is_held_between_two_pieces(writer: GroupWriter, view: View) -> None:
    put(writer, A, 1, bytes(5 * PIECE_BYTES))
    large = large_of(view, A, bytes_max=1)
    assert large is not None
    environment = view.reader(0).environment
    for _ in large.pieces():
        assert environment.running == []


def test_what_decompresses_to_a_large_value_is_large(writer: GroupWriter, view: View) -> None:
    value = bytes(1000) * 1000
    put(writer, A, 1, bytes(cramjam.snappy.compress_raw(value)), datatype=3)
    large = large_of(view, A, bytes_max=100_000)
    assert large is not None
    assert large.value_bytes == len(value) > large.stored_bytes
    found = mmap(-1, large.value_bytes)
    records.decompress_into(b"".join(large.pieces()), found)
    assert found[:] == value


@pytest.mark.parametrize(
    "value", [b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x10" + bytes(20), b"", b"\xe8\x07" + b"\0" * 30]
)
def test_what_cannot_be_decompressed_is_an_error(value: bytes) -> None:
    with pytest.raises(CorruptedError):
        records.decompress_into(value, mmap(-1, records.decompressed_bytes(value)))


def test_there_is_none_where_get_finds_none(writer: GroupWriter, view: View) -> None:
    assert large_of(view, A, bytes_max=1) is None
    put(writer, A, 1, bytes(1000), expiry=5)
    put(writer, B, 2, bytes(1000))
    put(writer, B, 3, b"small")
    assert view.get(A) is None
    assert large_of(view, A, bytes_max=1) is None, "it is expired"
    assert large_of(view, B, bytes_max=10) is None
    large = large_of(view, B, as_of=2, bytes_max=10)
    assert large is not None
    assert large.document.seqno == 2
    assert large_of(view, C, bytes_max=1) is None


def test_a_row_that_is_purged_or_damaged_meanwhile_is_an_error(writer: GroupWriter, view: View) -> None:
    put(writer, A, 1, bytes(3 * PIECE_BYTES))
    large = large_of(view, A, bytes_max=1)
    assert large is not None
    environment = view.reader(0).environment
    row_key, rows = keys.ROW.pack(1, 1), environment.db(keys.rows_db(0))
    with environment.env.begin(write=True) as txn:
        stored = txn.get(row_key, db=rows)
        assert stored is not None
        txn.put(row_key, stored[:-9] + b"!" + stored[-8:], db=rows)
    with pytest.raises(CorruptedError, match=r"the row of seqno 1 \(branch 1\), key .*, is damaged"):
        list(large.pieces())
    pieces = large.pieces()
    next(pieces)
    with environment.env.begin(write=True) as txn:
        txn.delete(row_key, db=rows)
    with pytest.raises(ViewInvalidated, match="purged meanwhile"):
        next(pieces)
    with environment.env.begin(write=True) as txn:
        txn.put(row_key, stored, db=rows)
