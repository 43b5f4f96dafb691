"""The pipe between the supervisor and one worker: whole messages over a socket pair, in order, either way.

Knows framing (length u32, then msgpack) and the words that both sides use; never what a message makes them do. The
pipe is also the leash: its end means that the other side is gone. Invariants: a message is delivered whole or not at
all; one longer than the limit is an error before it is read or sent.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Final

import msgpack

from mirror.errors import SupervisionError

MESSAGE_LENGTH_MAX = 64 * 1024 * 1024
"""The status of 65,536 vbuckets at 500 bytes each is half of this."""

# supervisor -> worker
START: Final = "start"
"""groups, data, settings, the newest cluster map: once, first."""
STOP: Final = "stop"
"""Commit, close, leave."""
REQUEST: Final = "request"
"""id, command: answered by `ANSWER` with the same id."""

# either way
MAP: Final = "map"
"""map: a worker found a newer cluster map; the supervisor has recorded one, which the worker is to follow."""

# worker -> supervisor
BEAT: Final = "beat"
"""The event loop turns; carries small totals."""
READY: Final = "ready"
"""Stores are open."""
ANSWER: Final = "answer"
FAILED: Final = "failed"
"""What ended the worker, in words; its exit follows."""

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")


class Channel:
    """One end of the pipe."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Use `Channel.open`."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        """Speak over `end`, which now belongs to the channel."""
        end.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer)

    def send(self, message: Message) -> None:
        """Queue `message`; never waits. A peer that is gone is noticed by `receive`."""
        body = msgpack.packb(message)
        if len(body) > MESSAGE_LENGTH_MAX:
            raise SupervisionError(f"a message of {len(body)} bytes is over the limit of {MESSAGE_LENGTH_MAX}")
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(body)) + body)

    async def receive(self) -> Message | None:
        """The next message; None when the other side is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MESSAGE_LENGTH_MAX:
                raise SupervisionError(f"a message of {length} bytes is over the limit of {MESSAGE_LENGTH_MAX}")
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        try:
            message = msgpack.unpackb(body, strict_map_key=False)
        except (ValueError, msgpack.UnpackException) as error:
            raise SupervisionError(f"a message that is no msgpack: {error}") from error
        if not isinstance(message, dict) or not isinstance(message.get("op"), str):
            raise SupervisionError("a message without an op")
        return message

    @property
    def waiting_bytes(self) -> int:
        """Queued and not yet taken by the other side."""
        return self._writer.transport.get_write_buffer_size()

    async def flush(self) -> None:
        """Wait until the other side took what was queued, or is gone."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    async def close(self) -> None:
        """Let go of the pipe; what is queued is sent first."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return
