"""Asks all nodes of a bucket for their cluster map, at intervals and on demand. A slow node delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from mirror.clock import Clock, happens
from mirror.errors import ClusterError, ConfigError
from mirror.feed.cluster.connections import QueriedNode
from mirror.feed.cluster.discovery import first_addresses
from mirror.feed.connection.bootstrap import Access, Handshake, fetch_newer_config
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.node_session import NodeSession
from mirror.feed.connection.transport import Link
from mirror.ingest.topology import ClusterMap, NewestMap
from mirror.log import get_logger

log = get_logger("feed")

ROUND_PAUSE_S = 0.05
"""Shortest pause between two rounds, so a thousand vbuckets that ask for a newer map cause only one round."""
ROUND_PAUSE_MAX_S = 1.0
"""The pause doubles up to this while no newer map appears. A mirror as the source, for example, refuses vbuckets during
its first fill, and each refusal requests a map.
"""
MAP_TIMEOUT_S = 2.0


class QueriesOwner(Protocol):
    def read(self, config: bytes, address: NodeAddress) -> ClusterMap:
        """Parse the map that a node sent. Raises HandshakeFailed."""
        ...

    def on_map(self, address: NodeAddress, found: ClusterMap) -> None: ...


class _Node(QueriedNode):
    task: asyncio.Task[None] | None = None
    config = b""
    """The node's last answer, to skip an equal answer: servers before 7.6 send the whole map each time."""
    error: str | None = "not queried yet"


class MapQueries:
    def __init__(self, access: Access, clock: Clock, maps: NewestMap, owner: QueriesOwner) -> None:
        self.session_at: Callable[[NodeAddress], NodeSession | None] = lambda _address: None
        self.nodes: dict[NodeAddress, _Node] = {}
        self._access = access
        self._clock = clock
        self._maps = maps
        self._owner = owner
        self._hosts: tuple[NodeAddress, ...] = ()
        self._wake = asyncio.Event()

    @property
    def error(self) -> str | None:
        """The reason why no node sends a map; None if a node does, or if no node was queried yet."""
        errors = [node.error for node in self.nodes.values() if node.failures.count or node.error is None]
        return None if None in errors or not errors else errors[-1]

    def wake(self) -> None:
        """Begin a round now, instead of at the end of the interval."""
        self._wake.set()

    async def run(self) -> None:
        """Query all nodes every `map_poll_interval_s`, and after `wake`."""
        interval_s = self._access.settings.map_poll_interval_s
        pause_s, known = ROUND_PAUSE_S, self._maps.current
        try:
            async with asyncio.TaskGroup() as queries:
                while True:
                    if not await happens(self._wake, interval_s):
                        pause_s = ROUND_PAUSE_S
                    self._wake.clear()
                    await self._find_hosts()
                    self._begin_round(queries)
                    if self._maps.current is not known:
                        pause_s, known = ROUND_PAUSE_S, self._maps.current
                    await self._clock.sleep(pause_s)
                    pause_s = min(pause_s * 2, max(min(ROUND_PAUSE_MAX_S, interval_s), ROUND_PAUSE_S))
        finally:
            for node in self.nodes.values():
                node.close()

    async def _find_hosts(self) -> None:
        """Look the source's name up again while no node answers, because its hosts may have changed."""
        if not self._hosts or all(node.error is not None for node in self.nodes.values()):
            self._hosts = await first_addresses(self._access.source)

    def _begin_round(self, queries: asyncio.TaskGroup) -> None:
        followed = self._maps.current
        members = map(self._access.address_of, followed.nodes) if followed is not None else ()
        targets = {address for address in (*members, *self._hosts) if address is not None}
        gone = [self.nodes.pop(address) for address in self.nodes.keys() - targets]
        for node in gone:
            node.close()
            if node.task is not None:
                node.task.cancel()
        for address in targets:
            node = self.nodes.setdefault(address, _Node(address, self._access, self._clock))
            # A slow node is not asked twice at a time, and delays no round of the others.
            if (node.task is None or node.task.done()) and not node.pausing:
                node.task = queries.create_task(self._ask(node), name=f"map of {address}")

    async def _ask(self, node: _Node) -> None:
        try:
            link, handshake = await self._connection(node)
            config = await fetch_newer_config(link, handshake, self._maps.current, timeout_s=MAP_TIMEOUT_S)
            is_new = bool(config) and config != node.config
            found = self._owner.read(config, node.address) if is_new else None
        except (ClusterError, ConfigError) as error:
            log.debug("no-map", node=str(node.address), error=str(error))
            node.failed(error)
            node.error = str(error)
            return
        node.error = None
        node.failures.clear()
        if found is not None:
            node.config = config
            self._owner.on_map(node.address, found)

    async def _connection(self, node: _Node) -> tuple[Link, Handshake]:
        """Return the connection of the node's session or, without one, a separate connection."""
        session = self.session_at(node.address)
        if session is not None:
            node.close()
            return session.link, session.handshake
        if node.link is None or node.link.closed:
            node.config = b""
        return await node.open(), node.handshake
