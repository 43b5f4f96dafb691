"""Rows and records: what is written is read back, and what cannot be true is named."""

from __future__ import annotations

import contextlib

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import CorruptedError
from storage.format import keys, records
from storage.model import (
    Branch,
    Collection,
    FailoverLog,
    Kind,
    Manifest,
    ManifestChange,
    ManifestUid,
    Rollback,
    Seqno,
    SnapshotRange,
    Vbuuid,
)
from tests.storage.frames import encode_deletion

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
VB, BR = 7, Branch(3)


@given(st.binary(min_size=1, max_size=246), st.binary(max_size=300), U64, U32, U64, U64, U32, U32)
def test_a_mutation_is_read_as_it_was_written(
    key: bytes, value: bytes, seqno: int, cid: int, rev: int, cas: int, flags: int, expiry: int
) -> None:
    frame = records.encode_mutation(
        key, value, seqno, collection_id=cid, rev_seqno=rev, cas=cas, flags=flags, expiry=expiry, datatype=1
    )
    document = records.decode_row(VB, BR, frame)
    assert document == (VB, cid, key, seqno, rev, cas, flags, expiry, 1, value, Kind.MUTATION, BR)
    assert not document.deleted
    assert records.key_rows([(b"position", frame)]) == [(keys.encode_collection_id(cid) + key, b"position" + b"\x57")]


@given(st.binary(min_size=1, max_size=246), U64, st.booleans())
def test_a_tombstone_is_read_as_it_was_written(key: bytes, seqno: int, expired: bool) -> None:
    document = records.decode_row(VB, BR, encode_deletion(key, seqno, expired=expired))
    assert (document.key, document.seqno, document.deleted) == (key, seqno, True)
    assert document.kind is (Kind.EXPIRATION if expired else Kind.DELETION)


def test_old_extended_metadata_is_not_part_of_the_value() -> None:
    frame = bytearray(records.encode_mutation(b"k", b"value" + b"META", 1))
    frame[24 + 28 : 24 + 30] = (4).to_bytes(2, "big")
    assert records.decode_row(VB, BR, bytes(frame)).value == b"value"


def xattrs(*pairs: tuple[bytes, bytes]) -> bytes:
    body = b"".join((len(k) + len(v) + 2).to_bytes(4, "big") + k + b"\0" + v + b"\0" for k, v in pairs)
    return len(body).to_bytes(4, "big") + body


def test_a_reader_gets_the_body_without_compression_and_xattrs_by_default() -> None:
    whole = xattrs((b"_sync", b"{}")) + b'{"a":1}'
    packed = bytes(cramjam.snappy.compress_raw(whole))
    frame = records.encode_mutation(b"k", packed, 5, datatype=7)
    document = records.decode_row(VB, BR, frame)
    assert (document.value, document.datatype) == (b'{"a":1}', 1)
    raw = records.decode_row(VB, BR, frame, raw=True)
    assert (raw.value, raw.datatype) == (packed, 7)


@pytest.mark.parametrize(
    ("value", "datatype", "message"),
    [
        (b"\xff\xff\xff\xff\x0f", 2, "claims 4294967295 bytes"),
        (b"\x05abc", 2, "cannot be decompressed"),
        (b"\0\0", 4, "longer than the value"),
        (b"\0\0\0\x09abc", 4, "longer than the value"),
    ],
)
def test_a_malformed_value_is_an_error(value: bytes, datatype: int, message: str) -> None:
    with pytest.raises(CorruptedError, match=message):
        records.decode_row(VB, BR, records.encode_mutation(b"k", value, 1, datatype=datatype))


@pytest.mark.parametrize(("value", "datatype"), [(b"\xff\xff\xff\xff\x0f", 2), (b"\0\0\0\x09abc", 5)])
def test_a_malformed_value_can_be_read_as_stored(value: bytes, datatype: int) -> None:
    frame = records.encode_mutation(b"k", value, 1, datatype=datatype)
    found = records.decode_row(VB, BR, frame, lenient=True)
    assert (found.value, found.datatype) == (value, datatype)
    assert records.value_problem(found)
    fine = records.decode_row(VB, BR, records.encode_mutation(b"k", b"x", 1), lenient=True)
    assert records.value_problem(fine) is None


@given(st.binary(max_size=80), st.integers(0, 70), st.integers(0, 255))
def test_damaged_rows_raise_only_the_corrupted_error(garbage: bytes, position: int, byte: int) -> None:
    whole = bytearray(records.encode_mutation(b"key", b"some value", 9, datatype=1))
    whole[position % len(whole)] = byte
    for frame in (garbage, bytes(whole), bytes(whole[: position % len(whole)])):
        with contextlib.suppress(CorruptedError):
            assert records.decode_row(VB, BR, frame).vbid == VB


LOGS = st.lists(st.tuples(U64, U64), max_size=25)


@given(
    U32, U64, U64, st.none() | st.tuples(U64, U64, st.integers(0, 255)), LOGS, st.none() | U64, st.none() | st.text()
)
def test_a_state_is_read_as_it_was_written(
    branch: int, staged: int, published: int, snapshot: tuple[int, int, int] | None, log: list[tuple[int, int]],
    last: int | None, stream_filter: str | None,
) -> None:  # fmt: skip
    range_ = SnapshotRange(Seqno(snapshot[0]), Seqno(snapshot[1]), snapshot[2]) if snapshot else None
    entries = FailoverLog.of(log)
    row = records.StateRow(branch, staged, published, 3, range_, entries, 5, 6, last, stream_filter)
    assert records.decode_state(records.encode_state(row)) == row


@given(U64, st.dictionaries(U32, st.text(max_size=30)), st.dictionaries(U32, st.none() | U32))
def test_a_manifest_is_read_as_written(uid: int, scopes: dict[int, str], collections: dict[int, int | None]) -> None:
    manifest = Manifest(
        ManifestUid(uid),
        scopes,
        {cid: Collection(cid, 8, f"c{cid}", Seqno(4), ttl) for cid, ttl in collections.items()},
    )
    for change in (
        ManifestChange.between(Manifest.initial(), manifest),
        ManifestChange.between(manifest, Manifest.initial()),
        ManifestChange.between(Manifest.initial(), manifest).as_whole(manifest),
    ):
        assert records.decode_manifest(records.encode_manifest(change)) == change


def test_branches_and_rollbacks_are_read_as_they_were_written() -> None:
    for row in (
        records.BranchRow(None, 0, 1, 1, 9),
        records.BranchRow(4, 50, 1, 2, 9, 60, 8, ((7, 50), (2**64 - 1, 70))),
    ):
        assert records.decode_branch(records.encode_branch(row)) == row
    rollback = Rollback(8, Branch(1), Seqno(2), Branch(3), Seqno(4), Vbuuid(5), Vbuuid(6), 7)
    assert records.decode_rollback(8, records.encode_rollback(rollback)) == rollback


@pytest.mark.parametrize("data", [None, b"", b"\xc1", b"\x91\x01", b"\xa3abc", b"\x96\x02\x01\x01\x01\x01\x01"])
def test_records_that_cannot_be_read_are_named(data: bytes | None) -> None:
    with pytest.raises(CorruptedError, match="branch record"):
        records.decode_branch(data)


@pytest.mark.parametrize(("collection_id", "encoded"), [(0, "00"), (8, "08"), (0x7F, "7f"), (0x1234, "b424")])
def test_the_prefix_of_a_key_is_leb128(collection_id: int, encoded: str) -> None:
    assert keys.encode_collection_id(collection_id).hex() == encoded


@pytest.mark.parametrize("bad", [b"", b"\x80", b"\xff" * 5, b"\xff" * 9])
def test_a_prefix_that_does_not_end_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="does not end"):
        keys.split_key(bad)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_collection_id_has_32_bits(bad: int) -> None:
    with pytest.raises(ValueError, match="not a 32 bit number"):
        keys.encode_collection_id(bad)


@pytest.mark.parametrize(("key", "vbid"), [(b"foo", 115), (b"hello", 528), (b"a", 183)])
def test_documents_hash_to_the_vbucket_that_every_sdk_computes(key: bytes, vbid: int) -> None:
    assert keys.vbid_of(key, 1024) == vbid
