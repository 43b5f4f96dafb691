"""Rows as the store has them, which only tests make."""

from __future__ import annotations

import struct

from google_crc32c import value as crc32c

from storage.format import keys, records
from storage.model import Kind


def sealed(frame: bytes) -> bytes:
    return frame + struct.pack("<I", crc32c(frame))


def encode_deletion(
    key: bytes, seqno: int, *, collection_id: int = 0, rev_seqno: int = 2, cas: int = 1, expired: bool = False
) -> bytes:
    wire_key = keys.encode_collection_id(collection_id) + key
    extras = struct.pack(">QQI", seqno, rev_seqno, 0) if expired else struct.pack(">QQH", seqno, rev_seqno, 0)
    opcode = Kind.EXPIRATION if expired else Kind.DELETION
    body_length = len(extras) + len(wire_key)
    return (
        records.HEADER.pack(records.MAGIC, opcode, len(wire_key), len(extras), 0, 0, body_length, 0, cas)
        + extras
        + wire_key
    )
