"""The KV or DCP endpoint of one process: its listeners, its connections, and the limits over all of them.

Memory is bounded: if the unsent bytes of clients that take no data exceed a limit, the connection with most of them is
closed. A stop closes the listeners, then gives clients a moment to take their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from mirror.clock import Clock
from mirror.config import Settings
from mirror.log import get_logger
from mirror.server.admission import IDLE_TIMEOUT_S, SEND_TIMEOUT_S, Acceptor, Admission, Slot
from mirror.server.connection import Connection, Counters, ServedSession
from mirror.server.listener import Address
from mirror.server.turns import Turns, Worker

SWEEP_S = 0.5
"""Seconds between sweeps. A changed users file takes effect within two: one applies it, one drops removed users."""
CROWDED_SEND_TIMEOUT_S = 3.0
"""A client that takes no answers for this long is dropped while others wait for memory."""
REPLACED_CHECK_S = 1.0

log = get_logger("port")


class Clients(Protocol):
    """The users of an endpoint, and what they read."""

    @property
    def failed_login_count(self) -> int: ...

    def new_session(self, address: Address, peer: str) -> ServedSession:
        """`peer`: as for `Admission`."""

    def reopen_if_replaced(self) -> object:
        """Called each second."""

    def close(self) -> None: ...


class Endpoint:
    def __init__(self, kind: str, clients: Clients, clock: Clock, settings: Settings) -> None:
        """`kind` is a prefix for the names of counters."""
        self.counters = Counters()
        self.now_s = clock.monotonic()
        self.turns = Turns()
        self.connections: set[Connection] = set()
        self.dropped_count = 0
        """Clients dropped for silence, unsent answers, or a removed user."""
        self.admission = Admission(settings, self.turns)
        self.worker = Worker(settings.reader_unsent_bytes_max)
        self._kind = kind
        self.clients = clients
        self._clock = clock
        self._settings = settings
        self._acceptors: list[Acceptor] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()

    async def start(self, sockets: Sequence[tuple[Address, socket.socket]], tls: ssl.SSLContext | None = None) -> None:
        for address, listening in sockets:
            assert not address.tls or tls is not None, "addresses were checked against the settings"
            factory = partial(self._connection, address)
            self._acceptors.append(Acceptor(self.admission, listening, factory, tls if address.tls else None))
        self._sweeper = asyncio.create_task(self._sweep(), name="sweeper")

    def _connection(self, address: Address, slot: Slot) -> Connection:
        return Connection(self, self.clients.new_session(address, slot.peer), slot)

    async def stop(self, grace_s: float = 1.0) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors.clear()
        for connection in list(self.connections):
            connection.hang_up()
        self._empty.clear()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), grace_s)
        for connection in list(self.connections):
            connection.abort()
        self.clients.close()
        self.worker.close()

    def status(self) -> dict[str, int]:
        counters = self.counters
        found = {
            "connections": len(self.connections),
            "accepted": self.admission.accepted_count,
            "rejected": self.admission.rejected_count,
            "dropped": self.dropped_count + self.admission.evicted_count,
            "requests": counters.requests,
            "hits": counters.hits,
            "misses": counters.misses,
            "refused": counters.refused,
            "errors": counters.errors,
            "failed_logins": self.clients.failed_login_count,
            "sent_bytes": counters.bytes_sent,
        }
        return {f"{self._kind}_{name}": number for name, number in found.items()}

    # -- for connections

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def paused(self, connection: Connection) -> None:
        """Drop the clients with most unsent bytes if all paused clients together have too many."""
        paused = [each for each in self.connections if each.outgoing.paused_s is not None]
        total = sum(each.outgoing.unsent_bytes for each in paused)
        while total > self._settings.reader_unsent_bytes_max and paused:
            worst = max(paused, key=lambda each: each.outgoing.unsent_bytes)
            paused.remove(worst)
            total -= worst.outgoing.unsent_bytes
            self._drop(worst, "readers take too little, and it has most to take")

    # -- the sweep

    async def _sweep(self) -> None:
        checked_s = self._clock.monotonic()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.now_s = self._clock.monotonic()
            self.sweep()
            if self.now_s - checked_s >= REPLACED_CHECK_S:
                checked_s = self.now_s
                self.clients.reopen_if_replaced()

    def sweep(self) -> None:
        send_timeout_s = CROWDED_SEND_TIMEOUT_S if self.worker.budget.waiting_count else SEND_TIMEOUT_S
        for connection in list(self.connections):
            if connection.session.may_be_silent:
                connection.last_received_s = self.now_s
            if not connection.ended and (why := connection.session.check_rights()):
                self._drop(connection, why)
            if connection.outgoing.took_nothing_for_s(self.now_s) > send_timeout_s:
                self._drop(connection, "takes nothing of its answers")
            elif connection.outgoing.paused_s is not None:
                continue
            elif self.now_s - connection.last_received_s > IDLE_TIMEOUT_S:
                self._drop(connection, "silent for too long")

    def _drop(self, connection: Connection, why: str) -> None:
        self.dropped_count += 1
        log.info("client-dropped", why=why, agent=connection.session.agent[:80])
        connection.abort()
