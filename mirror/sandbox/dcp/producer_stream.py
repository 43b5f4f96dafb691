"""One DCP stream of the sandbox: makes the next message, from disk or memory (kv_engine
docs/dcp/documentation/concepts.md, docs/protocol.md 2.4, 2.6, 2.7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from random import Random

from mirror.sandbox.data.item import MUTATION, BetweenItem, Item
from mirror.sandbox.data.sandbox_vbucket import Vbucket
from mirror.sandbox.data.streams import StreamTuning
from mirror.sandbox.dcp.encoder import ItemEncoder
from mirror.sandbox.dcp.filter import SandboxFilter
from mirror.server.controls import Controls
from mirror.wire import codec_dcp
from mirror.wire.constants import MarkerVersion, SnapshotFlag, StreamEndReason, StreamRequestFlag
from mirror.wire.events import SeqnoAdvanced, SnapshotMarker, StreamEnd, StreamRequest
from mirror.wire.frame import with_stream_id

BACKLOG_FOR_LARGE_SNAPSHOTS = 2000
"""A stream that is behind by more changes than this gets the rest of a checkpoint in one snapshot."""

DISK = int(SnapshotFlag.DISK | SnapshotFlag.CHECKPOINT)
MEMORY = int(SnapshotFlag.MEMORY)
CHECKPOINT = int(SnapshotFlag.CHECKPOINT)
HISTORY = int(SnapshotFlag.HISTORY | SnapshotFlag.MAY_DUPLICATE_KEYS)


class ProducerStream:
    def __init__(
        self,
        vbucket: Vbucket,
        request: StreamRequest,
        stream_filter: SandboxFilter,
        controls: Controls,
        rng: Random,
        tuning: StreamTuning | None = None,
        *,
        disk_flags: int = DISK,
        ephemeral: bool = False,
        announced_ends: set[int] | None = None,
    ) -> None:
        """`controls` must not change later. `announced_ends` collects the last seqno of each snapshot, for tests."""
        self.vbucket = vbucket
        self.vbid = int(vbucket.vbid)
        self.opaque = request.opaque
        self.stream_id = stream_filter.stream_id
        self.seqno = request.start_seqno
        """All changes up to this seqno were sent, were filtered out, or are in the open snapshot from memory."""
        self.end_seqno = request.end_seqno
        self.ended = False
        self.frames_sent = 0
        self.bytes_sent = 0
        self.in_snapshot_until = 0
        """The last seqno of the present snapshot; 0 between two snapshots."""
        self._request = request
        self.filter = stream_filter
        self._controls = controls
        self._encoder = ItemEncoder(controls)
        self._plain = self._encoder.plain and self.stream_id is None
        self._unwanted_datatype = self._encoder.unwanted_datatype
        self._opaque_bytes = request.opaque.to_bytes(4)
        self._tuning = tuning or StreamTuning()
        self._disk_flags = disk_flags
        self._ephemeral = ephemeral
        self._announced_ends = announced_ends
        self._rng = rng
        self._disk_only = bool(request.flags & StreamRequestFlag.DISK_ONLY)
        if request.flags & (StreamRequestFlag.TO_LATEST | StreamRequestFlag.DISK_ONLY):
            self.end_seqno = vbucket.high_seqno
        self._has_history = controls.change_streams and vbucket.history_start_seqno > 0
        self._first_marker_sent = False
        self._next_opens_checkpoint = True
        self._pending: Iterator[Item] = iter(())
        self._snapshot_start = 0
        self._snapshot_end = 0
        self._from_disk = False
        self._last_sent = 0

    # --- called by the connection

    @property
    def has_more(self) -> bool:
        if self.ended:
            return False
        return bool(self.in_snapshot_until) or self.seqno < self.vbucket.high_seqno or self.seqno >= self.end_seqno

    def add_message(self, out: bytearray) -> bool:
        """Append the next message to `out`; return False if none is ready."""
        start = len(out)
        while len(out) == start and not self.ended:
            if not self.in_snapshot_until:
                if not self._begin(out):
                    break
            elif not self._add_item(out):
                self._finish(out)
        self.bytes_sent += len(out) - start
        return len(out) > start

    def take(self, bytes_max: int) -> bytes:
        """Return the next messages, until they have `bytes_max` bytes or no message is ready."""
        out = bytearray()
        while len(out) < bytes_max and self.add_message(out):
            pass
        return bytes(out)

    def end(self, reason: StreamEndReason) -> bytes:
        if self.ended:
            return b""
        self.ended = True
        self.frames_sent += 1
        return self._message(StreamEnd(self.vbucket.vbid, int(reason), opaque=self.opaque))

    # --- snapshots

    def _begin(self, out: bytearray) -> bool:
        vbucket = self.vbucket
        if self.filter.empty:
            out += self.end(StreamEndReason.FILTER_EMPTY)
            return False
        if self.seqno >= self.end_seqno:
            out += self.end(StreamEndReason.OK)
            return False
        if self.seqno >= vbucket.high_seqno:
            return False
        if self._disk_only or self.seqno < vbucket.memory_floor_seqno:
            return self._begin_disk(out)
        return self._begin_memory(out)

    def _begin_disk(self, out: bytearray) -> bool:
        vbucket = self.vbucket
        high = vbucket.high_seqno
        if self._lacks_tombstones():
            out += self.end(StreamEndReason.STATE_CHANGED)  # kv_engine reports a rollback by this reason
            return False
        is_partial = not self._first_marker_sent and self.seqno < self._request.snap_end_seqno
        holds_all = self.filter.holds_all(vbucket.collection_high_seqno, self.seqno)
        if holds_all and not is_partial and self.seqno < vbucket.purge_seqno:
            self.seqno = high  # kv_engine skips the backfill (v8.0.2 engines/ep/src/dcp/backfill_by_seqno_disk.cc)
            return True
        if self.filter.legacy:
            high = vbucket.collection_high_seqno.get(0, 0)
            if high <= self.seqno:
                self.seqno = vbucket.high_seqno
                return True
        start = self._request.start_seqno if not self._first_marker_sent else self.seqno + 1
        if not self._first_marker_sent:
            start = min(start, self._request.snap_start_seqno)
        whole_history = self.seqno + 1 >= self._history_start(high)
        self._marker(out, start, high, self._disk_flags | (HISTORY if whole_history else 0))
        self._open(self._on_disk(self.seqno + 1, high), high, from_disk=True)
        return True

    def _lacks_tombstones(self) -> bool:
        """True if a backfill from `seqno` on would silently leave out purged deletions.

        This happens if the stream was accepted before the purge, and later continues from disk. kv_engine checks the
        seqno again when it opens the file (DCPBackfillBySeqnoDisk::create), and ends the stream as rolled back. As in
        the check of a stream request, a filtered stream misses no deletion if its collections have not changed after
        `seqno`. The check of an ephemeral bucket ignores the request's purge seqno (kv_engine v8.0.2
        engines/ep/src/dcp/backfill_memory.cc).
        """
        purge_seqno = self.vbucket.purge_seqno
        if self._request.flags & StreamRequestFlag.IGNORE_PURGED_TOMBSTONES:
            return False
        if self.filter.holds_all(self.vbucket.collection_high_seqno, self.seqno):
            return False
        return 0 < self.seqno < purge_seqno and (self._ephemeral or self.filter.purge_seqno != purge_seqno)

    def _begin_memory(self, out: bytearray) -> bool:
        vbucket = self.vbucket
        backlog = vbucket.high_seqno - self.seqno
        count = self._rng.randint(1, self._tuning.live_snapshot_items)
        if backlog > BACKLOG_FOR_LARGE_SNAPSHOTS or not self._first_marker_sent:
            count = backlog
        first = self.seqno + 1
        last, opens = vbucket.cut(self.seqno, count)
        self._next_opens_checkpoint |= opens
        shown: list[Item] = []
        marker_end = 0
        keeps = vbucket.keeps
        history = self._has_history
        for item in vbucket.changes(first, last):
            superseded = item.next_seqno
            if superseded and superseded <= last and superseded != item.seqno and not (history and keeps(item)):
                continue
            if not self.filter.passes(item):
                continue
            if self._encoder.shows(item):
                shown.append(item)
                marker_end = item.seqno
            elif self._controls.collections:  # a hidden change: if it is the last, SeqnoAdvanced reports it
                marker_end = item.seqno
        if not shown:
            if not self._ends_resumed_snapshot(last):  # an empty snapshot is not sent (docs/protocol.md 2.7)
                self.seqno = last
                return True
            marker_end = last
        start = first
        if not self._first_marker_sent:
            start = min(self._request.start_seqno, self._request.snap_start_seqno)
        flags = MEMORY | (CHECKPOINT if self._next_opens_checkpoint else 0) | (HISTORY if history else 0)
        self._next_opens_checkpoint = False
        self._marker(out, start, marker_end, flags)
        self._open(iter(shown), marker_end, from_disk=False)
        self.seqno = last
        return True

    def _ends_resumed_snapshot(self, last: int) -> bool:
        """True if a client with collections resumes a snapshot that ends by `last`. Its rest is sent, even if empty."""
        request = self._request
        is_partial = not self._first_marker_sent and request.start_seqno < request.snap_end_seqno <= last
        return is_partial and self._controls.collections

    def _open(self, items: Iterator[Item], end: int, *, from_disk: bool) -> None:
        if self._announced_ends is not None:
            self._announced_ends.add(end)
        self._pending = items
        self._snapshot_end = end
        self._from_disk = from_disk
        self._last_sent = 0
        self.in_snapshot_until = end

    def _on_disk(self, first: int, last: int) -> Iterator[Item]:
        """Return the items of a backfill: each key's newest version as of `last`, even if a purge takes it meanwhile.
        With change streams: the newest versions below the start of history, a second marker, then every version.
        """
        purge_seqno, history = self.vbucket.purge_seqno, self._history_start(last)
        changes = self.vbucket.changes
        if first >= history:
            return self._found_on_disk(changes(first, last), last, purge_seqno, history)
        newest = self._found_on_disk(changes(first, history - 1), last, purge_seqno, history)
        if history > last:
            return newest
        marker = self._marker_of(self._snapshot_start, last, self._disk_flags | HISTORY)
        turn = [BetweenItem(history - 1, codec_dcp.encode(marker))]
        return chain(newest, turn, self._found_on_disk(changes(history, last), last, purge_seqno, history))

    def _history_start(self, last: int) -> int:
        """Return the seqno from which on every version is sent; `last` + 1 if only the newest versions are."""
        return self.vbucket.history_start_seqno if self._has_history else last + 1

    def _found_on_disk(self, items: Sequence[Item], as_of: int, purge_seqno: int, history: int) -> Iterator[Item]:
        keeps = self.vbucket.keeps
        passes = None if self.filter.all and self.filter.hidden is None else self.filter.passes
        shows = self._encoder.shows
        antilag = self._tuning.antilag_items if self._controls.collections else 0
        left_out = 0
        for item in items:
            superseded = item.next_seqno
            if (
                superseded
                and superseded <= as_of
                and not superseded == item.seqno > purge_seqno
                and (item.seqno < history or superseded == item.seqno or not keeps(item))
            ):
                continue
            if (passes is None or passes(item)) and (item.frame[1] == MUTATION or shows(item)):
                yield item
                left_out = 0
            elif antilag:
                left_out += 1
                if left_out == antilag:
                    left_out = 0
                    yield BetweenItem(item.seqno, codec_dcp.encode(SeqnoAdvanced(self.vbucket.vbid, item.seqno)))

    def _add_item(self, out: bytearray) -> bool:
        """Append the next item of the open snapshot; return False after the last."""
        item = next(self._pending, None)
        if item is None:
            return False
        frame = item.frame
        if not (self._plain and frame[1] == MUTATION and not frame[5] & self._unwanted_datatype):
            frame = self._encoder.encode(item, from_disk=self._from_disk, stream_id=self.stream_id)
        opaque_at = len(out) + 12
        out += frame
        out[opaque_at : opaque_at + 4] = self._opaque_bytes
        self.frames_sent += 1
        self._last_sent = item.seqno
        if self._from_disk:
            self.seqno = item.seqno
        return True

    def _finish(self, out: bytearray) -> None:
        end = self._snapshot_end
        vbid = self.vbucket.vbid
        if self._last_sent < end and self._controls.collections and not self.filter.empty:
            self._emit(out, SeqnoAdvanced(vbid, end, opaque=self.opaque))
        if self._from_disk:
            self.seqno = max(self.seqno, end)
            self._next_opens_checkpoint = True
        self.in_snapshot_until = 0

    # --- messages

    def _marker(self, out: bytearray, start: int, end: int, flags: int) -> None:
        self._first_marker_sent = True
        self._snapshot_start = start
        self._emit(out, self._marker_of(start, end, flags))

    def _marker_of(self, start: int, end: int, flags: int) -> SnapshotMarker:
        version, purge_seqno = MarkerVersion.V1, 0
        wants_purge_seqno = self._controls.marker_version is MarkerVersion.V2_2 and self._tuning.purge_seqno_reported
        if flags & SnapshotFlag.DISK and wants_purge_seqno:  # docs/protocol.md 2.6
            version, purge_seqno = MarkerVersion.V2_2, self.vbucket.purge_seqno
        return SnapshotMarker(
            self.vbucket.vbid, start, end, flags, purge_seqno=purge_seqno, version=int(version), opaque=self.opaque
        )

    def _emit(self, out: bytearray, event: SnapshotMarker | SeqnoAdvanced) -> None:
        self.frames_sent += 1
        out += self._message(event)

    def _message(self, event: SnapshotMarker | SeqnoAdvanced | StreamEnd) -> bytes:
        message = codec_dcp.encode(event, opaque=self.opaque)
        return message if self.stream_id is None else with_stream_id(message, self.stream_id)
