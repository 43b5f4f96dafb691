"""One client's unsent answers: written in slices, as the client takes them.

The transport holds at most `HIGH_WATER_BYTES` and one slice, over TLS too, where it does not count what it has
encrypted.
"""

from __future__ import annotations

import asyncio
from collections import deque

HIGH_WATER_BYTES = 256 * 1024
"""Unsent bytes above which a client's requests wait."""
SLICE_BYTES = 256 * 1024


class Outgoing:
    def __init__(self, transport: asyncio.Transport) -> None:
        self.writable = asyncio.Event()
        """Set while everything was written, and the client takes data."""
        self.writable.set()
        self.paused_s: float | None = None
        """The time since which the client has taken nothing; None if it takes data."""
        self._unsent_seen = 0
        """Unsent bytes at `paused_s`."""
        self._transport = transport
        self._waiting: deque[memoryview] = deque()
        self._closing = False
        transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)

    @property
    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._waiting))

    def write(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES and not self._waiting:
            self._transport.write(data)
            return
        self._waiting.append(memoryview(data))
        if len(self._waiting) == 1:
            self.writable.clear()
            self._go_on()

    def close(self) -> None:
        """Close the connection once everything was sent."""
        self._closing = True
        if not self._waiting:
            self._transport.close()

    def pause(self, now_s: float) -> None:
        self.writable.clear()
        self.paused_s, self._unsent_seen = now_s, self.unsent_bytes

    def resume(self) -> None:
        self.paused_s = None
        self._go_on()

    def took_nothing_for_s(self, now_s: float) -> float:
        """Return the seconds since the client last took anything, if it has unsent data."""
        if self.paused_s is None:
            return 0.0
        if (unsent := self.unsent_bytes) < self._unsent_seen:
            self.paused_s, self._unsent_seen = now_s, unsent
        return now_s - self.paused_s

    def _go_on(self) -> None:
        while self._waiting and self.paused_s is None:
            data = self._waiting.popleft()
            if len(data) > SLICE_BYTES:
                self._waiting.appendleft(data[SLICE_BYTES:])
            self._transport.write(bytes(data[:SLICE_BYTES]))
        if not self._waiting and self._closing:
            self._transport.close()
        if self.paused_s is None:
            self.writable.set()
