"""Large values of one process: read one after the other, in pieces, with other clients' requests between any two.

Knows documents that are read in pieces and whose turn it is; never a protocol. Decompressing runs in a thread, which
does not hold the interpreter's lock meanwhile. Invariant: one value is read at a time, so that no client's takes longer
because others ask for theirs than it takes to read those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from mirror.serve.turns import Turns
from storage.errors import CorruptedError
from storage.large import PIECE_BYTES, LargeDocument
from storage.records import DATATYPE_SNAPPY, DATATYPE_XATTR, decompress_large

LARGE_BYTES = 256 * 1024
"""A value of more is read in pieces."""


class UnreadableValue(CorruptedError, ValueError):
    """A value that is what was stored, and cannot be taken apart."""


class LargeReads:
    """The large values of one process."""

    def __init__(self, turns: Turns) -> None:
        """Nothing is read."""
        self._turns = turns
        self._one = asyncio.Lock()

    async def read(self, found: LargeDocument, *, decompress: bool) -> tuple[bytearray, int]:
        """The value with its xattrs, and its datatype. Raises StorageError; UnreadableValue where it cannot be
        decompressed.
        """
        datatype = found.document.datatype
        async with self._one:
            value, at = bytearray(found.stored_bytes), 0
            await self._turns.turn()
            for piece in found.pieces():
                value[at : at + len(piece)] = piece
                at += len(piece)
                await self._turns.turn()
            if decompress and datatype & DATATYPE_SNAPPY:
                try:
                    return await asyncio.to_thread(decompress_large, value), datatype & ~DATATYPE_SNAPPY
                except CorruptedError as error:
                    raise UnreadableValue(error.message) from error
        return value, datatype


def held_bytes(found: LargeDocument, *, decompress: bool) -> int:
    """What reading a value takes in memory."""
    if decompress and found.document.datatype & DATATYPE_SNAPPY:
        return found.stored_bytes + found.value_bytes
    return found.stored_bytes


def body_of(value: bytearray, datatype: int) -> tuple[memoryview, int]:
    """A value that is not compressed without its xattrs, and its datatype. Raises UnreadableValue."""
    if not datatype & DATATYPE_XATTR:
        return memoryview(value), datatype
    body_at = 4 + int.from_bytes(value[:4], "big")
    if not 4 <= body_at <= len(value):
        raise UnreadableValue("the xattr section of a value is longer than the value")
    return memoryview(value)[body_at:], datatype & ~DATATYPE_XATTR


def in_pieces(value: memoryview) -> Iterator[memoryview]:
    """Parts of a value that are sent one after the other."""
    return (value[start : start + PIECE_BYTES] for start in range(0, len(value), PIECE_BYTES))
