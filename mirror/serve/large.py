"""Reads of large values in one process: in pieces, with other clients' requests between them.

Knows large documents and the event loop's turns (`turns`); never a protocol. Decompression runs in a thread, without
the interpreter's lock. Invariants: one value is read at a time, so a client waits only for values requested before its
own; one turn copies, clears or frees at most one piece of memory, because 20 MiB would take up to 16 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from mmap import MADV_DONTNEED, MAP_ANONYMOUS, MAP_PRIVATE, mmap

from mirror.serve.turns import Turns
from mirror.server.session import Buffer
from storage.errors import CorruptedError
from storage.format.records import DATATYPE_SNAPPY, DATATYPE_XATTR, decompress_into, decompressed_bytes
from storage.read.large import PIECE_BYTES, LargeDocument

LARGE_BYTES = 256 * 1024
"""Larger values are read in pieces."""

Pieces = list[Buffer]
"""The pieces of a value, or of a part of it. A released piece is empty."""


class UnreadableValue(CorruptedError, ValueError):
    """The value is intact, but its compression or xattr section is invalid."""


class Block:
    """Contiguous memory for a value. The system clears each page at its first write."""

    def __init__(self, byte_count: int) -> None:
        self.data: mmap | bytes = mmap(-1, byte_count, flags=MAP_PRIVATE | MAP_ANONYMOUS) if byte_count else b""
        self._released = 0

    def release(self) -> bool:
        """Give the memory of the next piece back to the system; its content is lost. Return False if none is left."""
        if isinstance(self.data, mmap) and self._released < len(self.data):
            self.data.madvise(MADV_DONTNEED, self._released, min(PIECE_BYTES, len(self.data) - self._released))
            self._released += PIECE_BYTES
        return self._released < len(self.data)


class LargeReads:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._one = asyncio.Lock()

    async def pieces(self, found: LargeDocument, *, decompress: bool) -> tuple[Pieces, int]:
        """Return the value in pieces, xattrs included, and its datatype. Raises StorageError, or UnreadableValue if the
        value cannot be decompressed.
        """
        async with self._one:
            await self._turns.turn()
            return await self._pieces(found, decompress=decompress)

    async def body(self, found: LargeDocument) -> tuple[bytes, Block]:
        """Return the xattr section (perhaps empty) and the body, decompressed. Raises the errors of `pieces`, and
        UnreadableValue if the xattr section is invalid.
        """
        datatype = found.document.datatype
        async with self._one:
            await self._turns.turn()
            if datatype & DATATYPE_XATTR:
                pieces, _ = await self._pieces(found, decompress=True)
                try:
                    section = b"".join(cut_xattrs(pieces))
                    return section, await self._joined(sum(map(len, pieces)), taken(pieces))
                finally:
                    let_go(self._turns, partial(drop, pieces))
            if datatype & DATATYPE_SNAPPY:
                return b"", await self._decompressed(found)
            return b"", await self._joined(found.stored_bytes, found.pieces())

    async def _pieces(self, found: LargeDocument, *, decompress: bool) -> tuple[Pieces, int]:
        datatype = found.document.datatype
        pieces: Pieces = []
        block: Block | None = None
        try:
            if decompress and datatype & DATATYPE_SNAPPY:
                datatype &= ~DATATYPE_SNAPPY
                block = await self._decompressed(found)
                for at in range(0, len(block.data), PIECE_BYTES):
                    pieces.append(block.data[at : at + PIECE_BYTES])
                    block.release()
                    await self._turns.turn()
            else:
                for piece in found.pieces():
                    pieces.append(piece)
                    await self._turns.turn()
        except BaseException:
            let_go(self._turns, partial(drop, pieces))
            if block is not None:
                let_go(self._turns, block.release)
            raise
        return pieces, datatype

    async def _joined(self, byte_count: int, pieces: Iterable[bytes]) -> Block:
        block = Block(byte_count)
        at = 0
        try:
            for piece in pieces:
                assert isinstance(block.data, mmap), "there is nothing to write"
                block.data[at : at + len(piece)] = piece
                at += len(piece)
                await self._turns.turn()
        except BaseException:
            let_go(self._turns, block.release)
            raise
        return block

    async def _decompressed(self, found: LargeDocument) -> Block:
        stored = await self._joined(found.stored_bytes, found.pieces())
        try:
            value = Block(decompressed_bytes(stored.data[:5]))
            await asyncio.to_thread(decompress_into, stored.data, value.data)
        except CorruptedError as error:
            raise UnreadableValue(error.message) from error
        finally:
            let_go(self._turns, stored.release)
        return value


def let_go(turns: Turns, release: Callable[[], bool], then: Callable[[], object] = lambda: None) -> None:
    """Call `release` now, then once a turn until it returns False; after that call `then`."""
    if release():
        turns.call(partial(let_go, turns, release, then))
    else:
        then()


def drop(pieces: Pieces) -> bool:
    """Release the last remaining piece. Return False if none is left."""
    while pieces and not pieces.pop():
        pass
    return any(pieces)


def taken(pieces: Pieces) -> Iterator[bytes]:
    """Yield each piece, and release it when the next is requested."""
    for at, piece in enumerate(pieces):
        pieces[at] = b""
        yield bytes(piece)


def merged(parts: Pieces, bytes_max: int) -> Iterator[bytes]:
    """Join the parts, release them, and yield pieces of `bytes_max` to twice that. The last piece may be smaller."""
    found: list[Buffer] = []
    size = 0
    parts.reverse()
    while parts:
        part = parts.pop()
        for at in range(0, len(part), bytes_max):
            found.append(part[at : at + bytes_max])
            size += len(found[-1])
            if size >= bytes_max:
                yield b"".join(found)
                found.clear()
                size = 0
    if found:
        yield b"".join(found)


def held_bytes(found: LargeDocument, *, decompress: bool) -> int:
    if decompress and found.document.datatype & DATATYPE_SNAPPY:
        return found.stored_bytes + found.value_bytes
    return found.stored_bytes


def cut_xattrs(pieces: Pieces) -> Pieces:
    """Remove the xattr section from an uncompressed value, and return it in pieces. Raises UnreadableValue."""
    head = b"".join(pieces[:2])[:4]
    left = 4 + int.from_bytes(head)
    if len(head) < 4 or left > sum(map(len, pieces)):
        raise UnreadableValue("the xattr section of a value is longer than the value")
    section: Pieces = []
    while left:
        at = len(section)
        section.append(pieces[at][:left])
        pieces[at] = pieces[at][left:]
        left -= len(section[-1])
    pieces[:] = filter(None, pieces)
    return section
