"""The follower of cluster maps: the first map, newer ones from any node, and the one that is followed.

Knows maps as they arrive (`discovery`, `map_poll`, sessions), the newest one, and the address of a vbucket's node; must
never know streams or the store, which are its user's. Invariants: no map is followed that is older than one followed
before, or than the floor (`NewestMap`); a node that sends the map of another bucket is refused before anything is
requested of it (docs/protocol.md 2.5), unless it is no member of the cluster; the user gets each newer map once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from mirror.clock import Clock
from mirror.errors import ClusterError, MirrorError, OlderMap
from mirror.feed.cluster.connections import pause_s
from mirror.feed.cluster.discovery import discover
from mirror.feed.cluster.map_poll import MapPoller
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.session import NodeSession
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap, Node
from mirror.log import get_logger
from mirror.wire.frame import Frame

log = get_logger("feed")

SHARED_MAP_S = 5.0
"""Time for the user to follow a map that it was given; after that a first map is looked for again."""


class MapUser(Protocol):
    """The user of the maps: it moves its streams."""

    def check_map(self, found: ClusterMap, verdict: MapVerdict) -> None:
        """Judge a map that is newer, or of another bucket. Raises MirrorError where it makes going on impossible."""
        ...

    def on_newer_map(self, found: ClusterMap) -> None:
        """Follow a newer map (`MapFollower.take`), now or later."""
        ...

    def on_map_refused(self, error: MirrorError) -> None:
        """Handle what `check_map` raised for a map that came unasked."""
        ...


class MapFollower:
    """Follows the cluster map of one bucket. `begin` or `find_first`, then `run`."""

    def __init__(
        self,
        access: Access,
        clock: Clock,
        maps: NewestMap,
        user: MapUser,
        on_defect: Callable[[asyncio.Task[None]], None],
    ) -> None:
        """`maps` names the bucket, and which maps are too old. `on_defect`: see MapPoller."""
        self.maps = maps
        self.session_at: Callable[[NodeAddress], NodeSession | None] = lambda _address: None
        self._access = access
        self._clock = clock
        self._user = user
        self._search_error: str | None = None
        self._has_map = asyncio.Event()
        self._poller = MapPoller(self, maps, access, clock, on_defect)

    @property
    def current(self) -> ClusterMap | None:
        return self.maps.current

    @property
    def network(self) -> str | None:
        """The network of the first map; all others are read by it."""
        return None if self.current is None else self.current.network

    @property
    def vbucket_count(self) -> int:
        """The bucket's vbuckets; 0 while no map is followed."""
        return 0 if self.current is None else self.current.vbucket_count

    @property
    def error(self) -> str | None:
        """The reason why no node gives a map; None if one does, or if none was queried yet."""
        return self._search_error or self._poller.error

    def address_of(self, vbid: int) -> NodeAddress | None:
        """Return the address of the vbucket's node; None if the map names none, or none that can be reached as
        required.
        """
        node = None if self.current is None else self.current.node_of(vbid)
        return None if node is None else self._access.address_of(node)

    def copies_of(self, vbid: int) -> list[NodeAddress]:
        """Return the addresses of the vbucket's copies, the active one first; empty unless all can be reached."""
        nodes = self.current.copies_of(vbid) if self.current is not None else []
        found = [self._access.address_of(node) for node in nodes]
        known = [address for address in found if address is not None]
        return known if len(known) == len(found) else []

    # -- the first map --------------------------------------------------------------------------------------------

    async def find_first(self) -> None:
        """Look for a map until one is followed. Raises what waiting does not fix, or not in time."""
        settings = self._access.settings
        started = self._clock.monotonic()
        attempt = 0
        while self.current is None:
            try:
                self.begin(await discover(self._access, self._clock, bucket_uuid=self.maps.bucket_uuid))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SHARED_MAP_S):
                        await self._has_map.wait()
            except ClusterError as error:
                waited_s = self._clock.monotonic() - started
                limit_s = settings.bootstrap_timeout_s
                if not error.retryable or (limit_s and waited_s >= limit_s):
                    raise
                self._search_error = str(error)
                if attempt & (attempt + 1) == 0:
                    log.warning("source-not-reached", error=str(error), tries=attempt + 1)
                with contextlib.suppress(TimeoutError):  # another worker may find one
                    async with asyncio.timeout(pause_s(attempt, settings, self._clock.jitter())):
                        await self._has_map.wait()
                attempt += 1

    def begin(self, found: ClusterMap) -> None:
        """Offer a first map. Raises OlderMap, and what `check_map` raises."""
        if self.offer(found) is MapVerdict.OLDER and self.maps.floor is not None:
            raise OlderMap.of(found.revision, self.maps.floor)

    async def run(self) -> None:
        """Ask all nodes for newer maps, until cancelled."""
        await self._poller.run()

    # -- maps that come -------------------------------------------------------------------------------------------

    def offer(self, found: ClusterMap) -> MapVerdict:
        """Give a map to the user if it is newer. Raises what `check_map` raises."""
        verdict = self.check(found)
        self._search_error = None
        if verdict is MapVerdict.NEWER:
            self._user.on_newer_map(found)
        elif verdict is MapVerdict.OLDER:
            log.debug("older-map-ignored", rev_epoch=found.rev_epoch, rev=found.rev)
        return verdict

    def check(self, found: ClusterMap) -> MapVerdict:
        """Compare a map with the one that is followed. Raises what `check_map` raises."""
        verdict = self.maps.judge(found)
        if verdict in (MapVerdict.NEWER, MapVerdict.OTHER_BUCKET):
            self._user.check_map(found, verdict)
        return verdict

    def take(self, found: ClusterMap) -> bool:
        """Follow a map, unless a newer one is followed already; return whether it is followed now."""
        if not self.maps.take(found):
            return False
        self._search_error = None
        self._has_map.set()
        return True

    def refresh_map(self, config: bytes, vbid: int) -> None:
        """Read the map that came with a node's refusal of the vbucket, or ask other nodes for one."""
        address = self.address_of(vbid)
        if not config or address is None or not self._poller.on_sent(config, address):
            self._poller.wake()

    def wake(self) -> None:
        self._poller.wake()

    # -- what the poller and the sessions call --------------------------------------------------------------------

    def on_map(self, address: NodeAddress, found: ClusterMap) -> None:
        found = self.maps.instead(found, self._is_away)
        member = self.current is None or address in map(self._access.address_of, self.current.nodes)
        if self.maps.judge(found) is MapVerdict.OTHER_BUCKET and not member:
            # A host that left the cluster serves another bucket of that name, which is none of ours.
            log.debug("other-bucket-ignored", node=str(address), bucket_uuid=found.bucket_uuid)
            return
        try:
            self.offer(found)
        except MirrorError as error:
            self._user.on_map_refused(error)

    def _is_away(self, node: Node) -> bool:
        address = self._access.address_of(node)
        return address is not None and self._poller.is_away(address)

    def on_first_map(self, found: ClusterMap) -> None:
        """Take the map of a node that a session is opened to, before anything is requested of it."""
        try:
            self.offer(found)
        except MirrorError as error:
            self._user.on_map_refused(error)
            raise

    def on_push(self, session: NodeSession, frame: Frame) -> None:
        self._poller.on_notice(session.address, frame)
