"""One HTTP process: the application on its sockets, from its start to its end.

At a stop, requests in progress have `DRAIN_S` to be answered; streams end at once, so that their clients connect to
another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

from mirror.clock import Clock
from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.messages import ProcessCommand, ProcessReport
from mirror.serve.access.tls import server_tls
from mirror.serve.http.api import make_app
from mirror.serve.http.protocol import Gate, HttpConnection
from mirror.serve.http.service import Service
from mirror.serve.http.status import Report
from mirror.server.admission import Acceptor, Admission
from mirror.server.listener import Address
from storage.errors import StorageError

DRAIN_S = 5.0
SWEEP_S = 0.5
"""Seconds between sweeps, which close connections whose time is over."""


class HttpServer:
    def __init__(
        self,
        settings: Settings,
        sockets: Sequence[tuple[Address, socket.socket]],
        stored: Callable[[Path], Report],
        clock: Clock,
    ) -> None:
        self.service = Service(settings, stored, clock)
        self.gate = Gate(make_app(self.service), self.service.has_lost_rights, self.service.turns)
        self.admission = Admission(settings, self.service.turns)
        self._sockets = sockets
        self._tls = server_tls(settings) if any(address.tls for address, _ in sockets) else None
        self._acceptors: list[Acceptor] = []
        self._stop = asyncio.Event()

    async def start(self) -> None:
        self._set_date()
        with contextlib.suppress(StorageError):
            self.service.view.published({})  # takes 30 ms, so not in the first request
        for address, listening in self._sockets:
            factory = partial(HttpConnection, self.gate, address.local)
            tls = self._tls if address.tls else None
            self._acceptors.append(Acceptor(self.admission, listening, factory, tls))

    async def run(self) -> None:
        tasks = [asyncio.create_task(each) for each in (self._stop.wait(), self._sweep(), self.service.status.run())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end()

    async def stop(self) -> None:
        self._stop.set()

    async def _end(self) -> None:
        self.service.stopping.set()
        self.service.watch.wake()
        self.service.write_watch.wake()
        for acceptor in self._acceptors:
            acceptor.close()
        await self.gate.stop(DRAIN_S)
        if self.service.queries is not None:
            await self.service.queries.close()
        self.service.logins.close()
        self.service.worker.close()
        self.service.changes_thread.shutdown(wait=False, cancel_futures=True)
        self.service.mirror.close()

    async def _sweep(self) -> None:
        while True:
            self._set_date()
            now_s = asyncio.get_running_loop().time()
            for connection in list(self.gate.connections):
                connection.sweep(now_s)
            await asyncio.sleep(SWEEP_S)

    def _set_date(self) -> None:
        now = formatdate(self.service.clock.wall_ms() / 1000, usegmt=True)
        self.gate.date = (b"date", now.encode())

    def status(self) -> ProcessReport:
        connections = len(self.gate.connections)
        return {
            "vbuckets": [],
            "counters": self.service.requests.counters() | {"http_connections": connections},
            "request_seconds": self.service.requests.latencies.figures(),
            "connections": connections,
            "streams": self.service.requests.streams.total(),
            "turned_away": self.admission.rejected_count,
            "unsent_bytes": self.service.budget.out_bytes,
        }

    async def request(self, command: ProcessCommand) -> dict[str, Any]:
        raise ConfigError(f"an HTTP process knows no command {command.op!r}")
