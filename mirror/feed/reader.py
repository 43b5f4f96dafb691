"""A bounded reader of a DCP source, for other processes: plain iteration, whole snapshots, no store.

Knows how to keep one connection to each node in a thread of its own, to follow the map, and to hand a read's items over
to the thread that iterates; what a stream means is `reading`'s and `ingest`'s. What it reads from may be a cluster or
another mirror. Invariants: no map is followed that is older than one followed before, by this reader or (`followed`) by
the mirror that it is compared with; connections live as long as the reader and are used again by each read; one read
at a time; a refusal that waiting cannot fix is raised at once, and whatever else keeps a vbucket from coming on for
`timeout_s` is raised then; leaving the context leaves no thread, no connection and no file behind.

    with SourceReader("couchbase://reader@db1/orders", password="...") as reader:
        until = reader.high_seqnos()
        for item in reader.read(dict.fromkeys(until, Position()), until):
            if isinstance(item, Snapshot):
                for document in item.documents():
                    ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from mirror.clock import Clock, SystemClock
from mirror.config import PasswordSource, Settings
from mirror.config_reader import load
from mirror.errors import (
    ClusterError,
    ConfigError,
    HandshakeFailed,
    MirrorError,
    NotSupported,
    OlderMap,
    SourceTimeout,
)
from mirror.feed.bootstrap import Access, fetch_manifest
from mirror.feed.connection_string import Address, parse
from mirror.feed.discovery import discover
from mirror.feed.map_poll import MapPoller
from mirror.feed.nodes import NodeKeeper
from mirror.feed.reading import Reading, ReadVbucket
from mirror.feed.session import NodeSession, StreamAnswer
from mirror.feed.snapshot import Ended, Item, Position, RolledBack, Snapshot
from mirror.feed.spool import SpoolFile
from mirror.feed.transport import Opaques, Tap
from mirror.ingest import events
from mirror.ingest.events import KeyRefused, Row
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap
from mirror.wire import events as ev
from mirror.wire.codec_dcp import decode_all_vb_seqnos, decode_failover_log, encode_all_vb_seqnos_request
from mirror.wire.codec_kv import decode_collection_id
from mirror.wire.constants import Opcode, VbucketState, status_name
from mirror.wire.constants import Status as WireStatus
from mirror.wire.errors import RemoteProtocolError
from storage.map_record import MapRecord
from storage.model import DEFAULT_COLLECTION, FailoverEntry, Seqno, Vbuuid

__all__ = ["Ended", "Position", "RolledBack", "Snapshot", "SourceReader"]

MEMORY_BYTES = 64 * 1024 * 1024
MEMORY_BYTES_MIN = 4096
TIMEOUT_S = 60.0
PARALLEL = 16
"""Vbuckets streamed at a time where each has an end: their snapshots are on disk together."""
POLL_S = 0.02
POLL_MAX_S = 1.0
"""Questions that the source cannot answer yet are repeated after pauses that double from the one to the other."""
CLOSE_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FixedPassword(PasswordSource):
    """A password that the caller holds already."""

    password: str = ""

    def read(self) -> str | None:
        """The password."""
        return self.password

    def __repr__(self) -> str:
        """Without it."""
        return "FixedPassword()"


class SourceReader:
    """Reads from a source. A context manager; used by one thread."""

    def __init__(
        self,
        source: str,
        *,
        password: str | None = None,
        collections: Sequence[str | int] | None = None,
        ca: str | None = None,
        settings: Settings | None = None,
        memory_bytes: int = MEMORY_BYTES,
        parallel: int = PARALLEL,
        timeout_s: float = TIMEOUT_S,
        folder: str | None = None,
        clock: Clock | None = None,
        tap: Tap | None = None,
        followed: MapRecord | None = None,
    ) -> None:
        """`source` is a connection string.

        `password`: by default the settings' way. `collections`: names (`scope.collection`), ids, or the name of one
        scope; by default everything. `ca`: a PEM file. `settings`: by default from the environment. `memory_bytes`
        bounds the rows held in memory, `parallel` the vbuckets that are read at a time; `folder` takes what memory
        does not; `tap` is shown every byte; `followed`: no older map of that bucket is followed. Raises ConfigError.
        """
        if memory_bytes < MEMORY_BYTES_MIN or parallel < 1 or timeout_s <= 0:
            raise ConfigError(f"a reader needs {MEMORY_BYTES_MIN} bytes of memory, a vbucket at a time, and time")
        if settings is None:
            settings = load().settings
        plain: dict[str, Any] = dict.fromkeys(("track_prepares", "change_streams", "out_of_order_backfill"), False)
        if ca is not None:
            plain["tls_ca_file"] = ca
        settings = replace(settings, **plain)
        if not settings.connection_buffer_size:
            raise ConfigError("a reader needs flow control", setting="connection_buffer_size")
        access = replace(Access.of(parse(source), settings), tap=tap)
        if password is not None:
            access = replace(access, password=FixedPassword(None, None, password))
        self._hub = _Hub(access, clock or SystemClock(), tuple(collections or ()), timeout_s, followed)
        self._memory_bytes = memory_bytes
        self._parallel = parallel
        self._file = SpoolFile(folder)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._iterating = False

    # -- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> SourceReader:
        """Connect. Raises what stands in the way."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._hub.broke)
        self._thread = threading.Thread(target=self._loop.run_forever, name="source reader", daemon=True)
        self._thread.start()
        try:
            self._call(self._hub.open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Close all connections and end the thread."""
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._hub.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(CLOSE_S)
        loop.close()
        self._file.close()

    # -- what the source is ---------------------------------------------------------------------------------------

    @property
    def vbucket_count(self) -> int:
        """How many vbuckets the bucket has."""
        return self._hub.map.vbucket_count

    @property
    def bucket_uuid(self) -> str:
        """Which bucket it is; empty where the source does not say."""
        return self._hub.map.bucket_uuid or ""

    @property
    def followed(self) -> MapRecord | None:
        """The newest cluster map that this reader follows; None for a mirror, whose maps are of its own."""
        found = self._hub.map
        return None if found.of_mirror or not found.bucket_uuid else MapRecord(found.bucket_uuid, *found.revision)

    @property
    def sends_purge_seqno(self) -> bool:
        """Snapshots say up to where the source has forgotten its tombstones."""
        return self._hub.sends_purge_seqno

    def high_seqnos(self) -> dict[int, int]:
        """The source's high seqno of each vbucket (the highest of the collections that are read), from all nodes."""
        return self._call(self._hub.high_seqnos())

    def failover_log(self, vbid: int) -> tuple[FailoverEntry, ...]:
        """The source's histories of a vbucket, newest first."""
        return self._call(self._hub.failover_log(vbid))

    def collection_names(self) -> dict[int, str]:
        """`scope.collection` of each collection that the bucket has now, by id; of one without, the default's alone."""
        return self._call(self._hub.collection_names())

    # -- reading --------------------------------------------------------------------------------------------------

    def read(
        self, positions: Mapping[int, Position], until: Mapping[int, int] | None = None
    ) -> Generator[Snapshot | RolledBack | Ended, None, None]:
        """What changed since the positions, in whole snapshots; those of different vbuckets come as they are complete.

        With `until`, a vbucket is read until a snapshot ends at or beyond its seqno, or until the source has sent all
        that there is of the collections up to it, and ends with Ended; it may go beyond. Without, reading goes on
        until the iterator is closed. A vbucket whose position the source no longer holds gives RolledBack and nothing
        more: the caller decides. Raises MirrorError, after everything that was complete.
        """
        for vbid, position in positions.items():
            if not 0 <= vbid < self.vbucket_count or position.seqno < 0 or position.vbuuid < 0:
                raise ConfigError(f"vb {vbid} cannot be read from {position}", hint="positions come from snapshots")
        if until is not None and (missing := sorted(set(positions) - set(until))):
            raise ConfigError(f"it is not said how far vb {missing[0]} is to be read", hint="name each in `until`")
        return self._iterate(dict(positions), None if until is None else dict(until))

    def _iterate(self, positions: dict[int, Position], until: dict[int, int] | None) -> Generator[Item, None, None]:
        assert not self._iterating, "one read at a time: close the other iterator first"
        self._iterating = True
        try:
            reading = self._call(self._begin(positions, until))
            try:
                while (item := reading.outbox.take()) is not None:
                    yield item
                    if isinstance(item, Snapshot):
                        item.close()
                    item = None
            finally:
                if self._loop is not None:
                    self._call(self._hub.end(reading))
        finally:
            self._iterating = False

    def stop_reading(self) -> None:
        """End the read that goes on, after what is complete; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._hub.stop)

    async def _begin(self, positions: dict[int, Position], until: dict[int, int] | None) -> Reading:
        reading = Reading(
            self._hub,
            self._file,
            positions,
            until,
            memory_bytes=self._memory_bytes,
            parallel=self._parallel,
            on_room=self._on_room,
        )
        self._hub.begin(reading)
        return reading

    def _on_room(self) -> None:
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._hub.release_acks)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None:
            work.close()
            raise ConfigError("the reader is not open", hint="use it as a context manager")
        return asyncio.run_coroutine_threadsafe(work, loop).result()


class _Hub:
    """The connections of a reader, in its loop: a session for each node, the map, and whose vbucket is where."""

    def __init__(
        self,
        access: Access,
        clock: Clock,
        collections: tuple[str | int, ...],
        timeout_s: float,
        followed: MapRecord | None = None,
    ) -> None:
        """`open` connects."""
        self.clock = clock
        self.settings = access.settings
        self._access = access
        self._collections = collections
        self._collection_ids: list[int] = []
        self.stream_filter: dict[str, Any] = {}
        """What every stream request says in its JSON value."""
        self._timeout_s = timeout_s
        self._followed = followed
        self._maps = NewestMap()
        self._keepers: dict[Address, NodeKeeper] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self._reading: Reading | None = None
        self._refusal: MirrorError | None = None
        self._opaques = Opaques()
        self._name = f"dcp-mirror:reader:{clock.unique()}"
        self._poller = MapPoller(self, self._maps, access, clock, self._poll_ended)
        self._tasks: list[asyncio.Task[None]] = []
        self._acks_held = False

    @property
    def map(self) -> ClusterMap:
        """The newest map."""
        assert self._maps.current is not None, "the reader is open"
        return self._maps.current

    @property
    def sends_purge_seqno(self) -> bool:
        """Every node does."""
        sessions = [keeper.session for keeper in self._keepers.values()]
        return all(session is not None and session.sends_purge_seqno for session in sessions)

    # -- life -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find the newest map, and connect to all nodes that it names."""
        followed = self._followed
        found = await discover(self._access, self.clock, bucket_uuid=followed.bucket_uuid if followed else None)
        if not found.vbucket_count:
            raise HandshakeFailed(
                f"the map of {self._access.source} names no vbuckets", hint="is it a memcached bucket?"
            )
        if followed is not None and found.bucket_uuid == followed.bucket_uuid:
            self._maps.floor = followed.revision
            if self._maps.judge(found) is MapVerdict.OLDER:
                raise OlderMap.of(found.revision, followed.revision)
        self._take_map(found)
        self._tasks = [asyncio.create_task(self._poller.run()), asyncio.create_task(self._watch())]
        if self._collections:
            await self._find_collections()

    async def close(self) -> None:
        """Close everything."""
        if self._reading is not None:
            await self.end(self._reading)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()), *self._retired)
        self._keepers = {}

    def broke(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback of the loop raised: the reader gets the error, instead of waiting for ever."""
        error = context.get("exception") or MirrorError(str(context.get("message")))
        self._fail(error)

    # -- questions ------------------------------------------------------------------------------------------------

    async def high_seqnos(self) -> dict[int, int]:
        """From all nodes, until every vbucket is named by its own."""
        found: dict[int, int] = {}

        async def ask(session: NodeSession) -> None:
            wanted: list[int | None] = [*self._collection_ids] or [None]
            for collection_id in wanted:
                answer = await session.link.request(
                    Opcode.GET_ALL_VB_SEQNOS,
                    extras=encode_all_vb_seqnos_request(VbucketState.ACTIVE, collection_id),
                    timeout_s=self.settings.request_timeout_s,
                )
                if answer.status != WireStatus.SUCCESS:
                    raise HandshakeFailed(
                        f"{session.address} gives no high seqnos: {status_name(answer.status)}",
                        node=str(session.address),
                    )
                for vbid, seqno in decode_all_vb_seqnos(answer.value):
                    found[vbid] = max(seqno, found.get(vbid, 0))

        def missing() -> str:
            absent = [vbid for vbid in range(self.map.vbucket_count) if vbid not in found]
            return f"no node says how far vb {absent[0]} is ({len(absent)} such vbuckets)" if absent else ""

        async def round_() -> str:
            found.clear()
            for keeper in list(self._keepers.values()):
                if keeper.session is not None and keeper.ready:
                    await ask(keeper.session)
            return missing()

        await self._until(
            round_,
            "check the nodes; a vbucket is active on none of them during a failover or rebalance, and where the source "
            "is a mirror, until its first fill is complete",
        )
        return {vbid: found[vbid] for vbid in sorted(found) if vbid < self.map.vbucket_count}

    async def failover_log(self, vbid: int) -> tuple[FailoverEntry, ...]:
        """From the vbucket's node."""
        if not 0 <= vbid < self.map.vbucket_count:
            raise ConfigError(f"there is no vb {vbid}", hint=f"the bucket has {self.map.vbucket_count}")
        log: list[FailoverEntry] = []

        async def round_() -> str:
            session = self.session_of(vbid)
            if session is None:
                return f"no node serves vb {vbid}"
            answer = await session.link.request(
                Opcode.DCP_GET_FAILOVER_LOG, vbucket=vbid, timeout_s=self.settings.request_timeout_s
            )
            if answer.status != WireStatus.SUCCESS:
                return f"{session.address} gives no failover log of vb {vbid}: {status_name(answer.status)}"
            log.extend(FailoverEntry(Vbuuid(vbuuid), Seqno(at)) for vbuuid, at in decode_failover_log(answer.value))
            return ""

        await self._until(round_)
        return tuple(log)

    async def collection_names(self) -> dict[int, str]:
        """From any node."""
        names = {DEFAULT_COLLECTION: "_default._default"}

        async def round_() -> str:
            session = next((keeper.session for keeper in self._keepers.values() if keeper.ready), None)
            if session is None:
                return "no node can be reached"
            if session.handshake.collections:
                manifest = await fetch_manifest(session.link, self.settings)
                names.clear()
                names.update({found: ".".join(name) for name, found in manifest.collections.items()})
            return ""

        await self._until(round_)
        return names

    async def _find_collections(self) -> None:
        """Names to ids, and what a stream is to be filtered by."""

        async def round_() -> str:
            session = next((keeper.session for keeper in self._keepers.values() if keeper.ready), None)
            if session is None:
                return "no node can be reached"
            if not session.handshake.collections:
                raise NotSupported(f"{session.address} knows no collections", hint="read the bucket as a whole")
            await self._resolve(session)
            return ""

        await self._until(round_)

    async def _resolve(self, session: NodeSession) -> None:
        names = self._collections
        if len(names) == 1 and isinstance(names[0], str) and "." not in names[0]:
            scope_id = await self._id_of(session, Opcode.GET_SCOPE_ID, "scope", names[0])
            self.stream_filter = {"scope": f"{scope_id:x}"}
            return
        self._collection_ids = [
            name if isinstance(name, int) else await self._id_of(session, Opcode.GET_COLLECTION_ID, "collection", name)
            for name in names
        ]
        self.stream_filter = {"collections": [f"{collection_id:x}" for collection_id in self._collection_ids]}

    async def _id_of(self, session: NodeSession, opcode: int, what: str, name: str) -> int:
        answer = await session.link.request(opcode, value=name.encode(), timeout_s=self.settings.request_timeout_s)
        if answer.status == WireStatus.SUCCESS:
            return decode_collection_id(answer.extras)[1]
        if answer.status in (WireStatus.UNKNOWN_COLLECTION, WireStatus.UNKNOWN_SCOPE, WireStatus.EINVAL):
            raise ConfigError(
                f"the bucket has no {what} {name!r}",
                hint="write scope.collection as the cluster knows it, or the name of one scope",
                setting="collections",
            )
        raise HandshakeFailed(f"{session.address} does not name the {what} {name!r}: {status_name(answer.status)}")

    async def _until(self, round_: Callable[[], Coroutine[Any, Any, str]], hint: str | None = None) -> None:
        """Repeat until the round has nothing to complain about; raise its complaint, with the hint, when time is up."""
        deadline = self.clock.monotonic() + self._timeout_s
        pause_s = POLL_S
        while True:
            if self._refusal is not None:
                raise self._refusal
            try:
                complaint = await round_()
            except ClusterError as error:
                if not error.retryable:
                    raise
                complaint = error.what
            except RemoteProtocolError as error:
                complaint = f"the source broke the protocol: {error}"
            if not complaint:
                return
            if self.clock.monotonic() >= deadline:
                raise SourceTimeout(f"{complaint}, for {self._timeout_s:g} s{self._node_errors()}", hint=hint)
            await self.clock.sleep(min(pause_s, deadline - self.clock.monotonic()))
            pause_s = min(pause_s * 2, POLL_MAX_S)

    # -- the read that goes on ------------------------------------------------------------------------------------

    def begin(self, reading: Reading) -> None:
        """A read begins."""
        assert self._reading is None, "one read at a time"
        if self._refusal is not None:
            raise self._refusal
        self._reading = reading
        reading.begin()

    async def end(self, reading: Reading) -> None:
        """The read is over."""
        if self._reading is reading:
            self._reading = None
            reading.end()
            self.release_acks()

    def session_of(self, vbid: int) -> NodeSession | None:
        """The open session of the vbucket's node, if there is one."""
        address = self._address_of(vbid)
        return None if address is None else self.session_at(address)

    def hold_acks(self) -> None:
        """Have the source wait."""
        self._acks_held = True
        for keeper in self._keepers.values():
            if keeper.session is not None:
                keeper.session.acks_held = True

    def release_acks(self) -> None:
        """Have it go on."""
        self._acks_held = False
        for keeper in self._keepers.values():
            if keeper.session is not None:
                keeper.session.release_acks()

    async def _watch(self) -> None:
        while True:
            await self.clock.sleep(min(1.0, self._timeout_s / 4))
            if self._reading is not None:
                self._reading.check_progress(self._timeout_s, self._node_errors())

    def stop(self) -> None:
        """The read is to end."""
        if self._reading is not None:
            self._reading.fail(None)

    def _fail(self, error: BaseException) -> None:
        if self._reading is not None:
            self._reading.fail(error)

    def _node_errors(self) -> str:
        errors = {keeper.error.what for keeper in self._keepers.values() if keeper.error is not None}
        return "; " + "; ".join(sorted(errors)) if errors else ""

    # -- the map --------------------------------------------------------------------------------------------------

    def refresh_map(self, config: bytes, vbid: int) -> None:
        """A vbucket was told that it is elsewhere; perhaps the map came with that."""
        address = self._address_of(vbid)
        if not config or address is None or not self._poller.on_sent(config, address):
            self._poller.wake()

    def session_at(self, address: Address) -> NodeSession | None:
        """The open session of a node, if there is one."""
        keeper = self._keepers.get(address)
        return keeper.session if keeper is not None and keeper.ready else None

    def on_map(self, address: Address, found: ClusterMap) -> None:
        """A node sent its map. A host that is in no map of the bucket does not say that the bucket is another one."""
        if self._maps.judge(found) is not MapVerdict.OTHER_BUCKET or address in self._keepers:
            self._take_map(found)

    def _poll_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _take_map(self, new: ClusterMap) -> None:
        old, verdict = self._maps.current, self._maps.judge(new)
        other = verdict is MapVerdict.NEWER and old is not None and old.vbucket_count != new.vbucket_count
        if verdict is MapVerdict.OTHER_BUCKET or other:
            self._refusal = ClusterError(
                f"bucket {self._access.source.bucket} was recreated at the source",
                hint="read it again",
                retryable=False,
            )
            self._fail(self._refusal)
            return
        if not self._maps.take(new):
            return
        nodes = (self._access.address_of(node) for node in new.nodes if new.vbids_of(node))
        wanted = {address for address in nodes if address is not None}
        for address in wanted - set(self._keepers):
            keeper = NodeKeeper(address, self._make_session, self, self.settings, self.clock)
            keeper.on_died = self._fail
            self._keepers[address] = keeper
            keeper.start()
        self._follow()
        for address in set(self._keepers) - wanted:
            task = asyncio.get_running_loop().create_task(self._keepers.pop(address).stop())
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    def _follow(self) -> None:
        """Streams go to where the map says."""
        for vbucket in self._streamed():
            session = self.session_of(vbucket.vbid)
            if vbucket.session is not None and vbucket.session is not session:
                vbucket.detach(events.Stop("moved"))
            if session is not None and vbucket.session is None:
                vbucket.attach(session)

    def _streamed(self) -> list[ReadVbucket]:
        reading = self._reading
        if reading is None:
            return []
        return [vbucket for vbid in reading.vbids if (vbucket := reading.vbucket(vbid)) is not None]

    def _address_of(self, vbid: int) -> Address | None:
        node = None if self._maps.current is None else self._maps.current.node_of(vbid)
        return None if node is None else self._access.address_of(node)

    def _make_session(self, address: Address) -> NodeSession:
        return NodeSession(self._access, address, self, self.clock, name=self._name, opaques=self._opaques)

    # -- what nodes bring -----------------------------------------------------------------------------------------

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        """A session is open: its vbuckets may ask for their streams."""
        assert keeper.session is not None
        keeper.session.acks_held = self._acks_held
        self._follow()

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        """What waiting cannot fix is raised; the rest is tried again."""
        self._poller.wake()
        if not error.retryable and self._keepers.get(keeper.address) is keeper:
            self._refusal = error
            self._fail(error)

    def on_closed(self, session: NodeSession, error: ClusterError) -> None:
        """A session is over: its vbuckets wait for the next."""
        for vbucket in self._streamed():
            if vbucket.session is session:
                vbucket.detach(events.ConnectionLost(error.what))

    def on_rows(self, vbid: int, opaque: int, rows: list[Row], byte_count: int) -> None:
        """Data of a live stream."""
        if (vbucket := self._vbucket(vbid)) is not None:
            vbucket.handle_rows(opaque, rows, byte_count)

    def on_event(self, vbid: int, event: ev.Event | KeyRefused) -> None:
        """Any other message of a live stream."""
        if (vbucket := self._vbucket(vbid)) is not None:
            vbucket.on_event(event)

    def on_answer(self, vbid: int, answer: StreamAnswer) -> None:
        """The answer to a stream request."""
        if (vbucket := self._vbucket(vbid)) is not None:
            vbucket.on_answer(answer)

    def _vbucket(self, vbid: int) -> ReadVbucket | None:
        return None if self._reading is None else self._reading.vbucket(vbid)
