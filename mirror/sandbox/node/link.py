"""The link from a node's connection to its socket. Faults can slow, corrupt, silence or truncate it.

A silent link neither sends nor receives, and stays open. A truncated link closes after a part of the next message.
"""

from __future__ import annotations

import asyncio
from random import Random

SLOW_TICK_SECONDS = 0.01
SLOW_BACKLOG_MAX = 256 * 1024
"""Bytes of backlog above which a slow link makes its sender wait."""

HIGH_WATER_BYTES = 1024 * 1024


class NetworkLink:
    def __init__(self, transport: asyncio.Transport, rng: Random) -> None:
        self.silent = False
        self.bytes_sent = 0
        self._transport = transport
        self._rng = rng
        self._rate = 0.0
        self._garble = 0
        self._truncate = False
        self._backlog = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._room.set()
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    def send(self, data: bytes) -> None:
        if self.silent or self._transport.is_closing():
            return
        if self._garble:
            self._garble -= 1
            damaged = bytearray(data)
            for _ in range(max(1, len(damaged) // 200)):
                damaged[self._rng.randrange(len(damaged))] ^= self._rng.randint(1, 255)
            data = bytes(damaged)
        if self._truncate:
            self._transport.write(data[: max(1, len(data) * 2 // 3)])
            self._transport.close()
            return
        self.bytes_sent += len(data)
        if self._rate:
            self._backlog += data
            if len(self._backlog) > SLOW_BACKLOG_MAX:
                self._room.clear()
            self._schedule()
        else:
            self._transport.write(data)

    async def writable(self) -> None:
        if not self._room.is_set():
            await self._room.wait()

    def pause(self) -> None:
        self._room.clear()

    def resume(self) -> None:
        if len(self._backlog) <= SLOW_BACKLOG_MAX:
            self._room.set()

    def closed(self) -> None:
        self._room.set()
        if self._timer is not None:
            self._timer.cancel()

    def cut(self) -> None:
        self._transport.abort()

    def silence(self) -> None:
        self.silent = True

    def slow(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        if not bytes_per_second and self._backlog:
            self._transport.write(bytes(self._backlog))
            self._backlog.clear()
            self._room.set()

    def garble(self, pieces: int) -> None:
        """Change about one byte in 200 in the data of the next `pieces` calls of `send`."""
        self._garble = pieces

    def truncate(self) -> None:
        self._truncate = True

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SLOW_TICK_SECONDS, self._trickle)

    def _trickle(self) -> None:
        self._timer = None
        count = max(1, int(self._rate * SLOW_TICK_SECONDS)) if self._rate else len(self._backlog)
        if not self.silent and not self._transport.is_closing():
            self._transport.write(bytes(self._backlog[:count]))
            del self._backlog[:count]
            if len(self._backlog) <= SLOW_BACKLOG_MAX:
                self._room.set()
            if self._backlog:
                self._schedule()
