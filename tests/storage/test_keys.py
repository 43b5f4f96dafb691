"""Layouts of keys: byte order is numeric order, and prefixes mean what the wire means by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.format import keys

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)


@given(st.tuples(U32, U64), st.tuples(U32, U64))
def test_row_keys_sort_as_their_numbers(a: tuple[int, int], b: tuple[int, int]) -> None:
    assert (keys.ROW.pack(*a) < keys.ROW.pack(*b)) == (a < b)


@given(U32, st.integers(0, 2**64 - 2))
def test_a_boundary_sorts_right_behind_its_row(branch: int, seqno: int) -> None:
    boundary = keys.ROW.pack(branch, seqno) + keys.BOUNDARY_SUFFIX
    assert keys.ROW.pack(branch, seqno) < boundary < keys.ROW.pack(branch, seqno + 1)
    assert len(boundary) == keys.BOUNDARY_KEY_SIZE


@given(U32, st.binary(max_size=246))
def test_a_prefixed_key_comes_apart_again(collection_id: int, key: bytes) -> None:
    assert keys.split_key(keys.encode_collection_id(collection_id) + key) == (collection_id, key)


@pytest.mark.parametrize(("collection_id", "encoded"), [(0, "00"), (8, "08"), (0x7F, "7f"), (0x1234, "b424")])
def test_the_prefix_is_leb128(collection_id: int, encoded: str) -> None:
    assert keys.encode_collection_id(collection_id).hex() == encoded


@pytest.mark.parametrize("bad", [b"", b"\x80", b"\xff" * 5, b"\xff" * 9])
def test_a_prefix_that_does_not_end_is_refused(bad: bytes) -> None:
    with pytest.raises(ValueError, match="does not end"):
        keys.split_key(bad)


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_collection_id_is_32_bits(bad: int) -> None:
    with pytest.raises(ValueError, match="not a 32 bit number"):
        keys.encode_collection_id(bad)


@pytest.mark.parametrize(("key", "vbid"), [(b"foo", 115), (b"hello", 528), (b"a", 183)])
def test_documents_hash_to_the_vbucket_that_every_sdk_computes(key: bytes, vbid: int) -> None:
    assert keys.vbid_of(key, 1024) == vbid
