"""A spool keeps the frames of a snapshot until the spool is closed: in memory or, above a limit, in a temporary file.

Blocks of a closed spool are used again, so the file is never larger than the spools that were open together. One thread
fills a spool and hands it over; another thread may read and close it.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence

from mirror.errors import MirrorError
from mirror.wire.frame import frame_size

BLOCK_BYTES = 64 * 1024
"""The unit of the file's space. A spill wastes less than one block."""


class SpoolFile:
    """A temporary file without a name, in blocks. The first write creates it."""

    def __init__(self) -> None:
        self._fd = -1
        self._count = 0
        self._free: list[int] = []
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self._count * BLOCK_BYTES

    def write(self, data: bytes) -> list[tuple[int, int]]:
        """Write the data to free blocks; return (number, length) of each block. Raises MirrorError if that fails."""
        blocks: list[tuple[int, int]] = []
        try:
            with self._lock:
                if self._fd < 0:
                    with tempfile.TemporaryFile(prefix="dcp-mirror-") as file:
                        self._fd = os.dup(file.fileno())
                for start in range(0, len(data), BLOCK_BYTES):
                    piece = data[start : start + BLOCK_BYTES]
                    number = self._free.pop() if self._free else self._count
                    self._count = max(self._count, number + 1)
                    blocks.append((number, len(piece)))
                    written = 0
                    while written < len(piece):
                        written += os.pwrite(self._fd, piece[written:], number * BLOCK_BYTES + written)
        except OSError as error:
            self.free(blocks)
            where = tempfile.gettempdir()
            raise MirrorError(
                f"a snapshot cannot be kept in the temporary folder {where}: {error.strerror or error}",
                hint="free space there, or name another folder in TMPDIR",
            ) from None
        return blocks

    def read(self, block: tuple[int, int]) -> bytes:
        number, length = block
        data = os.pread(self._fd, length, number * BLOCK_BYTES)
        if len(data) != length:
            raise MirrorError("the temporary file of a snapshot is shorter than what was written to it")
        return data

    def free(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Free the blocks; once all are free, the file returns its space."""
        with self._lock:
            self._free += [number for number, _ in blocks]
            if self._fd >= 0 and len(self._free) == self._count:
                self._free, self._count = [], 0
                os.ftruncate(self._fd, 0)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class Spool:
    __slots__ = ("_blocks", "_file", "_frames", "disk_bytes", "frame_count", "memory_bytes")

    def __init__(self, file: SpoolFile) -> None:
        self._file = file
        self._frames: list[bytes] = []
        self._blocks: list[tuple[int, int]] = []
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.frame_count = 0

    def append(self, frames: Sequence[bytes]) -> int:
        """Add frames; return their size in bytes."""
        byte_count = sum(map(len, frames))
        self._frames += frames
        self.memory_bytes += byte_count
        self.frame_count += len(frames)
        return byte_count

    def spill(self) -> None:
        self._blocks += self._file.write(b"".join(self._frames))
        self.disk_bytes += self.memory_bytes
        self._frames, self.memory_bytes = [], 0

    def frames(self) -> Iterator[bytes]:
        pieces: list[bytes] = []
        have = need = 0
        for block in self._blocks:
            pieces.append(self._file.read(block))
            have += len(pieces[-1])
            if have < need:
                continue
            data = b"".join(pieces)
            pos = 0
            while (size := frame_size(data, pos)) and pos + size <= len(data):
                yield data[pos : pos + size]
                pos += size
            pieces, have, need = [data[pos:]], len(data) - pos, size
        assert not have, "spills end where frames end"
        yield from self._frames

    def close(self) -> None:
        self._file.free(self._blocks)
        self._blocks, self._frames = [], []
        self.memory_bytes = self.disk_bytes = self.frame_count = 0


class OpenSpools:
    """The spools of a read's open snapshots. If they exceed `memory_bytes` together, the largest is written to disk."""

    def __init__(self, file: SpoolFile, memory_bytes: int) -> None:
        self._file = file
        self.memory_bytes = 0
        self._limit_bytes = memory_bytes
        self._spools: set[Spool] = set()

    def append(self, spool: Spool | None, frames: Sequence[bytes]) -> Spool:
        """Add frames to a spool (None: a new one), and return the spool."""
        spool = self.new() if spool is None else spool
        self._spools.add(spool)
        self.memory_bytes += spool.append(frames)
        while self.memory_bytes > self._limit_bytes:
            largest = max(self._spools, key=lambda each: each.memory_bytes)
            self.memory_bytes -= largest.memory_bytes
            largest.spill()
        return spool

    def new(self) -> Spool:
        return Spool(self._file)

    def release(self, spool: Spool) -> None:
        """Stop counting a spool: its snapshot is complete or given up."""
        if spool in self._spools:
            self._spools.remove(spool)
            self.memory_bytes -= spool.memory_bytes
