"""Polls the source's high seqnos from every node, and requests stalled streams again.

A vbucket is stalled if it receives nothing for `stall_timeout_s` although the source is ahead. If it stalls twice in a
row, the connection is closed: only a new one helps if the flow-control window stays full, or if the node answers but
does not stream (docs/protocol.md 3). A stream that stops inside a snapshot is requested again, too: if the filter
leaves out the rest of the snapshot, only a new stream gets the snapshot's end (docs/protocol.md 2.7).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from mirror.errors import ClusterError, SourceTimeout
from mirror.feed.cluster.collection_watch import CollectionWatch
from mirror.feed.cluster.connections import Connections, NodeKeeper
from mirror.feed.connection.bootstrap import fetch_high_seqnos, fetch_lost_contact
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.node_session import SILENCE_MAX_S, NodeSession
from mirror.feed.follow.mirrored_vbucket import MirroredVbucket
from mirror.log import get_logger

log = get_logger("feed")

POLL_INTERVAL_S = 1.0
"""The shown lag is at most about this old."""
STREAMS_BEFORE_RECONNECT = 2
"""If this many streams of a vbucket stall in a row, the connection is closed."""
COLLECTIONS_PER_S = 50
"""Limit of queries to a node per second. A poll queries each collection, so many collections are polled less often."""


class SourceWatch:
    def __init__(
        self,
        connections: Connections,
        collections: CollectionWatch,
        vbuckets_at: Callable[[NodeAddress], Sequence[MirroredVbucket]],
        reopen: Callable[[MirroredVbucket, str], None],
    ) -> None:
        """`reopen` requests a vbucket's stream again, for the given cause."""
        self._connections = connections
        self._collections = collections
        self._vbuckets_at = vbuckets_at
        self._reopen = reopen
        self._settings = connections.access.settings
        self._clock = connections.clock
        self._polls: dict[NodeAddress, asyncio.Task[None]] = {}
        self._polled: dict[NodeAddress, NodeSession | None] = {}
        """The session over which each node was polled in this interval."""
        self._wake = asyncio.Event()

    def look(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as polls:
            while True:
                self._polled.clear()
                self._poll_new_sessions(polls)
                self.judge()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        while await self._wake.wait():
                            self._wake.clear()
                            self._poll_new_sessions(polls)

    @property
    def _interval_s(self) -> float:
        collections = self._collections.polled_collections or ()
        return max(POLL_INTERVAL_S, len(collections) / COLLECTIONS_PER_S)

    def _poll_new_sessions(self, polls: asyncio.TaskGroup) -> None:
        """Poll the nodes whose session was not polled in this interval."""
        for address, keeper in self._connections.keepers.items():
            last = self._polls.get(address)
            is_new = address not in self._polled or self._polled[address] != keeper.session
            if is_new and (last is None or last.done()):
                self._polled[address] = keeper.session
                self._polls[address] = polls.create_task(self._poll(keeper))

    async def _poll(self, keeper: NodeKeeper) -> None:
        session = keeper.session
        if session is None or not session.ready:
            return
        collections = self._collections.polled_collections
        # Before the query: its answer may be older than a snapshot that is published meanwhile.
        published = {each.vbid: each.writer.state.staging_published_seqno for each in self._vbuckets_at(keeper.address)}
        sent_at = self._clock.monotonic()
        try:
            seqnos = await fetch_high_seqnos(session.link, self._settings, collections)
            if collections == () and self._collections.resolved.streams:
                seqnos = dict.fromkeys(published, 0)  # a scope without collections: no row is missing
            by_mirror = session.handshake.by_mirror
            lost_ms = await fetch_lost_contact(session.link, self._settings) if by_mirror else {}
        except SourceTimeout as error:
            if not session.requests.unanswered:  # else the poll's turn may come after those answers
                session.close(error)
            return
        except ClusterError as error:
            log.debug("no-high-seqnos", node=str(keeper.address), error=str(error))
            return
        session.seqnos_at, session.seqnos_until = sent_at, sent_at + self._interval_s + SILENCE_MAX_S
        for vbucket in self._vbuckets_at(keeper.address):
            vbucket.source_silent_ms = lost_ms.get(vbucket.vbid)
            if vbucket.vbid in seqnos or collections is None:
                seqno = seqnos.get(vbucket.vbid)
                if by_mirror and collections is None and (seqno or 0) < published.get(vbucket.vbid, 0):
                    seqno = None  # the node is behind this mirror
                vbucket.polled = None if seqno is None else (session, seqno)
            if vbucket.vbid in seqnos:
                vbucket.on_high_seqno(seqnos[vbucket.vbid])

    def judge(self) -> None:
        for address in list(self._connections.keepers):
            for vbucket in self._vbuckets_at(address):
                self._judge(vbucket)

    def _judge(self, vbucket: MirroredVbucket) -> None:
        now = self._clock.monotonic()
        high, progress = vbucket.source_high_seqno, vbucket.progress
        session, machine = vbucket.host.session, vbucket.host.machine
        if session is None or high is None or machine is None or not vbucket.host.streaming:
            return
        is_behind = vbucket.writer.staged_seqno < high
        if not is_behind and not machine.waits_for_end:
            progress.moved(session.received_at)
            return
        limit_s = self._settings.stall_timeout_s
        silence_s = now - progress.last_at
        if silence_s <= limit_s or now - session.backfill_at <= limit_s:
            return
        why = f"the source is at {high}" if is_behind else "in the middle of a snapshot"
        progress.stalled(f"stalled: nothing for {silence_s:.0f} s, {why}; asking for the stream again", now)
        log.warning(
            "stream-stalled", vbid=vbucket.vbid, high_seqno=high, stalls=progress.stalls, node=str(session.address)
        )
        if is_behind and progress.stalled_streams >= STREAMS_BEFORE_RECONNECT:
            session.close(
                SourceTimeout(
                    f"{session.address} answers and does not stream vb {vbucket.vbid}: nothing for {silence_s:.0f} s, "
                    f"it is at {high}"
                )
            )
        else:
            self._reopen(vbucket, "stalled")
