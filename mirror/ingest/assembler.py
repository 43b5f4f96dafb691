"""Assembles a stream's messages into whole snapshots, which are staged and then published (docs/protocol.md 2.6, 2.7).

- A marker announces a snapshot with its start and end. The end is trusted, the start is not.
- Any message with the end's seqno completes the snapshot: a row, a system event, a prepare or abort of a durable write,
  or SeqnoAdvanced. Below the end, a prepare, an abort or SeqnoAdvanced only moves the position.
- A marker with the open snapshot's end continues that snapshot. A marker with a later end extends the snapshot to that
  end. A marker with an earlier end is a violation.
- On connections without collections a source sends nothing for filtered changes, so perhaps no message has the end's
  seqno. Then the next marker that starts beyond the end, or a regular end of the stream, completes the snapshot.
- After an accepted mid-snapshot request, the first marker replaces the end of the open snapshot, if it is not earlier.
- An out-of-order snapshot (OSO) is a violation, because no request allows it.

A message that breaks a rule raises Violation. The instructions already in `out` must still be executed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace

from mirror.ingest import collections
from mirror.ingest.events import Row
from mirror.ingest.instructions import Advance, Instruction, PublishSnapshot, StageRows, StageSystemEvent
from mirror.ingest.offset import is_resumable
from mirror.ingest.selection import StreamFilter
from mirror.wire.codec_dcp import encode
from mirror.wire.constants import SnapshotFlag
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.events import Abort, Commit, OsoSnapshot, Prepare, SeqnoAdvanced, SnapshotMarker, SystemEvent
from mirror.wire.system_events import decode_system_event
from storage.model import DEFAULT_COLLECTION, SEQNO_MAX, Manifest, Seqno, SnapshotRange, VbucketState

_DISK = int(SnapshotFlag.DISK)  # a plain int, because testing an IntFlag takes a microsecond


class Violation(Exception):
    """The source broke the rules of a stream."""


class Assembler:
    def __init__(self, on_publish: Callable[[list[Instruction]], None]) -> None:
        """`on_publish` is called after each appended PublishSnapshot, and may append more instructions."""
        self._on_publish = on_publish
        self._collections = True
        self._filter: StreamFilter | None = None
        self._scope_names: Mapping[int, str] = {}
        self.boundary_seqno = Seqno(0)
        self.position_seqno = Seqno(0)
        self.manifest = Manifest.initial()
        self.open_snapshot: SnapshotRange | None = None
        self._held_snapshot: SnapshotRange | None = None
        self._purge_seqno: int | None = None
        self._replaces_end = False
        self._resumed_end = Seqno(0)  # the lowest valid end of the snapshot inside which the request resumed

    def load(self, state: VbucketState) -> None:
        self.boundary_seqno = state.staging_published_seqno
        if state.open_snapshot is None and state.staged_seqno > self.boundary_seqno:
            self.boundary_seqno = state.staged_seqno  # complete; the store publishes it once the key rows are written
        # `handshake.begin` abandons rows above the boundary that no stream can continue.
        self.position_seqno = max(state.staged_seqno, self.boundary_seqno)
        self.manifest = state.manifest
        resumable = is_resumable(self.boundary_seqno, self.position_seqno, state.open_snapshot)
        self._held_snapshot = state.open_snapshot if resumable else None
        self.end_stream()

    @property
    def holds_part(self) -> bool:
        return self.position_seqno > self.boundary_seqno

    @property
    def resumable(self) -> bool:
        return is_resumable(self.boundary_seqno, self.position_seqno, self.open_snapshot)

    def begin_stream(
        self,
        *,
        inside_snapshot: bool,
        collections_granted: bool,
        stream_filter: StreamFilter | None = None,
        scope_names: Mapping[int, str] | None = None,
    ) -> None:
        self._collections = collections_granted
        self._filter = stream_filter
        self._scope_names = scope_names or {}
        self._replaces_end = inside_snapshot
        if inside_snapshot and self.open_snapshot is not None:
            self._resumed_end = self.open_snapshot.end_seqno

    def end_stream(self) -> None:
        """Go back to the open snapshot as of the last accepted row or other change. Forget a newer marker: a request
        with that marker's range would claim rows that the mirror does not hold.
        """
        self.open_snapshot = self._held_snapshot
        self._purge_seqno = None
        self._replaces_end = False
        self._resumed_end = Seqno(0)

    def marker(self, event: SnapshotMarker, out: list[Instruction]) -> None:
        # Never earlier than before the resume: the held part left out versions that come up to that end.
        end_seqno = Seqno(max(event.end_seqno, self._resumed_end))
        if end_seqno < self.position_seqno:
            raise Violation(f"a snapshot that ends at {end_seqno}, below {self.position_seqno} which is already held")
        if end_seqno >= SEQNO_MAX:  # in requests, SEQNO_MAX means "without end"
            raise Violation(f"a snapshot that ends at {end_seqno}, which is no seqno")
        current = self.open_snapshot
        start_seqno = Seqno(min(event.start_seqno, end_seqno))
        if current is not None:
            if not self._replaces_end and current.end_seqno != end_seqno:
                if end_seqno < current.end_seqno:
                    raise Violation(f"a snapshot that ends at {end_seqno}, inside the open one to {current.end_seqno}")
                if not self._collections and event.start_seqno > current.end_seqno:
                    self._close(out)
                    current = None
            if current is not None:  # the snapshot continues: the lower start counts
                start_seqno = min(start_seqno, current.start_seqno)
        self._replaces_end = False
        self._purge_seqno = event.reported_purge_seqno
        self.open_snapshot = SnapshotRange(start_seqno, end_seqno, event.flags)
        if end_seqno == self.position_seqno:  # the snapshot is complete
            if end_seqno > self.boundary_seqno:
                self._publish(out)
            else:
                self.open_snapshot = None

    def rows(self, rows: list[Row], byte_count: int, out: list[Instruction]) -> None:
        """Stage a run of rows in constant time. The sink checks the order inside the run."""
        open_snapshot = self.open_snapshot
        if open_snapshot is None or self._replaces_end:
            raise Violation(f"a row at {_seqno_of(rows[0])} outside any snapshot")
        first_seqno, last_seqno = _seqno_of(rows[0]), _seqno_of(rows[-1])
        if first_seqno <= self.position_seqno:
            raise Violation(f"a row at {first_seqno} after {self.position_seqno}: seqnos must rise")
        if last_seqno - first_seqno < len(rows) - 1:
            raise Violation(f"{len(rows)} rows between {first_seqno} and {last_seqno}: seqnos must rise")
        end_seqno = open_snapshot.end_seqno
        if last_seqno <= end_seqno:
            out.append(StageRows(rows, byte_count, open_snapshot))
            self._moved_to(last_seqno, out)
            return
        # What completes the snapshot is right, although the source then breaks the rules.
        within = rows[: bisect_right(rows, int(end_seqno), key=_seqno_of)]
        if within and _seqno_of(within[-1]) == end_seqno:
            within_byte_count = sum(len(value) for _, value in within)
            out.append(StageRows(within, within_byte_count, open_snapshot))
            self._moved_to(end_seqno, out)
        raise Violation(f"a row at {last_seqno}, beyond the end of its snapshot at {end_seqno}")

    def seqno_advanced(self, event: SeqnoAdvanced, out: list[Instruction]) -> None:
        """Move the position: every change up to the event's seqno was sent. Publish if a snapshot ends there."""
        seqno = event.seqno
        if seqno < self.position_seqno:
            raise Violation(f"an advance to {seqno}, below {self.position_seqno} which is already held")
        if seqno == self.position_seqno:
            return
        if self._replaces_end:
            raise Violation(f"an advance to {seqno} before the first marker")
        if self.open_snapshot is None:
            # A source may send SeqnoAdvanced without a marker; the snapshot then ends at the message's seqno.
            if seqno >= SEQNO_MAX:  # in requests, SEQNO_MAX means "without end"
                raise Violation(f"a message at {seqno}")
            self.open_snapshot = SnapshotRange(Seqno(self.position_seqno + 1), Seqno(seqno))
        self._advance(seqno, out)

    def system_event(self, event: SystemEvent, out: list[Instruction]) -> None:
        try:
            content = decode_system_event(event)
        except RemoteProtocolError as error:
            raise Violation(f"a system event at {event.seqno} that cannot be read: {error.detail}") from None
        within = self._check_next(event.seqno)
        seqno = Seqno(event.seqno)
        # No event creates the default collection, so a filter that hides it has to be asked.
        shown = self._filter is None or self._filter.shows_by_itself(DEFAULT_COLLECTION, collections.DEFAULT_SCOPE)
        before = self.manifest if shown else collections.without_default(self.manifest)
        after = collections.apply(before, content, seqno, self._scope_names)
        count = len(after.scopes) + len(after.collections)
        if count > collections.NAMES_MAX:
            raise Violation(f"{count} scopes and collections at {seqno}; {collections.NAMES_MAX} at most")
        change = collections.change_by(content, before, after) if before is self.manifest else None
        self.manifest = after
        # Stream id and opaque belong to the connection, not to the change.
        row_value = encode(replace(event, stream_id=None), opaque=0)
        out.append(StageSystemEvent(seqno, row_value, after, within, change))
        self._moved_to(seqno, out)

    def sync_write(self, event: Prepare | Commit | Abort, out: list[Instruction]) -> None:
        """Move the position to the seqno of a prepare or an abort. A COMMIT message is a violation.

        A mirror never requests sync writes, so a source sends a committed one as a mutation (docs/protocol.md 2.6). A
        COMMIT message has no value, and the prepare with the value was skipped.
        """
        self._check_next(event.seqno)
        if isinstance(event, Commit):
            raise Violation(f"a commit at {event.seqno} without its value, which was not requested")
        self._advance(event.seqno, out)

    def oso_snapshot(self, event: OsoSnapshot, out: list[Instruction]) -> None:
        raise Violation(f"an out-of-order snapshot (flags {event.flags:#x}), which was not requested")

    def stream_ended_regularly(self, out: list[Instruction]) -> None:
        """On a connection without collections, complete the open snapshot: perhaps no message has the end's seqno."""
        if self.open_snapshot is not None and not self._collections and not self._replaces_end:
            self._close(out)

    def _check_next(self, seqno: int) -> SnapshotRange:
        """Return the open snapshot. Raises Violation if a message with this seqno may not come next in it."""
        if self.open_snapshot is None or self._replaces_end:
            raise Violation(f"a message at {seqno} outside any snapshot")
        if seqno <= self.position_seqno:
            raise Violation(f"a message at {seqno} after {self.position_seqno}: seqnos must rise")
        if seqno > self.open_snapshot.end_seqno:
            raise Violation(f"a message at {seqno}, beyond the end of its snapshot at {self.open_snapshot.end_seqno}")
        return self.open_snapshot

    def _advance(self, seqno: int, out: list[Instruction]) -> None:
        open_snapshot = self.open_snapshot
        assert open_snapshot is not None  # the callers checked or opened it
        if seqno > open_snapshot.end_seqno:
            raise Violation(f"an advance to {seqno}, beyond the end of its snapshot at {open_snapshot.end_seqno}")
        out.append(Advance(Seqno(seqno), open_snapshot))
        self._moved_to(seqno, out)

    def _close(self, out: list[Instruction]) -> None:
        """Complete the open snapshot: all its changes are here, but no message has the seqno of its end."""
        assert self.open_snapshot is not None  # the callers checked it
        end_seqno = self.open_snapshot.end_seqno
        if end_seqno > self.position_seqno:
            self._advance(end_seqno, out)

    def _moved_to(self, seqno: int, out: list[Instruction]) -> None:
        self.position_seqno = Seqno(seqno)
        self._held_snapshot = self.open_snapshot
        assert self.open_snapshot is not None  # the callers checked it
        if seqno == self.open_snapshot.end_seqno:
            self._publish(out)

    def _publish(self, out: list[Instruction]) -> None:
        assert self.open_snapshot is not None  # the callers checked it
        end_seqno = self.open_snapshot.end_seqno
        out.append(PublishSnapshot(end_seqno, self.open_snapshot.start_seqno, self._purge_seqno))
        self.boundary_seqno = end_seqno
        self.open_snapshot = self._held_snapshot = None
        self._purge_seqno = None
        self._resumed_end = Seqno(0)
        self._on_publish(out)

    @property
    def from_disk(self) -> bool:
        return self.open_snapshot is not None and self.open_snapshot.flags & _DISK != 0


def _seqno_of(row: Row) -> int:
    return int.from_bytes(row[0][4:12])
