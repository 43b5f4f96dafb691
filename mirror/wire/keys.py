"""Document keys on the wire: a collection id in unsigned LEB128 (32 bits), then the document's key.

Each id has exactly one encoding. An encoding with trailing zero groups, or of more than 32 bits, is refused
(kv_engine docs/Collections.md; docs/protocol.md 2.1). Range scans encode lengths in the same way.
"""

from __future__ import annotations

from mirror.wire.errors import LocalProtocolError, RemoteProtocolError

KEY_BYTES_MAX = 250
"""Bytes of the longest document key, without the collection id (kv_engine daemon/mcbp_validators.cc, KEY_MAX_LENGTH).
Stored keys must stay below the 511 bytes that LMDB can index (MDB_MAXKEYSIZE).
"""
COLLECTION_ID_BYTES_MAX = 5
"""Bytes of the longest encoding of 32 bits."""

_U32_MAX = 0xFFFF_FFFF


def encode_leb128(number: int) -> bytes:
    if not 0 <= number <= _U32_MAX:
        raise LocalProtocolError(f"{number} is not an unsigned number of 32 bits")
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def decode_leb128(buf: bytes | bytearray | memoryview, pos: int = 0) -> tuple[int, int]:
    number = 0
    for index, byte in enumerate(buf[pos : pos + COLLECTION_ID_BYTES_MAX]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if byte == 0 and index > 0:
                raise RemoteProtocolError("collection id with a zero group at its end")
            if number > _U32_MAX:
                raise RemoteProtocolError("collection id of more than 32 bits")
            return number, pos + index + 1
    if len(buf) - pos >= COLLECTION_ID_BYTES_MAX:
        raise RemoteProtocolError("collection id of more than 5 bytes")
    raise RemoteProtocolError("key ends inside of its collection id")


def key_problem(key: bytes, *, prefixed: bool = True) -> str | None:
    """Return the fault of a key, or None if the key may be stored. `prefixed` keys begin with their collection id."""
    id_length = 0
    if prefixed:
        id_length = next((at + 1 for at, byte in enumerate(key[:COLLECTION_ID_BYTES_MAX]) if byte < 0x80), 0)
        if not id_length:
            return f"the collection id of the key {_shown(key)} does not end within {COLLECTION_ID_BYTES_MAX} bytes"
    size = len(key) - id_length
    return None if size <= KEY_BYTES_MAX else f"the key {_shown(key)} has {size} bytes; {KEY_BYTES_MAX} is the most"


def _shown(key: bytes) -> str:
    return repr(key[:40]) + ("..." if len(key) > 40 else "")
