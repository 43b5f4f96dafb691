"""A worker's consumer: requests each vbucket's stream over the session to the vbucket's node.

Everything runs in one event loop: received bytes are processed before more are read, so nothing queues. An error of one
vbucket, node or group never affects another. No connection and no map ever deletes local data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from mirror.clock import Clock, SystemClock
from mirror.config import Settings
from mirror.errors import ClusterError, ConfigError, MirrorError
from mirror.feed.cluster.collection_watch import CollectionWatch
from mirror.feed.cluster.connections import Connections, FailureCount, NodeKeeper, report_defect
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import ConnectionString, NodeAddress
from mirror.feed.connection.node_session import NodeSession
from mirror.feed.follow.group_commits import GroupCommits
from mirror.feed.follow.mirrored_vbucket import MirroredVbucket
from mirror.feed.follow.persistence import PersistencePoller
from mirror.feed.follow.store_sink import PersistenceGate
from mirror.feed.follow.watch import SourceWatch
from mirror.ingest import events
from mirror.ingest.instructions import VbucketStatus
from mirror.ingest.selection import Selection
from mirror.ingest.state import Phase
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap, Revision, check_bucket, check_persists
from mirror.log import get_logger
from storage.model import Identity
from storage.write.writer import GroupWriter

log = get_logger("feed")


class Consumer:
    """Mirrors the vbuckets of some groups, from `run` to `stop`. Call every method on one event loop."""

    def __init__(
        self,
        settings: Settings,
        *,
        source: ConnectionString,
        writers: Sequence[GroupWriter],
        identity: Identity,
        worker: str = "0",
        clock: Clock | None = None,
        cluster_map: ClusterMap | None = None,
        map_floor: Revision | None = None,
        share_map: Callable[[ClusterMap], None] | None = None,
        ends_on_refusal: bool = True,
    ) -> None:
        """Mirror the vbuckets of `writers`. The caller closes the writers.

        `cluster_map` is the first map; no map older than `map_floor` is followed. `share_map` gets each newer map; the
        caller records the map and then calls `follow`. Without `ends_on_refusal`, a refusal by the source is shown as
        the vbuckets' state, and retried.
        """
        self.clock: Clock = clock or SystemClock()
        self.settings = settings
        self.identity = identity
        selection = Selection.parse(identity.selection)
        self._source = source
        self._access = Access.of(source, settings)
        self._first_map = cluster_map
        self._share_map = share_map
        self._ends_on_refusal = ends_on_refusal
        newest = NewestMap(identity.bucket_uuid, map_floor)
        self.map_follower = MapFollower(self._access, self.clock, newest, self)
        name = f"dcp-mirror:{self.clock.unique()}:{worker}"
        self.connections = Connections(
            self._access, self.clock, self, self.map_follower.check_node, name=name, on_defect=self._end
        )
        self.map_follower.queries.session_at = self.connections.session_at
        self.collections = CollectionWatch(selection, self.connections, self.map_follower, self._on_collections)
        self.commits = GroupCommits(writers, settings, lambda vbid: self.attach_if_ready(self.vbuckets[vbid]))
        self.vbuckets: dict[int, MirroredVbucket] = {}
        self._gated = settings.publish == "persisted"
        for group in self.commits.groups:
            for vbid in group.writer.vbids:
                gate = PersistenceGate() if self._gated else None
                vbucket = MirroredVbucket(vbid, group, self.clock, self.map_follower, self.collections, gate)
                self.vbuckets[vbid] = vbucket
                group.hosts[vbid] = vbucket.host
        self._node_of: dict[int, NodeAddress | None] = dict.fromkeys(self.vbuckets)
        self._source_watch = SourceWatch(self.connections, self.collections, self.vbuckets_at, self.reopen)
        self._was_ready = False
        self._ending: asyncio.Future[None] | None = None
        self._stop_requested = False
        self._finished = asyncio.Event()

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Mirror until `stop`. Raises the error that ends mirroring: the source's refusal, another bucket, a defect."""
        self._ending = asyncio.get_running_loop().create_future()
        if self._stop_requested:
            self._ending.set_result(None)
        works = {
            "maps": self._follow_maps(),
            "high seqnos": self._source_watch.run(),
            "background work": self.commits.work_in_background(),
            "collections": self._retried(self.collections.run),
        }
        if self._gated:
            poller = PersistencePoller(self._access, self.map_follower, self.clock)
            works["persistence"] = self._retried(partial(poller.run, list(self.vbuckets.values())))
        tasks = [asyncio.create_task(work, name=f"feed {name}") for name, work in works.items()]
        for task in tasks:
            task.add_done_callback(partial(report_defect, on_defect=self._end))
        try:
            for vbucket in self.vbuckets.values():
                vbucket.host.start_machine()
            await self._ending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Before the connections close: a machine that hears of the loss would report it as an error.
            for vbucket in self.vbuckets.values():
                vbucket.host.drop_machine()
            await self.connections.close()
            self.commits.close()
            self._finished.set()

    async def stop(self) -> None:
        self._stop_requested = True
        if self._ending is None:
            return
        if not self._ending.done():
            self._ending.set_result(None)
        await self._finished.wait()

    def _end(self, error: BaseException) -> None:
        assert self._ending is not None
        if not self._ending.done():
            self._ending.set_exception(error)

    async def _retried(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`. Without `ends_on_refusal`, show a failure and run `work` again after a pause."""
        failures = FailureCount(self.settings, self.clock)
        while True:
            try:
                await work()
            except (ClusterError, ConfigError) as error:
                if self._ends_on_refusal:
                    raise
                self._show_failure(error)
                await self.clock.sleep(failures.add(error))

    # -- the map --------------------------------------------------------------------------------------------------

    async def _follow_maps(self) -> None:
        if self._first_map is not None:
            self.follow(self._first_map)
        await self.map_follower.find_first(None if self._ends_on_refusal else self._show_failure)
        await self.map_follower.queries.run()

    def _show_failure(self, error: MirrorError) -> None:
        for vbucket in self.vbuckets.values():
            if vbucket.host.streaming and vbucket.observed_vbuuid is None:
                continue  # it streams, and waits for no report of persistence
            vbucket.report(_status_after(error), str(error))

    def check_map(self, found: ClusterMap, verdict: MapVerdict) -> None:
        """Raise BucketChanged or NotSupported for a map with which mirroring cannot continue."""
        check_bucket(self.identity, found.bucket_uuid, found.vbucket_count)
        if self._gated:
            check_persists(found, self.identity.bucket_name)

    def on_newer_map(self, found: ClusterMap) -> None:
        (self._share_map or self.follow)(found)

    def on_map_refused(self, error: MirrorError) -> None:
        """End mirroring or, without `ends_on_refusal`, close the sessions: `check_map` refuses new ones."""
        if self._ends_on_refusal:
            self._end(error)
            return
        for session in self.connections.ready_sessions():
            session.close(error if isinstance(error, ClusterError) else None)

    def follow(self, found: ClusterMap) -> None:
        """Move the vbuckets to the nodes of a newer map. A map that is not newer, or is refused, is ignored."""
        try:
            self.map_follower.check(found)
        except ClusterError as error:
            self.on_map_refused(error)
            return
        if not self.map_follower.take(found):
            return
        log.debug("map-followed", rev_epoch=found.rev_epoch, rev=found.rev, nodes=len(found.nodes))
        for vbid in self.vbuckets:
            address = self.map_follower.address_of(vbid)
            if address != self._node_of[vbid] or address is None:  # without a node again: the reason may be another
                self._move(vbid, address)
        self.connections.retain(set(self._node_of.values()))

    def _move(self, vbid: int, address: NodeAddress | None) -> None:
        vbucket = self.vbuckets[vbid]
        self._node_of[vbid] = address
        vbucket.polled = None
        if address is None:
            vbucket.detach(events.NoActiveNode())
            current = self.map_follower.current
            node = current.node_of(vbid) if current is not None else None
            if node is not None:
                how = "with TLS" if self._source.tls else "without TLS"
                vbucket.report(VbucketStatus.WAITING, f"its node {node.host} does not offer the data service {how}")
            return
        vbucket.detach(events.Stop(f"moved to {address}"))
        keeper = self.connections.keep(address)
        if keeper.ready:
            self.attach_if_ready(vbucket)
        elif vbucket.group.error is None:
            connecting = VbucketStatus.REQUESTING, f"connecting to {address}"
            vbucket.report(*connecting if keeper.error is None else (VbucketStatus.WAITING, str(keeper.error)))

    # -- nodes ----------------------------------------------------------------------------------------------------

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        self._was_ready = True
        assert keeper.session is not None
        for vbucket in self.vbuckets_at(keeper.address):
            if vbucket.group.error is None:
                self._attach(vbucket, keeper.session)
        self._source_watch.look()
        self.collections.look()

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        """Show the failure. With `ends_on_refusal`, end mirroring if all nodes refuse before any session was ready."""
        self.map_follower.queries.wake()
        for vbucket in self.vbuckets_at(keeper.address):
            if vbucket.host.session is None:
                vbucket.report(_status_after(error), str(error))
        if self._was_ready or not self._ends_on_refusal:
            return
        errors = [other.error for other in self.connections.keepers.values()]
        if all(one is not None and not one.retryable for one in errors):
            self._end(error)

    def on_closed(self, session: NodeSession, error: ClusterError) -> None:
        for vbucket in self.vbuckets.values():
            if vbucket.host.session is session:
                vbucket.detach(events.ConnectionLost(str(error)))

    def vbuckets_at(self, address: NodeAddress) -> list[MirroredVbucket]:
        return [self.vbuckets[vbid] for vbid, at in self._node_of.items() if at == address]

    def _attach(self, vbucket: MirroredVbucket, session: NodeSession) -> None:
        """Let a vbucket request its stream. If there are no collections to request, report the reason."""
        if self.collections.resolved.streams:
            vbucket.attach(session)
        else:
            # Perhaps not dropped: the user may not see it, or the node has restarted. So the old copy is served.
            held = self.collections.resolved.uid >= 0 and vbucket.writer.state.published_seqno
            vbucket.report(VbucketStatus.REFUSED if held else VbucketStatus.WAITING, self.collections.text)

    def attach_if_ready(self, vbucket: MirroredVbucket) -> None:
        session = self.connections.session_at(self._node_of[vbucket.vbid])
        if session is not None:
            self._attach(vbucket, session)

    def reopen(self, vbucket: MirroredVbucket, cause: str) -> None:
        session = vbucket.host.session
        if session is not None:
            vbucket.detach(events.Stop(cause))
            self._attach(vbucket, session)

    def _on_collections(self, waiting: set[int]) -> None:
        for vbid, vbucket in self.vbuckets.items():
            refused = vbucket.host.machine is not None and vbucket.host.machine.phase is Phase.REFUSED
            if vbucket.group.error is None and (not self.collections.selection.whole or (vbid in waiting and refused)):
                self.attach_if_ready(vbucket)


def _status_after(error: MirrorError) -> VbucketStatus:
    return VbucketStatus.WAITING if error.retryable else VbucketStatus.REFUSED
