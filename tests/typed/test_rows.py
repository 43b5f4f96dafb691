"""Columns out of rows against `decode_row`, which takes one row apart at a time."""

from __future__ import annotations

import cramjam
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.typed import rows as rows_module
from mirror.typed.rows import DOCUMENTS, Documents
from storage.errors import CorruptedError
from storage.format import records
from storage.format.keys import encode_collection_id
from storage.model import Branch

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
MUTATION = st.fixed_dictionaries(
    {
        "key": st.binary(min_size=1, max_size=20),
        "value": st.binary(max_size=50),
        "seqno": U64,
        "collection_id": st.sampled_from([0, 8, 0x90, 2**32 - 1]),
        "rev_seqno": U64,
        "cas": U64,
        "flags": U32,
        "expiry": U32,
        "datatype": st.sampled_from([0, 1]),
    }
)


def taken(frames: list[tuple[int, bytes]], checksum: bytes = b"") -> Documents:
    """Rows, each of a collection and vbucket of its own, with `checksum` behind it."""
    found = Documents(len(checksum))
    for vbid, frame in frames:
        start = 24 + frame[4]
        wire_key = frame[start : start + (frame[2] << 8 | frame[3])]
        length = next(at for at, byte in enumerate(wire_key, 1) if byte < 0x80)
        found.add(vbid, f"s.c{length}", length, [frame + checksum], len(frame))
    found.close()
    return found


def batch(documents: Documents) -> list[dict[str, object]]:
    arrays = [documents.column(name) for name in DOCUMENTS.names]
    rows: list[dict[str, object]] = (
        pa.RecordBatch.from_arrays(arrays, schema=DOCUMENTS)
        .set_column(0, "key", arrays[0].cast(pa.binary()))
        .to_pylist()
    )
    return rows


def signed(number: int) -> int:
    return int.from_bytes(number.to_bytes(8, "big"), "big", signed=True)


def expected(vbid: int, frame: bytes) -> dict[str, object]:
    row = records.decode_row(vbid, Branch(0), frame)
    return {
        "key": row.key,
        "collection": f"s.c{len(encode_collection_id(row.collection_id))}",
        "vbid": vbid,
        "seqno": signed(row.seqno),
        "rev_seqno": signed(row.rev_seqno),
        "cas": signed(row.cas),
        "flags": row.flags,
        "expiry": row.expiry,
        "datatype": row.datatype,
        "value": row.value,
    }


@given(st.lists(st.tuples(st.integers(0, 1023), MUTATION), min_size=1, max_size=20), st.sampled_from([b"", b"4321"]))
def test_every_column_equals_that_of_decode_row(
    given_rows: list[tuple[int, dict[str, object]]], checksum: bytes
) -> None:
    frames = [(vbid, records.encode_mutation(**fields)) for vbid, fields in given_rows]  # type: ignore[arg-type]
    assert batch(taken(frames, checksum)) == [expected(vbid, frame) for vbid, frame in frames]


def test_compression_and_xattrs_are_removed_from_values() -> None:
    xattrs = b'\0\0\0\x0d\0\0\0\x09_x\0{"a":1}\0'[:4] + b"\0\0\0\x09_x\0{}\0xx"
    with_xattrs = (len(xattrs) - 4).to_bytes(4, "big") + xattrs[4:] + b'{"body":1}'
    frames = [
        (0, records.encode_mutation(b"a", b'{"plain":1}', 1, datatype=1)),
        (0, records.encode_mutation(b"b", bytes(cramjam.snappy.compress_raw(b'{"snappy":1}')), 2, datatype=3)),
        (1, records.encode_mutation(b"c", with_xattrs, 3, datatype=5)),
        (1, records.encode_mutation(b"d", bytes(cramjam.snappy.compress_raw(with_xattrs)), 4, datatype=7)),
    ]
    found = batch(taken(frames))
    assert found == [expected(vbid, frame) for vbid, frame in frames]
    assert [row["datatype"] for row in found] == [1, 1, 1, 1]


def test_columns_that_need_no_value_inflate_none(monkeypatch: pytest.MonkeyPatch) -> None:
    inflated: list[int] = []

    def inflate(value: bytes, datatype: int) -> tuple[bytes, int]:
        inflated.append(datatype)
        return value, 1

    monkeypatch.setattr(records, "body_or_all", inflate)
    compressed = bytes(cramjam.snappy.compress_raw(b'{"snappy":1}'))
    documents = taken([(3, records.encode_mutation(b"b", compressed, 2, datatype=3, expiry=9))])
    for name, value in {"vbid": 3, "seqno": 2, "expiry": 9, "key": "b"}.items():
        assert documents.column(name).to_pylist() == [value]
    assert documents.alive(10_000).to_pylist() == [False]
    assert inflated == []
    assert documents.column("datatype").to_pylist() == [1]
    assert inflated == [3]


def test_extended_metadata_behind_a_value_is_not_part_of_it() -> None:
    frame = bytearray(records.encode_mutation(b"a", b"value+meta", 1))
    frame[52:54] = (5).to_bytes(2, "big")
    plain = records.encode_mutation(b"b", b"value", 2)
    for checksum in (b"", b"4321"):
        found = batch(taken([(0, bytes(frame)), (0, plain)], checksum))
        assert [row["value"] for row in found] == [b"value", b"value"]


@pytest.mark.parametrize("damage", [lambda f: f[:-1], lambda f: f[:40], lambda f: f[:1] + b"\x42" + f[2:]])
def test_a_damaged_row_is_an_error_that_names_its_vbucket(damage: object) -> None:
    good = records.encode_mutation(b"a", b"value", 1)
    documents = Documents()
    documents.add(7, "s.c", 1, [good, damage(good)], 100)  # type: ignore[operator]
    with pytest.raises(CorruptedError, match="vbucket 7"):
        documents.close()


def test_expired_documents_are_not_alive() -> None:
    fresh = taken([(0, records.encode_mutation(b"a", b"", 1)), (0, records.encode_mutation(b"b", b"", 2))])
    assert fresh.alive(1) is None
    mixed = taken([(0, records.encode_mutation(b"a", b"", 1, expiry=at)) for at in (0, 100, 101)])
    assert mixed.alive(100_000).to_pylist() == [True, False, True]


def test_a_batch_is_full_by_rows_or_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "BATCH_ROWS", 3)
    monkeypatch.setattr(rows_module, "BATCH_BYTES", 1000)
    small, large = (records.encode_mutation(b"a", b"x" * size, 1) for size in (1, 1000))
    assert not taken([(0, small)] * 2).full
    assert taken([(0, small)] * 3).full
    assert taken([(0, large)]).full
