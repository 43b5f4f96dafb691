"""Split and join values: compression, xattrs, body, and the datatype bits for them (kv_engine docs/Document.md).

Datatype and value change together, so a function that alters one of them returns both. Snappy covers the whole value,
xattrs included. The name of a system xattr begins with an underscore.
"""

from __future__ import annotations

import json
from typing import NoReturn

import cramjam

from mirror.wire import xattr
from mirror.wire.constants import Datatype
from mirror.wire.errors import RemoteProtocolError
from storage.errors import CorruptedError
from storage.format import records

JSON = int(Datatype.JSON)
SNAPPY = int(Datatype.SNAPPY)
XATTR = int(Datatype.XATTR)

Xattrs = dict[bytes, bytes]


def inflate(value: bytes, datatype: int) -> tuple[bytes, int]:
    """Decompress a value. Raises ValueError if the value is not snappy or too large."""
    if not datatype & SNAPPY:
        return value, datatype
    try:
        return records.decompress(value), datatype & ~SNAPPY  # checks the size limit of all readers
    except CorruptedError as error:
        raise ValueError(f"not snappy: {error.message}") from None


def deflate(value: bytes, datatype: int) -> tuple[bytes, int]:
    if datatype & SNAPPY or not value:
        return value, datatype
    smaller = bytes(cramjam.snappy.compress_raw(value))
    return (smaller, datatype | SNAPPY) if len(smaller) < len(value) else (value, datatype)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def is_json(body: bytes | bytearray) -> bool:
    """Return True if the body is JSON (RFC 8259, UTF-8), as kv_engine judges it."""
    try:
        json.loads(body.decode(), parse_constant=_no_number, parse_float=str, parse_int=str)
    except (ValueError, RecursionError):
        return False
    return True


def datatype_of(body: bytes) -> int:
    return JSON if is_json(body) else 0


def split(value: bytes, datatype: int) -> tuple[Xattrs, bytes]:
    """Return the xattrs and the body of a value, decompressed. Raises ValueError for a damaged value."""
    value, datatype = inflate(value, datatype)
    try:
        xattrs, body = xattr.split(value, datatype)
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from None
    return dict(xattrs), bytes(body)


def join(xattrs: Xattrs, body: bytes, datatype: int) -> tuple[bytes, int]:
    """Join xattrs and a body; return the value and its datatype. `datatype` is the body's: only its JSON bit counts."""
    if not xattrs:
        return body, datatype & JSON
    return xattr.join(xattrs, body), datatype & JSON | XATTR


def tombstone_value(value: bytes, datatype: int) -> tuple[bytes, int]:
    """Return the value that a tombstone keeps: its system xattrs."""
    if not datatype & XATTR:
        return b"", 0
    xattrs, _ = split(value, datatype)
    system = {name: content for name, content in xattrs.items() if name.startswith(b"_")}
    return join(system, b"", 0)


def without_xattrs(value: bytes, datatype: int) -> tuple[bytes, int]:
    if not datatype & XATTR:
        return value, datatype
    return split(value, datatype)[1], datatype & JSON


def without_body(value: bytes, datatype: int) -> tuple[bytes, int]:
    if not datatype & XATTR:
        return b"", 0
    return join(split(value, datatype)[0], b"", 0)
