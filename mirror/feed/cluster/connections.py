"""The connections to the source: one session for each needed node, and backpressure on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from mirror.clock import Clock
from mirror.config import Settings
from mirror.errors import HandshakeFailed, MirrorError
from mirror.feed.connection.bootstrap import Access, Handshake, enter
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.node_session import CheckNode, NodeSession, SessionOwner
from mirror.feed.connection.transport import Link, Opaques
from mirror.ingest.instructions import RetryReason
from mirror.ingest.reactions import delay_s
from mirror.log import get_logger
from mirror.wire.errors import ProtocolError

log = get_logger("feed")

FIRST_DELAY_MS = 100
"""Pause after the first failure; each further failure of the same kind doubles it."""


class ConnectionsOwner(SessionOwner, Protocol):
    def on_node_ready(self, keeper: NodeKeeper) -> None: ...

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None: ...


class Connections:
    def __init__(
        self,
        access: Access,
        clock: Clock,
        owner: ConnectionsOwner,
        check: CheckNode,
        *,
        name: str,
        on_defect: Callable[[BaseException], None],
    ) -> None:
        """`name` is the DCP name. `on_defect` is called with an unexpected error that ended a keeper."""
        self.keepers: dict[NodeAddress, NodeKeeper] = {}
        self.opaques = Opaques()
        self.acks_held = False
        self.access = access
        self.clock = clock
        self.owner = owner
        self.on_defect = on_defect
        self.check = check
        self.name = name
        self._stopping: set[asyncio.Task[None]] = set()

    def keep(self, address: NodeAddress) -> NodeKeeper:
        keeper = self.keepers.get(address)
        if keeper is None:
            keeper = self.keepers[address] = NodeKeeper(address, self)
        return keeper

    def retain(self, needed: Collection[NodeAddress | None]) -> None:
        """Close the sessions of all other nodes."""
        for address in [address for address in self.keepers if address not in needed]:
            task = asyncio.get_running_loop().create_task(self.keepers.pop(address).stop())
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def close(self) -> None:
        await asyncio.gather(*(keeper.stop() for keeper in self.keepers.values()), *self._stopping)
        self.keepers.clear()

    def session_at(self, address: NodeAddress | None) -> NodeSession | None:
        keeper = None if address is None else self.keepers.get(address)
        return keeper.session if keeper is not None and keeper.ready else None

    def ready_sessions(self) -> list[NodeSession]:
        return [keeper.session for keeper in self.keepers.values() if keeper.session is not None and keeper.ready]

    def errors(self) -> str:
        """Return the nodes' errors, to be appended to a message; empty if there are none."""
        found = {keeper.error.what for keeper in self.keepers.values() if keeper.error is not None}
        return "; " + "; ".join(sorted(found)) if found else ""

    def hold_acks(self) -> None:
        """Hold back all acknowledgements: the source pauses once its flow-control windows are full."""
        self.acks_held = True
        for session in self.ready_sessions():
            session.acks_held = True

    def release_acks(self) -> None:
        self.acks_held = False
        for session in self.ready_sessions():
            session.release_acks()


class FailureCount:
    """FailureCount in a row, and the pause after each: up to `retry_delay_max_ms`, and up to a minute after a refusal.

    The pause grows with the failures of one kind: an engine was back without its bucket for 3 s, and the mirror paused
    for 45 s, because the outage before counted.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self.count = 0
        self._settings = settings
        self._clock = clock
        self._kind: type[MirrorError] | None = None
        self._alike = 0

    def add(self, error: MirrorError) -> float:
        """Count a failure; return the pause in seconds before the next try."""
        # All passing errors are one kind: a node that starts fails in several ways, one after the other.
        kind = MirrorError if error.retryable else type(error)
        self._alike = self._alike + 1 if kind is self._kind else 0
        self._kind = kind
        self.count += 1
        settings, jitter = self._settings, self._clock.jitter()
        if not error.retryable:
            return delay_s(RetryReason.REFUSED_FOR_NOW, self._alike, jitter)
        full_ms = min(FIRST_DELAY_MS << min(self._alike, 20), settings.retry_delay_max_ms)
        # Spread, because all workers lost the node at the same moment.
        return full_ms * (0.5 + 0.5 * jitter) / 1000

    def clear(self) -> None:
        self.count, self._kind = 0, None

    @property
    def to_be_logged(self) -> bool:
        """True for failures 1, 2, 4, 8...: the log must not fill."""
        return self.count & (self.count - 1) == 0


def report_defect(task: asyncio.Task[None], on_defect: Callable[[BaseException], None]) -> None:
    """Call `on_defect` with the error that ended a task, or with the first error of an error group."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    on_defect(error)


class QueriedNode:
    """A connection to one node for queries only, opened on demand. After a failure it pauses, longer each time."""

    def __init__(self, address: NodeAddress, access: Access, clock: Clock) -> None:
        self.address = address
        self.failures = FailureCount(access.settings, clock)
        self.handshake = Handshake(frozenset())
        self.link: Link | None = None
        self._access = access
        self._clock = clock
        self._not_before_s = 0.0

    @property
    def pausing(self) -> bool:
        return self._clock.monotonic() < self._not_before_s

    async def open(self) -> Link:
        """Return the open connection, or log in. Raises ClusterError, ConfigError."""
        if self.link is None or self.link.closed:
            self.link, self.handshake = await enter(self._access, self.address, self._clock)
            if self.link.closed:
                raise HandshakeFailed(f"{self.address} hung up after the login")
        return self.link

    def failed(self, error: MirrorError) -> None:
        self.close()
        self._not_before_s = self._clock.monotonic() + self.failures.add(error)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None


class NodeKeeper:
    """Keeps a session to one node until `stop`: opens it, waits for its end, pauses, and opens the next."""

    def __init__(self, address: NodeAddress, connections: Connections) -> None:
        self.address = address
        self.session: NodeSession | None = None
        self.error: MirrorError | None = None
        self.failures = FailureCount(connections.access.settings, connections.clock)
        self.reconnects = 0
        self._connections = connections
        self._task = asyncio.create_task(self._keep(), name=f"node {address}")
        self._task.add_done_callback(partial(report_defect, on_defect=connections.on_defect))

    @property
    def ready(self) -> bool:
        return self.session is not None and self.session.ready

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        connections = self._connections
        clock = connections.clock
        while True:
            session = NodeSession(
                connections.access,
                self.address,
                connections.owner,
                clock,
                name=connections.name,
                opaques=connections.opaques,
                check=connections.check,
            )
            try:
                await session.open()
            except (MirrorError, ProtocolError) as error:
                pause_s = self._failed(error)
            else:
                if self.failures.count:
                    log.info("node-back", node=str(self.address), failures=self.failures.count)
                self.session, self.error = session, None
                self.failures.clear()
                # A session that opens during backpressure holds back, too.
                session.acks_held = connections.acks_held
                try:
                    connections.owner.on_node_ready(self)
                    # Shielded: a keeper that is stopped must not cancel the future that `on_lost` sets.
                    pause_s = self._failed(await asyncio.shield(session.closed))
                finally:
                    self.session = None
                    session.close()
            await clock.sleep(pause_s)
            self.reconnects += 1

    def _failed(self, error: Exception) -> float:
        """Show the error; return the pause before the next session."""
        self.error = error if isinstance(error, MirrorError) else MirrorError(str(error), retryable=True)
        self.session = None
        pause_s = self.failures.add(self.error)
        if self.failures.to_be_logged:
            log.warning("node-failed", node=str(self.address), error=str(self.error), failures=self.failures.count)
        self._connections.owner.on_node_failed(self, self.error)
        return pause_s
