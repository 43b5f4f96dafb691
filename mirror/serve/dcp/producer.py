"""The mirror's DCP producer: checks stream requests against published data, and sends its streams in turns.

Requests are checked against the source's failover log, cut at the published seqno, so a client cannot resume at a seqno
that the mirror does not have yet. First snapshots are sent one after the other, between turns of the other (live)
streams, so clients can use the first vbucket early. If the client negotiated round-robin, all streams take turns.
Between its turns a stream holds no rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from functools import partial

from mirror.serve.access.auth import Reader
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.dcp import filter as dcp_filter
from mirror.serve.dcp.dcp_stream import PIECE_BYTES, DcpStream
from mirror.serve.dcp.filter import ServedFilter
from mirror.serve.watch import News, Watch
from mirror.server.controls import Controls
from mirror.server.errors import Refused
from mirror.server.producer import Producer, ProducerPort
from mirror.server.rollback import StreamHistory
from mirror.server.turns import Worker
from mirror.wire.constants import Status, StreamEndReason, StreamRequestFlag
from mirror.wire.events import StreamRequest
from storage.errors import StorageError
from storage.model import SEQNO_MAX, FailoverLog
from storage.read import stream_reads as store
from storage.read.stream_reads import ServedState
from storage.read.view import View

STREAMS_MAX = 16_384
"""Limit of streams of one connection; each takes 6 KiB."""
PROCESS_STREAMS_MAX = 32_768


@dataclass(slots=True)
class DcpCounters:
    streams_opened: int = 0
    streams_closed: int = 0
    streams_refused: int = 0
    rollbacks: int = 0
    snapshots: int = 0
    documents: int = 0
    stream_bytes: int = 0

    @property
    def open_streams(self) -> int:
        return self.streams_opened - self.streams_closed


@dataclass(frozen=True, slots=True)
class PublishedHistory(StreamHistory):
    served: ServedState | None = None


def published_history(served: ServedState) -> PublishedHistory:
    """Return the history against which requests are checked: the source's failover log, cut at the published seqno."""
    log = FailoverLog.of((vbuuid, min(seqno, served.pub.seqno)) for vbuuid, seqno in served.failover_log)
    return PublishedHistory(log, served.pub.seqno, served.purge_seqno, answered_log=served.failover_log, served=served)


def rollback_seqno(view: View, request: StreamRequest, history: PublishedHistory, seqno: int) -> int:
    """Return the seqno to which the client must roll back: `seqno`, the one that `judge` found, or a lower one if the
    client has rows that the source lost (docs/protocol.md 4.2). Raises StorageError. Raises Refused if the client's
    rows are valid, but not published here yet (4.8).
    """
    assert history.served is not None
    is_inside = request.start_seqno > request.snap_start_seqno
    held_seqno = request.snap_end_seqno if is_inside else request.start_seqno
    end_seqno = history.served.failover_log.end_of(request.vbuuid, SEQNO_MAX)
    if end_seqno is not None and history.high_seqno < held_seqno <= end_seqno:
        raise Refused(Status.NOT_MY_VBUCKET, bare=True)
    if seqno == request.snap_start_seqno:  # to the start of the snapshot that the client holds in part
        return seqno
    return store.shared_seqno(view.reader(request.vbid), history.served, request.vbuuid, seqno)


class DcpProducer(Producer[DcpStream, ServedFilter]):
    def __init__(
        self,
        port: ProducerPort,
        name: str,
        controls: Controls,
        bucket: ServedBucket,
        watch: Watch,
        counters: DcpCounters,
        worker: Worker,
    ) -> None:
        super().__init__(port, name, controls)
        self._worker = worker
        self.reader: Reader | None = None
        self._bucket = bucket
        self._watch = watch
        self._counters = counters
        self._news: dict[DcpStream, News] = {}
        self._live: deque[DcpStream] = deque()
        self._fresh: deque[DcpStream] = deque()
        self._filling: DcpStream | None = None
        self._live_next = False
        self._is_ready: set[DcpStream] = set()

    # -- requests

    def request_stream(self, request: StreamRequest) -> FailoverLog:
        try:
            if len(self.streams) >= STREAMS_MAX or self._counters.open_streams >= PROCESS_STREAMS_MAX:
                raise Refused(Status.ENOMEM, "too many streams")
            return super().request_stream(request)
        except Refused as error:
            if error.status == Status.ROLLBACK:
                self._counters.rollbacks += 1
            else:
                self._counters.streams_refused += 1
            raise

    def permit(self, reader: Reader | None) -> None:
        """End streams that select more than `reader` may read; all streams if `reader` is None."""
        self.reader = reader
        for stream in list(self.streams.values()):
            try:
                if reader is not None:
                    dcp_filter.check_reader(stream.filter, self._bucket.manifest(), reader)
                    continue
            except Refused as error:
                if error.status != Status.EACCESS:
                    continue
            self._stream_ends.append(stream.end(StreamEndReason.LOST_PRIVILEGES))
            self._forget(stream)
            self.wake()

    def statistics(self) -> dict[str, str]:
        head = f"eq_dcpq:{self.name}:"
        controls = self.controls
        found = {
            f"{head}type": "producer",
            f"{head}num_streams": str(len(self.streams)),
            f"{head}max_buffer_bytes": str(self.window.window_bytes),
            f"{head}unacked_bytes": str(self.window.outstanding),
            f"{head}noop_enabled": str(controls.noop_enabled).lower(),
            f"{head}noop_tx_interval": f"{controls.noop_interval_s:g}",
            f"{head}collections_enabled": str(controls.collections).lower(),
        }
        for stream in self.streams.values():
            name = f"{head}stream_{stream.vbid}_"
            found[f"{name}opaque"] = str(stream.opaque)
            found[f"{name}last_read_seqno"] = str(stream.position_seqno)
            found[f"{name}end_seqno"] = str(stream.end_seqno)
            found[f"{name}items_sent"] = str(stream.row_count)
            found[f"{name}snapshots_sent"] = str(stream.snapshot_count)
        return found

    # -- checks of a stream request

    def _check_request(self, request: StreamRequest) -> StreamRequest:
        self._bucket.state_for_dcp(request.vbid)  # raises before the first snapshot, which may add collections
        if request.flags & StreamRequestFlag.TAKEOVER:
            raise Refused(Status.NOT_SUPPORTED, "a mirror cannot hand a vbucket over")
        return request

    def _parse_filter(self, request: StreamRequest) -> ServedFilter:
        assert self.reader is not None, "a DCP client has logged in"
        own = self._bucket.state_for_dcp(request.vbid)
        manifest = max(self._bucket.manifest(), own.manifest, key=lambda each: each.uid)  # the vbucket's may be newer
        found = dcp_filter.parse(
            request.value,
            manifest,
            self.reader,
            has_collections=self.controls.collections,
            has_stream_ids=self.controls.stream_ids,
        )
        if own.stream_filter is not None:
            dcp_filter.check_selected(found, own.stream_filter, manifest)
        return found

    def _history(self, request: StreamRequest, stream_filter: ServedFilter) -> PublishedHistory:
        return published_history(self._bucket.state_for_dcp(request.vbid))

    def _rollback_seqno(self, request: StreamRequest, history: StreamHistory, seqno: int) -> int:
        assert isinstance(history, PublishedHistory)
        try:
            return rollback_seqno(self._bucket.view, request, history, seqno)
        except StorageError as error:
            raise Refused(Status.ETMPFAIL, f"the store cannot be read: {error}") from error

    def _open_stream(self, request: StreamRequest, stream_filter: ServedFilter, history: StreamHistory) -> DcpStream:
        assert isinstance(history, PublishedHistory)
        assert history.served is not None
        return DcpStream(request, history.served, stream_filter, replace(self.controls), lambda: self._bucket.view)

    def _opened(self, stream: DcpStream) -> None:
        self._counters.streams_opened += 1
        self._news[stream] = lambda _vbid: self._queue(stream)
        self._watch.follow(stream.vbid, self._news[stream])
        self._queue(stream)

    def _forget(self, stream: DcpStream) -> None:
        super()._forget(stream)
        self._watch.leave(stream.vbid, self._news.pop(stream))
        self._counters.streams_closed += 1

    # -- sending

    def _queue(self, stream: DcpStream) -> None:
        if stream in self._is_ready:
            return
        self._is_ready.add(stream)
        # A live stream has little to send, and would wait for whole vbuckets behind a first snapshot.
        if self.controls.round_robin or not stream.filling:
            self._live.append(stream)
        elif stream.snapshot_count:
            self._filling = stream
        else:
            self._fresh.append(stream)
        self.wake()

    def _next(self) -> DcpStream:
        """Choose the next stream: alternate between the live streams and a first snapshot."""
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

    async def _pump(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._send_stream_ends()
            while self._is_ready and self.window.is_open:
                stream = self._next()
                if not stream.large_bytes:
                    self._turn(stream)
                else:
                    await self._turn_in_worker(stream, stream.large_bytes)
                await self._port.writable()
                # Otherwise a client that reads fast would keep other clients, and its own requests, waiting.
                await asyncio.sleep(0)
                self._send_stream_ends()

    def _turn(self, stream: DcpStream) -> None:
        if stream.ended:  # closed while it waited for its turn
            return
        window = self.window
        free_bytes = PIECE_BYTES
        if window.window_bytes:
            free_bytes = min(free_bytes, window.window_bytes - window.outstanding)
        rows, snapshots = stream.row_count, stream.snapshot_count
        self._send_taken(stream, stream.take(free_bytes), rows, snapshots)

    async def _turn_in_worker(self, stream: DcpStream, byte_count: int) -> None:
        """Send the large row that is next in a stream. Its memory counts until the client has taken it."""
        if stream.ended:
            return
        async with self._worker.memory(byte_count):
            if stream.ended:
                return
            rows, snapshots = stream.row_count, stream.snapshot_count
            data = await self._worker.run(partial(stream.take, 1, byte_count))
            if self.streams.get((stream.vbid, stream.stream_id)) is stream:  # not closed meanwhile
                self._send_taken(stream, data, rows, snapshots)
            del data
            await self._port.writable()

    def _send_taken(self, stream: DcpStream, data: bytes, rows: int, snapshots: int) -> None:
        if data:
            self._send(data)
        self._counters.documents += stream.row_count - rows
        self._counters.snapshots += stream.snapshot_count - snapshots
        self._go_on(stream)

    def _go_on(self, stream: DcpStream) -> None:
        if not stream.ended:
            if not stream.waiting:
                self._queue(stream)
        elif self.streams.get((stream.vbid, stream.stream_id)) is stream:
            self._forget(stream)

    def _send(self, data: bytes) -> None:
        super()._send(data)
        self._counters.stream_bytes += len(data)
