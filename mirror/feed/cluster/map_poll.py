"""Cluster maps as they arrive: queried from all nodes in rounds, announced, or sent along with a refusal.

Knows nodes, the hosts of the connection string, connections and pauses; its owner decides which map is followed. A node
that was failed over while it was stopped still announces and answers its old map. A worker may be connected to such a
node alone, so it asks nodes that it is not connected to.

Invariants: each round queries every node of the followed map and every host of the source; a node is queried over its
open session, else over a connection of its own that stays open for announcements; a slow node delays no other; a node
that failed is tried again with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from mirror.clock import Clock
from mirror.errors import ClusterError, ConfigError, HandshakeFailed
from mirror.feed.cluster.connections import pause_s
from mirror.feed.cluster.srv import first_addresses
from mirror.feed.connection.bootstrap import Access, Handshake, enter, fetch_newer_config, read_map
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.session import NodeSession
from mirror.feed.connection.transport import Link
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap
from mirror.log import get_logger
from mirror.wire.codec_kv import decode_clustermap_notification
from mirror.wire.constants import ServerOpcode
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame

log = get_logger("feed")

ROUND_PAUSE_S = 0.05
"""Minimal pause between two rounds: a thousand vbuckets that ask for a newer map cause one round."""
ROUND_PAUSE_MAX_S = 1.0
"""The pause doubles up to this while no requested newer map appears: the vbuckets of a source that is a mirror and not
filled yet are refused for minutes.
"""
MAP_TIMEOUT_S = 2.0
"""Timeout for a node's map; it is queried again in the next round."""


class MapOwner(Protocol):
    """The follower of the maps."""

    def session_at(self, address: NodeAddress) -> NodeSession | None: ...

    def on_map(self, address: NodeAddress, found: ClusterMap) -> None:
        """Take a node's map, which may be older than the one that is followed, or of another bucket."""
        ...


class _Node:
    def __init__(self, address: NodeAddress) -> None:
        self.address = address
        self.task: asyncio.Task[None] | None = None
        self.link: Link | None = None
        self.handshake = Handshake(frozenset())
        self.config = b""
        """The node's last answer: servers before 7.6 send the whole map each time."""
        self.failures = 0
        self.not_before_s = 0.0
        self.error: str | None = "not queried yet"

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None


class MapPoller:
    """Asks the nodes, until cancelled."""

    def __init__(
        self,
        owner: MapOwner,
        maps: NewestMap,
        access: Access,
        clock: Clock,
        on_defect: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`maps` is not changed here. `on_defect` is called with the task of every request that ended, for those that
        ended in a defect.
        """
        self._owner = owner
        self._maps = maps
        self._access = access
        self._clock = clock
        self._on_defect = on_defect
        self._nodes: dict[NodeAddress, _Node] = {}
        self._hosts: tuple[NodeAddress, ...] = ()
        self._wake = asyncio.Event()

    @property
    def error(self) -> str | None:
        """The reason why no node gives a map; None if one does, or if none was queried yet."""
        errors = [node.error for node in self._nodes.values() if node.failures or node.error is None]
        return None if None in errors or not errors else errors[-1]

    def is_away(self, address: NodeAddress) -> bool:
        """Return True if the node did not answer when it was last queried."""
        node = self._nodes.get(address)
        return node is not None and node.failures > 0

    def wake(self) -> None:
        """Ask now instead of at the end of the interval."""
        self._wake.set()

    def on_notice(self, address: NodeAddress, frame: Frame) -> None:
        """Take a node's announcement of a map, perhaps with the map (SDK RFC 75)."""
        if frame.opcode != ServerOpcode.CLUSTERMAP_CHANGE_NOTIFICATION:
            return
        try:
            epoch, rev, bucket, config = decode_clustermap_notification(frame)
        except RemoteProtocolError as error:
            log.warning("map-announcement-invalid", node=str(address), error=str(error))
            return
        if bucket not in (b"", self._access.source.bucket.encode()):
            return
        if config:
            self.on_sent(config, address)
        elif self._maps.current is None or (epoch, rev) > self._maps.current.revision:
            self.wake()

    def on_sent(self, config: bytes, address: NodeAddress) -> bool:
        """Hand on a map that came unasked; return False if it is not newer than the one that is followed."""
        try:
            found = self._read(config, address)
        except HandshakeFailed as error:
            log.warning("map-invalid", node=str(address), error=str(error))
            return False
        if self._maps.judge(found) not in (MapVerdict.NEWER, MapVerdict.OTHER_BUCKET):
            return False
        # Not from within: the vbucket that was refused is in the middle of performing its instructions.
        asyncio.get_running_loop().call_soon(self._owner.on_map, address, found)
        return True

    def _read(self, config: bytes, address: NodeAddress) -> ClusterMap:
        network = None if self._maps.current is None else self._maps.current.network
        return read_map(config, address, self._access.settings, network=network)

    async def run(self) -> None:
        """Ask all nodes every `map_poll_interval_s`, and when woken."""
        interval_s = self._access.settings.map_poll_interval_s
        pause_s, known = ROUND_PAUSE_S, self._maps.current
        try:
            while True:
                try:
                    async with asyncio.timeout(interval_s):
                        await self._wake.wait()
                except TimeoutError:
                    pause_s = ROUND_PAUSE_S
                self._wake.clear()
                await self._find_hosts()
                self._begin_round()
                if self._maps.current is not known:
                    pause_s, known = ROUND_PAUSE_S, self._maps.current
                await self._clock.sleep(pause_s)
                pause_s = min(pause_s * 2, max(min(ROUND_PAUSE_MAX_S, interval_s), ROUND_PAUSE_S))
        finally:
            await self._drop(self._nodes.values())

    async def _find_hosts(self) -> None:
        """Look the source's name up again while no node answers: it may stand for other hosts by now."""
        if not self._hosts or all(node.error is not None for node in self._nodes.values()):
            with contextlib.suppress(ConfigError):
                self._hosts = await first_addresses(self._access.source, self._access.settings.dns_server)

    def _begin_round(self) -> None:
        followed = self._maps.current
        members = map(self._access.address_of, followed.nodes) if followed is not None else ()
        targets = {address for address in (*members, *self._hosts) if address is not None}
        gone = [self._nodes.pop(address) for address in self._nodes.keys() - targets]
        for node in gone:
            node.close()
            if node.task is not None:
                node.task.cancel()
        now_s = self._clock.monotonic()
        for address in targets:
            node = self._nodes.setdefault(address, _Node(address))
            if node.task is None and now_s >= node.not_before_s:
                node.task = asyncio.create_task(self._ask(node), name=f"map of {address}")
                node.task.add_done_callback(partial(self._answered, node))

    def _answered(self, node: _Node, task: asyncio.Task[None]) -> None:
        node.task = None
        self._on_defect(task)

    async def _ask(self, node: _Node) -> None:
        settings = self._access.settings
        try:
            link, handshake = await self._connection(node)
            some_away = any(each.failures for each in self._nodes.values())
            known = None if some_away else self._maps.current  # theirs may be of equal revision and name other nodes
            config = await fetch_newer_config(link, handshake, settings, known, timeout_s=MAP_TIMEOUT_S)
            found = self._read(config, node.address) if config and (some_away or config != node.config) else None
        except (ClusterError, ConfigError) as error:
            log.debug("no-map", node=str(node.address), error=str(error))
            node.close()
            node.error = str(error)
            node.failures += 1
            node.not_before_s = self._clock.monotonic() + pause_s(
                node.failures - 1, settings, self._clock.jitter(), error
            )
            return
        node.error, node.failures = None, 0
        if found is not None:
            node.config = config
            self._owner.on_map(node.address, found)

    async def _connection(self, node: _Node) -> tuple[Link, Handshake]:
        """Return the node's session, or else a connection of its own."""
        session = self._owner.session_at(node.address)
        if session is not None:
            node.close()
            return session.link, session.handshake
        if node.link is None or node.link.closed:
            node.link, node.handshake = await enter(self._access, node.address, self._clock)
            node.link.on_push = partial(self.on_notice, node.address)
            node.config = b""
            if node.link.closed:
                raise HandshakeFailed(f"{node.address} hung up after the login")
        return node.link, node.handshake

    async def _drop(self, nodes: Iterable[_Node]) -> None:
        tasks = [node.task for node in nodes if node.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for node in nodes:
            node.close()
