"""Looks up the selected collections in the source's manifest, because stream requests need ids.

While the manifest lacks a selected name, the watch polls it. A vbucket that was refused for an unknown collection waits
for the watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mirror.clock import happens
from mirror.errors import ClusterError, NotSupported
from mirror.feed.cluster.connections import Connections
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.connection.bootstrap import fetch_manifest
from mirror.ingest.selection import Resolved, Selection, SourceManifest
from mirror.log import get_logger

log = get_logger("feed")

HIDDEN = (
    "the source's own collections (scope _system) are not mirrored: the user may not look them up, so the source "
    "leaves them out; grant the user the privilege SystemCollectionLookup if they are needed (role data_dcp_reader)"
)
PAUSE_MIN_S = 0.2


class CollectionWatch:
    def __init__(
        self,
        selection: Selection,
        connections: Connections,
        maps: MapFollower,
        on_news: Callable[[set[int]], None],
    ) -> None:
        """`on_news` is called when streams should be requested again, with the vbids that were passed to `look`."""
        self.selection = selection
        self.resolved = Resolved(-1, None, () if selection.whole else ("?",))
        self.hidden = False
        """True if the source leaves out the server's own collections, because this user may not see them."""
        self._connections = connections
        self._maps = maps
        self._on_news = on_news
        self._settings = connections.access.settings
        self._clock = connections.clock
        self._wake = asyncio.Event()
        self._waiting: set[int] = set()
        self._turn = 0
        self._said: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The reason why no stream is requested, as shown to users."""
        if self.resolved.uid < 0:
            return "asking the source which collections there are"
        names = ", ".join(self.resolved.missing)
        what = "scope" if self.selection.scope is not None else "collection"
        return f"the source has no {what} {names} for this user (yet, or any more); waiting for it to be created"

    @property
    def polled_collections(self) -> Sequence[int] | None:
        """The collections whose high seqnos are polled; None: the bucket's high seqnos."""
        return self.resolved.collection_ids if self.hidden or not self.selection.whole else None

    @property
    def warnings(self) -> list[str]:
        found = [HIDDEN] if self.hidden and self.selection.whole else []
        if self.resolved.missing and self.resolved.uid >= 0:
            found.append(self.text)
        return found

    def look(self, vbid: int | None = None) -> None:
        """Fetch the manifest soon. Pass `vbid` to `on_news` once there are collections to request."""
        if vbid is not None:
            self._waiting.add(vbid)
        self._wake.set()

    async def run(self) -> None:
        """Follow the manifest until cancelled. Raises NotSupported if the source does not support collections."""
        while True:
            polls = bool(not self.selection.whole or self._waiting or self.hidden)
            await happens(self._wake, self._settings.map_poll_interval_s if polls else None)
            self._wake.clear()
            await self._look_once()
            if self.selection.whole and self._waiting:  # no name can be missing: let these vbuckets request again
                self._notify()
            await self._clock.sleep(PAUSE_MIN_S)

    async def _look_once(self) -> None:
        """Query nodes in turn until one answers. Each call begins with another node."""
        sessions = self._connections.ready_sessions()
        self._turn += 1
        # A node that has just started may have an old manifest (docs/protocol.md 2.11): do not ask it alone.
        turn = self._turn % max(1, len(sessions))
        for session in sessions[turn:] + sessions[:turn]:
            if not session.handshake.collections:
                if self.selection.whole:
                    return
                raise NotSupported(
                    f"{session.address} does not support collections, and {self.selection} is to be mirrored",
                    hint="use Couchbase Server 7.0 or newer, or mirror the whole bucket into a new data directory",
                )
            try:
                manifest = await fetch_manifest(session.link, self._settings)
            except ClusterError as error:
                log.debug("no-collections", node=str(session.address), error=str(error))
            else:
                self.take(manifest)
                return

    def take(self, manifest: SourceManifest) -> None:
        """Resolve the selection by a manifest. A manifest older than the last one is ignored."""
        before = self.resolved
        # A node that lags behind must not take collections away that streams already have.
        if manifest.uid < before.uid:
            return
        self.resolved = self.selection.resolve(manifest)
        current = self._maps.current
        # Without the right to see them, the source leaves them out of streams silently (docs/protocol.md 2.2).
        hidden = current is not None and current.system_collections and manifest.hides_system
        if hidden and not self.hidden and self.selection.whole:
            log.warning("collections-hidden", text=HIDDEN)
        self.hidden = hidden
        if self.resolved.missing != self._said:
            self._said = self.resolved.missing
            if self._said:
                log.warning("collections-missing", text=self.text)
        # A dropped collection is no news: the streams report the drop, or the source ends them.
        news = before.uid < 0 or (self.resolved.filter is not None and not self.resolved.filter.within(before.filter))
        if news and not self.selection.whole:
            self._notify()

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, set()
        self._on_news(waiting)
