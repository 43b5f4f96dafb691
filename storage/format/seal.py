"""Checksums of rows: a stored row is a message and the CRC-32C of it, so that a flipped bit is noticed.

Knows bytes, and positions for its errors; never LMDB. LMDB has no checksums of its own. Little-endian on purpose: the
CRC-32C of a message and its own CRC-32C is then the same number for all, so that a row is verified by one call on what
LMDB returns. Invariant: nothing is given to a reader that the writer did not accept, unless it requested that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import add

from google_crc32c import value as crc32c

from storage.errors import CorruptedError
from storage.format import keys, records

SIZE = 4
"""Bytes of a checksum."""
FRAME = slice(0, -SIZE)
"""Where the message stands in a stored row."""
RESIDUE = 0x48674BC7
"""CRC-32C of any message that is followed by its CRC-32C."""

_pack = struct.Struct("<I").pack


def sealed(frame: bytes) -> bytes:
    """A message as it is stored."""
    return frame + _pack(crc32c(frame))


def sealed_rows(row_keys: Sequence[bytes], rows: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Rows of messages as they are stored. No bytecode runs per row but the first list's: this is the ingest path."""
    frames = [row[1] for row in rows]
    return list(zip(row_keys, map(add, frames, map(_pack, map(crc32c, frames))), strict=True))


def frame_of(stored: bytes, row_key: bytes, vbid: int, path: str) -> bytes:
    """The message of a stored row. Raises CorruptedError, which names vbucket, key and seqno."""
    if crc32c(stored) != RESIDUE:
        raise damaged(stored, row_key, vbid, path)
    return stored[FRAME]


def is_sound(stored: bytes) -> bool:
    """True when a stored row is what was stored."""
    return bool(crc32c(stored) == RESIDUE)


def check_all(stored: Sequence[bytes], vbid: int, path: str) -> None:
    """Raise CorruptedError unless all are what was stored."""
    if list(map(crc32c, stored)).count(RESIDUE) != len(stored):
        first = next(each for each in stored if crc32c(each) != RESIDUE)
        raise damaged(first, b"", vbid, path)


def damaged(stored: bytes, row_key: bytes, vbid: int, path: str) -> CorruptedError:
    """The error of a row whose checksum does not match; of an empty one, which is missing."""
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
        f"{where}, key {key[:250]!r}, is damaged: its checksum does not match",
        path=path,
        vbid=vbid,
        hint="`dcp-mirror verify --repair` fetches the vbucket again",
    )
