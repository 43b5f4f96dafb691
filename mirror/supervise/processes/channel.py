"""The pipe between the supervisor and one process: whole messages, in order, in both directions.

A frame is a length (u32) and a message of `mirror.messages` in msgpack. The end of the pipe means that the other side
is gone.
"""

from __future__ import annotations

import asyncio
import socket
import struct

import msgpack

from mirror.errors import ConfigError, SupervisionError
from mirror.messages import PipeMessage, encode, pipe_message

MESSAGE_LENGTH_MAX = 64 * 1024 * 1024
"""Bytes of a report with 65,536 vbuckets of 1 KiB each."""

_LENGTH = struct.Struct(">I")


class Channel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        end.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer)

    def send(self, message: PipeMessage) -> None:
        """Queue `message`. Raises SupervisionError if it is above the limit. Only `receive` notices a dead peer."""
        body = msgpack.packb(encode(message))
        if len(body) > MESSAGE_LENGTH_MAX:
            raise SupervisionError(f"a message of {len(body)} bytes is over the limit of {MESSAGE_LENGTH_MAX}")
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(body)) + body)

    async def receive(self) -> PipeMessage | None:
        """Return the next message; None if the other side is gone. Raises SupervisionError."""
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
            raise SupervisionError(f"a message is not msgpack: {error}") from error
        if not isinstance(message, dict):
            raise SupervisionError("a message is not an object")
        try:
            return pipe_message(message)
        except ConfigError as error:
            raise SupervisionError(str(error)) from error

    @property
    def waiting_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    async def flush(self) -> None:
        """Wait until at most 64 KiB of messages are queued, or the other side is gone."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return
