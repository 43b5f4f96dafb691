"""Large values of one process: read one after the other, in pieces, with other clients' requests between any two.

Knows documents that are read in pieces and whose turn it is; never a protocol. Decompressing runs in a thread, which
does not hold the interpreter's lock meanwhile. Invariant: one value is read at a time, so that no client's takes longer
because others ask for theirs than it takes to read those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mirror.serve.turns import Turns
from storage.errors import CorruptedError
from storage.large import PIECE_BYTES, LargeDocument
from storage.records import DATATYPE_SNAPPY, DATATYPE_XATTR, decompress_large

Pieces = Sequence[bytes | memoryview]

LARGE_BYTES = 256 * 1024
"""A value of more is read in pieces."""


class LargeReads:
    """The large values of one process."""

    def __init__(self, turns: Turns) -> None:
        """Nothing is read."""
        self._turns = turns
        self._one = asyncio.Lock()

    @staticmethod
    def held_bytes(found: LargeDocument, *, raw: bool) -> int:
        """What reading a value takes in memory."""
        if raw or not found.document.datatype & DATATYPE_SNAPPY:
            return found.stored_bytes
        return found.stored_bytes + found.value_bytes

    async def value(self, found: LargeDocument, *, raw: bool) -> tuple[Pieces, int]:
        """The body in pieces, and its datatype; `raw`: the value as it is stored. Raises StorageError."""
        datatype = found.document.datatype
        async with self._one:
            pieces: Pieces = await self._stored(found)
            if not raw and datatype & DATATYPE_SNAPPY:
                pieces = await self._decompressed(pieces, found.stored_bytes)
                datatype &= ~DATATYPE_SNAPPY
        if not raw and datatype & DATATYPE_XATTR:
            pieces = _without_xattrs(pieces)
            datatype &= ~DATATYPE_XATTR
        return pieces, datatype

    async def _stored(self, found: LargeDocument) -> list[bytes]:
        pieces = []
        await self._turns.turn()
        for piece in found.pieces():
            pieces.append(piece)
            await self._turns.turn()
        return pieces

    async def _decompressed(self, pieces: Pieces, stored_bytes: int) -> Pieces:
        stored, at = bytearray(stored_bytes), 0
        for piece in pieces:
            stored[at : at + len(piece)] = piece
            at += len(piece)
            await self._turns.turn()
        value = memoryview(await asyncio.to_thread(decompress_large, stored))
        return [value[start : start + PIECE_BYTES] for start in range(0, len(value), PIECE_BYTES)]


def _without_xattrs(pieces: Pieces) -> Pieces:
    """The body behind the xattr section. Raises CorruptedError."""
    left = 4 + int.from_bytes(pieces[0][:4], "big")
    if len(pieces[0]) < 4 or left > sum(map(len, pieces)):
        raise CorruptedError("the xattr section of a value is longer than the value")
    body: list[bytes | memoryview] = []
    for piece in pieces:
        if len(piece) > left:
            body.append(piece[left:])
        left = max(0, left - len(piece))
    return body
