"""Connections of HTTP readers: uvicorn's protocol, with the limits that it lacks.

uvicorn is used by its public names: `Config` (whose `http` names a protocol's class, made with the arguments `config`,
`server_state` and `app_state`) and `Server`. Its protocol parses with h11, which takes one request at a time, bounds a
head, and ignores offers of another protocol: Java's HttpClient and `curl --http2` make one with every request.
`HttpConnection` stands between the socket and uvicorn's protocol: for the slot, timeouts, and small reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mirror.server.admission import IDLE_TIMEOUT_S, SEND_TIMEOUT_S, Slot
from mirror.server.turns import Turns

HEAD_BYTES_MAX = 256 * 1024
"""Limit of request line and headers: a position in the changes of 1,024 vbuckets takes 40 KiB."""
READ_BYTES = 2 * 1024
"""Bytes received at a time. h11 takes 5 ms for this many in chunks of one byte."""
REQUEST_TIMEOUT_S = 20.0
"""Time for a request's head from its first byte, and for a body that the application does not read."""
CLOSE = (b"connection", b"close")

logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())


@dataclass(slots=True, eq=False)
class Gate:
    app: ASGIApp
    has_lost_rights: Callable[[dict[str, Any]], object] = lambda _: None
    """True if the reader of a request, by the request's state, has other rights than when it began."""
    turns: Turns = field(default_factory=Turns)
    date: tuple[bytes, bytes] = (b"date", b"")
    connections: set[HttpConnection] = field(default_factory=set)
    answering: set[asyncio.Task[Any]] = field(default_factory=set)
    is_stopping: bool = False
    make_server: Callable[..., Any] = field(init=False)
    received: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))

    def __post_init__(self) -> None:
        config = uvicorn.Config(
            self._answer,
            http="h11",
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=int(IDLE_TIMEOUT_S),
        )
        config.load()
        protocol: Any = config.http_protocol_class
        self.make_server = partial(protocol, config=config, server_state=uvicorn.Server(config).server_state)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["state"]["connection"].answer(scope, receive, send)

    async def stop(self, drain_s: float) -> None:
        """Close idle connections now, others after their answers; after `drain_s` abort all."""
        self.is_stopping = True
        for connection in list(self.connections):
            connection.close_if_idle()
        if self.answering:
            await asyncio.wait(self.answering, timeout=drain_s)
        for connection in list(self.connections):
            connection.transport.abort()


class HttpConnection(asyncio.BufferedProtocol):
    def __init__(self, gate: Gate, local: bool, slot: Slot) -> None:
        """`local`: only this machine can connect to the listener."""
        self.transport: asyncio.Transport
        self._gate, self._slot = gate, slot
        self._given = {"connection": self, "slot": slot, "local": local}
        """The state with which each request begins."""
        self._server = gate.make_server(app_state=self._given)
        self._loop = asyncio.get_running_loop()
        self._answered: dict[str, Any] | None = None
        """The state of the request that is being answered."""
        self._input_s: float | None = None
        """The time of the first input since the last answer."""
        self._stuck_s: float | None = None
        """The time since which the client has taken nothing; None if it takes data."""
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = self._given["transport"] = transport
        self._slot.abort = transport.abort
        self._gate.connections.add(self)
        self._server.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._gate.connections.discard(self)
        self._slot.release()
        if self._slot.in_line is not None:
            self._slot.in_line.cancel()
        self._server.connection_lost(error)

    def get_buffer(self, _size: int) -> memoryview:
        return self._gate.received

    def buffer_updated(self, byte_count: int) -> None:
        if self._input_s is None and self._answered is None:
            self._input_s = self._loop.time()
        self._server.data_received(bytes(self._gate.received[:byte_count]))

    def eof_received(self) -> None:
        self._server.eof_received()

    def pause_writing(self) -> None:
        self._stuck_s, self._unsent_bytes = self._loop.time(), self.transport.get_write_buffer_size()
        self._server.pause_writing()

    def resume_writing(self) -> None:
        self._stuck_s = None
        self._server.resume_writing()

    def sweep(self, now_s: float) -> None:
        """Close the connection if its time is over. uvicorn's protocol closes idle ones."""
        if self._input_s is not None and now_s - self._input_s > REQUEST_TIMEOUT_S:
            self.transport.abort()
        if self._stuck_s is None:
            return
        if (unsent_bytes := self.transport.get_write_buffer_size()) < self._unsent_bytes:
            self._stuck_s, self._unsent_bytes = now_s, unsent_bytes
        has_lost_rights = self._answered is not None and self._gate.has_lost_rights(self._answered)
        if has_lost_rights or now_s - self._stuck_s > SEND_TIMEOUT_S:
            self.transport.abort()

    def close_if_idle(self) -> None:
        if self._answered is None:
            self.transport.close()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        gate, task = self._gate, asyncio.current_task()
        assert task is not None
        gate.answering.add(task)
        is_pipelined = self._input_s is None
        self._answered, self._input_s = scope["state"], None

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                closes = [CLOSE] if gate.is_stopping else []
                message["headers"] = [gate.date, *closes, *message["headers"]]
            await send(message)

        try:
            if is_pipelined:  # 200 clients that pipeline kept others waiting for 0.4 s
                await gate.turns.turn()
            await gate.app(scope, receive, sent)
        finally:
            gate.answering.discard(task)
            self._answered = None
