"""A worker's side of mirroring: its groups' vbuckets, one session per node, the map, the commits, the watchdogs.

Knows who is where and when what is due; decides nothing about a stream (the machines do), writes nothing itself (the
sinks do). One event loop, one thread: whatever comes from a socket is worked on before the next read, so nothing
queues, and the flow-control window bounds what can come.

Invariants:
- groups with something that waits commit in turn, at once while commits take less than their share of the time, after
  `commit_interval_ms` at the latest (`pace`), or at once when `batch_bytes_max` is staged;
- an error of one vbucket, node or group never touches another; a group whose store failed drops its machines, reads
  its states again and asks for its streams again;
- no map is followed that is older than one followed before, here, in another worker or before a restart (`NewestMap`);
  with a supervisor, a newer one is followed once that has recorded it, by all workers alike; a map of another bucket
  than the stored one ends the consumer with `BucketChanged`; local data is never deleted for anything that a connection
  or a map says;
- a vbucket whose source is ahead and that receives nothing is noticed, reported and asked for again (`watch`);
- a mirror of some collections asks for streams once it knows which these are (`collection_watch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mirror.clock import Clock, SystemClock
from mirror.config import Settings
from mirror.errors import BucketChanged, ClusterError, ConfigError, MirrorError, NotSupported, OlderMap
from mirror.feed.bootstrap import Access
from mirror.feed.collection_watch import CollectionWatch
from mirror.feed.connection_string import Address, ConnectionString
from mirror.feed.discovery import discover
from mirror.feed.map_poll import MapPoller
from mirror.feed.nodes import NodeKeeper, pause_s
from mirror.feed.pace import CommitPace
from mirror.feed.persistence import PersistenceGate, PersistencePoller
from mirror.feed.session import NodeSession, StreamAnswer
from mirror.feed.transport import Opaques
from mirror.feed.vbucket import MirroredVbucket
from mirror.feed.watch import SourceWatch
from mirror.ingest import events
from mirror.ingest.events import KeyRefused, Row
from mirror.ingest.instructions import Status
from mirror.ingest.selection import Resolved, Selection
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap, Revision
from mirror.log import get_logger
from mirror.wire import events as ev
from mirror.wire.constants import ControlKey
from mirror.wire.frame import Frame
from storage.errors import Full, Locked, SeqnoOrder, StorageError
from storage.history import History
from storage.model import Identity
from storage.writer import GroupWriter

log = get_logger("feed")

STEP_IDLE_S = 0.1
"""Pause between looks for background work when there was none; the store's idle sync is as late as this."""
STEP_SHARE_S = 0.002
"""Pause between two slices of background work, in which sockets are served."""
SHARED_MAP_S = 5.0
"""For a map that was sent to the supervisor to come back; after that it is looked for again."""
REOPEN_FACTOR_MAX = 16
"""Times `storage_retry_interval_s` that a group waits at most which cannot be opened again."""
FREE_BYTES_TO_RESUME = 2
"""Times `batch_bytes_max` that must be free before a group whose disk was full tries again."""


def judge_streams(settings: Settings, selection: Selection) -> None:
    """Refuse settings that no source can meet for what is mirrored. Raises ConfigError."""
    if settings.track_prepares and not selection.whole:
        raise ConfigError(
            f"track_prepares is set, and the data directory mirrors {selection}",
            hint="a source sends both halves of sync writes for a whole bucket alone: leave the setting out",
            setting="track_prepares",
        )
    if settings.out_of_order_backfill and len(selection.collections) != 1:
        raise ConfigError(
            f"out_of_order_backfill is set, and {selection} is mirrored",
            hint="a source does so for a single collection alone: leave the setting out, or name one collection",
            setting="out_of_order_backfill",
        )


class Group:
    """A group environment of this worker, and what waits in it."""

    __slots__ = (
        "actors",
        "commit_waits",
        "commits",
        "error",
        "full_count",
        "reopen_count",
        "retry_timer",
        "waiting_since",
        "writer",
    )

    def __init__(self, writer: GroupWriter) -> None:
        """A healthy group without actors."""
        self.writer = writer
        self.actors: list[MirroredVbucket] = []
        self.commit_waits = False
        self.waiting_since = 0.0
        self.retry_timer: asyncio.TimerHandle | None = None
        self.error: StorageError | None = None
        self.full_count = 0
        self.reopen_count = 0
        self.commits = 0

    @property
    def may_be_retried(self) -> bool:
        """False for an error that no waiting changes. One of no known kind is waited for if the file is not open."""
        assert self.error is not None
        if isinstance(self.error, Locked):  # another process has claimed the group
            return False
        return self.error.retryable or (self.writer.lost and type(self.error) is StorageError)


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
    ) -> None:
        """Mirror what `writers` are for. They stay the caller's to close.

        `cluster_map` is one to begin with; no map older than `map_floor` is followed. With `share_map`, a newer map is
        handed to that function instead of being followed, and `follow` is called when it is recorded.
        """
        self.clock: Clock = clock or SystemClock()
        self.settings = settings
        self.identity = identity
        self._source = source
        self._access = Access.of(source, settings)
        self._first_map = cluster_map
        self._maps = NewestMap(identity.bucket_uuid, map_floor)
        self._share_map = share_map
        self._has_map = asyncio.Event()
        self._map_poller = MapPoller(self, self._maps, self._access, self.clock, self._task_ended)
        self._groups = [Group(writer) for writer in writers]
        self._actors: dict[int, MirroredVbucket] = {}
        self._group_of: dict[int, Group] = {}
        for group in self._groups:
            for vbid in group.writer.vbids:
                gate = PersistenceGate() if settings.publish == "persisted" else None
                actor = MirroredVbucket(vbid, group.writer, self, gate)
                group.actors.append(actor)
                self._actors[vbid] = actor
                self._group_of[vbid] = group
        self._nodes: dict[Address, NodeKeeper] = {}
        self._node_of: dict[int, Address | None] = dict.fromkeys(self._actors)
        self._opaques = Opaques()
        self._poller: PersistencePoller | None = None
        if settings.publish == "persisted":
            self._poller = PersistencePoller(self._access, self, self.clock)
        self._dcp_name = f"dcp-mirror:{self.clock.unique()}:{worker}"
        self._was_ready = False
        selection = Selection.parse(identity.selection)
        judge_streams(settings, selection)
        self._collections = CollectionWatch(selection, self, settings, self.clock)
        self._source_watch = SourceWatch(self, settings, self.clock, self._task_ended)
        self._work_wanted = asyncio.Event()
        self._ending: asyncio.Future[None] | None = None
        self._stop_asked = False
        self._stopping_keepers: set[asyncio.Task[None]] = set()
        self._finished = asyncio.Event()
        self._error: str | None = None
        self._clock_step_count = 0
        self._pace = CommitPace(settings.commit_interval_ms / 1000)
        self._commit_queue: deque[Group] = deque()
        self._commit_timer: asyncio.TimerHandle | None = None
        self._room_bytes = 0
        """How much may be received before the groups' pending bytes must be summed: never too much."""

    # -- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Mirror until `stop`. Raises what makes going on impossible: a refusal by the source, another bucket."""
        self._ending = asyncio.get_running_loop().create_future()
        if self._stop_asked:
            self._ending.set_result(None)
        tasks = [
            asyncio.create_task(work(), name=f"feed {work.__name__}")
            for work in (
                self._follow_map,
                self._watch_source,
                self._step_writers,
                self._poll_persistence,
                self._watch_collections,
            )
        ]
        for task in tasks:
            task.add_done_callback(self._task_ended)
        try:
            for actor in self._actors.values():
                actor.start_machine()
            await self._ending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._wind_up()
            self._finished.set()

    async def stop(self) -> None:
        """Let `run` commit what is complete and return."""
        self._stop_asked = True
        if self._ending is None:
            return
        if not self._ending.done():
            self._ending.set_result(None)
        await self._finished.wait()

    async def _wind_up(self) -> None:
        for actor in self._actors.values():
            actor.drop_machine()
        await asyncio.gather(*(keeper.stop() for keeper in self._nodes.values()), *self._stopping_keepers)
        self._nodes = {}
        if self._commit_timer is not None:
            self._commit_timer.cancel()
        for group in self._groups:
            if group.retry_timer is not None:
                group.retry_timer.cancel()
            if group.error is None:
                try:
                    group.writer.commit()
                except StorageError as error:
                    log.error("last commit failed", group=group.writer.group, error=str(error))

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
        return self._maps.current

    async def _follow_map(self) -> None:
        """Find a first map, then ask all nodes for newer ones."""
        if self._first_map is not None:
            self._judge_map(self._first_map)
            self.follow(self._first_map)
        await self._find_first_map()
        await self._map_poller.run()

    async def _find_first_map(self) -> None:
        started = self.clock.monotonic()
        attempt = 0
        while self.cluster_map is None:
            try:
                found = await discover(self._access, self.clock, bucket_uuid=self.identity.bucket_uuid)
                if self._offer(found) is MapVerdict.OLDER and self._maps.floor is not None:
                    raise OlderMap.of(found.revision, self._maps.floor)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SHARED_MAP_S):
                        await self._has_map.wait()
            except ClusterError as error:
                waited_s = self.clock.monotonic() - started
                limit_s = self.settings.bootstrap_timeout_s
                if not error.retryable or (limit_s and waited_s >= limit_s):
                    raise
                self._error = str(error)
                if attempt & (attempt + 1) == 0:
                    log.warning("source cannot be reached", error=str(error), tries=attempt + 1)
                with contextlib.suppress(TimeoutError):  # another worker may find one
                    async with asyncio.timeout(pause_s(attempt, self.settings, self.clock.jitter())):
                        await self._has_map.wait()
                attempt += 1

    def ready_sessions(self) -> list[NodeSession]:
        """Connections that can be asked."""
        return [keeper.session for keeper in self._nodes.values() if keeper.session is not None and keeper.ready]

    def session_at(self, address: Address) -> NodeSession | None:
        """The open session of a node, if there is one."""
        keeper = self._nodes.get(address)
        return keeper.session if keeper is not None and keeper.ready else None

    def on_map(self, address: Address, found: ClusterMap) -> None:
        """A node sent its map."""
        current = self.cluster_map
        member = current is None or address in map(self._access.address_of, current.nodes)
        if self._maps.judge(found) is MapVerdict.OTHER_BUCKET and not member:
            # A host that left the cluster and serves another bucket of that name says nothing about ours.
            log.debug("a host of the source serves another bucket", node=str(address), bucket_uuid=found.bucket_uuid)
            return
        try:
            self._offer(found)
        except MirrorError as error:
            self._end(error)

    def _offer(self, found: ClusterMap) -> MapVerdict:
        """Have a map followed if it is newer. Raises BucketChanged, NotSupported."""
        verdict = self._judge_map(found)
        self._error = None
        if verdict is MapVerdict.NEWER:
            (self._share_map or self.follow)(found)
        elif verdict is MapVerdict.OLDER:
            log.debug("an older map is not followed", rev_epoch=found.rev_epoch, rev=found.rev)
        return verdict

    def _judge_map(self, found: ClusterMap) -> MapVerdict:
        """What a map is to the one that is followed. Raises what a map says that makes going on impossible."""
        verdict = self._maps.judge(found)
        if verdict is MapVerdict.OTHER_BUCKET:
            raise BucketChanged(
                f"bucket {self.identity.bucket_name} at the source has uuid {found.bucket_uuid}, "
                f"the data directory mirrors uuid {self.identity.bucket_uuid}"
            )
        if verdict is not MapVerdict.NEWER:
            return verdict
        if found.vbucket_count != self.identity.vbucket_count:
            raise BucketChanged(
                f"bucket {self.identity.bucket_name} at the source has {found.vbucket_count} vbuckets, "
                f"the data directory has {self.identity.vbucket_count}"
            )
        if found.ephemeral and self._poller is not None:
            raise NotSupported(
                f"bucket {self.identity.bucket_name} is ephemeral: nothing of it is ever persisted",
                hint="set publish to received",
            )
        return verdict

    def follow(self, found: ClusterMap) -> None:
        """Move the vbuckets to where a map says they are, unless a newer one is followed already."""
        if not self._maps.take(found):
            return
        self._error = None
        self._has_map.set()
        log.info("cluster map", rev_epoch=found.rev_epoch, rev=found.rev, nodes=len(found.nodes))
        for vbid in self._actors:
            node = found.node_of(vbid)
            address = None if node is None else self._access.address_of(node)
            if address != self._node_of[vbid] or address is None:
                self._move(vbid, address)
        self._retire_nodes()

    def _move(self, vbid: int, address: Address | None) -> None:
        actor = self._actors[vbid]
        self._node_of[vbid] = address
        actor.forget_high_seqno()
        if address is None:
            self._guarded(vbid, partial(actor.detach, events.NoActiveNode()))
            node = self.cluster_map.node_of(vbid) if self.cluster_map is not None else None
            if node is not None:
                how = "with TLS" if self._source.tls else "without TLS"
                actor.report(Status.WAITING, f"its node {node.host} offers the data service nowhere {how}")
            return
        self._guarded(vbid, partial(actor.detach, events.Stop(f"moved to {address}")))
        keeper = self._nodes.get(address)
        if keeper is None:
            keeper = NodeKeeper(address, self._make_session, self, self.settings, self.clock)
            keeper.on_died = self._end  # else the node's vbuckets would stop quietly: the worker is started again
            self._nodes[address] = keeper
            keeper.start()
        elif keeper.session is not None and keeper.ready:
            self._attach(vbid, keeper.session)

    def _retire_nodes(self) -> None:
        """Close what no vbucket of ours needs any more."""
        needed = set(self._node_of.values())
        for address in [address for address in self._nodes if address not in needed]:
            task = asyncio.create_task(self._nodes.pop(address).stop())
            self._stopping_keepers.add(task)
            task.add_done_callback(self._stopping_keepers.discard)

    def _make_session(self, address: Address) -> NodeSession:
        session = NodeSession(self._access, address, self, self.clock, name=self._dcp_name, opaques=self._opaques)
        session.map_watch = self
        session.with_prepares = self.settings.track_prepares
        session.with_history = self.settings.change_streams
        session.with_oso = self.settings.out_of_order_backfill
        return session

    # -- what nodes bring -----------------------------------------------------------------------------------------

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        """A session is open: its vbuckets may ask for their streams."""
        self._was_ready = True
        session = keeper.session
        assert session is not None
        for vbid in self._vbids_at(keeper.address):
            if self._group_of[vbid].error is None:
                self._attach(vbid, session)
        self._collections.look()

    def _attach(self, vbid: int, session: NodeSession) -> None:
        """Let a vbucket ask for its stream, if there is something to ask for."""
        actor = self._actors[vbid]
        if self._collections.streams:
            self._guarded(vbid, partial(actor.attach, session))
        else:
            actor.report(Status.WAITING, self._collections.text)

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        """A refusal at the very start ends the consumer; later failures are waited out and shown."""
        self._map_poller.wake()
        for vbid in self._vbids_at(keeper.address):
            actor = self._actors[vbid]
            if actor.session is None:
                actor.report(Status.WAITING, str(error))
        if self._was_ready:
            return
        errors = [other.error for other in self._nodes.values()]
        if all(one is not None and not one.retryable for one in errors):
            self._end(error)

    @property
    def network(self) -> str | None:
        """Whose addresses the first map was read by; all others are, too."""
        return None if self.cluster_map is None else self.cluster_map.network

    def on_first_map(self, found: ClusterMap) -> None:
        """Judge what a node that was connected to is part of, before anything is asked of it."""
        try:
            self._offer(found)
        except MirrorError as error:
            self._end(error)
            raise

    def on_push(self, session: NodeSession, frame: Frame) -> None:
        """A node announces a cluster map over its session."""
        self._map_poller.on_notice(session.address, frame)

    def on_closed(self, session: NodeSession, error: ClusterError) -> None:
        """A session is over: its vbuckets wait for the next."""
        for vbid, actor in self._actors.items():
            if actor.session is session:
                self._guarded(vbid, partial(actor.detach, events.ConnectionLost(str(error))))

    def on_rows(self, vbid: int, opaque: int, rows: list[Row], byte_count: int) -> None:
        """Data: staged when this returns, and the group is committed first where it holds enough."""
        group = self._group_of[vbid]
        actor = self._actors[vbid]
        try:
            actor.handle_rows(opaque, rows, byte_count)
            self._room_bytes -= byte_count
            if self._room_bytes <= 0:
                self._relieve()
        except StorageError as error:
            self._store_failed(group, error)

    def on_event(self, vbid: int, event: ev.Event | KeyRefused) -> None:
        """Any other message of a stream."""
        self._actors[vbid].progressed()
        self.enter(vbid, event)
        if isinstance(event, (ev.Prepare, ev.Commit, ev.SystemEvent)):  # they bring as much as rows do
            self._relieve()

    def on_answer(self, vbid: int, answer: StreamAnswer) -> None:
        """The answer to a stream request."""
        self.enter(vbid, answer)

    def enter(self, vbid: int, event: Any) -> None:
        """Hand an event to a vbucket, with the group's errors looked after."""
        try:
            self._actors[vbid].handle(event)
        except StorageError as error:
            self._store_failed(self._group_of[vbid], error)
        self.touch_group(vbid)

    def refresh_map(self, config: bytes, vbid: int) -> None:
        """A vbucket was told that it is elsewhere; perhaps the map came with that (not where we have it already)."""
        address = self._node_of[vbid]
        if not config or address is None or not self._map_poller.on_sent(config, address):
            self._map_poller.wake()

    def _vbids_at(self, address: Address) -> list[int]:
        return [vbid for vbid, at in self._node_of.items() if at == address]

    # -- commits and the store's failures -------------------------------------------------------------------------

    def touch_group(self, vbid: int) -> None:
        """Something waits: commit before long."""
        group = self._group_of[vbid]
        if not group.commit_waits and group.error is None:
            group.commit_waits = True
            group.waiting_since = self.clock.monotonic()
            self._commit_queue.append(group)
            self._schedule_commit()

    def _schedule_commit(self) -> None:
        """Have the group commit that has waited longest."""
        if self._commit_timer is None and self._commit_queue:
            delay_s = self._pace.delay_s(self.clock.monotonic(), self._commit_queue[0].waiting_since)
            self._commit_timer = asyncio.get_running_loop().call_later(delay_s, self._commit_due)

    def commit_group(self, vbid: int) -> None:
        """Commit now; raises what the store raises."""
        self._commit(self._group_of[vbid])

    def _commit_due(self) -> None:
        self._commit_timer = None
        if self._commit_queue:
            group = self._commit_queue.popleft()
            group.commit_waits = False
            started = self.clock.monotonic()
            try:
                self._commit(group)
            except StorageError as error:
                self._store_failed(group, error)
            finally:
                self._pace.committed(started, self.clock.monotonic())
                self._schedule_commit()

    def _commit(self, group: Group, *, flush_open: bool = False) -> None:
        result = group.writer.commit(flush_open=flush_open)
        group.commits += 1
        group.full_count = 0
        self._work_wanted.set()
        for vbid, seqno in result.published:
            self._actors[vbid].published(seqno)

    def _relieve(self) -> None:
        """Write the fullest group's rows down when all groups together hold as much as the worker may."""
        limit_bytes = self.settings.batch_bytes_max
        pending_bytes = sum(group.writer.pending_bytes for group in self._groups)
        self._room_bytes = limit_bytes - pending_bytes
        if pending_bytes >= limit_bytes:
            fullest = max(self._groups, key=lambda group: group.writer.pending_bytes)
            try:
                self._commit(fullest, flush_open=True)
            except StorageError as error:
                self._store_failed(fullest, error)

    def _guarded(self, vbid: int, work: Callable[[], None]) -> None:
        try:
            work()
        except StorageError as error:
            self._store_failed(self._group_of[vbid], error)

    def _store_failed(self, group: Group, error: StorageError) -> None:
        """Stop the group's streams; start them again from what is stored, later where the disk is full."""
        if group.error is not None:
            return
        group.error = error
        if group.commit_waits:
            group.commit_waits = False
            self._commit_queue.remove(group)
        log.error("store failed", group=group.writer.group, error=str(error))
        guilty = self._actors.get(error.vbid) if isinstance(error, SeqnoOrder) and error.vbid is not None else None
        for actor in group.actors:
            actor.drop_machine()
            actor.report(Status.WAITING, f"the store failed: {error}")
            actor.last_error = str(error)
        delay_s = self.settings.storage_retry_interval_s
        if isinstance(error, Full):
            group.full_count += 1
        elif guilty is not None:
            guilty.violations += 1
            delay_s = min(delay_s, 0.1 * 2 ** min(guilty.violations, 10))
        elif not group.may_be_retried:
            self._give_up(group)
            return
        group.retry_timer = asyncio.get_running_loop().call_later(delay_s, self._retry_group, group)

    def _give_up(self, group: Group) -> None:
        """The group is damaged, locked or taken over, which no waiting changes. The others go on."""
        for actor in group.actors:
            actor.report(Status.REFUSED, f"the store failed: {group.error}")
        group.writer.give_up()

    def _retry_group(self, group: Group) -> None:
        group.retry_timer = None
        try:
            group.writer.reopen()
        except StorageError as error:
            group.error = error
            group.reopen_count += 1
            log.warning("store cannot be opened again", group=group.writer.group, error=str(error))
            if not group.may_be_retried:
                self._give_up(group)
                return
            delay_s = self.settings.storage_retry_interval_s * min(2**group.reopen_count, REOPEN_FACTOR_MAX)
            group.retry_timer = asyncio.get_running_loop().call_later(delay_s, self._retry_group, group)
            return
        group.reopen_count = 0
        if isinstance(group.error, Full):
            free_bytes = shutil.disk_usage(group.writer.path).free
            if free_bytes < FREE_BYTES_TO_RESUME * self.settings.batch_bytes_max:
                delay_s = self.settings.storage_retry_interval_s
                group.retry_timer = asyncio.get_running_loop().call_later(delay_s, self._retry_group, group)
                return
        log.info("store is tried again", group=group.writer.group)
        group.error = None
        for actor in group.actors:
            address = self._node_of[actor.vbid]
            keeper = None if address is None else self._nodes.get(address)
            actor.start_machine()
            if keeper is not None and keeper.session is not None and keeper.ready:
                self._attach(actor.vbid, keeper.session)

    async def _step_writers(self) -> None:
        """Background work of the store (key rows, syncs), in slices between which sockets are served."""
        while True:
            busy = False
            for group in self._groups:
                if group.error is not None:
                    continue
                try:
                    waiting = group.writer.step()
                    if group.writer.has_pending:
                        self.touch_group(group.actors[0].vbid)
                    if waiting:  # one at a time: the key rows of one snapshot are all that memory has room for
                        busy = True
                        break
                except StorageError as error:
                    self._store_failed(group, error)
            if busy:
                await asyncio.sleep(STEP_SHARE_S)
                continue
            self._work_wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STEP_IDLE_S):
                    await self._work_wanted.wait()

    # -- how far the source is ------------------------------------------------------------------------------------

    async def _watch_source(self) -> None:
        await self._source_watch.run()

    @property
    def keepers(self) -> Mapping[Address, NodeKeeper]:
        """The nodes."""
        return self._nodes

    @property
    def polled_collections(self) -> Sequence[int] | None:
        """The collections whose high seqnos count; None: the bucket's."""
        return self._collections.polled_collections

    def actors_at(self, address: Address) -> list[MirroredVbucket]:
        """The vbuckets whose node that is."""
        return [self._actors[vbid] for vbid in self._vbids_at(address)]

    def guarded(self, vbid: int, work: Callable[[], None]) -> None:
        """Do something that may fail as the store fails."""
        self._guarded(vbid, work)

    def reopen(self, vbid: int, cause: str) -> None:
        """Ask for a vbucket's stream again, over the connection that it has."""
        actor = self._actors[vbid]
        session = actor.session
        if session is not None:
            self._guarded(vbid, partial(actor.detach, events.Stop(cause)))
            self._attach(vbid, session)

    # -- which collections ----------------------------------------------------------------------------------------

    async def _watch_collections(self) -> None:
        await self._collections.run()

    @property
    def shown(self) -> Resolved:
        """What of the bucket streams are asked for."""
        return self._collections.resolved

    @property
    def has_system_collections(self) -> bool:
        """Whether the cluster map says that there are collections of the server's own."""
        return self.cluster_map is not None and self.cluster_map.system_collections

    def refresh_collections(self, vbid: int) -> None:
        """A vbucket was told of an unknown collection, or that all it had is gone."""
        self._collections.look(vbid)

    def on_collections(self, waiting: set[int]) -> None:
        """There is something to ask for that was not asked for."""
        for vbid, actor in self._actors.items():
            address = self._node_of[vbid]
            keeper = None if address is None else self._nodes.get(address)
            if keeper is None or keeper.session is None or not keeper.ready or self._group_of[vbid].error is not None:
                continue
            if self._collections.selection.whole and not (vbid in waiting and actor.refused):
                continue
            self._attach(vbid, keeper.session)

    async def _poll_persistence(self) -> None:
        if self._poller is not None:
            await self._poller.run(self._actors.values())

    def copies_of(self, vbid: int) -> list[Address]:
        """Where the vbucket is, the active copy first; empty while nobody can say."""
        found = [self._access.address_of(node) for node in self.cluster_map.copies_of(vbid)] if self.cluster_map else []
        known = [address for address in found if address is not None]
        return known if len(known) == len(found) else []

    # -- what people see and ask ----------------------------------------------------------------------------------

    def caught_up(self, targets: Mapping[int, int]) -> bool:
        """True once every vbucket of ours in `targets` has an open stream and has published its target."""
        return all(
            self._actors[vbid].streaming and self._has_published(vbid, seqno)
            for vbid, seqno in targets.items()
            if vbid in self._actors
        )

    def _has_published(self, vbid: int, seqno: int) -> bool:
        state = self._actors[vbid].writer.served(vbid)
        return state.published_seqno >= seqno and not state.rollback_deferred

    def source_high_seqnos(self) -> dict[int, int]:
        """The source's high seqno of each vbucket, as last polled; without those that nobody has told yet."""
        return {
            vbid: actor.source_high_seqno for vbid, actor in self._actors.items() if actor.source_high_seqno is not None
        }

    def status(self) -> dict[str, Any]:
        """`vbuckets` (a row each), `nodes`, `groups`, `counters` (they only rise), `map`, `error`."""
        histories = self._histories()
        rows = [actor.row(histories.get(vbid)) for vbid, actor in self._actors.items()]
        new = self.cluster_map
        return {
            "vbuckets": rows,
            "nodes": [self._node_row(keeper) for keeper in self._nodes.values()],
            "groups": [self._group_row(group) for group in self._groups],
            "counters": {
                "received_documents": sum(row["received_documents"] for row in rows),
                "received_bytes": sum(row["received_bytes"] for row in rows),
                "requested_again_bytes": sum(row["requested_again_bytes"] for row in rows),
                "commits": sum(group.commits for group in self._groups),
                "stalls": sum(row["stalls"] for row in rows),
                "retries": sum(actor.retries for actor in self._actors.values()),
            },
            "map": None if new is None else {"rev_epoch": new.rev_epoch, "rev": new.rev, "nodes": len(new.nodes)},
            "error": self._error or self._map_poller.error,
            "selection": str(self._collections.selection),
            "warnings": self._collections.warnings + self._unmet_wishes() + self._clock_warnings(),
        }

    def _unmet_wishes(self) -> list[str]:
        """What was asked for that a node does not offer."""
        asked = [ControlKey.CHANGE_STREAMS] if self.settings.change_streams else []
        if self.settings.out_of_order_backfill:
            asked.append(ControlKey.ENABLE_OUT_OF_ORDER_SNAPSHOTS)
        sessions = self.ready_sessions()
        return [
            f"{session.address} does not offer {name.decode()}, which the settings ask for; going on without"
            for name in asked
            for session in sessions
            if not session.controls.get(name.decode(), False)
        ]

    def _clock_warnings(self) -> list[str]:
        """That the wall clock was set, which times of publication then show; each step is also logged, once."""
        steps = [group.writer.clock_steps() for group in self._groups]
        count, step_ms = max(steps, default=(0, 0))
        if count > self._clock_step_count:
            self._clock_step_count = count
            log.warning("the wall clock was set", step_s=step_ms / 1000, step_count=count)
        if not count:
            return []
        return [
            f"the wall clock was set {count} times since this worker began, the last time by {step_ms / 1000:+,.0f} s; "
            "times of publication are wrong where it was"
        ]

    def _histories(self) -> dict[int, History]:
        """Of the groups that can be read."""
        found: dict[int, History] = {}
        for group in self._groups:
            if group.error is None:
                try:
                    found |= group.writer.histories()
                except StorageError as error:
                    log.warning("history cannot be read", group=group.writer.group, error=str(error))
        return found

    def _node_row(self, keeper: NodeKeeper) -> dict[str, Any]:
        session = keeper.session
        return {
            "address": str(keeper.address),
            "ready": keeper.ready,
            "error": str(keeper.error) if keeper.error is not None else None,
            "reconnects": keeper.reconnects,
            "streams": session.stream_count if session is not None else 0,
            "unacked_bytes": session.ledger.outstanding if session is not None else 0,
            "received_bytes": session.ledger.received_total if session is not None else 0,
            "acked_bytes": session.ledger.acked_total if session is not None else 0,
            "dropped_bytes": session.figures.dropped_bytes if session is not None else 0,
            "controls": dict(session.controls) if session is not None else {},
        }

    def _group_row(self, group: Group) -> dict[str, Any]:
        return {
            "group": group.writer.group,
            "error": str(group.error) if group.error is not None else None,
            "full": isinstance(group.error, Full),
            **(group.writer.figures() if group.error is None else {}),
        }

    async def request(self, command: dict[str, Any]) -> dict[str, Any]:
        """Obey a command: `{"op": "rollback", "vbid": N, "to": SEQNO}` or `{"op": "refill", "vbid": N}`."""
        known: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "rollback": self._roll_back,
            "refill": self._refill,
        }
        operation = str(command.get("op"))
        if operation not in known:
            raise ConfigError(f"unknown command {operation!r}", hint="known: " + ", ".join(known))
        return await known[operation](command)

    async def _roll_back(self, command: dict[str, Any]) -> dict[str, Any]:
        """Go back to the newest kept boundary at or below a seqno, and stream on from there.

        At the published boundary there is nothing to take back, and nothing is changed.
        """
        vbid, to_seqno = command.get("vbid"), command.get("to")
        if not isinstance(vbid, int) or vbid not in self._actors or not isinstance(to_seqno, int) or to_seqno < 0:
            raise ConfigError(f"rollback of vb {vbid!r} to {to_seqno!r}", hint="vbid must be ours, to a seqno")
        group, actor = self._group_of[vbid], self._actors[vbid]
        if group.error is not None:
            raise group.error
        session = actor.session
        try:
            self._commit(group)
        except StorageError as error:
            self._store_failed(group, error)
            raise
        boundary = group.writer.check_rollback(vbid, to_seqno)
        state = group.writer.state(vbid)
        if boundary.seqno == state.published_seqno:
            branch = int(state.branch)
            at = int(boundary.seqno)
            return {"vbid": vbid, "boundary_seqno": at, "from_branch": branch, "from_seqno": at, "branch": branch}
        actor.drop_machine()
        try:
            result = group.writer.rollback(vbid, to_seqno)
        except StorageError as error:
            self._store_failed(group, error)
            raise
        actor.note_rollback(result)
        actor.start_machine()
        if session is not None and session.ready:
            self._attach(vbid, session)
        return {
            "vbid": vbid,
            "boundary_seqno": int(result.boundary_seqno),
            "from_branch": int(result.from_branch),
            "from_seqno": int(result.from_seqno),
            "branch": int(result.branch),
        }

    async def _refill(self, command: dict[str, Any]) -> dict[str, Any]:
        """Fetch a vbucket again, next to its old copy, and swap it in when it is whole."""
        vbid = command.get("vbid")
        if not isinstance(vbid, int) or vbid not in self._actors:
            raise ConfigError(f"refill of vb {vbid!r}", hint="vbid must be ours")
        group, actor = self._group_of[vbid], self._actors[vbid]
        if group.error is not None:
            raise group.error
        session = actor.session
        actor.drop_machine()
        try:
            actor.begin_resync("requested by an operator")
        except StorageError as error:
            self._store_failed(group, error)
            raise
        state = group.writer.state(vbid)
        actor.start_machine()
        if session is not None and session.ready:
            self._attach(vbid, session)
        if state.published_seqno and state.staging_branch == state.branch:
            raise MirrorError(f"vb {vbid} cannot be resynced", hint="make room on the disk for a second copy of it")
        return {"vbid": vbid, "staging_branch": int(state.staging_branch)}
