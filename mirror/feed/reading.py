"""One bounded read of a source: the vbuckets' machines, the snapshots they complete, and the queue to the reader.

Knows the machines of `ingest`, and does what they want with a spool where a mirror has its store; must never know how
connections are made, nor the threads on the other side of the queue. Invariants:
- only whole snapshots are handed out, of each vbucket in the order of their seqnos, each once;
- what was handed out is never taken back: where the source says that it lost some of it, or that it cannot say what was
  deleted since, the vbucket's read ends with RolledBack;
- what of a snapshot came before a broken connection is kept only if the source agrees to continue exactly there;
- memory holds no more than `memory_bytes` of rows and one message for each connection: open snapshots beyond half of it
  go to disk, and complete ones that nobody takes make the source wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from mirror.clock import Clock
from mirror.errors import ClusterError, PrivilegeMissing, SourceTimeout
from mirror.feed.session import NodeSession, StreamAnswer
from mirror.feed.spool import Spool, SpoolFile
from mirror.feed.vbucket import failover_log_event
from mirror.ingest import events as happenings
from mirror.ingest import instructions as deeds
from mirror.ingest.backoff import delay_s
from mirror.ingest.events import Row
from mirror.ingest.instructions import Instruction
from mirror.ingest.machine import Phase, VbucketMachine
from mirror.wire import events as ev
from mirror.wire.constants import Status as WireStatus
from mirror.wire.constants import StreamEndReason
from mirror.wire.frame import Frame
from storage.model import (
    SEQNO_MAX,
    Branch,
    Document,
    FailoverEntry,
    Manifest,
    Seqno,
    Vbid,
    VbucketState,
    Vbuuid,
    vbuuid_at,
)
from storage.records import decode_row

BRANCH = Branch(0)
ROW_PREFIX = bytes(4)
DISK_FACTOR = 16
"""Complete snapshots that nobody takes may lie on disk up to this many times `memory_bytes`."""
WAITING_SNAPSHOTS_MAX = 10_000
"""Live snapshots hold two or three rows: their objects weigh more than their bytes."""


@dataclass(frozen=True, slots=True)
class Position:
    """Everything of a vbucket up to `seqno` is held, on the history `vbuuid`. (0, 0): nothing is."""

    vbuuid: int = 0
    seqno: int = 0


class Snapshot:
    """A whole snapshot of a vbucket: everything that changed in (start_seqno, end_seqno].

    Valid until the next item is asked for. Rows are whole messages in stored form (`storage.records` decodes them):
    mutations, deletions, expirations and system events.
    """

    __slots__ = (
        "_on_close",
        "_spool",
        "end_seqno",
        "manifest",
        "ordered",
        "purge_seqno",
        "start_seqno",
        "vbid",
        "vbuuid",
    )

    def __init__(
        self,
        vbid: int,
        vbuuid: int,
        start_seqno: int,
        end_seqno: int,
        spool: Spool,
        *,
        manifest: Manifest,
        ordered: bool = True,
        purge_seqno: int | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`ordered`: seqnos rise from row to row (not in an out-of-order snapshot, of which each key comes once)."""
        self.vbid = vbid
        self.vbuuid = vbuuid
        self.start_seqno = start_seqno
        self.end_seqno = end_seqno
        self.manifest = manifest
        """Scopes and collections at its end, as far as the read has seen them made: all, where it began at 0."""
        self.ordered = ordered
        self.purge_seqno = purge_seqno
        """Tombstones up to here are gone at the source, where it says so (8.0 and newer)."""
        self._spool: Spool | None = spool
        self._on_close = on_close

    @property
    def position(self) -> Position:
        """Where anyone who has taken this snapshot stands."""
        return Position(self.vbuuid, self.end_seqno)

    @property
    def row_count(self) -> int:
        """How many rows there are; none in a snapshot that only says that nothing up to its end is missing."""
        return self._open.frame_count

    @property
    def byte_count(self) -> int:
        """Bytes of all rows."""
        return self._open.byte_count

    def frames(self) -> Iterator[bytes]:
        """The rows, one after the other, as they are stored."""
        return self._open.frames()

    def documents(self, *, raw: bool = False) -> Iterator[Document]:
        """The rows, decoded; `raw` leaves values compressed and with their xattrs. A value that cannot be taken apart
        stays so, too: `storage.records.value_problem` says why.
        """
        vbid = Vbid(self.vbid)
        return (decode_row(vbid, BRANCH, frame, raw=raw, lenient=True) for frame in self.frames())

    def close(self) -> None:
        """Give the rows' memory and disk back."""
        if self._spool is not None:
            self._spool.close()
            self._spool = None
            self._on_close()

    @property
    def _open(self) -> Spool:
        assert self._spool is not None, "a snapshot is valid until the next item is asked for"
        return self._spool

    def __repr__(self) -> str:
        """For people."""
        return f"Snapshot(vb {self.vbid}, {self.start_seqno}..{self.end_seqno}, vbuuid {self.vbuuid:#x})"


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The source holds only what lies at or below `seqno` of what was read before: the rest is lost, or (at 0) it can
    no longer say what changed since. Nothing more comes of the vbucket in this read.
    """

    vbid: int
    seqno: int


@dataclass(frozen=True, slots=True)
class Ended:
    """All that was asked for of the vbucket was handed out, up to `position`."""

    vbid: int
    position: Position
    text: str = "complete"


Item = Snapshot | RolledBack | Ended


class Outbox:
    """From the loop to the reader: whole items, bounded by making the source wait."""

    def __init__(self, memory_bytes: int, on_room: Callable[[], None]) -> None:
        """`on_room` is called, from any thread, when the source may go on."""
        self._memory_max = memory_bytes // 2
        self._disk_max = memory_bytes * DISK_FACTOR
        self._on_room = on_room
        self._items: deque[Item] = deque()
        self._memory_bytes = 0
        self._disk_bytes = 0
        self._finished = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.full = False

    def put(self, item: Item, memory_bytes: int = 0, disk_bytes: int = 0) -> None:
        """Add an item; the bytes are those it holds until it is closed."""
        with self._changed:
            self._items.append(item)
            self._memory_bytes += memory_bytes
            self._disk_bytes += disk_bytes
            self.full = (
                self._memory_bytes >= self._memory_max
                or self._disk_bytes >= self._disk_max
                or len(self._items) >= WAITING_SNAPSHOTS_MAX
            )
            self._changed.notify()

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing more comes; anyone who takes gets the rest, then the error."""
        with self._changed:
            if not self._finished:
                self._finished, self._error = True, error
            self._changed.notify_all()

    def take(self) -> Item | None:
        """The next item; None at the end. Waits."""
        with self._changed:
            while not self._items and not self._finished:
                self._changed.wait()
            if self._items:
                return self._items.popleft()
            if self._error is not None:
                raise self._error
            return None

    def gave_back(self, memory_bytes: int, disk_bytes: int) -> None:
        """An item was closed."""
        with self._changed:
            self._memory_bytes -= memory_bytes
            self._disk_bytes -= disk_bytes
            room = (
                self.full
                and self._memory_bytes <= self._memory_max // 2
                and self._disk_bytes <= self._disk_max // 2
                and len(self._items) <= WAITING_SNAPSHOTS_MAX // 2
            )
            if room:
                self.full = False
        if room:
            self._on_room()

    def discard(self) -> None:
        """Close what nobody took."""
        while self._items:
            item = self._items.popleft()
            if isinstance(item, Snapshot):
                item.close()


class Surroundings(Protocol):
    """What a read may ask of the connections around it."""

    clock: Clock

    def session_of(self, vbid: int) -> NodeSession | None:
        """The open session of the vbucket's node, if there is one."""
        ...

    def refresh_map(self, config: bytes, vbid: int) -> None:
        """Get a new cluster map, or read this one."""
        ...

    def hold_acks(self) -> None:
        """Nobody takes what is complete: have the source wait."""
        ...


class VbucketReading:
    """One vbucket of a read: its machine, and the snapshot that is being filled."""

    def __init__(self, reading: Reading, vbid: int, position: Position, until: int | None) -> None:
        """At rest; `attach` gives it a session."""
        self.vbid = vbid
        self.until = until
        self.session: NodeSession | None = None
        self.opaque: int | None = None
        self.done = False
        self.text = "not asked for yet"
        self.progress_at = reading.clock.monotonic()
        self.spool: Spool | None = None
        self._reading = reading
        self._boundary = Seqno(position.seqno)
        # Of a position only its history is known: the entry says so for every seqno.
        self._log = (FailoverEntry(Vbuuid(position.vbuuid), Seqno(0)),) if position.seqno else ()
        self._manifest = Manifest.initial()
        self._manifest_open = self._manifest
        self._purge_seqno = 0
        self._ordered = True
        self._retry: asyncio.TimerHandle | None = None
        self._machine = VbucketMachine(Vbid(vbid), self._state())

    @property
    def position(self) -> Position:
        """What was handed out reaches to here."""
        return Position(int(vbuuid_at(self._log, self._boundary)), int(self._boundary))

    @property
    def idle(self) -> bool:
        """True while nothing is owed by the source: an endless stream is open."""
        return self.until is None and self._machine.phase is Phase.STREAMING

    def attach(self, session: NodeSession) -> None:
        """The session of its node is ready."""
        self.session, self.opaque = session, None
        # A stream with an end below its start is out of range: where all is held, an endless one is asked for and
        # closed at once, so that the source says whether it still has what was read.
        end_seqno = self.until if self.until is not None and self.until > self._boundary else SEQNO_MAX
        self.handle(
            happenings.Start(
                collections=session.handshake.collections,
                sends_purge_seqno=session.sends_purge_seqno,
                end_seqno=end_seqno,
            )
        )

    def detach(self, event: happenings.Stop | happenings.ConnectionLost | happenings.NoActiveNode) -> None:
        """The session is gone, or no longer the right one."""
        self._cancel_retry()
        self.handle(event)
        self.session, self.opaque = None, None

    def handle(self, event: Any) -> None:
        """Hand an event to the machine and do what it wants."""
        if not self.done:
            self._perform(self._machine.handle(event))

    def handle_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        """Hand data to the machine and do what it wants."""
        if not self.done:
            self.progress_at = self._reading.clock.monotonic()
            self._perform(self._machine.handle_run(opaque, rows, byte_count))

    def answered(self, answer: StreamAnswer) -> None:
        """The answer to a stream request."""
        if isinstance(answer, happenings.StreamRefused) and answer.status == WireStatus.EACCESS:
            self._reading.fail(PrivilegeMissing("the user may not stream this bucket"))
            return
        self.handle(answer)
        if isinstance(answer, happenings.StreamAccepted) and not self.done:
            self.progress_at = self._reading.clock.monotonic()
            if self.until is not None and self._boundary >= self.until:
                self._end("complete")

    def event(self, event: ev.Event | happenings.KeyRefused) -> None:
        """Any other message of the stream."""
        self.progress_at = self._reading.clock.monotonic()
        if isinstance(event, ev.StreamEnd) and event.reason == StreamEndReason.FILTER_EMPTY:
            self._end("every collection that was asked for is dropped")
        elif isinstance(event, ev.StreamEnd) and event.reason == StreamEndReason.LOST_PRIVILEGES:
            self._reading.fail(PrivilegeMissing("the user lost the privilege to stream this bucket"))
        else:
            self.handle(event)

    def close(self) -> None:
        """End the stream and forget what is not complete."""
        self.done = True
        self._cancel_retry()
        if self.session is not None and self.opaque is not None:
            self.session.close_stream(self.vbid, self.opaque)
        self.session, self.opaque = None, None
        self._drop_spool()

    # -- what the machine wants -----------------------------------------------------------------------------------

    def _perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if self.done:
                return
            deed = _DEEDS.get(type(instruction))  # what is not in it is for those who store
            answer = None if deed is None else deed(self, instruction)
            if answer is None:
                continue
            self.handle(answer)
            if isinstance(answer, happenings.StagingRefused):
                return

    def _request_stream(self, asked: Any) -> Any:
        session = self.session
        if session is None or not session.ready:
            return happenings.ConnectionLost("there is no connection to the node")
        self.opaque = session.request_stream(asked, ROW_PREFIX)
        return happenings.StreamRequested(self.opaque)

    def _close_stream(self, asked: Any) -> None:
        if self.session is not None:
            self.session.close_stream(self.vbid, asked.opaque)
        self.opaque = None

    def _get_failover_log(self, _asked: Any) -> Any:
        session = self.session
        if session is None or not session.ready:
            return happenings.ConnectionLost("there is no connection to the node")

        def settle(outcome: Frame | Exception) -> None:
            if self.session is session and isinstance(outcome, Frame):
                self.handle(failover_log_event(outcome))

        session.get_failover_log(self.vbid, settle)
        return None

    def _answer_marker(self, asked: Any) -> None:
        if self.session is not None and self.session.ready:
            self.session.answer_marker(self.vbid, asked.opaque)

    def _refresh_map(self, asked: Any) -> None:
        self._reading.refresh_map(asked.config, self.vbid)

    def _reconnect(self, _asked: Any) -> None:
        if self.session is not None:
            asyncio.get_running_loop().call_soon(self.session.close)

    def _stage_rows(self, asked: Any) -> Any:
        rows: list[Row] = asked.rows
        if not asked.unordered and any(earlier[0] >= later[0] for earlier, later in pairwise(rows)):
            self._drop_spool()
            return happenings.StagingRefused(self._state(), "seqnos do not rise inside a run of rows")
        self._keep([frame for _, frame in rows])
        return None

    def _stage_system_event(self, asked: Any) -> None:
        self._keep([asked.row_value])
        self._manifest_open = asked.manifest

    def _keep(self, frames: list[bytes]) -> None:
        if self.spool is None:
            self.spool = Spool(self._reading.file)
        self._reading.took(self.spool.append(frames))

    def _publish(self, asked: Any) -> Any:
        spool, self.spool = self.spool or Spool(self._reading.file), None
        start_seqno, self._boundary = int(self._boundary), asked.seqno
        self._manifest = self._manifest_open
        if asked.source_purge_seqno is not None:
            self._purge_seqno = asked.source_purge_seqno
        self._reading.hand_out(
            Snapshot(
                self.vbid,
                self.position.vbuuid,
                start_seqno,
                int(asked.seqno),
                spool,
                manifest=self._manifest,
                ordered=self._ordered,
                purge_seqno=asked.source_purge_seqno,
                on_close=self._reading.closing(spool.memory_bytes, spool.disk_bytes),
            ),
            spool,
        )
        self._ordered = True
        return happenings.Published(asked.seqno)

    def _save_failover_log(self, asked: Any) -> None:
        self._log = asked.failover_log

    def _roll_back(self, asked: Any) -> None:
        self._finish(RolledBack(self.vbid, int(asked.seqno)))

    def _abandon(self, _asked: Any) -> Any:
        self._drop_spool()
        return happenings.Abandoned(self._state())

    def _begin_refill(self, _asked: Any) -> None:
        self._finish(RolledBack(self.vbid, 0))

    def _begin_oso(self, _asked: Any) -> None:
        self._ordered = False

    def _refresh_collections(self, _asked: Any) -> None:
        """They were named once, by the reader: the stream is asked for again, and waits for a node that knows."""

    def _retry_after(self, asked: Any) -> None:
        self._cancel_retry()
        delay = delay_s(asked.reason, asked.attempt, self._reading.clock.jitter())
        self._retry = asyncio.get_running_loop().call_later(delay, self.handle, happenings.RetryDue())

    def _report(self, asked: Any) -> None:
        self.text = asked.text
        if asked.status is deeds.Status.REFUSED:
            self._reading.fail(ClusterError(f"vb {self.vbid}: {asked.text}", hint="", retryable=False))
        elif asked.status is deeds.Status.FINISHED:
            self._end("complete")

    # -- ends -----------------------------------------------------------------------------------------------------

    def _end(self, text: str) -> None:
        self._finish(Ended(self.vbid, self.position, text))

    def _finish(self, item: Item) -> None:
        self.close()
        self._reading.vbucket_done(self, item)

    def _drop_spool(self) -> None:
        if self.spool is not None:
            self._reading.dropped(self.spool)
            self.spool = None
        self._manifest_open = self._manifest
        self._ordered = True

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _state(self) -> VbucketState:
        seqno = self._boundary
        return VbucketState(
            vbid=Vbid(self.vbid),
            branch=BRANCH,
            published_seqno=seqno,
            history_floor_seqno=seqno,
            staging_branch=BRANCH,
            staged_seqno=seqno,
            staging_published_seqno=seqno,
            open_snapshot=None,
            failover_log=self._log,
            source_purge_seqno=Seqno(self._purge_seqno),
            local_purge_seqno=Seqno(0),
            manifest=self._manifest,
        )


_DEEDS: dict[type[Instruction], Callable[[VbucketReading, Any], Any]] = {
    deeds.RequestStream: VbucketReading._request_stream,
    deeds.CloseStream: VbucketReading._close_stream,
    deeds.GetFailoverLog: VbucketReading._get_failover_log,
    deeds.AnswerMarker: VbucketReading._answer_marker,
    deeds.RefreshMap: VbucketReading._refresh_map,
    deeds.RefreshCollections: VbucketReading._refresh_collections,
    deeds.Reconnect: VbucketReading._reconnect,
    deeds.StageRows: VbucketReading._stage_rows,
    deeds.StageSystemEvent: VbucketReading._stage_system_event,
    deeds.PublishSnapshot: VbucketReading._publish,
    deeds.SaveFailoverLog: VbucketReading._save_failover_log,
    deeds.RollbackTo: VbucketReading._roll_back,
    deeds.AbandonStaged: VbucketReading._abandon,
    deeds.BeginRefill: VbucketReading._begin_refill,
    deeds.BeginOso: VbucketReading._begin_oso,
    deeds.RetryAfter: VbucketReading._retry_after,
    deeds.Report: VbucketReading._report,
}
"""Every instruction and its deed; a deed returns the event that answers it, if there is one."""


class Reading:
    """A read of some vbuckets, from where each stands to where it is to go."""

    def __init__(
        self,
        around: Surroundings,
        file: SpoolFile,
        positions: Mapping[int, Position],
        until: Mapping[int, int] | None,
        *,
        memory_bytes: int,
        parallel: int,
        on_room: Callable[[], None],
    ) -> None:
        """With `until`, at most `parallel` vbuckets are streamed at a time; without, all are, and without end."""
        self.clock = around.clock
        self.file = file
        self.outbox = Outbox(memory_bytes, on_room)
        self._around = around
        self._spill_at = memory_bytes // 2
        self._open_bytes = 0
        self._active: dict[int, VbucketReading] = {}
        self._waiting = deque(sorted(positions))
        self._positions = positions
        self._until = until
        self._parallel = parallel if until is not None else len(positions)
        self._ended = False

    def begin(self) -> None:
        """Ask for the first streams."""
        self._fill_up()

    @property
    def vbids(self) -> list[int]:
        """The vbuckets that are being streamed now."""
        return list(self._active)

    def vbucket(self, vbid: int) -> VbucketReading | None:
        """A vbucket that is being streamed now."""
        return self._active.get(vbid)

    def end(self) -> None:
        """Close all streams and forget what nobody took."""
        self._ended = True
        for reading in self._active.values():
            reading.close()
        self._active = {}
        self.outbox.finish()
        self.outbox.discard()

    def fail(self, error: BaseException | None) -> None:
        """Nothing more can come, or (None) is to; the reader gets the reason, after what is complete."""
        self._ended = True
        for reading in self._active.values():
            reading.close()
        self._active = {}
        self.outbox.finish(error)

    def check_progress(self, timeout_s: float, why: str) -> None:
        """Give up when a vbucket has brought nothing for that long although something is owed."""
        now = self.clock.monotonic()
        for reading in self._active.values():
            if reading.idle or self.outbox.full:
                reading.progress_at = now
            elif now - reading.progress_at > timeout_s:
                what = f"the source brought nothing of vb {reading.vbid} for {timeout_s:g} s: {reading.text}{why}"
                self.fail(SourceTimeout(what, hint="check the nodes and the network, and start again"))
                return

    # -- what the vbuckets ask for --------------------------------------------------------------------------------

    def refresh_map(self, config: bytes, vbid: int) -> None:
        """Get a new cluster map, or read this one."""
        self._around.refresh_map(config, vbid)

    def took(self, byte_count: int) -> None:
        """An open snapshot grew in memory: the largest goes to disk when all together are too large."""
        self._open_bytes += byte_count
        while self._open_bytes > self._spill_at:
            spools = [reading.spool for reading in self._active.values() if reading.spool is not None]
            largest = max(spools, key=lambda spool: spool.memory_bytes)
            self._open_bytes -= largest.memory_bytes
            largest.spill()

    def dropped(self, spool: Spool) -> None:
        """An open snapshot is not going to be complete."""
        self._open_bytes -= spool.memory_bytes
        spool.close()

    def hand_out(self, snapshot: Snapshot, spool: Spool) -> None:
        """A snapshot is complete."""
        self._open_bytes -= spool.memory_bytes
        self.outbox.put(snapshot, spool.memory_bytes, spool.disk_bytes)
        if self.outbox.full:
            self._around.hold_acks()

    def closing(self, memory_bytes: int, disk_bytes: int) -> Callable[[], None]:
        """What is to be called when anyone who read is done with a snapshot."""
        return lambda: self.outbox.gave_back(memory_bytes, disk_bytes)

    def vbucket_done(self, reading: VbucketReading, item: Item) -> None:
        """Nothing more comes of the vbucket; another has its turn."""
        self.outbox.put(item)
        self._active.pop(reading.vbid, None)
        # Not from within: the vbucket is in the middle of performing its instructions.
        asyncio.get_running_loop().call_soon(self._fill_up)

    def _fill_up(self) -> None:
        while self._waiting and len(self._active) < self._parallel and not self._ended:
            vbid = self._waiting.popleft()
            until = None if self._until is None else self._until[vbid]
            reading = VbucketReading(self, vbid, self._positions[vbid], until)
            self._active[vbid] = reading
            session = self._around.session_of(vbid)
            if session is not None:
                reading.attach(session)
        if not self._active and not self._waiting and not self._ended:
            self._ended = True
            self.outbox.finish()
