"""A value with extended attributes: a blob with the attributes, then the body (kv_engine docs/Document.md, XATTR
encoding; docs/protocol.md 2.1). The owner decompresses the value first. Each attribute occurs once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from mirror.wire.constants import Datatype
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError

_U32 = struct.Struct(">I")
_PAIR_LENGTH_MIN = 3
"""Bytes of the shortest attribute: a key of one byte, a zero, an empty value and a zero."""


def split(value: bytes, datatype: int) -> tuple[dict[bytes, bytes], bytes]:
    """Return the attributes, in their order, and the body. If `datatype` lacks XATTR, the whole value is the body."""
    if datatype & Datatype.SNAPPY:
        raise LocalProtocolError("the value is compressed: decompress it first, xattrs and all")
    if not datatype & Datatype.XATTR:
        return {}, value
    end = _blob_end(value)
    xattrs: dict[bytes, bytes] = {}
    pos = _U32.size
    while pos < end:
        if end - pos < _U32.size:
            raise RemoteProtocolError(f"xattrs end {end - pos} bytes into a length")
        length = _U32.unpack_from(value, pos)[0]
        pos += _U32.size
        if not _PAIR_LENGTH_MIN <= length <= end - pos:
            raise RemoteProtocolError(f"an xattr of {length} bytes where {end - pos} are left")
        key, found, rest = value[pos : pos + length].partition(b"\0")
        if not found or not key or not rest.endswith(b"\0") or key in xattrs:
            raise RemoteProtocolError(f"not a pair of xattr name and value in {length} bytes")
        xattrs[key] = rest[:-1]
        pos += length
    return xattrs, value[end:]


def join(xattrs: Mapping[bytes, bytes], body: bytes = b"") -> bytes:
    parts = []
    for key, content in xattrs.items():
        if not key or b"\0" in key:
            raise LocalProtocolError(f"not a name of an xattr: {key!r}")
        pair = b"%b\0%b\0" % (key, content)
        parts += [_U32.pack(len(pair)), pair]
    blob = b"".join(parts)
    return _U32.pack(len(blob)) + blob + body


def _blob_end(value: bytes) -> int:
    if len(value) < _U32.size:
        raise RemoteProtocolError(f"a value with xattrs of {len(value)} bytes")
    length: int = _U32.unpack_from(value)[0]
    if length > len(value) - _U32.size:
        raise RemoteProtocolError(f"xattrs of {length} bytes in a value of {len(value)}")
    return _U32.size + length
