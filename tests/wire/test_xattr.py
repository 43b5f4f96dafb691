"""Extended attributes: blobs in, pairs out, and every length that lies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire import xattr
from mirror.wire.constants import Datatype
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError

names = st.binary(min_size=1, max_size=10).filter(lambda name: b"\0" not in name)
pairs = st.dictionaries(names, st.binary(max_size=20), max_size=4)


@given(pairs, st.binary(max_size=30))
def test_attributes_and_body_are_read_as_they_were_written(xattrs: dict[bytes, bytes], body: bytes) -> None:
    value = xattr.join(xattrs, body)
    found, rest = xattr.split(value, Datatype.XATTR | Datatype.JSON)
    assert (list(found.items()), rest) == (list(xattrs.items()), body)


@given(st.binary(max_size=60))
def test_any_bytes_are_attributes_or_a_remote_error(value: bytes) -> None:
    try:
        xattrs, body = xattr.split(value, Datatype.XATTR)
    except RemoteProtocolError:
        return
    assert xattr.join(xattrs, body) == value


def test_a_value_without_the_xattr_bit_is_all_body() -> None:
    assert xattr.split(b"\0\0\0\1x", Datatype.JSON) == ({}, b"\0\0\0\1x")


def test_a_blob_of_a_real_server_is_split() -> None:
    blob = bytes.fromhex("00000010 0000000c 5f73796e6300 7b7d2020 2000".replace(" ", ""))
    assert xattr.split(blob + b"body", 4) == ({b"_sync": b"{}   "}, b"body")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\1",
        b"\0\0\0\2xx",
        b"\0\0\0\4\0\0\0\0",
        b"\0\0\0\7\0\0\0\4a\0\0",
        b"\0\0\0\7\0\0\0\3\0\0\0",
        b"\0\0\0\7\0\0\0\3a\0b",
        b"\0\0\0\7\0\0\0\3abc",
        b"\0\0\0\x0e" + b"\0\0\0\3a\0\0" * 2,
        b"\xff\xff\xff\xff\0\0\0\3a\0\0",
    ],
)
def test_wrong_lengths_and_terminators_are_refused(value: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        xattr.split(value, Datatype.XATTR)


def test_a_compressed_value_is_refused_until_it_is_inflated() -> None:
    with pytest.raises(LocalProtocolError, match="compressed"):
        xattr.split(b"", Datatype.XATTR | Datatype.SNAPPY)


@pytest.mark.parametrize("name", [b"", b"a\0b"])
def test_an_invalid_attribute_name_is_refused_before_it_is_sent(name: bytes) -> None:
    with pytest.raises(LocalProtocolError):
        xattr.join({name: b""})
