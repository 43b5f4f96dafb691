"""Follows the cluster map: finds the first map, takes newer maps from any node, and names the node of a vbucket.

A node that was failed over while it was stopped still sends its old map, and may be the only node with a session. So
`MapQueries` asks all nodes of the followed map and all hosts of the source in rounds, over the node's session or a
separate connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from mirror.clock import Clock, happens
from mirror.errors import ClusterError, ConfigError, HandshakeFailed, MirrorError, OlderMap
from mirror.feed.cluster.connections import FailureCount
from mirror.feed.cluster.discovery import discover
from mirror.feed.cluster.map_queries import MapQueries
from mirror.feed.connection.bootstrap import Access, fetch_map, read_map
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.transport import Link
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap
from mirror.log import get_logger

log = get_logger("feed")

SHARED_MAP_S = 5.0
"""Time for the `MapUser` to follow the first map. After that time the search starts again."""


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
        self.queries = MapQueries(access, clock, maps, self)
        self._access = access
        self._clock = clock
        self._user = user
        self._search_error: str | None = None
        self._has_map = asyncio.Event()

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
        return self._search_error or self.queries.error

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
            self.queries.wake()

    def on_map(self, address: NodeAddress, found: ClusterMap) -> None:
        """Offer a node's map, which may be older than the followed map, or of another bucket."""
        member = self.current is None or address in map(self._access.address_of, self.current.nodes)
        if self.maps.judge(found) is MapVerdict.OTHER_BUCKET and not member:
            # Ignore the map: a host that left the cluster may serve another bucket of the same name.
            log.debug("other-bucket-ignored", node=str(address), bucket_uuid=found.bucket_uuid)
            return
        try:
            self.offer(found)
        except MirrorError as error:
            self._user.on_map_refused(error)

    async def check_node(self, link: Link) -> None:
        """Offer a node's map while its session opens, before any stream is requested."""
        found = await fetch_map(link, self._access.settings, network=self.network)
        try:
            self.offer(found)
        except MirrorError as error:
            self._user.on_map_refused(error)
            raise

    def _on_sent(self, config: bytes, address: NodeAddress) -> bool:
        """Offer a map that a node sent without a request. Return False if the map is invalid or not newer."""
        try:
            found = self.read(config, address)
        except HandshakeFailed as error:
            log.warning("map-invalid", node=str(address), error=str(error))
            return False
        if self.maps.judge(found) not in (MapVerdict.NEWER, MapVerdict.OTHER_BUCKET):
            return False
        # Not now, because the refused vbucket is still executing its instructions.
        asyncio.get_running_loop().call_soon(self.on_map, address, found)
        return True

    def read(self, config: bytes, address: NodeAddress) -> ClusterMap:
        return read_map(config, address, self._access.settings, network=self.network)
