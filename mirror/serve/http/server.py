"""One HTTP process: the application on its sockets, from its start to its end.

Knows settings, sockets and uvicorn's protocol; `api` knows the answers. The supervisor starts it, gives it its sockets,
reads its status and replaces it. Invariants: requests from before a stop are answered within the time that is left;
streams end at once, so that their readers find another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

from mirror.clock import Clock
from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.messages import ProcessCommand, ProcessReport
from mirror.serve.access.admission import Acceptor, Admission
from mirror.serve.access.auth import Users, users_of
from mirror.serve.access.logins import Logins
from mirror.serve.access.tls import server_tls
from mirror.serve.http.api import make_app
from mirror.serve.http.protocol import BoundedProtocol, Gate, protocol_config
from mirror.serve.http.query_pool import Queries
from mirror.serve.http.service import PublishWatch, Service
from mirror.serve.http.status import Report, StatusReporter
from mirror.serve.http.view import Mirror
from mirror.serve.listener import Limits
from mirror.serve.metrics import Requests
from mirror.serve.turns import Budget
from storage.errors import StorageError

SWITCH_INTERVAL_S = 0.0005
"""Time that a bulk read computes before the event loop runs: Python's own 5 ms are as long as some requests."""
DRAIN_S = 5.0
"""For answers on their way when the process stops."""
STREAMS_SHARE = 8
"""One in so many of a process's connections may be a stream of changes."""
STREAMS_PER_READER_SHARE = 2
"""One in so many of these may be one user's, or one anonymous peer's."""


@dataclass(frozen=True, slots=True)
class Listening:
    socket: socket.socket
    local: bool
    tls: bool = False


class HttpServer:
    def __init__(
        self,
        settings: Settings,
        listening: Sequence[Listening],
        stored: Callable[[Path], Report],
        clock: Clock,
        *,
        name: str = "http-0",
        users: Users | None = None,
    ) -> None:
        """`stored` makes a status from the store alone; `name` is this process in the metrics."""
        if settings.data is None:
            raise ConfigError("no data directory is given", hint="give --data DIR", setting="data")
        limits = Limits.of(settings)
        requests = Requests(name)
        mirror = Mirror(settings.data, verify_reads=settings.verify_reads)
        users = users_of(settings) if users is None else users
        streams_max = max(1, limits.connections_max // STREAMS_SHARE)
        self.service = Service(
            mirror=mirror,
            status=StatusReporter(
                mirror, stored, lambda: requests.document_total, clock, lag_limit_s=settings.ready_lag_limit_s
            ),
            users=users,
            logins=Logins(users, clock),
            requests=requests,
            budget=Budget(limits.unsent_bytes_max),
            watch=PublishWatch(mirror, clock),
            clock=clock,
            stale_reads=settings.resync_reads == "stale",
            streams_max=streams_max,
            streams_per_reader_max=max(1, streams_max // STREAMS_PER_READER_SHARE),
            queries=Queries(settings) if settings.sql else None,
        )
        app = make_app(self.service)
        self.gate = Gate(
            limits.idle_timeout_s,
            limits.send_timeout_s,
            changed=requests.open_connections.set,
            answer_now=app.answer_now,
            turns=self.service.turns,
        )
        self.admission = Admission(limits, self.service.turns)
        self._settings = settings
        self._listening = list(listening)
        self._tls = server_tls(settings) if any(each.tls for each in listening) else None
        self._config = protocol_config(app)
        self._config.timeout_keep_alive = int(max(1, limits.idle_timeout_s))
        self._acceptors: list[Acceptor] = []
        self._stop = asyncio.Event()

    async def start(self) -> None:
        self._set_date()
        with contextlib.suppress(StorageError):
            self.service.view.published()  # as in `KvBucket`
        for each in self._listening:
            tls: ssl.SSLContext | None = self._tls if each.tls else None
            factory = partial(BoundedProtocol, self._config, self.gate, {"local": each.local})
            self._acceptors.append(Acceptor(self.admission, each.socket, factory, tls, answers=True))

    async def run(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        if not self._acceptors:
            await self.start()
        tasks = [asyncio.create_task(self.service.status.run()), asyncio.create_task(self._dates())]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await self._end()

    async def stop(self) -> None:
        self._stop.set()

    async def _end(self) -> None:
        self.service.stopping.set()
        self.service.watch.wake()
        for acceptor in self._acceptors:
            acceptor.close()
        state = self.gate.state
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(list(state.tasks), timeout=DRAIN_S)
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
        self._acceptors.clear()
        if self.service.queries is not None:
            await self.service.queries.close()
        self.service.logins.close()
        self.service.changes_thread.shutdown(wait=False, cancel_futures=True)
        self.service.mirror.close()

    async def _dates(self) -> None:
        while True:
            self._set_date()
            await self.service.clock.sleep(1.0)

    def _set_date(self) -> None:
        now = formatdate(self.service.clock.wall_ms() / 1000, usegmt=True)
        self.gate.state.default_headers[:] = [(b"date", now.encode())]

    def status(self) -> ProcessReport:
        connections = len(self.gate.state.connections)
        return {
            "vbuckets": [],
            "counters": self.service.requests.counters() | {"http_connections": connections},
            "request_seconds": self.service.requests.latencies.figures(),
            "connections": connections,
            "streams": self.service.requests.stream_count,
            "turned_away": self.admission.rejected_count,
            "unsent_bytes": self.service.budget.out_bytes,
        }

    async def request(self, command: ProcessCommand) -> dict[str, Any]:
        """Raises ConfigError: an HTTP process has no commands."""
        raise ConfigError(f"an HTTP process knows no command {command.op!r}")
