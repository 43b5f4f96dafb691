"""Connections of HTTP readers: uvicorn's protocol with limits on how many there are and how long they may dawdle.

Knows asyncio's transports and uvicorn's own parser of HTTP/1.1; never a route. Invariants: a connection that says
nothing, says half a request, or takes nothing of its answer is gone after its limit, with whatever was kept for it;
more connections than allowed are turned away at once; what is on its way to slow readers has one bound for all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mirror.serve.http_problems import Problem

HEAD_BYTES_MAX = 256 * 1024
"""Request line and headers; the position of a reader of 1,024 vbuckets is some 10 KiB."""
LINGER_S = 2.0
"""How long what a refused client still sends is thrown away: closing at once would take the refusal away from it."""
REQUEST_TIMEOUT_S = 20.0
"""For a request to arrive whole, from the opening of the connection or its first byte."""
TURNED_AWAY = (
    b"HTTP/1.1 %s\r\nContent-Type: application/problem+json\r\nRetry-After: 1\r\n"
    b"Cache-Control: no-store\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
)
BUSY = bytes(Problem("too-busy", "this process has as many connections as it may have").response().body)

logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())


class Budget:
    """Bytes of answers that wait for their readers, over all connections."""

    def __init__(self, bytes_max: int) -> None:
        """Nothing is out."""
        self._bytes_max = bytes_max
        self.out_bytes = 0

    def take(self, byte_count: int) -> None:
        """Have so much on its way. Raises Problem when that is too much just now; a first one always goes."""
        if self.out_bytes and self.out_bytes + byte_count > self._bytes_max:
            raise Problem("too-busy", "slow readers hold all the memory that answers may take")
        self.out_bytes += byte_count

    def give_back(self, byte_count: int) -> None:
        """It was taken, or will not be."""
        self.out_bytes -= byte_count
        assert self.out_bytes >= 0, "given back more than was taken"


@dataclass(slots=True)
class Gate:
    """Who is connected to one process."""

    connections_max: int = 1024
    idle_timeout_s: float = 600.0
    send_timeout_s: float = 30.0
    request_timeout_s: float = REQUEST_TIMEOUT_S
    changed: Callable[[int], None] = lambda _: None
    state: ServerState = field(default_factory=ServerState)
    turned_away_count: int = 0


class BoundedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, config: Config, gate: Gate, app_state: dict[str, Any]) -> None:
        """`app_state` is what requests see of the listener they came in by."""
        super().__init__(config, gate.state, app_state)
        self._gate = gate
        self._timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, or turn it away."""
        super().connection_made(transport)
        if len(self._gate.state.connections) > self._gate.connections_max:
            self._gate.turned_away_count += 1
            self._turn_away(b"503 Service Unavailable", BUSY)
            return
        self._gate.changed(len(self._gate.state.connections))
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_waiting()
        self._unstick()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        self._gate.changed(len(self._gate.state.connections))

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
        """Let uvicorn read on; a request has so long to be whole."""
        if self._refused or self.transport.is_closing():
            return
        self._wait_for_request()
        super().data_received(data)

    def handle_events(self) -> None:
        """Stop the clock once a request is being answered: its own limits hold from there."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """The next request may take its time, but not for ever."""
        super().on_response_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._stop_waiting()

    def pause_writing(self) -> None:
        """The reader takes nothing for now."""
        super().pause_writing()
        self._unstick()
        self._stuck = self.loop.call_later(self._gate.send_timeout_s, self._look_if_stuck, self._unsent())

    def resume_writing(self) -> None:
        """The reader took it."""
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
        """What came is no HTTP, or too long: say so, and hang up."""
        body = Problem("bad-request", msg, hint=f"request line and headers: {HEAD_BYTES_MAX} bytes at most").response()
        self._turn_away(b"400 Bad Request", bytes(body.body))

    def _turn_away(self, status: bytes, body: bytes) -> None:
        self._refused = True
        self._stop_waiting()
        self.transport.write(TURNED_AWAY % (status, len(body), body))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER_S, self._too_slow)

    def _should_upgrade(self) -> bool:
        return False


def protocol_config(app: Any) -> Config:
    """What uvicorn's protocol needs of its settings."""
    config = Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
    )
    config.load()
    return config
