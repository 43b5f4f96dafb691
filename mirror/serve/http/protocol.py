"""Connections of HTTP readers: uvicorn's protocol, with limits on time and memory.

Knows asyncio's transports and uvicorn's protocol over httptools (llhttp, the parser of Node.js); never a route.
`admission` decides who may connect. Invariants:
- a connection that is silent, sends an incomplete request, or takes no answer is closed after a time limit;
- all answers to slow readers share one memory bound;
- pipelined requests wait as bytes, except for those of one slice (`SLICE_BYTES`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from time import perf_counter
from typing import Any

import httptools
from starlette.responses import Response
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from mirror.serve.access.admission import Slot
from mirror.serve.http.problems import Problem
from mirror.server.turns import Turns

HEAD_BYTES_MAX = 256 * 1024
"""Limit of request line and headers."""
HEADERS_MAX = 100
FRAMING_BYTES_MAX = HEAD_BYTES_MAX
"""Limit of framing bytes (chunk sizes, extensions, trailers) since the newest byte of a chunked body's data."""
SLICE_BYTES = 4 * 1024
"""Bytes parsed at a time. Requests of a parsed slice wait as objects, those of later slices as bytes."""
PARSE_S = 0.001
"""Time for parsing slices before other connections have a turn. Chunks of one byte are slow to parse."""
WITH_MORE = frozenset((b"content-length", b"expect", b"transfer-encoding", b"upgrade"))
"""Headers of requests that may have a body or an upgrade."""
LINGER_S = 2.0
"""Time for which a refused client's input is discarded. Closing at once would lose the refusal."""
REQUEST_TIMEOUT_S = 20.0
"""Time for a request's head, from its first byte or the opening of the connection. `BODY_TIMEOUT_S` limits the body."""


def last_answer(problem: Problem) -> bytes:
    response = problem.response()
    headers = b"".join(b"%s: %s\r\n" % each for each in response.raw_headers)
    status = HTTPStatus(response.status_code)
    return f"HTTP/1.1 {status} {status.phrase}\r\n".encode() + headers + b"connection: close\r\n\r\n" + response.body


BUSY = last_answer(Problem("too-busy", "too many connections to this process"))

logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())


@dataclass(slots=True)
class Gate:
    send_timeout_s: float = 30.0
    request_timeout_s: float = REQUEST_TIMEOUT_S
    answer_now: Callable[[Any], Response | None] = lambda _: None
    """Answers a request at once if the answer need not wait and is sent whole. None: the application answers."""
    turns: Turns = field(default_factory=Turns)
    state: ServerState = field(default_factory=ServerState)


class BoundedProtocol(HttpToolsProtocol):
    transport: asyncio.Transport

    def __init__(self, config: Config, gate: Gate, app_state: dict[str, Any], slot: Slot) -> None:
        """`app_state` is the listener's part of each request's state."""
        super().__init__(config, gate.state, app_state | {"slot": slot})
        self._slot = slot
        self._gate = gate
        self._timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._refused = False
        self._in_head = True
        self._request_begun = False
        self._answered_now = False
        self._idle_since_s = 0.0
        self._answer_now: Callable[[Any], Response | None] | None = None
        """Set while the first request of received data is parsed. Only that request can be answered at once; later
        ones wait for a turn."""
        self._is_only_head = self._offers_upgrade = False
        self._head_bytes = self._framing_bytes = 0
        self._unparsed = b""
        self._is_waiting = False
        """True while the next request waits for its turn."""
        self._is_busy = False
        """True if several requests came together: the next requests then wait for turns too."""
        self._wrong: str | None = None
        """Why reading has stopped; None while reading. The client gets this text, unless it is empty, once earlier
        requests are answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state["transport"] = transport
        self._slot.abort = transport.abort
        if self._slot.refused:
            self._turn_away(BUSY)
            return
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._slot.release()
        if self._slot.in_line is not None:
            self._slot.in_line.cancel()
        self._stop_waiting()
        self._unstick()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._gate.request_timeout_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused or self._wrong is not None or self.transport.is_closing():
            return
        self._unparsed += data
        if self._is_waiting:
            return
        if self._is_busy and not self._answering:
            self._wait_for_turn()
            return
        self._answered_now = False
        self._answer_now = self._gate.answer_now
        self._parse()
        self._is_busy = bool(self.pipeline or self._unparsed)
        self._answer_now = None
        if self._answered_now and not (self._answering or self._request_begun or self._refused):
            self._stop_waiting()
            self._idle_since_s = self.loop.time()
            if self.timeout_keep_alive_task is None:
                self._watch_idle(self.timeout_keep_alive)
            return
        self._unset_keepalive_if_required()
        if not self._answering:
            self._wait_for_request()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it was idle for the whole timeout; else wait for the remaining time. An answer of
        `answer_now` does not restart the timer.
        """
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._watch_idle(left_s)
        else:
            super().timeout_keep_alive_handler()

    def _watch_idle(self, timeout_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(timeout_s, self.timeout_keep_alive_handler)

    def _parse(self) -> None:
        """Parse until a request must wait, or for `PARSE_S`. Stop the request timer if a request is being answered."""
        at = 0
        unparsed = self._unparsed
        ends_s = perf_counter() + PARSE_S
        while at < len(unparsed) and not self.pipeline and self._wrong is None and not self._refused:
            self._feed(unparsed[at : at + SLICE_BYTES])
            at += SLICE_BYTES
            if perf_counter() > ends_s:
                break
        self._unparsed = unparsed[at:]
        if self._unparsed:
            self.flow.pause_reading()
            if not self.pipeline and self._wrong is None and not self._refused:
                self._wait_for_turn()
        if self._answering:
            self._stop_waiting()

    def _feed(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._offers_upgrade:
                self._offers_upgrade, self._head_bytes = False, 0
                self._feed(self._head_without_offer() + data[upgrade.args[0] :])
            else:  # CONNECT; the parser has stopped
                self.cycle.keep_alive = False
                self._wrong = ""
        except httptools.HttpParserError as error:
            self.send_400_response(f"not an HTTP request: {error.__context__ or error}")
        else:
            if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
                self.send_400_response("the request's head is too long")
            elif self._framing_bytes > FRAMING_BYTES_MAX:
                self.send_400_response("the chunks or trailers of the request are too long")

    def _head_without_offer(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        answer_now, self._answer_now = self._answer_now, None
        if answer_now is not None and cycle.keep_alive and not self.flow.write_paused and self._is_only_head:
            response = answer_now(cycle.scope)
            if response is not None:
                cycle.response_started = cycle.response_complete = True
                self.server_state.total_requests += 1
                self._answered_now = True
                head = [b"%b: %b\r\n" % each for each in (*cycle.default_headers, *response.raw_headers)]
                self.transport.write(b"".join((STATUS_LINE[response.status_code], *head, b"\r\n", response.body)))
                return
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._request_begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= HEADERS_MAX:
            raise ValueError(f"it has more than {HEADERS_MAX} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Require one Host header (RFC 9112, section 3.2). Ignore an offered upgrade (RFC 9110, section 7.8): httptools
        takes the body of such a request for the other protocol's, so `_feed` then parses the head without the offer.
        """
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offers_upgrade = True
            return
        names = [name for name, _ in self.headers]
        if self.parser.get_http_version() == "1.1" and names.count(b"host") != 1:
            raise ValueError("it needs exactly one Host header")
        self._is_only_head = WITH_MORE.isdisjoint(names)
        super().on_headers_complete()
        self._in_head, self._head_bytes, self._framing_bytes = False, 0, 0

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        super().on_message_complete()
        self._in_head, self._framing_bytes = True, 0
        self._request_begun = False

    def on_response_complete(self) -> None:
        """Wait for the next request. If it was received already, let it wait for its turn."""
        parsed, self.pipeline = self.pipeline, deque()  # else uvicorn would answer the next request at once
        super().on_response_complete()
        self.pipeline = parsed
        if self.transport.is_closing():
            return
        if self._wrong and not self._answering:
            self.send_400_response(self._wrong)
        elif self.pipeline or self._unparsed:
            self._wait_for_turn()
        elif not self._answering:
            self._stop_waiting()

    def _wait_for_turn(self) -> None:
        self.flow.pause_reading()
        self._unset_keepalive_if_required()
        if not self._is_waiting:
            self._is_waiting = True
            self._gate.turns.call(self._go_on)

    def _go_on(self) -> None:
        self._is_waiting = False
        if self.transport.is_closing():
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            if not self._answering:
                self._wait_for_request()
            self._parse()
            in_body = not self._in_head and len(self.cycle.body) <= HIGH_WATER_LIMIT
            if not self._unparsed and (in_body or not self._answering):
                self.flow.resume_reading()
        self._is_busy = bool(self.pipeline or self._unparsed)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unstick()
        self._stuck = self.loop.call_later(self._gate.send_timeout_s, self._look_if_stuck, self._unsent())

    def resume_writing(self) -> None:
        self._unstick()
        super().resume_writing()

    def _unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def _look_if_stuck(self, before: int) -> None:
        if self._unsent() >= before:
            self.transport.abort()
        else:
            self._stuck = self.loop.call_later(self._gate.send_timeout_s, self._look_if_stuck, self._unsent())

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid or too long input once earlier requests are answered, and hang up."""
        if self._answering and self._in_head:
            self._wrong = msg
            self.flow.pause_reading()
            return
        if self._answering:  # the input is the body of this request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started or self.pipeline:
                self.transport.abort()
                return
        hint = f"request line and headers: {HEAD_BYTES_MAX} bytes at most"
        self._turn_away(last_answer(Problem("bad-request", msg, hint=hint)))

    def _turn_away(self, answer: bytes) -> None:
        self._refused = True
        self._stop_waiting()
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self._too_slow)


def protocol_config(app: Any) -> Config:
    config = Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )
    config.load()
    return config
