"""One DCP stream of one vbucket: its next messages, snapshot by snapshot, and its end.

All snapshots are complete, as in the stream of a replica vbucket (kv_engine docs/dcp/documentation/concepts.md,
docs/protocol.md 2.6, 2.7).
- A snapshot ends at a published boundary, and has all rows up to there that pass the filter. For a client without
  collections it ends at the last document up to the boundary.
- Everything sent belongs to the history of the client's failover log. The stream ends if that log changes, if sent data
  is retracted, or if a tombstone that the client needs was purged; the client then requests the stream again.
- Only positions are held between two calls of `take`; a call does bounded work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

from mirror.log import get_logger
from mirror.serve.dcp.encoder import MUTATION, RowEncoder
from mirror.serve.dcp.filter import ServedFilter
from mirror.server.controls import Controls
from mirror.server.turns import LARGE_BYTES
from mirror.wire import codec_dcp
from mirror.wire.constants import MarkerVersion, SnapshotFlag, StreamEndReason, StreamRequestFlag
from mirror.wire.errors import ProtocolError
from mirror.wire.events import SeqnoAdvanced, SnapshotMarker, StreamEnd, StreamRequest
from storage.errors import StorageError, ViewInvalidated
from storage.read import stream_reads as store
from storage.read.stream_reads import ServedState
from storage.read.view import View

DISK = int(SnapshotFlag.DISK | SnapshotFlag.CHECKPOINT)
MEMORY = int(SnapshotFlag.MEMORY | SnapshotFlag.CHECKPOINT)

BACKLOG_OF_DISK = 10_000
"""Snapshots of more seqnos than this are marked as disk snapshots, and so is a stream's first snapshot."""

PIECE_BYTES = 256 * 1024
"""Limit in bytes of rows read in one transaction, and of messages that one `take` returns."""

TURN_S = 0.002
"""A call of `take` ends once it has taken this long: 32 snapshots of 1,000 versions of one key each took 50 ms."""

SNAPSHOTS_PER_TURN = 32

log = get_logger("dcp")


class DcpStream:
    def __init__(
        self,
        request: StreamRequest,
        served: ServedState,
        stream_filter: ServedFilter,
        controls: Controls,
        view: Callable[[], View],
    ) -> None:
        """`served` is the state that the request was checked against; `view` returns the present view."""
        self.vbid = request.vbid
        self.opaque = request.opaque
        self.stream_id = stream_filter.stream_id
        self.position_seqno = request.start_seqno
        """The seqno up to which all rows were sent or filtered out."""
        self.end_seqno = request.end_seqno
        if request.flags & (StreamRequestFlag.TO_LATEST | StreamRequestFlag.DISK_ONLY):
            self.end_seqno = min(self.end_seqno, served.pub.seqno)
        self.ended = False
        self.waiting = False
        """True if there is no message to send until the mirror publishes more."""
        self.snapshot_count = 0
        self.row_count = 0
        self._view = view
        self._branch = served.position[0]
        self._failover_log = served.failover_log
        self.filter = stream_filter
        self._encoder = RowEncoder(controls, stream_filter)
        self._sends_advance = controls.collections
        self._marker_version = controls.marker_version
        self._first_start_seqno = min(request.start_seqno, request.snap_start_seqno)
        self._minds_tombstones = not request.flags & StreamRequestFlag.IGNORE_PURGED_TOMBSTONES
        self._shared_seqno = request.start_seqno
        """The client's data belongs to the served history if this seqno does. If the client resumes inside a snapshot,
        this is the snapshot's end: rows up to there replaced older versions, which the snapshot left out."""
        if request.start_seqno != request.snap_start_seqno:
            self._shared_seqno = request.snap_end_seqno
        self._holds_nothing = request.start_seqno == 0
        """True for a stream from 0 until its first snapshot ends. Until then the client needs no tombstones, because it
        has no older documents."""
        self._level = False
        self._served: ServedState | None = None
        self._ends: list[ServedState] = []
        """The served states at the ends of the next snapshots."""
        self.large_bytes = 0
        """Bytes of the large row that is next. Then call `take` in the worker thread, with as much memory."""
        self._pinned: ServedState | None = None
        """The served state at the end of the snapshot that is being sent."""
        self._begins: Mapping[int, int] | None = None
        self._marker_end_seqno = 0
        self._last_sent_seqno = 0

    @property
    def filling(self) -> bool:
        """True until the client has caught up or has the whole first snapshot."""
        return not self._level and (self.snapshot_count == 0 or (self.snapshot_count == 1 and self._pinned is not None))

    def take(self, bytes_max: int, row_bytes_max: int = LARGE_BYTES) -> bytes:
        """Return the next messages, up to the one that reaches the limit, or for `TURN_S`. Return no messages if
        `waiting`, if the next row is larger than `row_bytes_max` (`large_bytes`), or if the turn's rows were left out.
        """
        out = bytearray()
        self.waiting, self._served, self._ends, self.large_bytes = False, None, [], 0
        snapshots_max, ends_s = self.snapshot_count + SNAPSHOTS_PER_TURN, perf_counter() + TURN_S
        try:
            while len(out) < bytes_max and perf_counter() < ends_s:
                if self.ended or self.waiting or self.large_bytes:
                    break
                if self._pinned is None:
                    if self.snapshot_count == snapshots_max:
                        break
                    self._begin(out)
                elif self.position_seqno < self._pinned.pub.seqno:
                    self._fill(out, min(bytes_max - len(out), PIECE_BYTES), row_bytes_max)
                else:
                    self._finish(out)
        except (StorageError, ProtocolError, ValueError) as error:
            out += self._end_by(error)
        return bytes(out)

    def _end_by(self, error: Exception) -> bytes:
        if isinstance(error, ViewInvalidated):
            log.info("stream-ended", vbid=self.vbid, why=error.message)
            return self.end(StreamEndReason.STATE_CHANGED if error.rolled_back else StreamEndReason.SLOW)
        log.error("stream-unreadable", vbid=self.vbid, error=str(error))
        return self.end(StreamEndReason.BACKFILL_FAIL)

    def end(self, reason: StreamEndReason) -> bytes:
        """End the stream. Return the STREAM_END, or b"" if the stream had ended."""
        if self.ended:
            return b""
        self.ended = True
        return codec_dcp.encode(StreamEnd(self.vbid, int(reason), opaque=self.opaque, stream_id=self.stream_id))

    # -- snapshots

    def _begin(self, out: bytearray) -> None:
        position = self.position_seqno
        now = self._served
        if now is None or (position < now.pub.seqno and not self._ends):
            now, self._ends = store.next_ends(
                self._view().reader(self.vbid), position, self._shared_seqno, SNAPSHOTS_PER_TURN
            )
            self._served = now
        shared = now.has(self._branch, max(position, self._shared_seqno))
        if not (now.whole and shared) or now.failover_log != self._failover_log:
            out += self.end(StreamEndReason.STATE_CHANGED)
        elif self.filter.empty:
            out += self.end(StreamEndReason.FILTER_EMPTY)
        elif position >= self.end_seqno:
            out += self.end(StreamEndReason.OK)
        elif now.pub.seqno <= position:
            self.waiting = self._level = True
        else:
            self._branch, self._shared_seqno = now.position[0], 0
            self._open(out, self._ends.pop(0))

    def _open(self, out: bytearray, now: ServedState) -> None:
        position = self.position_seqno
        begins = self.filter.begins(now.manifest)
        end_seqno = int(now.pub.seqno)
        if self.filter.legacy and begins is not None:  # the client gets no SeqnoAdvanced: end at a document
            end_seqno = store.last_document_seqno(self._view().reader(self.vbid), now, position, begins)
            if end_seqno == position:
                self.position_seqno = now.pub.seqno
                return
        first = self.snapshot_count == 0
        self.snapshot_count += 1
        self._pinned, self._begins = now, begins
        self._encoder.manifest = now.manifest
        self._marker_end_seqno, self._last_sent_seqno = end_seqno, 0
        disk = first or end_seqno - position > BACKLOG_OF_DISK
        says_purge = disk and self._marker_version == MarkerVersion.V2_2  # docs/protocol.md 2.6
        version = MarkerVersion.V2_2 if says_purge else MarkerVersion.V1
        marker = SnapshotMarker(
            self.vbid,
            self._first_start_seqno if first else position + 1,
            end_seqno,
            DISK if disk else MEMORY,
            purge_seqno=now.purge_seqno if says_purge else 0,
            version=int(version),
            opaque=self.opaque,
            stream_id=self.stream_id,
        )
        out += codec_dcp.encode(marker)

    def _fill(self, out: bytearray, bytes_max: int, row_bytes_max: int) -> None:
        assert self._pinned is not None
        minded = self._minds_tombstones and not self._holds_nothing
        rows, position, self.large_bytes = store.rows(
            self._view().reader(self.vbid),
            self._pinned,
            self.position_seqno,
            bytes_max=bytes_max,
            large_bytes=row_bytes_max,
            begins=self._begins,
            tombstones_from=self.position_seqno if minded else None,
        )
        messages: list[bytes] = []
        add = messages.append
        encode = self._encoder.encode
        plain, unwanted = self._encoder.plain, self._encoder.unwanted_datatype
        left = bytes_max
        last = b""
        for key, row in rows:
            if left <= 0:
                position = int.from_bytes(last[4:])
                break
            if not (plain and row[1] == MUTATION and not row[5] & unwanted):
                row = encode(row)
                if not row:
                    continue
            add(row)
            left -= len(row)
            last = key
        if not messages:
            self.position_seqno = position
            return
        at = len(out)
        out += b"".join(messages)
        vbid, opaque = self.vbid.to_bytes(2), self.opaque.to_bytes(4)
        for message in messages:
            out[at + 6 : at + 8] = vbid
            out[at + 12 : at + 16] = opaque
            at += len(message)
        self.row_count += len(messages)
        self.position_seqno, self._last_sent_seqno = position, int.from_bytes(last[4:])

    def _finish(self, out: bytearray) -> None:
        if self._last_sent_seqno < self._marker_end_seqno and self._sends_advance:
            out += codec_dcp.encode(
                SeqnoAdvanced(self.vbid, self._marker_end_seqno, opaque=self.opaque, stream_id=self.stream_id)
            )
        self._pinned = None
        self._holds_nothing = False
