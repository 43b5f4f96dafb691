"""Reads whole snapshots from a source, for processes that have no store.

A separate thread runs the connections, and hands snapshots to the thread that iterates. A permanent error is raised at
once; any other error only after a vbucket made no progress for `timeout_s`.

    with SourceReader("couchbase://reader@db1/orders", password="...") as reader:
        until = reader.high_seqnos()
        for item in reader.read(dict.fromkeys(until, Position()), until):
            if isinstance(item, Snapshot):
                for document in item.documents():
                    ...
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mirror.clock import SystemClock
from mirror.config import PasswordSource, Settings
from mirror.config_reader import load
from mirror.errors import ClusterError, ConfigError, HandshakeFailed, MirrorError
from mirror.feed.cluster.connections import Connections, NodeKeeper, report_defect
from mirror.feed.cluster.discovery import discover
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import parse
from mirror.feed.connection.node_session import NodeSession
from mirror.feed.read.queries import SourceQueries
from mirror.feed.read.reading import BoundedRead, ReadVbucket
from mirror.feed.read.snapshot import Item, Position, ReadEnded, Snapshot, SourceRolledBack
from mirror.feed.read.spool import SpoolFile
from mirror.ingest import events
from mirror.ingest.selection import FilterFields
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap
from storage.env.directory import MapRecord
from storage.model import FailoverLog

__all__ = ["Position", "ReadEnded", "Snapshot", "SourceReader", "SourceRolledBack"]

MEMORY_BYTES = 64 * 1024 * 1024
MEMORY_BYTES_MIN = 4096
TIMEOUT_S = 60.0
PARALLEL = 16
"""Limit of the vbuckets that a read with `until` streams at a time, because the disk may hold a snapshot of each."""
CLOSE_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FixedPassword(PasswordSource):
    password: str = field(default="", repr=False)

    def read(self) -> str | None:
        return self.password


class SourceReader:
    """Reads from a source. A context manager, for use by one thread."""

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
        followed: MapRecord | None = None,
    ) -> None:
        """`source` is a connection string.

        `password`: by default from the settings. `collections`: names (`scope.collection`), ids, or the name of one
        scope; by default everything. `ca`: a PEM file. `settings`: by default from the environment. `memory_bytes`
        limits the rows held in memory; other rows go to a temporary file. `parallel` limits the vbuckets that a read
        with `until` reads at a time. `followed`: a bucket, and the oldest revision that its maps may have.
        Raises ConfigError.
        """
        if memory_bytes < MEMORY_BYTES_MIN or parallel < 1 or timeout_s <= 0:
            raise ConfigError(f"a reader needs memory_bytes from {MEMORY_BYTES_MIN}, parallel and timeout_s above 0")
        if settings is None:
            settings = load().settings
        settings = replace(settings, change_streams=False, tls_ca_file=Path(ca) if ca else settings.tls_ca_file)
        if not settings.connection_buffer_size:
            raise ConfigError("a reader needs flow control")
        access = Access.of(parse(source), settings)
        if password is not None:
            access = replace(access, password=FixedPassword(None, None, password))
        self._core = _Core(access, tuple(collections or ()), timeout_s, followed, memory_bytes, parallel)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # -- life -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> SourceReader:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._core.on_loop_error)
        self._thread = threading.Thread(target=self._loop.run_forever, name="source reader", daemon=True)
        self._thread.start()
        try:
            self._call(self._core.open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._core.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(CLOSE_S)
        loop.close()

    # -- the source -----------------------------------------------------------------------------------------------

    @property
    def vbucket_count(self) -> int:
        return self._core.map.vbucket_count

    @property
    def bucket_uuid(self) -> str:
        """The bucket's uuid; empty if the source does not send it."""
        return self._core.map.bucket_uuid or ""

    @property
    def followed(self) -> MapRecord | None:
        """Bucket and revision of the followed map; None if the source is a mirror, whose maps have other revisions."""
        found = self._core.map
        return None if found.of_mirror or not found.bucket_uuid else MapRecord(found.bucket_uuid, *found.revision)

    @property
    def stream_filter(self) -> FilterFields:
        """The ids of the selected collections or scope, as streams are requested with; empty: the whole bucket."""
        return self._core.queries.stream_filter

    def high_seqnos(self) -> dict[int, int]:
        """Return each vbucket's high seqno. If collections (not a scope) are selected, only their changes count."""
        return self._call(self._core.queries.high_seqnos())

    def failover_log(self, vbid: int) -> FailoverLog:
        return self._call(self._core.queries.failover_log(vbid))

    def collection_names(self) -> dict[int, str]:
        """Return the names `scope.collection` of the bucket's current collections, by id."""
        return self._call(self._core.queries.collection_names())

    # -- reading --------------------------------------------------------------------------------------------------

    def read(
        self, positions: Mapping[int, Position], until: Mapping[int, int] | None = None
    ) -> Generator[Snapshot | SourceRolledBack | ReadEnded, None, None]:
        """Yield the changes after the positions in whole snapshots. Snapshots come in the order of completion, with all
        vbuckets mixed.

        With `until`, each vbucket is read until a snapshot ends at or beyond its seqno in `until`, or until the source
        has sent all changes of the collections up to that seqno. ReadEnded follows; its position may be beyond that
        seqno. Without `until`, the read continues until the iterator is closed. If the source no longer has the
        position of a vbucket, the read yields SourceRolledBack and nothing more of that vbucket. Raises MirrorError,
        after all complete snapshots.
        """
        for vbid, position in positions.items():
            if not 0 <= vbid < self.vbucket_count or position.seqno < 0 or position.vbuuid < 0:
                raise ConfigError(f"vb {vbid} cannot be read from {position}", hint="positions come from snapshots")
        if until is not None and (missing := sorted(set(positions) - set(until))):
            raise ConfigError(f"`until` has no seqno for vb {missing[0]}", hint="give one for each vbucket")
        return self._iterate(dict(positions), None if until is None else dict(until))

    def _iterate(self, positions: dict[int, Position], until: dict[int, int] | None) -> Generator[Item, None, None]:
        reading = self._call(self._core.begin(positions, until))
        try:
            while (item := reading.outbox.take()) is not None:
                yield item
                if isinstance(item, Snapshot):
                    item.close()
                item = None
        finally:
            if self._loop is not None:
                self._call(self._core.end(reading))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._loop
        if loop is None:
            work.close()
            raise ConfigError("the reader is not open", hint="use it as a context manager")
        return asyncio.run_coroutine_threadsafe(work, loop).result()


class _Core:
    def __init__(
        self,
        access: Access,
        collections: tuple[str | int, ...],
        timeout_s: float,
        followed: MapRecord | None,
        memory_bytes: int,
        parallel: int,
    ) -> None:
        self._clock = clock = SystemClock()
        self._access = access
        self._memory_bytes = memory_bytes
        self._parallel = parallel
        self._file = SpoolFile()
        self._selected = collections
        self._timeout_s = timeout_s
        self._followed = followed
        self._reading: BoundedRead | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.maps = MapFollower(access, clock, NewestMap(), self)
        self.connections = Connections(
            access, clock, self, self.maps.check_node, name=f"dcp-mirror:reader:{clock.unique()}", on_defect=self._fail
        )
        self.maps.queries.session_at = self.connections.session_at
        self.queries = SourceQueries(self.maps, self.connections, timeout_s)

    @property
    def map(self) -> ClusterMap:
        assert self.maps.current is not None, "the reader is open"
        return self.maps.current

    # -- life -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        followed = self._followed
        found = await discover(self._access, self._clock, bucket_uuid=followed.bucket_uuid if followed else None)
        if not found.vbucket_count:
            raise HandshakeFailed(
                f"the map of {self._access.source} names no vbuckets", hint="is it a memcached bucket?"
            )
        if followed is not None and found.bucket_uuid == followed.bucket_uuid:
            self.maps.maps.floor = followed.revision
        self.maps.begin(found)
        self._tasks = [asyncio.create_task(self.maps.queries.run()), asyncio.create_task(self._watch_progress())]
        for task in self._tasks:
            task.add_done_callback(partial(report_defect, on_defect=self._fail))
        if self._selected:
            await self.queries.resolve(self._selected)

    async def close(self) -> None:
        if self._reading is not None:
            await self.end(self._reading)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.connections.close()
        self._file.close()

    def on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Fail the current read with a callback's error, because otherwise the read would wait for ever."""
        self._fail(context.get("exception") or MirrorError(str(context.get("message"))))

    def _fail(self, error: BaseException) -> None:
        if self._reading is not None:
            self._reading.fail(error)

    # -- the current read -----------------------------------------------------------------------------------------

    async def begin(self, positions: dict[int, Position], until: dict[int, int] | None) -> BoundedRead:
        assert self._reading is None, "one read at a time: close the other iterator first"
        if self.queries.refusal is not None:
            raise self.queries.refusal
        loop = asyncio.get_running_loop()

        def on_half_empty() -> None:
            with contextlib.suppress(RuntimeError):  # a snapshot may be closed after its reader and the loop
                loop.call_soon_threadsafe(self.connections.release_acks)

        reading = self._reading = BoundedRead(
            self.queries,
            self._file,
            positions,
            until,
            memory_bytes=self._memory_bytes,
            parallel=self._parallel,
            on_half_empty=on_half_empty,
        )
        reading.fill_up()
        return reading

    async def end(self, reading: BoundedRead) -> None:
        if self._reading is reading:
            self._reading = None
            reading.end()
            self.connections.release_acks()

    async def _watch_progress(self) -> None:
        while True:
            await self._clock.sleep(min(1.0, self._timeout_s / 4))
            if self._reading is not None:
                self._reading.check_progress(self._timeout_s, self.connections.errors())

    # -- the map --------------------------------------------------------------------------------------------------

    def check_map(self, found: ClusterMap, verdict: MapVerdict) -> None:
        """Refuse the map of another bucket. Raises ClusterError."""
        current = self.maps.current
        resized = current is not None and current.vbucket_count != found.vbucket_count
        if verdict is MapVerdict.OTHER_BUCKET or resized:
            raise ClusterError(
                f"bucket {self._access.source.bucket} was recreated at the source",
                hint="read it again",
                retryable=False,
            )

    def on_map_refused(self, error: MirrorError) -> None:
        self.queries.refusal = error
        self._fail(error)

    def on_newer_map(self, found: ClusterMap) -> None:
        if not self.maps.take(found):
            return
        nodes = (self._access.address_of(node) for node in found.nodes if found.vbids_of(node))
        needed = {address for address in nodes if address is not None}
        for address in needed:
            self.connections.keep(address)
        self._move_streams()
        self.connections.retain(needed)

    def _move_streams(self) -> None:
        for vbucket in self._streamed():
            session = self.connections.session_at(self.maps.address_of(vbucket.vbid))
            if vbucket.host.session is not None and vbucket.host.session is not session:
                vbucket.host.detach(events.Stop("moved"))
            if session is not None and vbucket.host.session is None:
                vbucket.host.attach(session)

    def _streamed(self) -> list[ReadVbucket]:
        return [] if self._reading is None else list(self._reading.active.values())

    # -- nodes ----------------------------------------------------------------------------------------------------

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        self._move_streams()

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        """Fail the read on a permanent error. After other errors the keeper reconnects."""
        self.maps.queries.wake()
        if not error.retryable and self.connections.keepers.get(keeper.address) is keeper:
            self.on_map_refused(error)

    def on_closed(self, session: NodeSession, error: ClusterError) -> None:
        for vbucket in self._streamed():
            if vbucket.host.session is session:
                vbucket.host.detach(events.ConnectionLost(error.what))
