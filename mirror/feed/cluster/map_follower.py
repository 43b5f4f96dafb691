"""Follows the cluster map: finds the first map, takes newer maps from any node, and names the node of a vbucket.

Must never know streams or the store. A node that was failed over while it was stopped still sends its old map, and may
be the only node with a session. So the follower queries, in rounds, all nodes of the followed map and all hosts of the
source. A query uses the node's session, or else a separate connection, which stays open for announcements of maps.

Invariants:
- a map older than one that was followed is never followed (`NewestMap`);
- a member of the cluster that sends the map of another bucket is refused before any stream request (docs/protocol.md
  2.5);
- the `MapUser` gets each newer map, perhaps several times until it follows that map;
- a slow node delays no other node;
- a failed node is queried after growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Protocol

from mirror.clock import Clock, happens
from mirror.errors import ClusterError, ConfigError, HandshakeFailed, MirrorError, OlderMap
from mirror.feed.cluster.connections import FailureCount, QueriedNode
from mirror.feed.cluster.discovery import discover, first_addresses
from mirror.feed.connection.bootstrap import Access, Handshake, fetch_map, fetch_newer_config, read_map
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.node_session import NodeSession
from mirror.feed.connection.transport import Link
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap, Node
from mirror.log import get_logger
from mirror.wire.codec_kv import decode_clustermap_notification
from mirror.wire.constants import ServerOpcode
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame

log = get_logger("feed")

SHARED_MAP_S = 5.0
"""Time for the `MapUser` to follow the first map. After that time the search starts again."""
ROUND_PAUSE_S = 0.05
"""Shortest pause between two rounds, so a thousand vbuckets that ask for a newer map cause only one round."""
ROUND_PAUSE_MAX_S = 1.0
"""The pause doubles up to this while no newer map appears. A mirror as the source, for example, refuses vbuckets during
its first fill, and each refusal requests a map.
"""
MAP_TIMEOUT_S = 2.0


class MapUser(Protocol):
    """Moves its streams to the nodes of each newer map."""

    def check_map(self, found: ClusterMap, verdict: MapVerdict) -> None:
        """Check a map that is newer, or of another bucket. Raises MirrorError if mirroring cannot continue with it."""
        ...

    def on_newer_map(self, found: ClusterMap) -> None:
        """Follow a newer map (`MapFollower.take`), now or later."""
        ...

    def on_map_refused(self, error: MirrorError) -> None:
        """Handle an error of `check_map`, except for a first map: `find_first` and `begin` raise that error."""
        ...


class _Node(QueriedNode):
    task: asyncio.Task[None] | None = None
    config = b""
    """The node's last answer, to skip an equal answer: servers before 7.6 send the whole map each time."""
    error: str | None = "not queried yet"


class MapFollower:
    """Follows the cluster map of one bucket. Call `begin` or `find_first`, then `run`."""

    def __init__(
        self,
        access: Access,
        clock: Clock,
        maps: NewestMap,
        user: MapUser,
    ) -> None:
        """`maps` has the bucket's uuid, and the floor: maps with an older revision are not followed."""
        self.maps = maps
        self.session_at: Callable[[NodeAddress], NodeSession | None] = lambda _address: None
        self._access = access
        self._clock = clock
        self._user = user
        self._search_error: str | None = None
        self._has_map = asyncio.Event()
        self._nodes: dict[NodeAddress, _Node] = {}
        self._hosts: tuple[NodeAddress, ...] = ()
        self._wake = asyncio.Event()

    @property
    def current(self) -> ClusterMap | None:
        return self.maps.current

    @property
    def network(self) -> str | None:
        """The network of the first map, used for all later maps."""
        return None if self.current is None else self.current.network

    @property
    def vbucket_count(self) -> int:
        """0 while no map is followed."""
        return 0 if self.current is None else self.current.vbucket_count

    @property
    def error(self) -> str | None:
        """The reason why no node sends a map; None if a node does, or if no node was queried yet."""
        errors = [node.error for node in self._nodes.values() if node.failures.count or node.error is None]
        return self._search_error or (None if None in errors or not errors else errors[-1])

    def address_of(self, vbid: int) -> NodeAddress | None:
        """Return the address of the vbucket's node; None without a node, or without the required kind of port."""
        node = None if self.current is None else self.current.node_of(vbid)
        return None if node is None else self._access.address_of(node)

    def copies_of(self, vbid: int) -> list[NodeAddress]:
        """Return the addresses of the vbucket's copies, the active copy first; empty if a copy has no address."""
        nodes = self.current.copies_of(vbid) if self.current is not None else []
        found = [self._access.address_of(node) for node in nodes]
        known = [address for address in found if address is not None]
        return known if len(known) == len(found) else []

    # -- the first map --------------------------------------------------------------------------------------------

    async def find_first(self, on_error: Callable[[MirrorError], None] | None = None) -> None:
        """Search until a map is followed. Raises a retryable error after `bootstrap_timeout_s`; without `on_error`, a
        permanent error at once.
        """
        started = self._clock.monotonic()
        failures = FailureCount(self._access.settings, self._clock)
        while self.current is None:
            try:
                self.begin(await discover(self._access, self._clock, bucket_uuid=self.maps.bucket_uuid))
                await happens(self._has_map, SHARED_MAP_S)
            except (ClusterError, ConfigError) as error:
                waited_s = self._clock.monotonic() - started
                limit_s = self._access.settings.bootstrap_timeout_s
                if on_error is None and not error.retryable:
                    raise
                if error.retryable and limit_s and waited_s >= limit_s:
                    raise
                if on_error is not None:
                    on_error(error)
                self._search_error = str(error)
                pause_s = failures.add(error)
                if failures.to_be_logged:
                    log.warning("source-not-reached", error=str(error), tries=failures.count)
                await happens(self._has_map, pause_s)  # meanwhile another worker may find a map

    def begin(self, found: ClusterMap) -> None:
        """Offer a first map. Raises OlderMap, and the errors of `check_map`."""
        if self.offer(found) is MapVerdict.OLDER and self.maps.floor is not None:
            raise OlderMap.of(found.revision, self.maps.floor)

    # -- received maps --------------------------------------------------------------------------------------------

    def offer(self, found: ClusterMap) -> MapVerdict:
        """Give a map to the user if it is newer. Raises the errors of `check_map`."""
        verdict = self.check(found)
        self._search_error = None
        if verdict is MapVerdict.NEWER:
            self._user.on_newer_map(found)
        elif verdict is MapVerdict.OLDER:
            log.debug("older-map-ignored", rev_epoch=found.rev_epoch, rev=found.rev)
        return verdict

    def check(self, found: ClusterMap) -> MapVerdict:
        """Compare a map with the followed map. Raises the errors of `check_map`."""
        verdict = self.maps.judge(found)
        if verdict in (MapVerdict.NEWER, MapVerdict.OTHER_BUCKET):
            self._user.check_map(found, verdict)
        return verdict

    def take(self, found: ClusterMap) -> bool:
        """Follow a map that is newer than the followed one; return False if it is not."""
        if not self.maps.take(found):
            return False
        self._search_error = None
        self._has_map.set()
        return True

    def refresh_map(self, config: bytes, vbid: int) -> None:
        """Use the map that came with a node's refusal of the vbucket. If that map is not newer, query all nodes."""
        address = self.address_of(vbid)
        if not config or address is None or not self._on_sent(config, address):
            self.wake()

    # -- maps of nodes and sessions -------------------------------------------------------------------------------

    def on_map(self, address: NodeAddress, found: ClusterMap) -> None:
        """Offer a node's map, which may be older than the followed map, or of another bucket."""
        found = self.maps.instead(found, self._is_away)
        member = self.current is None or address in map(self._access.address_of, self.current.nodes)
        if self.maps.judge(found) is MapVerdict.OTHER_BUCKET and not member:
            # Ignore the map: a host that left the cluster may serve another bucket of the same name.
            log.debug("other-bucket-ignored", node=str(address), bucket_uuid=found.bucket_uuid)
            return
        try:
            self.offer(found)
        except MirrorError as error:
            self._user.on_map_refused(error)

    def _is_away(self, node: Node) -> bool:
        address = self._access.address_of(node)
        known = None if address is None else self._nodes.get(address)
        return known is not None and known.failures.count > 0

    async def check_node(self, link: Link) -> None:
        """Offer a node's map while its session opens, before any stream is requested."""
        link.on_push = partial(self._on_notice, link.address)
        found = await fetch_map(link, self._access.settings, network=self.network)
        try:
            self.offer(found)
        except MirrorError as error:
            self._user.on_map_refused(error)
            raise

    def _on_notice(self, address: NodeAddress, frame: Frame) -> None:
        """Handle a node's announcement of a map, which may contain the map (SDK RFC 75)."""
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
            self._on_sent(config, address)
        elif self.current is None or (epoch, rev) > self.current.revision:
            self.wake()

    def _on_sent(self, config: bytes, address: NodeAddress) -> bool:
        """Offer a map that a node sent without a request. Return False if the map is invalid or not newer."""
        try:
            found = self._read(config, address)
        except HandshakeFailed as error:
            log.warning("map-invalid", node=str(address), error=str(error))
            return False
        if self.maps.judge(found) not in (MapVerdict.NEWER, MapVerdict.OTHER_BUCKET):
            return False
        # Not now, because the refused vbucket is still executing its instructions.
        asyncio.get_running_loop().call_soon(self.on_map, address, found)
        return True

    def _read(self, config: bytes, address: NodeAddress) -> ClusterMap:
        return read_map(config, address, self._access.settings, network=self.network)

    # -- querying all nodes ---------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Begin a round now, instead of at the end of the interval."""
        self._wake.set()

    async def run(self) -> None:
        """Query all nodes every `map_poll_interval_s`, and after `wake`."""
        interval_s = self._access.settings.map_poll_interval_s
        pause_s, known = ROUND_PAUSE_S, self.current
        try:
            async with asyncio.TaskGroup() as queries:
                while True:
                    if not await happens(self._wake, interval_s):
                        pause_s = ROUND_PAUSE_S
                    self._wake.clear()
                    await self._find_hosts()
                    self._begin_round(queries)
                    if self.current is not known:
                        pause_s, known = ROUND_PAUSE_S, self.current
                    await self._clock.sleep(pause_s)
                    pause_s = min(pause_s * 2, max(min(ROUND_PAUSE_MAX_S, interval_s), ROUND_PAUSE_S))
        finally:
            for node in self._nodes.values():
                node.close()

    async def _find_hosts(self) -> None:
        """Look the source's name up again while no node answers, because its hosts may have changed."""
        if not self._hosts or all(node.error is not None for node in self._nodes.values()):
            with contextlib.suppress(ConfigError):
                self._hosts = await first_addresses(self._access.source, self._access.settings.dns_server)

    def _begin_round(self, queries: asyncio.TaskGroup) -> None:
        followed = self.current
        members = map(self._access.address_of, followed.nodes) if followed is not None else ()
        targets = {address for address in (*members, *self._hosts) if address is not None}
        gone = [self._nodes.pop(address) for address in self._nodes.keys() - targets]
        for node in gone:
            node.close()
            if node.task is not None:
                node.task.cancel()
        for address in targets:
            node = self._nodes.setdefault(address, _Node(address, self._access, self._clock))
            if (node.task is None or node.task.done()) and not node.pausing:
                node.task = queries.create_task(self._ask(node), name=f"map of {address}")

    async def _ask(self, node: _Node) -> None:
        try:
            link, handshake = await self._connection(node)
            some_away = any(each.failures.count for each in self._nodes.values())
            known = None if some_away else self.current  # None: fetch even a map of equal revision, for `instead`
            config = await fetch_newer_config(link, handshake, known, timeout_s=MAP_TIMEOUT_S)
            found = self._read(config, node.address) if config and (some_away or config != node.config) else None
        except (ClusterError, ConfigError) as error:
            log.debug("no-map", node=str(node.address), error=str(error))
            node.failed(error)
            node.error = str(error)
            return
        node.error = None
        node.failures.clear()
        if found is not None:
            node.config = config
            self.on_map(node.address, found)

    async def _connection(self, node: _Node) -> tuple[Link, Handshake]:
        """Return the connection of the node's session or, without one, a separate connection."""
        session = self.session_at(node.address)
        if session is not None:
            node.close()
            return session.link, session.handshake
        if node.link is None or node.link.closed:
            node.config = b""
        return await node.open(partial(self._on_notice, node.address)), node.handshake
