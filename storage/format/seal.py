"""Checksums of rows: a stored row is a message followed by its CRC-32C. LMDB itself has no checksums.

The checksum is little-endian, because then the CRC-32C over message and checksum is the same number for every intact
row (`RESIDUE`). So one call verifies a row as LMDB returns the row.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import add

from google_crc32c import value as crc32c

from storage.errors import VERIFY, CorruptedError
from storage.format import keys, records

SIZE = 4
FRAME = slice(0, -SIZE)
"""The message in a stored row."""
RESIDUE = 0x48674BC7
"""CRC-32C of every intact stored row."""

_pack = struct.Struct("<I").pack


def sealed_rows(row_keys: Sequence[bytes], rows: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return (row key, stored row) pairs. The second elements of `rows` are the messages. In this hot path, only the
    list comprehension runs bytecode for each row.
    """
    frames = [row[1] for row in rows]
    return list(zip(row_keys, map(add, frames, map(_pack, map(crc32c, frames))), strict=True))


def frame_of(stored: bytes, row_key: bytes, vbid: int, path: str) -> bytes:
    """Return the message of a stored row. Raises CorruptedError."""
    if crc32c(stored) != RESIDUE:
        raise damaged(stored, row_key, vbid, path)
    return stored[FRAME]


def check_all(stored: Sequence[bytes], vbid: int, path: str) -> None:
    if list(map(crc32c, stored)).count(RESIDUE) != len(stored):
        first = next(each for each in stored if crc32c(each) != RESIDUE)
        raise damaged(first, b"", vbid, path)


def damaged(stored: bytes, row_key: bytes, vbid: int, path: str) -> CorruptedError:
    """Return the error for a row whose checksum does not match, or for a missing row (`stored` is empty)."""
    if not stored:
        return CorruptedError("a key points to a row that is missing", path=path, vbid=vbid)
    where = "a row"
    if len(row_key) == keys.ROW_KEY_SIZE:
        branch, seqno = keys.ROW.unpack(row_key)
        where = f"the row of seqno {seqno} (branch {branch})"
    elif len(stored) >= 32:
        where = f"the row of seqno {int.from_bytes(stored[24:32], 'big')}"
    key = b""
    if len(stored) > 24:
        try:
            key = keys.split_key(records.key_of(stored))[1]
        except ValueError:
            key = b""
    return CorruptedError(
        f"{where}, key {key[:250]!r}, is damaged: its checksum does not match", path=path, vbid=vbid, hint=VERIFY
    )
