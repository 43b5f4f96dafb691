"""Values: compression, xattrs and datatype bits change together."""

from __future__ import annotations

import json

import pytest

from mirror.document import values


def test_a_value_is_compressed_only_if_that_makes_it_smaller() -> None:
    packed, datatype = values.deflate(b"a" * 1000, values.JSON)
    assert (datatype, len(packed) < 200) == (values.JSON | values.SNAPPY, True)
    assert values.inflate(packed, datatype) == (b"a" * 1000, values.JSON)
    assert values.deflate(packed, datatype) == (packed, datatype)
    assert values.deflate(b"xyz", 0) == (b"xyz", 0)
    assert values.deflate(b"", 0) == (b"", 0)
    with pytest.raises(ValueError, match="not snappy"):
        values.inflate(b"\xff\xff\xff\xff\xff", values.SNAPPY)


def test_the_json_bit_follows_from_the_content() -> None:
    assert [values.datatype_of(body) for body in (b"{}", b'"x"', b"1", b"1" * 5000)] == [1, 1, 1, 1]
    assert [values.datatype_of(body) for body in (b"", b"\xff", b"{", b"[" * 100_000)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "body",
    [b"NaN", b"[Infinity]", b'{"a":-Infinity}', "\ufeff{}".encode(), "{}".encode("utf-16"), "1".encode("utf-32-le")],
)
def test_a_body_that_only_python_accepts_is_not_json(body: bytes) -> None:
    assert json.loads(body) is not None
    assert not values.is_json(body)


def test_the_parts_of_a_value_change_together_with_its_datatype() -> None:
    value, datatype = values.join({b"_sync": b"1", b"mine": b"2"}, b"{}", values.JSON)
    packed, packed_type = values.deflate(value + b" " * 100, datatype)
    assert datatype == values.JSON | values.XATTR
    assert values.split(packed, packed_type) == ({b"_sync": b"1", b"mine": b"2"}, b"{}" + b" " * 100)
    assert values.without_xattrs(value, datatype) == (b"{}", values.JSON)
    assert values.without_body(value, datatype) == (
        values.join({b"_sync": b"1", b"mine": b"2"}, b"", 0)[0],
        values.XATTR,
    )
    assert values.without_body(b"{}", 1) == (b"", 0)
    assert values.tombstone_value(value, datatype) == (values.join({b"_sync": b"1"}, b"", 0)[0], values.XATTR)
    assert values.tombstone_value(b"{}", 1) == (b"", 0)
    assert values.join({}, b"{}", 5) == (b"{}", 1)
    with pytest.raises(ValueError, match="xattrs"):
        values.split(b"\0\0", values.XATTR)
