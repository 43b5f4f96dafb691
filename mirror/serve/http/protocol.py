"""Connections of HTTP readers: a protocol in front of uvicorn's, which bounds time and memory.

`HttpConnection` is the socket's protocol, and the transport of uvicorn's protocol. Of uvicorn it uses public names:
`Config` (its option `http`: a protocol's class, made with the arguments `config`, `server_state` and `app_state`) and
`Server`. uvicorn's protocol gets one request at a time, its head once it is complete, and its body as the application
reads it. What is not read is left to the kernel, except for `READ_BYTES`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from http import HTTPStatus
from time import perf_counter
from typing import Any

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mirror.serve.http.framing import HEAD_BYTES_MAX, BadFraming, Framing, Head
from mirror.serve.http.problems import Problem
from mirror.server.admission import IDLE_TIMEOUT_S, SEND_TIMEOUT_S, Slot
from mirror.server.outgoing import Outgoing
from mirror.server.turns import Turns

READ_BYTES = 64 * 1024
"""Bytes received at a time, and kept while the application does not read them."""
PART_BYTES = 16 * 1024
"""Bytes of a body that the server gets at a time."""
PART_S = 0.001
"""Time for giving parts before other connections have a turn. Chunks of one byte are slow to parse."""
HIGH_WATER_BYTES = 64 * 1024
"""Unsent bytes above which the application waits."""
LINGER_S = 2.0
"""Time for which a refused client's input is discarded. Closing at once would lose the refusal."""
REQUEST_TIMEOUT_S = 20.0
"""Time for a request's head, from its first byte or the opening of the connection. `BODY_TIMEOUT_S` limits the body."""
NEVER_S = 10**6
"""For uvicorn's own timeout of idle connections: `HttpConnection.sweep` closes them."""
CLOSE = (b"connection", b"close")
PLAIN_GET = re.compile(rb"GET (/[!\x22$-~]*) HTTP/1\.1\r\n(?:[-!#$%&'*+.^_`|~0-9A-Za-z]+:[\t -~]*\r\n)+\r\n")
"""Heads that can be answered without the server's parser."""


def last_answer(problem: Problem) -> bytes:
    return answer_bytes(problem.response(), [CLOSE])


BUSY = Problem("too-busy", "too many connections to this process")

logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())


@cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()


def answer_bytes(response: Response, more: list[tuple[bytes, bytes]]) -> bytes:
    """Return a whole answer, with `more` headers."""
    head = [b"%b: %b\r\n" % each for each in (*more, *response.raw_headers)]
    return b"".join((_status_line(response.status_code), *head, b"\r\n", response.body))


@dataclass(slots=True, eq=False)
class Gate:
    """State that the connections of a process share."""

    app: ASGIApp
    answer_now: Callable[[Scope], Response | None] = lambda _: None
    """Answers a request at once if the answer need not wait. None: the application answers."""
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
            http="httptools",
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=NEVER_S,
        )
        config.load()
        protocol: Any = config.http_protocol_class
        self.make_server = partial(protocol, config=config, server_state=uvicorn.Server(config).server_state)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["state"]["transport"].answer(scope, receive, send)

    async def stop(self, drain_s: float) -> None:
        """Close idle connections now, others after their answers; after `drain_s` abort all."""
        self.is_stopping = True
        for connection in list(self.connections):
            connection.close_if_idle()
        if self.answering:
            await asyncio.wait(self.answering, timeout=drain_s)
        for connection in list(self.connections):
            connection.abort()


class HttpConnection(asyncio.BufferedProtocol, asyncio.Transport):
    def __init__(self, gate: Gate, local: bool, slot: Slot) -> None:
        """`local`: only this machine can connect to the listener."""
        asyncio.Transport.__init__(self)
        self._gate, self._local, self._slot = gate, local, slot
        self._loop = asyncio.get_running_loop()
        self._framing = Framing()
        self._transport: asyncio.Transport
        self._server: Any = None
        self.outgoing: Outgoing
        self._since_s = self._loop.time()
        """Begin of the present state: idle, a request's head that is incomplete, or lingering."""
        self._is_idle = self._is_refused = False
        self._is_answering = self._is_responding = self._wants_body = False
        self._state: dict[str, Any] = {}
        self._is_waiting = False
        """True while the next request waits for its turn."""

    # -- the socket's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._gate.connections.add(self)
        self._slot.abort = self.abort
        self.outgoing = Outgoing(transport, HIGH_WATER_BYTES)
        if self._slot.refused:
            self._refuse(BUSY)
            return
        state = {"transport": self, "slot": self._slot, "local": self._local}
        self._server = self._gate.make_server(app_state=state)
        self._server.connection_made(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._gate.connections.discard(self)
        self._framing = Framing()  # a garbage collection may come late
        self._slot.release()
        if self._slot.in_line is not None:
            self._slot.in_line.cancel()
        if self._server is not None:
            self._server.connection_lost(error or ConnectionError("the client hung up"))
            self._server = None

    def get_buffer(self, _size: int) -> memoryview:
        return self._gate.received

    def buffer_updated(self, byte_count: int) -> None:
        if self._is_refused or self._transport.is_closing():
            return
        self._framing.feed(bytes(self._gate.received[:byte_count]))
        if self._is_idle:
            self._is_idle, self._since_s = False, self._loop.time()
        if self._is_waiting:
            self._read_or_wait()
        else:
            self._go_on(at_once=True)

    def pause_writing(self) -> None:
        self.outgoing.pause(self._loop.time())

    def resume_writing(self) -> None:
        self.outgoing.resume()
        if self.outgoing.writable.is_set() and self._server is not None:
            self._server.resume_writing()

    def sweep(self, now_s: float) -> None:
        """Close the connection if its time is over."""
        waited_s = now_s - self._since_s
        if self.outgoing.took_nothing_for_s(now_s) > SEND_TIMEOUT_S:
            self.abort()
        elif self._is_refused:
            if waited_s > LINGER_S:
                self.abort()
        elif self._is_answering:
            if self._is_responding and not self.outgoing.writable.is_set() and self._gate.has_lost_rights(self._state):
                self.abort()
        elif self._is_idle:
            if waited_s > IDLE_TIMEOUT_S:
                self._transport.close()
        elif waited_s > REQUEST_TIMEOUT_S:
            self.abort()

    def close_if_idle(self) -> None:
        if not (self._is_answering or self._is_refused):
            self._transport.close()

    # -- what the server gets

    def _go_on(self, *, at_once: bool = False) -> None:
        """Give the server the next head, or the next part of a body. `at_once`: the client waits for this answer."""
        self._is_waiting = False
        if self._is_refused or self._transport.is_closing():
            return
        try:
            if self._framing.in_body:
                self._next_part()
            elif not self._is_answering and (head := self._framing.next_head()) is not None:
                self._next_request(head, at_once=at_once and not self._framing.byte_count)
        except BadFraming as error:
            self._refuse_request(str(error))
            return
        self._read_or_wait()

    def _next_part(self) -> None:
        byte_count, ends_s = 0, perf_counter() + PART_S
        # the server may refuse the head, and each part, while it gets them
        while not self._is_refused and self._wants_body and self._framing.in_body:
            if not (part := self._framing.next_part(PART_BYTES)):
                break
            self._server.data_received(part)
            byte_count += len(part)
            if byte_count >= PART_BYTES or perf_counter() > ends_s:
                self._wait_for_turn()
                break

    def _next_request(self, head: Head, *, at_once: bool) -> None:
        if at_once and (response := self._answered_now(head)) is not None:
            self.write(answer_bytes(response, [self._gate.date]))
            self._is_idle, self._since_s = True, self._loop.time()
            return
        self._is_answering, self._wants_body = True, self._framing.in_body
        self._server.data_received(head.data)
        self._next_part()

    def _answered_now(self, head: Head) -> Response | None:
        found = PLAIN_GET.fullmatch(head.data)
        if found is None or self._framing.in_body or self._gate.is_stopping or not self.outgoing.writable.is_set():
            return None
        for name, value in head.headers:
            if name == b"expect" or (name == b"connection" and value.lower() != b"keep-alive"):
                return None
        path, _, query = found[1].partition(b"?")
        return self._gate.answer_now(
            {
                "type": "http",
                "method": "GET",
                "raw_path": path,
                "query_string": query,
                "headers": head.headers,
                "state": {"transport": self, "slot": self._slot, "local": self._local},
            }
        )

    def _wait_for_turn(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            self._gate.turns.call(self._go_on)

    def _read_or_wait(self) -> None:
        is_blocked = self._is_waiting or (self._is_answering and not self._wants_body)
        if is_blocked and self._framing.byte_count >= READ_BYTES:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer a request that the server has parsed."""
        gate = self._gate
        task = asyncio.current_task()
        assert task is not None
        gate.answering.add(task)
        self._state = scope["state"]

        async def received() -> Message:
            self._wants_body = True
            if not self._is_waiting:
                self._go_on()
            message = await receive()
            self._wants_body = False
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._is_responding = True
                closes = [CLOSE] if self._framing.in_body or gate.is_stopping else []
                message["headers"] = [gate.date, *closes, *message["headers"]]
            await send(message)

        try:
            await gate.app(scope, received, sent)
        finally:
            gate.answering.discard(task)
            self._is_answering = self._is_responding = self._wants_body = False
            self._is_idle, self._since_s = not self._framing.byte_count, self._loop.time()
            self._state = {}
            if self._framing.byte_count:
                self._wait_for_turn()

    def _refuse_request(self, detail: str) -> None:
        hint = f"request line and headers: {HEAD_BYTES_MAX} bytes at most"
        self._refuse(Problem("bad-request", detail, hint=hint))

    def _refuse(self, problem: Problem) -> None:
        """Refuse the input, tell the client why unless an answer has begun, and hang up."""
        if self._is_responding:
            self.abort()
            return
        self.outgoing.write(last_answer(problem))
        self._linger()
        if self._server is not None:
            server, self._server = self._server, None
            server.connection_lost(ConnectionError(problem.detail))

    def _linger(self) -> None:
        self._is_refused, self._since_s = True, self._loop.time()
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    # -- the server's transport

    def write(self, data: Any) -> None:
        if self._is_refused:
            return
        if self._is_answering and not self._is_responding and not data.startswith(b"HTTP/1.1 100 "):
            self._refuse_request("not an HTTP request")  # the server's own refusal, in another form
            return
        self.outgoing.write(data)
        if not self.outgoing.writable.is_set() and self._server is not None:
            self._server.pause_writing()

    def close(self) -> None:
        if self._is_refused:
            return
        if self._framing.in_body and self.outgoing.writable.is_set():
            self._linger()
        else:
            self.outgoing.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._is_refused or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Do nothing: only parts that the application asks for are read."""

    def resume_reading(self) -> None:
        """As for `pause_reading`."""
