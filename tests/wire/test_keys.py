"""Collection ids: one spelling each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.keys import COLLECTION_ID_BYTES_MAX, decode_leb128, encode_leb128
from tests.wire.shapes import u32


@given(u32, st.binary(max_size=8), st.binary(max_size=8))
def test_a_number_is_read_as_it_was_written(number: int, before: bytes, after: bytes) -> None:
    spelled = encode_leb128(number)
    assert 1 <= len(spelled) <= COLLECTION_ID_BYTES_MAX
    assert decode_leb128(before + spelled + after, len(before)) == (number, len(before) + len(spelled))


@given(st.binary(max_size=7))
def test_any_bytes_are_the_only_encoding_of_a_number_or_a_remote_error(data: bytes) -> None:
    try:
        number, end = decode_leb128(data)
    except RemoteProtocolError:
        return
    assert encode_leb128(number) == data[:end]


@pytest.mark.parametrize(
    ("number", "spelled"),
    [(0, "00"), (8, "08"), (127, "7f"), (128, "8001"), (0x1234, "b424"), (2**32 - 1, "ffffffff0f")],
)
def test_known_numbers_have_their_known_encoding(number: int, spelled: str) -> None:
    assert encode_leb128(number).hex() == spelled
    assert decode_leb128(bytes.fromhex(spelled)) == (number, len(spelled) // 2)


@pytest.mark.parametrize(
    ("spelled", "words"),
    [
        ("", "ends inside"),
        ("80", "ends inside"),
        ("ffffffff", "ends inside"),
        ("8000", "zero group"),
        ("8880808000", "zero group"),
        ("ffffffff1f", "more than 32 bits"),
        ("808080808001", "more than 5 bytes"),
        ("ffffffffff", "more than 5 bytes"),
    ],
)
def test_overlong_and_truncated_encodings_are_refused(spelled: str, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        decode_leb128(bytes.fromhex(spelled))


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_number_beyond_32_bits_is_a_local_error(number: int) -> None:
    with pytest.raises(LocalProtocolError):
        encode_leb128(number)
