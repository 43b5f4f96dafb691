"""Collection ids as they stand before a key: unsigned LEB128 of 32 bits, at most five bytes.

Knows one integer code; must never know keys. Invariant: one id has exactly one spelling. A spelling with
trailing zero groups, or of more than 32 bits, is refused (kv_engine docs/Collections.md; docs/protocol.md 2.1).
"""

from __future__ import annotations

from mirror.wire.errors import LocalProtocolError, RemoteProtocolError

LENGTH_MAX = 5
"""Bytes of the longest spelling of 32 bits."""

_U32_MAX = 0xFFFF_FFFF


def encode(number: int) -> bytes:
    if not 0 <= number <= _U32_MAX:
        raise LocalProtocolError(f"{number} is not an unsigned number of 32 bits")
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def decode(buf: bytes | bytearray | memoryview, pos: int = 0) -> tuple[int, int]:
    number = 0
    for index, byte in enumerate(buf[pos : pos + LENGTH_MAX]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if byte == 0 and index > 0:
                raise RemoteProtocolError("collection id with a zero group at its end")
            if number > _U32_MAX:
                raise RemoteProtocolError("collection id of more than 32 bits")
            return number, pos + index + 1
    if len(buf) - pos >= LENGTH_MAX:
        raise RemoteProtocolError("collection id of more than 5 bytes")
    raise RemoteProtocolError("key ends inside of its collection id")


def split_key(key: bytes) -> tuple[int, bytes]:
    """Return the collection id of a wire key, and the key without it."""
    collection_id, pos = decode(key)
    return collection_id, key[pos:]
