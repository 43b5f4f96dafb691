"""One read of a source, in limited memory: the vbuckets that are read, and the queue to the thread that iterates.

A snapshot that was handed out is never taken back. If the source has lost part of it, or has purged deletions that
followed it, the vbucket's read ends with SourceRolledBack.

Memory holds at most `memory_bytes` of rows, and one flow-control window for each connection. If open snapshots exceed
half of `memory_bytes`, the largest go to disk. While too many complete snapshots are queued, the source waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping

from mirror.errors import ClusterError, PrivilegeMissing, SourceTimeout
from mirror.feed.connection.node_session import NodeSession, StreamAnswer
from mirror.feed.host import MachineEvent, VbucketHost
from mirror.feed.read.queries import SourceQueries
from mirror.feed.read.snapshot import Item, Position, ReadEnded, Snapshot, SourceRolledBack, SpoolSink
from mirror.feed.read.spool import OpenSpools, SpoolFile
from mirror.ingest import events
from mirror.ingest.events import Row
from mirror.ingest.instructions import VbucketStatus
from mirror.wire import events as ev
from mirror.wire.constants import Status as WireStatus
from mirror.wire.constants import StreamEndReason
from storage.model import SEQNO_MAX

DISK_FACTOR = 16
"""Limit of the queue's snapshots on disk, in units of `memory_bytes`."""
WAITING_SNAPSHOTS_MAX = 10_000
"""Limit of the queue's items, because the objects of a small snapshot need more memory than its rows."""


class Outbox:
    """The queue from the event loop to the thread that iterates. While it is full, the source waits."""

    def __init__(self, memory_bytes: int, on_half_empty: Callable[[], None]) -> None:
        """`on_half_empty` is called, by any thread, when the source may continue."""
        self._memory_max = memory_bytes // 2
        self._disk_max = memory_bytes * DISK_FACTOR
        self._on_half_empty = on_half_empty
        self._items: deque[Item] = deque()
        self._memory_bytes = 0
        self._disk_bytes = 0
        self._finished = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.full = False

    def put(self, item: Item, memory_bytes: int = 0, disk_bytes: int = 0) -> None:
        """Add an item, with the bytes that it holds until it is closed."""
        with self._changed:
            self._items.append(item)
            self._memory_bytes += memory_bytes
            self._disk_bytes += disk_bytes
            self.full = self.full or (  # only `gave_back` resets it
                self._memory_bytes >= self._memory_max
                or self._disk_bytes >= self._disk_max
                or len(self._items) >= WAITING_SNAPSHOTS_MAX
            )
            self._changed.notify()

    def finish(self, error: BaseException | None = None) -> None:
        """End the queue: `take` returns the remaining items, then raises the error."""
        with self._changed:
            if not self._finished:
                self._finished, self._error = True, error
            self._changed.notify_all()

    def take(self) -> Item | None:
        """Wait for the next item and return it; None at the end."""
        with self._changed:
            while not self._items and not self._finished:
                self._changed.wait()
            if self._items:
                return self._items.popleft()
            if self._error is not None:
                raise self._error
            return None

    def gave_back(self, memory_bytes: int, disk_bytes: int) -> None:
        with self._changed:
            self._memory_bytes -= memory_bytes
            self._disk_bytes -= disk_bytes
            half_empty = (
                self.full
                and self._memory_bytes <= self._memory_max // 2
                and self._disk_bytes <= self._disk_max // 2
                and len(self._items) <= WAITING_SNAPSHOTS_MAX // 2
            )
            if half_empty:
                self.full = False
        if half_empty:
            self._on_half_empty()

    def discard(self) -> None:
        while self._items:
            item = self._items.popleft()
            if isinstance(item, Snapshot):
                item.close()


class ReadVbucket:
    def __init__(self, reading: BoundedRead, vbid: int, position: Position, until: int | None) -> None:
        self._clock = clock = reading.source.clock
        self._reading = reading
        self.vbid = vbid
        self.sink = SpoolSink(vbid, position, reading.spools, reading.hand_out, self._lost)
        self.host = VbucketHost(vbid, self.sink, self, clock)
        self.host.stream_filter = reading.source.stream_filter
        self.host.start_machine()
        self.until = until
        self.text = "not requested yet"
        self.progress_at = clock.monotonic()

    @property
    def idle(self) -> bool:
        """True while a stream without an end is open: it may be silent for any time."""
        return self.until is None and self.host.streaming

    def close(self) -> None:
        self.host.drop_machine()
        self.host.session = None

    # -- messages of the stream -----------------------------------------------------------------------------------

    def on_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        self.progress_at = self._clock.monotonic()
        self.host.on_rows(opaque, rows, byte_count)

    def on_answer(self, answer: StreamAnswer) -> None:
        if isinstance(answer, events.StreamRefused) and answer.status == WireStatus.EACCESS:
            self._reading.fail(PrivilegeMissing("the user may not stream this bucket"))
            return
        self.host.handle(answer)
        if isinstance(answer, events.StreamAccepted) and self.host.machine is not None:
            self.progress_at = self._clock.monotonic()
            if self.until is not None and self.sink.position.seqno >= self.until:
                self._end("complete")

    def on_event(self, event: ev.Event | events.KeyRefused) -> None:
        self.progress_at = self._clock.monotonic()
        if isinstance(event, ev.StreamEnd) and event.reason == StreamEndReason.FILTER_EMPTY:
            self._end("every requested collection is dropped")
        elif isinstance(event, ev.StreamEnd) and event.reason == StreamEndReason.LOST_PRIVILEGES:
            self._reading.fail(PrivilegeMissing("the user lost the privilege to stream this bucket"))
        else:
            self.host.handle(event)

    # -- calls of the host (`HostOwner`) --------------------------------------------------------------------------

    def start_event(self, session: NodeSession) -> events.Start:
        # A request with an end below its start is out of range. If the position is at the end already, request a stream
        # without an end, and close it at once: the answer shows if the source still has the position.
        position = self.sink.position
        end_seqno = self.until if self.until is not None and self.until > position.seqno else SEQNO_MAX
        return events.Start(
            collections=session.handshake.collections, sends_purge_seqno=session.sends_purge_seqno, end_seqno=end_seqno
        )

    def enter(self, event: MachineEvent) -> None:
        self.host.handle(event)

    def refresh_map(self, config: bytes) -> None:
        self._reading.source.maps.refresh_map(config, self.vbid)

    def refresh_collections(self) -> None:
        """Do nothing: a read keeps its collections. The machine requests the refused stream again after a pause."""

    def report(self, status: VbucketStatus, text: str) -> None:
        """End the whole read on a refusal, and the vbucket's read at the end of its stream."""
        self.text = text
        if status is VbucketStatus.REFUSED:
            self._reading.fail(ClusterError(f"vb {self.vbid}: {text}", hint="", retryable=False))
        elif status is VbucketStatus.FINISHED:
            self._end("complete")

    # -- the end --------------------------------------------------------------------------------------------------

    def _lost(self, seqno: int) -> None:
        self._finish(SourceRolledBack(self.vbid, seqno))

    def _end(self, text: str) -> None:
        self._finish(ReadEnded(self.vbid, self.sink.position, text))

    def _finish(self, item: Item) -> None:
        self.close()
        self._reading.vbucket_done(self, item)


class BoundedRead:
    def __init__(
        self,
        source: SourceQueries,
        file: SpoolFile,
        positions: Mapping[int, Position],
        until: Mapping[int, int] | None,
        *,
        memory_bytes: int,
        parallel: int,
        on_half_empty: Callable[[], None],
    ) -> None:
        """With `until`, stream at most `parallel` vbuckets at a time. Without it, stream all, without an end."""
        self.source = source
        self.spools = OpenSpools(file, memory_bytes // 2)
        self.outbox = Outbox(memory_bytes, on_half_empty)
        self.active: dict[int, ReadVbucket] = {}
        self._waiting = deque(sorted(positions))
        self._positions = positions
        self._until = until
        self._parallel = parallel if until is not None else len(positions)
        self._ended = False

    def end(self) -> None:
        self.fail(None)
        self.outbox.discard()

    def fail(self, error: BaseException | None) -> None:
        """End the read. The queue still yields the complete snapshots, then raises the error."""
        self._ended = True
        for vbucket in self.active.values():
            vbucket.close()
        self.active = {}
        self.outbox.finish(error)

    def check_progress(self, timeout_s: float, why: str) -> None:
        """Fail the read if a vbucket received nothing for `timeout_s`, unless it is `idle` or the queue is full."""
        now = self.source.clock.monotonic()
        for vbucket in self.active.values():
            if vbucket.idle or self.outbox.full:
                vbucket.progress_at = now
            elif now - vbucket.progress_at > timeout_s:
                what = f"the source brought nothing of vb {vbucket.vbid} for {timeout_s:g} s: {vbucket.text}{why}"
                self.fail(SourceTimeout(what, hint="check the nodes and the network, and start again"))
                return

    # -- calls of the vbuckets ------------------------------------------------------------------------------------

    def hand_out(self, snapshot: Snapshot) -> None:
        snapshot.on_close = self.outbox.gave_back
        self.outbox.put(snapshot, snapshot.spool.memory_bytes, snapshot.spool.disk_bytes)
        if self.outbox.full:
            self.source.connections.hold_acks()  # so that the source waits for the reader

    def vbucket_done(self, vbucket: ReadVbucket, item: Item) -> None:
        self.outbox.put(item)
        self.active.pop(vbucket.vbid, None)
        # Not now, because the vbucket is still executing its instructions.
        asyncio.get_running_loop().call_soon(self.fill_up)

    def fill_up(self) -> None:
        while self._waiting and len(self.active) < self._parallel and not self._ended:
            vbid = self._waiting.popleft()
            until = None if self._until is None else self._until[vbid]
            vbucket = ReadVbucket(self, vbid, self._positions[vbid], until)
            self.active[vbid] = vbucket
            session = self.source.connections.session_at(self.source.maps.address_of(vbid))
            if session is not None:
                vbucket.host.attach(session)
        if not self.active and not self._waiting and not self._ended:
            self._ended = True
            self.outbox.finish()
