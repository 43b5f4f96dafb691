"""Unsent bytes of one client: written at once, or after an answer that is being written in pieces.

Knows the transport and turns; never frames. Invariants: an answer in pieces is never interrupted by other bytes; each
piece is written in a turn of its own, when the client takes data, and then released.
"""

from __future__ import annotations

import asyncio

from mirror.serve.kv.fast import Counters
from mirror.serve.large import Pieces
from mirror.serve.turns import Turns


class Unsent:
    def __init__(self, transport: asyncio.Transport, turns: Turns, counters: Counters) -> None:
        self.takes = asyncio.Event()
        """Set while the client takes data."""
        self.takes.set()
        self.writable = asyncio.Event()
        """Set while the client takes data, and no answer is being written in pieces."""
        self.writable.set()
        self.is_sending = False
        self._transport, self._turns, self._counters = transport, turns, counters
        self._one_sends = asyncio.Lock()
        self._deferred: list[bytes] = []
        self._kept_bytes = 0
        """Unwritten bytes of the answer in pieces."""

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() + self._kept_bytes

    def pause(self) -> None:
        self.takes.clear()
        self.writable.clear()

    def resume(self) -> None:
        self.takes.set()
        if not self.is_sending:
            self.writable.set()

    def write(self, data: bytes) -> None:
        """Write now, or after the answer that is being written in pieces."""
        if self.is_sending:
            self._deferred.append(data)
        else:
            self._counters.bytes_sent += len(data)
            self._transport.write(data)

    async def write_in_pieces(self, head: bytes, pieces: Pieces) -> None:
        async with self._one_sends:
            if not self._transport.is_closing():
                self.write(head)
                await self._write_pieces(pieces)

    async def _write_pieces(self, pieces: Pieces) -> None:
        self.is_sending = True
        self.writable.clear()
        self._kept_bytes = sum(map(len, pieces))
        try:
            for at, piece in enumerate(pieces):
                await self._turns.turn()
                await self.takes.wait()
                if self._transport.is_closing():
                    return
                self._kept_bytes -= len(piece)
                self._counters.bytes_sent += len(piece)
                pieces[at] = b""  # release each piece at once, not all at the end
                self._transport.write(bytes(piece))  # a copy: the transport may keep it after the block's release
        finally:
            self.is_sending = False
            self._kept_bytes = 0
            deferred, self._deferred = self._deferred, []
            if self.takes.is_set():
                self.writable.set()
            for data in deferred:
                self.write(data)
