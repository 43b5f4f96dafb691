"""The DCP side of one connection, from DCP_OPEN on: stream requests judged, streams sent in turn, the window kept.

Knows the rules of DCP_STREAM_REQ and their refusals (docs/protocol.md 2.4, 2.5; the recordings 72_i*, 72_k*), and flow
control. Must never know sockets: bytes leave through the port that it is given. Invariants:
- a message of a stream is sent only while the window is open, so the window is overshot by one message at most, and
  only while the client takes what was written; stream ends and noops go at once;
- streams take turns of bounded size, and nothing is held for a stream that waits; first snapshots come one after the
  other unless the client asks otherwise, each between turns of those that are live: so a client can use the first
  vbucket long before it has the last, and no snapshot stays open while history goes on;
- a request is judged by the one rule of producers, with the source's own failover log, cut at what is published here:
  what the mirror does not have (yet) nobody can resume on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from mirror.ingest.rollback import OutOfRange, ProducerAnswer, Rollback, producer_answer
from mirror.serve import dcp_filter
from mirror.serve.auth import Reader
from mirror.serve.dcp_controls import Negotiated
from mirror.serve.dcp_filter import StreamFilter
from mirror.serve.dcp_stream import PIECE_BYTES, DcpStream
from mirror.serve.dcp_watch import News, Watch
from mirror.serve.kv_bucket import KvBucket, Refused
from mirror.wire import codec_dcp
from mirror.wire.constants import Status, StreamEndReason, StreamRequestFlag
from mirror.wire.events import DcpNoop, StreamRequest
from mirror.wire.flow_control import ProducerWindow
from storage import stream as store
from storage.errors import StorageError
from storage.model import FailoverEntry, Seqno
from storage.stream import Standing

NOOP_OPAQUE_FIRST = 10_000_000
IDLE_TIMEOUT_S = 360.0
"""A client with noops that says nothing for so long is hung up on, as a server does (dcp_idle_timeout)."""

REFUSED_FLAGS = int(StreamRequestFlag.TAKEOVER | StreamRequestFlag.FROM_LATEST | StreamRequestFlag.CACHE_TRANSFER)


class RolledBack(Exception):
    """The client must go back to `seqno` or below, and ask again."""

    def __init__(self, seqno: int) -> None:
        """`seqno` is the answer's body."""
        super().__init__(seqno)
        self.seqno = seqno


class Counters:
    """What one process has sent over DCP."""

    __slots__ = ("closed_streams", "opened_streams", "refused_streams", "rollbacks", "rows", "sent_bytes", "snapshots")

    def __init__(self) -> None:
        """All zero."""
        self.opened_streams = self.closed_streams = self.refused_streams = self.rollbacks = 0
        self.snapshots = self.rows = self.sent_bytes = 0


class ProducerPort(Protocol):
    """What a producer needs of its connection."""

    def write(self, data: bytes) -> None:
        """Send now, or as soon as the client takes it."""

    async def writable(self) -> None:
        """Return when the client takes what was written."""

    def hang_up(self) -> None:
        """Close the connection."""

    @property
    def heard_s(self) -> float:
        """When the client last said something, by the clock of the process."""

    @property
    def now_s(self) -> float:
        """The clock of the process; a second old at most."""


class DcpProducer:
    """A producer."""

    def __init__(
        self, port: ProducerPort, name: str, negotiated: Negotiated, bucket: KvBucket, watch: Watch, counters: Counters
    ) -> None:
        """`negotiated` holds what HELLO and DCP_OPEN said; controls add to it."""
        self.name = name
        self.negotiated = negotiated
        self.streams: dict[tuple[int, int | None], DcpStream] = {}
        self.window = ProducerWindow()
        self._port = port
        self._bucket = bucket
        self._watch = watch
        self._counters = counters
        self._news: dict[DcpStream, News] = {}
        self._live: deque[DcpStream] = deque()
        self._fresh: deque[DcpStream] = deque()
        """Streams that wait to begin their first snapshot."""
        self._filling: DcpStream | None = None
        """The one whose first snapshot is being sent."""
        self._live_next = False
        self._is_ready: set[DcpStream] = set()
        self._outbox: deque[bytes] = deque()
        """Stream ends that wait for the answer before them to be written."""
        self._wake = asyncio.Event()
        self._noop_opaque = NOOP_OPAQUE_FIRST
        self._noop_task: asyncio.Task[None] | None = None
        self._pumping = asyncio.create_task(self._pump(), name="dcp producer")

    def stop(self) -> None:
        """The connection is gone."""
        for task in (self._pumping, self._noop_task):
            if task is not None:
                task.cancel()
        for stream, news in self._news.items():
            self._watch.leave(stream.vbid, news)
        self._counters.closed_streams += len(self.streams)
        self.streams.clear()

    def failed(self, report: Callable[[BaseException], None]) -> None:
        """Have `report` told when sending ends by an error of this program."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                report(error)

        self._pumping.add_done_callback(done)

    # -- requests

    def control(self, name: bytes, value: bytes) -> Status:
        """DCP_CONTROL."""
        negotiated = self.negotiated
        noops = (negotiated.noop_enabled, negotiated.noop_interval_s)
        status = negotiated.set(name, value)
        if negotiated.buffer_bytes != self.window.window_bytes:
            self.window.resize(negotiated.buffer_bytes)
            self._wake.set()
        if noops != (negotiated.noop_enabled, negotiated.noop_interval_s):
            if self._noop_task is not None:
                self._noop_task.cancel()
            self._noop_task = asyncio.create_task(self._noops()) if negotiated.noop_enabled else None
        return status

    def request_stream(self, request: StreamRequest, reader: Reader) -> tuple[FailoverEntry, ...]:
        """DCP_STREAM_REQ: the failover log; the stream begins once the caller has written it. Raises Refused,
        RolledBack.
        """
        try:
            stream, log = self._judge(request, reader)
        except RolledBack:
            self._counters.rollbacks += 1
            raise
        except Refused:
            self._counters.refused_streams += 1
            raise
        self._counters.opened_streams += 1
        self.streams[stream.vbid, stream.stream_id] = stream
        self._news[stream] = lambda _vbid: self._queue(stream)
        self._watch.follow(stream.vbid, self._news[stream])
        self._queue(stream)
        return log

    def close_stream(self, vbid: int, stream_id: int | None) -> None:
        """DCP_CLOSE_STREAM; the STREAM_END, if it was asked for, follows the answer. Raises Refused."""
        if (stream_id is not None) != self.negotiated.stream_ids:
            raise Refused(Status.DCP_STREAM_ID_INVALID)
        stream = self.streams.get((vbid, stream_id))
        if stream is None:
            raise Refused(Status.KEY_ENOENT)
        end = stream.end(StreamEndReason.CLOSED)
        self._forget(stream)
        if self.negotiated.end_on_close:
            self._outbox.append(end)
            self._wake.set()

    def acked(self, count: int) -> None:
        """DCP_BUFFER_ACK. Raises RemoteProtocolError for more than was sent."""
        self.window.acked(count)
        if self._is_ready:
            self._wake.set()

    def permit(self, reader: Reader | None) -> None:
        """The client may read what `reader` may, from now on: streams that show more end."""
        for stream in list(self.streams.values()):
            try:
                if reader is not None:
                    dcp_filter.check_reader(stream.filter, self._bucket.manifest(), reader)
                    continue
            except Refused as error:
                if error.status != Status.EACCESS:
                    continue
            self._outbox.append(stream.end(StreamEndReason.LOST_PRIVILEGES))
            self._forget(stream)
            self._wake.set()

    # -- the rules of a stream request

    def _judge(self, request: StreamRequest, reader: Reader) -> tuple[DcpStream, tuple[FailoverEntry, ...]]:
        vbid, negotiated = request.vbid, self.negotiated
        self._bucket.state(vbid)
        if request.flags & REFUSED_FLAGS:
            raise Refused(
                Status.NOT_SUPPORTED, "A mirror knows no takeover, no stream from the latest, no cache transfer"
            )
        if (negotiated.xattrs or request.value) and not negotiated.noop_enabled:
            raise Refused(Status.NOT_SUPPORTED, "enable_noop first")
        stream_filter = dcp_filter.parse(
            request.value,
            self._bucket.manifest(),
            reader,
            has_collections=negotiated.collections,
            has_stream_ids=negotiated.stream_ids,
        )
        if (vbid, stream_filter.stream_id) in self.streams:
            raise Refused(Status.KEY_EEXISTS, "The stream is open")
        try:
            standing = store.standing(self._bucket.view, vbid)
        except StorageError as error:
            raise Refused(Status.ETMPFAIL, f"the store cannot be read: {error}") from error
        if not standing.whole:
            raise Refused(Status.ETMPFAIL, "nothing complete of the vbucket is here yet")
        answer = answer_of(request, standing, stream_filter)
        if isinstance(answer, OutOfRange):
            raise Refused(Status.ERANGE, "not snap_start <= start <= snap_end, or start > end")
        if isinstance(answer, Rollback):
            raise RolledBack(answer.seqno)
        stream = DcpStream(request, standing, stream_filter, replace(negotiated), lambda: self._bucket.view)
        return stream, standing.failover_log

    # -- sending

    def _queue(self, stream: DcpStream) -> None:
        if stream in self._is_ready:
            return
        self._is_ready.add(stream)
        if self.negotiated.in_parallel or not stream.filling:
            self._live.append(stream)
        elif stream.snapshot_count:
            self._filling = stream
        else:
            self._fresh.append(stream)
        self._wake.set()

    def _next(self) -> DcpStream:
        """Whose turn it is: a live one's after each piece of a first snapshot, and the other way round."""
        waiting = self._filling or self._fresh
        self._live_next = bool(self._live) and (self._live_next or not waiting)
        if self._live_next:
            stream = self._live.popleft()
        else:
            stream = self._filling or self._fresh.popleft()
            self._filling = None
        self._live_next = not self._live_next
        self._is_ready.discard(stream)
        return stream

    def _forget(self, stream: DcpStream) -> None:
        del self.streams[stream.vbid, stream.stream_id]
        self._watch.leave(stream.vbid, self._news.pop(stream))
        self._counters.closed_streams += 1

    async def _pump(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                self._send(self._outbox.popleft())
            while self._is_ready and self.window.is_open:
                self._turn(self._next())
                await self._port.writable()
                await asyncio.sleep(0)
                while self._outbox:
                    self._send(self._outbox.popleft())

    def _turn(self, stream: DcpStream) -> None:
        """Send some of a stream."""
        if stream.ended:  # it was closed while it waited for its turn
            return
        window = self.window
        room = PIECE_BYTES
        if window.window_bytes:
            room = min(room, window.window_bytes - window.outstanding)
        rows, snapshots = stream.row_count, stream.snapshot_count
        data = stream.take(room)
        if data:
            self._send(data)
        self._counters.rows += stream.row_count - rows
        self._counters.snapshots += stream.snapshot_count - snapshots
        if stream.ended:
            self._forget(stream)
        elif not stream.waiting:
            self._queue(stream)

    def _send(self, data: bytes) -> None:
        """Send what flow control counts."""
        self.window.sent(len(data))
        self._counters.sent_bytes += len(data)
        self._port.write(data)

    async def _noops(self) -> None:
        while True:
            await asyncio.sleep(self.negotiated.noop_interval_s)
            if self._port.now_s - self._port.heard_s > IDLE_TIMEOUT_S:
                self._port.hang_up()
                return
            if self.streams:
                self._noop_opaque += 1
                self._port.write(codec_dcp.encode(DcpNoop(opaque=self._noop_opaque)))


def answer_of(request: StreamRequest, standing: Standing, stream_filter: StreamFilter) -> ProducerAnswer:
    """What the rule says to a stream request here."""
    log = tuple(FailoverEntry(entry.vbuuid, Seqno(min(entry.seqno, standing.seqno))) for entry in standing.failover_log)
    return producer_answer(
        request.start_seqno,
        request.snap_start_seqno,
        request.snap_end_seqno,
        request.vbuuid,
        log,
        standing.seqno,
        standing.purge_seqno,
        end_seqno=request.end_seqno,
        strict_vbuuid=bool(request.flags & StreamRequestFlag.STRICT_VBUUID),
        ignore_purged_tombstones=bool(request.flags & StreamRequestFlag.IGNORE_PURGED_TOMBSTONES),
        client_purge_seqno=stream_filter.purge_seqno,
    )
