"""A worker's side of mirroring: which vbucket's stream goes over which node's session.

Knows who is where; decides nothing about a stream (the machines do), writes nothing itself (the sinks do). Maps are
followed by `map_follower`, sessions kept by `connections`, commits made by `group_commits`. One event loop, one thread:
whatever comes from a socket is worked on before the next read, so nothing queues, and the flow-control window bounds
what can come.

Invariants:
- an error of one vbucket, node or group never touches another;
- with a supervisor, a newer map is followed once that has recorded it, by all workers alike; a map of another bucket
  than the stored one ends the consumer with `BucketChanged`; local data is never deleted for anything that a connection
  or a map says;
- a vbucket whose source is ahead and that receives nothing is noticed, reported and requested again (`watch`);
- a mirror of some collections asks for streams once it knows which these are (`collection_watch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mirror.clock import Clock, SystemClock
from mirror.config import Settings
from mirror.errors import BucketChanged, ClusterError, MirrorError, NotSupported
from mirror.feed.cluster.collection_watch import CollectionWatch
from mirror.feed.cluster.connections import Connections
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.cluster.nodes import NodeKeeper, pause_s
from mirror.feed.cluster.persistence import PersistenceGate, PersistencePoller
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import ConnectionString, NodeAddress
from mirror.feed.connection.session import NodeSession, StreamAnswer
from mirror.feed.follow.commands import ConsumerCommands
from mirror.feed.follow.group_commits import Group, GroupCommits
from mirror.feed.follow.status import ConsumerStatus
from mirror.feed.follow.vbucket import MirroredVbucket
from mirror.feed.follow.watch import SourceWatch
from mirror.feed.stream.host import MachineEvent
from mirror.ingest import events
from mirror.ingest.events import KeyRefused, Row
from mirror.ingest.instructions import VbucketStatus
from mirror.ingest.selection import Resolved, Selection, check_streams
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap, Revision
from mirror.log import get_logger
from mirror.messages import ProcessReport, Resync, RollBack
from mirror.wire import events as ev
from storage.errors import StorageError
from storage.model import Identity
from storage.write.writer import GroupWriter

log = get_logger("feed")


class Consumer:
    """Mirrors the vbuckets of some groups. `run` until `stop`; everything else is to be called on the same loop."""

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
        """Mirror what `writers` are for. They stay the caller's to close.

        `cluster_map` is one to begin with; no map older than `map_floor` is followed. With `share_map`, a newer map is
        handed to that function instead of being followed, and `follow` is called when it is recorded. Without
        `ends_on_refusal` a refusal by the source is shown as the state of the vbuckets, and the source is asked again.
        """
        self.clock: Clock = clock or SystemClock()
        self.settings = settings
        self.identity = identity
        selection = Selection.parse(identity.selection)
        check_streams(settings, selection)
        self._source = source
        self._access = Access.of(source, settings)
        self._first_map = cluster_map
        self._share_map = share_map
        self._ends_on_refusal = ends_on_refusal
        newest = NewestMap(identity.bucket_uuid, map_floor)
        self.map_follower = MapFollower(self._access, self.clock, newest, self, self._task_ended)
        name = f"dcp-mirror:{self.clock.unique()}:{worker}"
        self.connections = Connections(
            self._access, self.clock, self, self.map_follower, name=name, on_defect=self._end
        )
        self.connections.with_prepares = settings.track_prepares
        self.connections.with_history = settings.change_streams
        self.commits = GroupCommits([Group(writer) for writer in writers], settings, self.clock, self._attach_if_ready)
        self.vbuckets: dict[int, MirroredVbucket] = {}
        self._group_of: dict[int, Group] = {}
        for group in self.commits.groups:
            for vbid in group.writer.vbids:
                gate = PersistenceGate() if settings.publish == "persisted" else None
                self.vbuckets[vbid] = group.vbuckets[vbid] = MirroredVbucket(vbid, group.writer, self, gate)
                self._group_of[vbid] = group
        self._node_of: dict[int, NodeAddress | None] = dict.fromkeys(self.vbuckets)
        self._persistence = (
            PersistencePoller(self._access, self.map_follower, self.clock) if settings.publish == "persisted" else None
        )
        self._collections = CollectionWatch(selection, self, settings, self.clock)
        self._source_watch = SourceWatch(self, settings, self.clock, self._task_ended)
        self._commands = ConsumerCommands(self.vbuckets, self._group_of, self.commits, self._attach)
        self._status = ConsumerStatus(self)
        self._was_ready = False
        self._ending: asyncio.Future[None] | None = None
        self._stop_requested = False
        self._finished = asyncio.Event()

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Mirror until `stop`. Raises what makes going on impossible: a refusal by the source, another bucket."""
        self._ending = asyncio.get_running_loop().create_future()
        if self._stop_requested:
            self._ending.set_result(None)
        tasks = [
            asyncio.create_task(work(), name=f"feed {name}")
            for name, work in (
                ("maps", self._follow_maps),
                ("high seqnos", self._source_watch.run),
                ("background work", self.commits.work_in_background),
                ("persistence", self._poll_persistence),
                ("collections", self._collections.run),
            )
        ]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        try:
            for vbucket in self.vbuckets.values():
                vbucket.start_machine()
            await self._ending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._shut_down()
            self._finished.set()

    async def stop(self) -> None:
        """Let `run` commit what is complete and return."""
        self._stop_requested = True
        if self._ending is None:
            return
        if not self._ending.done():
            self._ending.set_result(None)
        await self._finished.wait()

    async def _shut_down(self) -> None:
        for vbucket in self.vbuckets.values():
            vbucket.drop_machine()
        await self.connections.close()
        self.commits.close()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        assert self._ending is not None
        if not self._ending.done():
            self._ending.set_exception(error)

    # -- the map --------------------------------------------------------------------------------------------------

    @property
    def cluster_map(self) -> ClusterMap | None:
        """The map that is followed."""
        return self.map_follower.current

    async def _follow_maps(self) -> None:
        if self._first_map is not None:
            self.map_follower.check(self._first_map)
            self.follow(self._first_map)
        attempt = 0
        while self.cluster_map is None:
            try:
                await self.map_follower.find_first()
            except ClusterError as error:
                if self._ends_on_refusal or error.retryable:
                    raise
                for vbucket in self.vbuckets.values():
                    vbucket.report(VbucketStatus.REFUSED, str(error))
                await self.clock.sleep(pause_s(attempt, self.settings, self.clock.jitter(), error))
                attempt += 1
        await self.map_follower.run()

    def check_map(self, found: ClusterMap, verdict: MapVerdict) -> None:
        """Refuse a map that makes going on impossible. Raises BucketChanged, NotSupported."""
        if verdict is MapVerdict.OTHER_BUCKET:
            raise BucketChanged.of(self.identity.bucket_name, self.identity.bucket_uuid, found.bucket_uuid)
        if found.vbucket_count != self.identity.vbucket_count:
            raise BucketChanged(
                f"bucket {self.identity.bucket_name} at the source has {found.vbucket_count} vbuckets, "
                f"the data directory has {self.identity.vbucket_count}"
            )
        if found.ephemeral and self._persistence is not None:
            raise NotSupported(
                f"bucket {self.identity.bucket_name} is ephemeral: nothing of it is ever persisted",
                hint="set publish to received",
            )

    def on_newer_map(self, found: ClusterMap) -> None:
        """Follow the map, or have it recorded first."""
        (self._share_map or self.follow)(found)

    def on_map_refused(self, error: MirrorError) -> None:
        """No map of the source can be followed any more: each session that opens again is refused by the same rule."""
        if self._ends_on_refusal:
            self._end(error)
            return
        for session in self.ready_sessions():
            session.close(error if isinstance(error, ClusterError) else None)

    def follow(self, found: ClusterMap) -> None:
        """Move the vbuckets to where a map says they are, unless a newer one is followed already."""
        if not self.map_follower.take(found):
            return
        log.debug("map-followed", rev_epoch=found.rev_epoch, rev=found.rev, nodes=len(found.nodes))
        for vbid in self.vbuckets:
            address = self.map_follower.address_of(vbid)
            if address != self._node_of[vbid] or address is None:
                self._move(vbid, address)
        self.connections.retain(set(self._node_of.values()))

    def _move(self, vbid: int, address: NodeAddress | None) -> None:
        vbucket = self.vbuckets[vbid]
        self._node_of[vbid] = address
        vbucket.forget_high_seqno()
        if address is None:
            self.guarded(vbid, partial(vbucket.detach, events.NoActiveNode()))
            node = self.cluster_map.node_of(vbid) if self.cluster_map is not None else None
            if node is not None:
                how = "with TLS" if self._source.tls else "without TLS"
                vbucket.report(VbucketStatus.WAITING, f"its node {node.host} offers the data service nowhere {how}")
            return
        self.guarded(vbid, partial(vbucket.detach, events.Stop(f"moved to {address}")))
        keeper = self.connections.keep(address)
        if keeper.session is not None and keeper.ready:
            self._attach(vbid, keeper.session)

    def refresh_map(self, config: bytes, vbid: int) -> None:
        """A vbucket's node refused it: get a new cluster map, or read the one that came with that."""
        self.map_follower.refresh_map(config, vbid)

    # -- nodes ----------------------------------------------------------------------------------------------------

    def session_at(self, address: NodeAddress) -> NodeSession | None:
        """The open session of a node, if there is one."""
        return self.connections.session_at(address)

    def ready_sessions(self) -> list[NodeSession]:
        """Connections that can be queried."""
        return self.connections.ready_sessions()

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        """A session is open: its vbuckets may ask for their streams, and how far they are behind is known soon."""
        self._was_ready = True
        assert keeper.session is not None
        for vbid in self._vbids_at(keeper.address):
            if self._group_of[vbid].error is None:
                self._attach(vbid, keeper.session)
        self._source_watch.look()
        self._collections.look()

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        """A refusal at the very start ends the consumer; later failures are waited out and shown."""
        self.map_follower.wake()
        for vbid in self._vbids_at(keeper.address):
            vbucket = self.vbuckets[vbid]
            if vbucket.session is None:
                vbucket.report(VbucketStatus.WAITING if error.retryable else VbucketStatus.REFUSED, str(error))
        if self._was_ready or not self._ends_on_refusal:
            return
        errors = [other.error for other in self.connections.keepers.values()]
        if all(one is not None and not one.retryable for one in errors):
            self._end(error)

    def _attach(self, vbid: int, session: NodeSession) -> None:
        """Let a vbucket ask for its stream, if there is something to ask for."""
        vbucket = self.vbuckets[vbid]
        if self._collections.streams:
            self.guarded(vbid, partial(vbucket.attach, session))
        else:
            vbucket.report(VbucketStatus.WAITING, self._collections.text)

    def _attach_if_ready(self, vbucket: MirroredVbucket) -> None:
        session = self.connections.session_at(self._node_of[vbucket.vbid])
        if session is not None:
            self._attach(vbucket.vbid, session)

    def _vbids_at(self, address: NodeAddress) -> list[int]:
        return [vbid for vbid, at in self._node_of.items() if at == address]

    # -- what streams bring ---------------------------------------------------------------------------------------

    def on_closed(self, session: NodeSession, error: ClusterError) -> None:
        """A session is over: its vbuckets wait for the next."""
        for vbid, vbucket in self.vbuckets.items():
            if vbucket.session is session:
                self.guarded(vbid, partial(vbucket.detach, events.ConnectionLost(str(error))))

    def on_rows(self, vbid: int, opaque: int, rows: list[Row], byte_count: int) -> None:
        """Data: staged when this returns, and the fullest group is written down first where all hold enough."""
        commits = self.commits
        try:
            self.vbuckets[vbid].handle_rows(opaque, rows, byte_count)
            commits.free_bytes -= byte_count
            if commits.free_bytes <= 0:
                commits.flush_over_budget()
        except StorageError as error:
            commits.failed(self._group_of[vbid], error)

    def on_event(self, vbid: int, event: ev.Event | KeyRefused) -> None:
        """Any other message of a stream."""
        self.vbuckets[vbid].progressed()
        self.enter(vbid, event)
        if isinstance(event, (ev.Prepare, ev.Commit, ev.SystemEvent)):  # they bring as much as rows do
            self.commits.flush_over_budget()

    def on_answer(self, vbid: int, answer: StreamAnswer) -> None:
        """The answer to a stream request."""
        self.enter(vbid, answer)

    def enter(self, vbid: int, event: MachineEvent) -> None:
        """Hand an event to a vbucket, with the group's errors handled."""
        group = self._group_of[vbid]
        try:
            self.vbuckets[vbid].handle(event)
        except StorageError as error:
            self.commits.failed(group, error)
        self.commits.schedule(group)

    def guarded(self, vbid: int, work: Callable[[], None]) -> None:
        """Do something for a vbucket that may fail as its store fails."""
        try:
            work()
        except StorageError as error:
            self.commits.failed(self._group_of[vbid], error)

    def schedule_commit(self, vbid: int) -> None:
        """Something waits in the vbucket's group: commit before long."""
        self.commits.schedule(self._group_of[vbid])

    def commit_group(self, vbid: int) -> None:
        """Commit the vbucket's group now. Raises what the store raises."""
        self.commits.commit(self._group_of[vbid])

    # -- how far the source is ------------------------------------------------------------------------------------

    @property
    def keepers(self) -> Mapping[NodeAddress, NodeKeeper]:
        """The nodes."""
        return self.connections.keepers

    @property
    def polled_collections(self) -> Sequence[int] | None:
        """The collections whose high seqnos count; None: the bucket's."""
        return self._collections.polled_collections

    def vbuckets_at(self, address: NodeAddress) -> list[MirroredVbucket]:
        """The vbuckets whose node that is."""
        return [self.vbuckets[vbid] for vbid in self._vbids_at(address)]

    def reopen(self, vbid: int, cause: str) -> None:
        """Ask for a vbucket's stream again, over the connection that it has."""
        vbucket = self.vbuckets[vbid]
        session = vbucket.session
        if session is not None:
            self.guarded(vbid, partial(vbucket.detach, events.Stop(cause)))
            self._attach(vbid, session)

    async def _poll_persistence(self) -> None:
        if self._persistence is not None:
            await self._persistence.run(self.vbuckets.values())

    # -- which collections ----------------------------------------------------------------------------------------

    @property
    def collections(self) -> CollectionWatch:
        """Which collections are mirrored."""
        return self._collections

    @property
    def shown(self) -> Resolved:
        """What of the bucket streams request."""
        return self._collections.resolved

    @property
    def has_system_collections(self) -> bool:
        """Whether the cluster map says that there are collections of the server's own."""
        return self.cluster_map is not None and self.cluster_map.system_collections

    def refresh_collections(self, vbid: int) -> None:
        """A vbucket's stream names an unknown collection, or all that it had is gone."""
        self._collections.look(vbid)

    def on_collections(self, waiting: set[int]) -> None:
        """There is something to request that was not requested before."""
        for vbid, vbucket in self.vbuckets.items():
            if self._group_of[vbid].error is not None:
                continue
            if self._collections.selection.whole and not (vbid in waiting and vbucket.refused):
                continue
            self._attach_if_ready(vbucket)

    # -- status and commands --------------------------------------------------------------------------------------

    def caught_up(self, targets: Mapping[int, int]) -> bool:
        """True once every vbucket of ours in `targets` has an open stream and has published its target."""
        return all(
            self.vbuckets[vbid].streaming and self.vbuckets[vbid].has_published(seqno)
            for vbid, seqno in targets.items()
            if vbid in self.vbuckets
        )

    def source_high_seqnos(self) -> dict[int, int]:
        """The source's high seqno of each vbucket, as last polled; without those that are unknown."""
        return {
            vbid: vbucket.source_high_seqno
            for vbid, vbucket in self.vbuckets.items()
            if vbucket.source_high_seqno is not None
        }

    def standing(self) -> tuple[bool, bool]:
        """True if every vbucket streams, and true if every one has caught up."""
        return self._status.standing()

    def status(self) -> ProcessReport:
        """`vbuckets` (a row each), `nodes`, `groups`, `counters` (they only rise), `map`, `error`."""
        return self._status.report()

    async def request(self, command: RollBack | Resync) -> dict[str, Any]:
        """Execute an operator's command; returns what it did."""
        return self._commands.request(command)
