"""The KV endpoint of one process: its listeners, its connections, and the limits over all of them.

Knows the event loop and the connections; must never know requests. `admission` decides who may connect. Invariants:
- a connection is closed if its client sends nothing, or takes no answers, for too long;
- memory is bounded: if the unsent bytes of clients that take no data exceed a limit, the connection with most of them
  is closed;
- a stop closes the listeners, then gives clients a moment to take their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence
from functools import partial

from mirror.clock import Clock
from mirror.config import Settings
from mirror.log import get_logger
from mirror.serve.access.admission import Acceptor, Admission
from mirror.serve.access.auth import Users, current
from mirror.serve.access.logins import Logins
from mirror.serve.kv.bucket import KvBucket
from mirror.serve.kv.connection import KvConnection
from mirror.serve.kv.fast import Counters
from mirror.serve.kv.map import ServedMap
from mirror.serve.kv.session import KvSession
from mirror.serve.listener import Address
from mirror.server.turns import Turns, Worker

SWEEP_S = 0.5
"""Seconds between sweeps. A changed users file takes effect within three of them: one starts to read it, one applies
it, one drops removed users."""
CROWDED_SEND_TIMEOUT_S = 3.0
"""A client that takes no answers for this long is dropped while others wait for memory."""
REPLACED_CHECK_S = 1.0

log = get_logger("kv")


class KvServer:
    connection_type: type[KvConnection] = KvConnection
    session_type = KvSession

    def __init__(
        self,
        bucket: KvBucket,
        users: Users,
        cluster_map: ServedMap,
        clock: Clock,
        settings: Settings,
    ) -> None:
        self.counters = Counters()
        self.now_s = clock.monotonic()
        self.requests_per_turn = settings.kv_pipeline_max
        self.request_bytes_max = settings.kv_request_bytes_max
        self.turns = Turns()
        self.connections: set[KvConnection] = set()
        self.dropped_count = 0
        """Clients dropped for silence, unsent answers, or a removed user."""
        self.bucket = bucket
        self._users = users
        self._map = cluster_map
        self._clock = clock
        self._settings = settings
        self.admission = Admission(settings, self.turns)
        self.worker = Worker(settings.reader_unsent_bytes_max)
        self._logins = Logins(users, clock)
        self._acceptors: list[Acceptor] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()

    async def start(self, sockets: Sequence[tuple[Address, socket.socket]], tls: ssl.SSLContext | None = None) -> None:
        for address, listening in sockets:
            assert not address.tls or tls is not None, "addresses were checked against the settings"
            factory = partial(self.connection_type, self, address)
            self._acceptors.append(Acceptor(self.admission, listening, factory, tls if address.tls else None))
        self._sweeper = asyncio.create_task(self._sweep(), name="kv sweeper")

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
        self._logins.close()
        self.worker.close()

    def status(self) -> dict[str, int]:
        counters = self.counters
        return {
            "kv_connections": len(self.connections),
            "kv_accepted": self.admission.accepted_count,
            "kv_rejected": self.admission.rejected_count,
            "kv_dropped": self.dropped_count + self.admission.evicted_count,
            "kv_requests": counters.requests,
            "kv_hits": counters.hits,
            "kv_misses": counters.misses,
            "kv_refused": counters.refused,
            "kv_errors": counters.errors,
            "kv_failed_logins": self._logins.failed_count,
            "kv_sent_bytes": counters.bytes_sent,
        }

    def change_map(self, cluster_map: ServedMap) -> None:
        """Replace the cluster map, and notify clients that negotiated it (kv_engine docs/BinaryProtocol.md, Clustermap
        Change Notification).
        """
        self._map = cluster_map
        for connection in list(self.connections):
            connection.session.cluster_map = cluster_map
            connection.map_changed()

    # -- for connections

    def opened(self, connection: KvConnection) -> None:
        self.connections.add(connection)

    def new_session(self, connection: KvConnection) -> KvSession:
        address = connection.address
        return self.session_type(
            self.bucket,
            self._users,
            self._map,
            self._logins,
            plain_allowed=address.local or address.tls,
            reader=self._users.anonymous if address.local else None,
            peer=connection.slot.peer,
        )

    def closed(self, connection: KvConnection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()

    def paused(self, connection: KvConnection) -> None:
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
                self.bucket.reopen_if_replaced()

    def sweep(self) -> None:
        send_timeout_s = self._settings.reader_send_timeout_s
        if self.worker.budget.waiting_count:
            send_timeout_s = min(send_timeout_s, CROWDED_SEND_TIMEOUT_S)
        for connection in list(self.connections):
            if not connection.ended:
                self._check_rights(connection)
            if connection.outgoing.took_nothing_for_s(self.now_s) > send_timeout_s:
                self._drop(connection, "takes nothing of its answers")
            elif connection.outgoing.paused_s is not None:
                continue
            elif self.now_s - connection.last_received_s > self._settings.reader_idle_timeout_s:
                self._drop(connection, "silent for too long")

    def _check_rights(self, connection: KvConnection) -> None:
        """Give a client its user's present rights. The next sweep drops a removed user."""
        session = connection.session
        if session.revoked:
            self._drop(connection, "the user may not log in any more")
        elif session.reader is not None and (now := current(self._users, session.reader)) != session.reader:
            session.revoked = now is None
            session.reader = now
            connection.rights_changed(now)

    def _drop(self, connection: KvConnection, why: str) -> None:
        self.dropped_count += 1
        log.info("client-dropped", why=why, agent=connection.session.agent[:80])
        connection.abort()
