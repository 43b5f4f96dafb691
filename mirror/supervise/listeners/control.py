"""The control socket `<data>/control.sock`: a command is a line with a JSON object, and so is its answer.

The socket has mode 0600, so only the service's user and root may send commands; `mirror.client` is the other end.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from mirror.client import SOCKET_NAME, socket_address
from mirror.errors import MirrorError, SupervisionError
from mirror.messages import Reply

REQUEST_LENGTH_MAX = 1024 * 1024
"""Bytes of the longest command; the client of a longer one is disconnected."""
CLIENTS_MAX = 64
"""Limit of connected clients; a further client gets an error and is disconnected at once."""
ANSWER_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 30.0
"""Limit for a client to take an answer."""
REQUEST_TIMEOUT_S = 60.0
"""Limit for a client to send a command, from its connection or previous answer on."""

Handler = Callable[[Reply], Awaitable[Reply]]


class ControlServer:
    def __init__(self, directory: Path, handler: Handler) -> None:
        """`handler` answers one command; a MirrorError that it raises becomes an error answer."""
        self._directory = directory
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Replace an existing socket: its service is dead, because the caller holds the lock."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with socket_address(self._directory) as address:
                (self._directory / SOCKET_NAME).unlink(missing_ok=True)
                # Not a chmod afterwards: until then other users could connect.
                mask = os.umask(0o177)
                try:
                    listener.bind(address)
                finally:
                    os.umask(mask)
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=REQUEST_LENGTH_MAX)
        except OSError as error:
            listener.close()
            raise SupervisionError(
                f"cannot listen on {self._directory / SOCKET_NAME}: {error.strerror}",
                hint="free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "",
            ) from error

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        (self._directory / SOCKET_NAME).unlink(missing_ok=True)
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "the server starts a task for each client"
        if len(self._clients) >= CLIENTS_MAX:
            full = SupervisionError(
                f"{CLIENTS_MAX} clients are connected already", hint="try again in a second", retryable=True
            )
            writer.write(_line_of(_refusal(full)))
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            return
        self._clients.add(task)
        try:
            while line := await self._line(reader):
                writer.write(_line_of(await self._answer(line)))
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await writer.drain()
        except TimeoutError:
            writer.transport.abort()
        except ValueError:
            writer.write(b'{"ok": false, "error": "the request is too long"}\n')
        except ConnectionError:
            writer.transport.abort()
            with suppress(ConnectionError):  # otherwise asyncio may log the stream's error
                await writer.wait_closed()
        except asyncio.CancelledError:
            pass
        finally:
            self._clients.discard(task)
            writer.close()

    @staticmethod
    async def _line(reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            return await reader.readline()

    async def _answer(self, line: bytes) -> Reply:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {"ok": False, "error": "the request is not JSON"}
        if not isinstance(request, dict) or not isinstance(request.get("op"), str):
            return {"ok": False, "error": 'the request is not an object with "op"'}
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return {"ok": True, **await self._handler(request)}
        except TimeoutError:
            return {"ok": False, "error": f"no answer within {ANSWER_TIMEOUT_S:.0f} s"}
        except MirrorError as error:
            return _refusal(error)


def _refusal(error: MirrorError) -> Reply:
    return {"ok": False, "error": str(error), "exit_code": int(error.exit_code), "retryable": error.retryable}


def _line_of(answer: Reply) -> bytes:
    return json.dumps(answer).encode() + b"\n"
