"""The DCP endpoint of one process: a KV endpoint whose connections can become producers.

Knows the differences from the KV endpoint: names of connections, notifications of new data, and silent clients.
Invariants:
- a new connection closes the user's older connection of the same name, never another user's (kv_engine
  docs/dcp/documentation/commands/open-connection.md);
- a client that has streams, and did not enable noops, may stay silent;
- if a changed users file forbids a stream, the stream ends within a second.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import asdict

from mirror.clock import Clock
from mirror.config import Settings
from mirror.log import get_logger
from mirror.serve.access.auth import Users
from mirror.serve.dcp.connection import DcpConnection, DcpSession, SourceContact
from mirror.serve.dcp.producer import DcpCounters
from mirror.serve.kv.bucket import KvBucket
from mirror.serve.kv.connection import KvConnection
from mirror.serve.kv.map import ServedMap
from mirror.serve.kv.server import KvServer
from mirror.serve.listener import Address
from mirror.serve.watch import Watch

log = get_logger("dcp")

PERSISTENCE_UNKNOWN = (
    "a DCP client waits until writes are persisted at the source, which this mirror does not know: "
    "set publish = persisted, or turn off the client's rollback mitigation (docs/reading.md)"
)


class DcpServer(KvServer):
    connection_type = DcpConnection
    session_type = DcpSession

    def __init__(
        self, bucket: KvBucket, users: Users, cluster_map: ServedMap, clock: Clock, settings: Settings
    ) -> None:
        super().__init__(bucket, users, cluster_map, clock, settings)
        self.watch = Watch(lambda: bucket.view)
        self.dcp_counters = DcpCounters()
        self.contact: SourceContact | None = None
        self.warnings: list[str] = []
        self._names: dict[tuple[str, str], DcpConnection] = {}

    async def start(self, sockets: Sequence[tuple[Address, socket.socket]], tls: ssl.SSLContext | None = None) -> None:
        self.watch.start()
        await super().start(sockets, tls)

    async def stop(self, grace_s: float = 1.0) -> None:
        await super().stop(grace_s)
        await self.watch.stop()

    def status(self) -> dict[str, int]:
        found = {name.replace("kv_", "dcp_"): number for name, number in super().status().items()}
        return found | {f"dcp_{name}": number for name, number in asdict(self.dcp_counters).items()}

    # -- for connections

    def named(self, connection: DcpConnection, name: str) -> None:
        """Register a connection's name, and close the user's older connection of that name."""
        self._forget(connection)
        key = connection.name_key = connection.session.known_reader.name, name
        older = self._names.get(key)
        if older is not None and older is not connection:
            log.info("connection-name-taken", name=name)
            older.abort()
        self._names[key] = connection

    def persistence_refused(self, agent: str) -> None:
        """Warn once: such a client gets nothing, asks again every few seconds, and may not say why."""
        if not self.warnings:
            log.warning("persistence-unknown", agent=agent[:80], message=PERSISTENCE_UNKNOWN)
            self.warnings.append(PERSISTENCE_UNKNOWN)

    def closed(self, connection: KvConnection) -> None:
        if isinstance(connection, DcpConnection):
            self._forget(connection)
        super().closed(connection)

    def _forget(self, connection: DcpConnection) -> None:
        if connection.name_key is not None and self._names.get(connection.name_key) is connection:
            del self._names[connection.name_key]

    # -- the sweep

    def sweep(self) -> None:
        """Sweep as for KV, but let clients stay silent if they have streams and did not enable noops."""
        for connection in self.connections:
            producer = connection.producer if isinstance(connection, DcpConnection) else None
            if producer is None:
                continue
            if producer.streams and not producer.controls.noop_enabled:
                connection.last_received_s = self.now_s
            if producer.reader != connection.session.reader:  # the client logged in again, or its login failed
                producer.permit(connection.session.reader)
        super().sweep()
