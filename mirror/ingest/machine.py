"""The state machine of one vbucket: takes events, returns instructions. No I/O, no clock, no random numbers.

Knows the vbucket's stored state, its assembler, and where it stands in the conversation with the source. Must never
know connections, opaques' making, delays or how the store works.

Theory of operation. A phase says whose turn it is:

    IDLE         no connection: waiting for Start
    REQUESTING   a stream was requested: waiting for its answer
    STREAMING    the stream is open: waiting for its messages
    ASKING_LOG   rolled back to 0 by the source: waiting for the source's failover log, to look for common history first
    ROLLING_BACK, ABANDONING, OPENING_RESYNC   waiting for the store; nothing is said to the source meanwhile
    WAITING      waiting for RetryDue
    REFUSED      waiting for people (a new Start)
    FINISHED     a stream with an end reached it

TRANSITIONS is the truth about what is legal in which phase; an event that is not in its phase's row is stale or comes
from a peer that breaks the rules, and is counted and ignored: the machine is total in its inputs.

A handshake is a chain of requests until one is accepted. In it, each ROLLBACK must be to less than what was requested,
and so, because what is requested next is at or below it, to less than the one before. If not, or if it is to 0, the
source's failover log is searched for common history, once, and a stream requested there; only after that a resync
begins, next to the old copy.

Invariants: see `validate`. Of the order of instructions: a stream is requested only when the store holds exactly what
the request says; the failover log is saved before the first row of its stream is staged; a marker is answered only
after its snapshot is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from mirror.ingest import events as ev
from mirror.ingest.assembler import Assembler, Violation
from mirror.ingest.instructions import (
    AbandonStaged,
    AnswerMarker,
    BeginResync,
    CloseStream,
    GetFailoverLog,
    Instruction,
    PublishSnapshot,
    Reconnect,
    RefreshCollections,
    RefreshMap,
    ReportStatus,
    RequestStream,
    RetryAfter,
    RetryReason,
    RollbackTo,
    SaveFailoverLog,
    SaveFilter,
    VbucketStatus,
)
from mirror.ingest.offset import StreamOffset, resume_offset
from mirror.ingest.reactions import Action, Reaction, on_refusal, on_stream_end
from mirror.ingest.rollback import common_history
from mirror.wire.constants import SnapshotFlag, StreamEndReason, StreamRequestFlag
from mirror.wire.events import (
    Abort,
    Commit,
    Event,
    OsoSnapshot,
    Prepare,
    SeqnoAdvanced,
    SnapshotMarker,
    StreamEnd,
    StreamEvent,
    SystemEvent,
)
from storage.model import SEQNO_MAX, FailoverLog, Seqno, Vbid, VbucketState, Vbuuid

STREAM_FLAGS = int(StreamRequestFlag.ACTIVE_VB_ONLY)
"""Never from a replica: its markers may overlap and mix disk and memory."""

ROLLBACK_ROUNDS_MAX = 64
"""Rollback answers in one handshake. Servers keep 25 histories, so more rounds than entries is a source gone wrong."""

_ACK = int(SnapshotFlag.ACK)
"""As a plain int: an IntFlag takes a microsecond per test, and markers come by the hundred thousand."""

MARKER_ACKS_MAX = 1024
"""Markers waiting to be answered. One snapshot is open at a time; more than a few is a source gone wrong."""


_STREAMING_TEXTS = {
    VbucketStatus.RESYNCING: "fetching the vbucket again next to the old copy",
    VbucketStatus.BACKFILLING: "the source reads a snapshot from its disk",
    VbucketStatus.STREAMING: "following the source",
}


class Phase(Enum):
    """Whose turn it is."""

    IDLE = auto()
    REQUESTING = auto()
    STREAMING = auto()
    ASKING_LOG = auto()
    ROLLING_BACK = auto()
    ABANDONING = auto()
    OPENING_RESYNC = auto()
    WAITING = auto()
    REFUSED = auto()
    FINISHED = auto()


STORE_PHASES = frozenset((Phase.ROLLING_BACK, Phase.ABANDONING, Phase.OPENING_RESYNC))
"""The store is at work and will answer, whatever happens to the connection."""


class VbucketMachine:
    """Decides for one vbucket. Made from the stored state, and again when the store had to drop its batch."""

    __slots__ = (
        "_assembler",
        "_attempt",
        "_common_tried",
        "_connected",
        "_empty_reported",
        "_features",
        "_idle_text",
        "_marker_acks",
        "_marker_purge_seqno",
        "_missing_seqno",
        "_next_vbuuid",
        "_no_node",
        "_offset",
        "_retry_reason",
        "_rollback_rounds",
        "_source_purge_seqno",
        "_stored_filter",
        "durable_seqno",
        "failing_text",
        "failover_log",
        "high_seqno",
        "ignored_count",
        "opaque",
        "phase",
        "resyncing",
        "status",
        "text",
        "vbid",
        "violation_count",
    )

    def __init__(self, vbid: Vbid, state: VbucketState) -> None:
        """Begin idle, from what the store holds."""
        self.vbid = vbid
        self.phase = Phase.IDLE
        self.opaque: int | None = None
        self.status = VbucketStatus.WAITING
        self.text = "not started"
        self.failover_log = FailoverLog()
        self.durable_seqno = state.staging_published_seqno
        self.resyncing = False
        self.high_seqno: int | None = None
        self.ignored_count = 0
        self.violation_count = 0
        self.failing_text: str | None = None
        """How the source broke the protocol, until something is published again."""
        self._assembler = Assembler(vbid)
        self._features = ev.Start()
        self._connected = False
        self._no_node = False
        self._idle_text = self.text
        self._attempt = 0
        self._offset = StreamOffset.fresh()
        self._marker_acks: list[tuple[int, int]] = []
        self._retry_reason: RetryReason | None = None
        self._source_purge_seqno = 0
        self._missing_seqno = 0
        self._stored_filter: str | None = None
        self._marker_purge_seqno = 0
        self._next_vbuuid: Vbuuid | None = None
        self._common_tried = False
        self._rollback_rounds = 0
        self._empty_reported = False
        """The store was given that the source has nothing; matters only while nothing is held."""
        self._load(state)

    # --- for people ---

    @property
    def published_seqno(self) -> Seqno:
        """Newest complete boundary on the branch that is being filled, as instructed (perhaps not durable yet)."""
        return self._assembler.boundary_seqno

    @property
    def position_seqno(self) -> Seqno:
        """Last seqno accepted, published or not."""
        return self._assembler.position_seqno

    @property
    def attempt(self) -> int:
        """Tries since the last progress."""
        return self._attempt

    @property
    def caught_up(self) -> bool:
        """True if everything up to the source's last known high seqno is durable and visible."""
        return not self.resyncing and self.high_seqno is not None and self.durable_seqno >= self.high_seqno

    @property
    def waits_for_end(self) -> bool:
        """True while part of a snapshot from the source's memory is held: all of one is sent at once, so its end should
        be near. Without collections perhaps nothing carries the end (docs/protocol.md 2.6).
        """
        return self._features.collections and self._assembler.holds_part and not self._assembler.from_disk

    # --- input ---

    def handle(self, event: ev.LocalEvent | Event) -> list[Instruction]:
        """Take one event, return what is to be done, in order."""
        move = TRANSITIONS[self.phase].get(type(event))
        if move is None:
            self.ignored_count += 1
            return []
        out: list[Instruction] = []
        move(self, event, out)
        return out

    def handle_run(self, opaque: int, rows: list[ev.Row], byte_count: int) -> list[Instruction]:
        """Take a run of rows: `handle(RowsRun(...))` without the object."""
        if opaque != self.opaque or self.phase is not Phase.STREAMING or not rows:
            self.ignored_count += 1
            return []
        out: list[Instruction] = []
        if self._marker_purge_seqno:
            self._save_purge_seqno(out)
        try:
            self._assembler.rows(rows, byte_count, out)
        except Violation as violation:
            self._violated(str(violation), out)
        else:
            self._noticed(out)
        return out

    # --- connection and time ---

    def _start(self, event: ev.Start, out: list[Instruction]) -> None:
        if self.opaque is not None or self.phase is Phase.REQUESTING:
            self._close_stream("start", out)
        self._connected = True
        self._no_node = False
        self._features = event
        if self.phase in STORE_PHASES:
            return  # goes on when the store has answered
        self._new_handshake()
        self._begin("start", out)

    def _stop(self, event: ev.Stop, out: list[Instruction]) -> None:
        if self.opaque is not None or self.phase is Phase.REQUESTING:
            self._close_stream("stop", out)
        self._disconnect(event.text, out)

    def _connection_lost(self, event: ev.ConnectionLost, out: list[Instruction]) -> None:
        self._disconnect(event.text, out)

    def _no_active_node(self, _event: ev.NoActiveNode, out: list[Instruction]) -> None:
        if self.opaque is not None or self.phase is Phase.REQUESTING:
            self._close_stream("no active node", out)
        self._no_node = True
        self._disconnect("the cluster map names no active node; waiting for a map that does", out)

    def _disconnect(self, text: str, out: list[Instruction]) -> None:
        self._connected = False
        self._idle_text = text
        self._forget_stream()
        if self.phase in STORE_PHASES:
            return  # goes to IDLE when the store has answered
        self._new_handshake()
        self._attempt = 0
        if self._no_node or self.phase not in (Phase.REFUSED, Phase.FINISHED):
            self._idle(out)

    def _idle(self, out: list[Instruction]) -> None:
        self.phase = Phase.IDLE
        self._report(VbucketStatus.NO_ACTIVE_NODE if self._no_node else VbucketStatus.WAITING, self._idle_text, out)

    def _retry_due(self, _event: ev.RetryDue, out: list[Instruction]) -> None:
        self._begin("retry", out)

    def _high_seqno(self, event: ev.HighSeqno, out: list[Instruction]) -> None:
        self.high_seqno = event.seqno
        if self.phase is Phase.STREAMING:
            if event.seqno == 0:
                self._perhaps_empty(out)
            if self.caught_up:
                self._attempt = 0  # an idle stream has no other way to show that it is well

    def _perhaps_empty(self, out: list[Instruction]) -> None:
        assembler = self._assembler
        if self._empty_reported or assembler.holds_part or assembler.boundary_seqno or assembler.open_snapshot:
            return
        self._empty_reported = True
        assembler.source_is_empty(out)
        self._noticed(out)

    # --- the handshake ---

    def _begin(self, cause: str, out: list[Instruction]) -> None:
        """Ask for a stream from where the store stands; whatever cannot be continued is dropped first."""
        if not self._connected:
            self._idle(out)
        elif self._assembler.holds_part and not (self._assembler.resumable and self._filter_continues):
            self._abandon(f"{cause}: staged rows cannot be continued", None, out)
        elif self._filter_continues:
            self._request(cause, out)
        else:
            self._resync("the requested collections are not those of what is held", out)

    @property
    def _filter_continues(self) -> bool:
        """True if a stream may go on from what is held: what its filter shows was not left out before."""
        requested, stored = self._features.filter, self._stored_filter
        if not self._assembler.position_seqno:
            return True
        if requested is None:
            return stored is None
        if self._assembler.holds_part:  # perhaps rows of a collection that the manifest does not know yet
            return requested.text == stored
        return requested.continues(stored, self._assembler.manifest.collections)

    def _request(self, cause: str, out: list[Instruction]) -> None:
        assembler = self._assembler
        end_seqno = self._features.end_seqno
        if assembler.boundary_seqno >= end_seqno:
            self._finish(out)
            return
        if self._next_vbuuid is not None and not assembler.holds_part:
            offset = StreamOffset.between_snapshots(assembler.boundary_seqno, self._next_vbuuid)
        else:
            offset = resume_offset(
                assembler.boundary_seqno, assembler.position_seqno, assembler.open_snapshot, self.failover_log
            )
        purge_seqno = None
        if offset.inside_snapshot:
            end_seqno = max(end_seqno, offset.snap_end_seqno)
            # Between snapshots it would say nothing: anyone who stands at a boundary below the purge lacks deletions.
            if self._features.sends_purge_seqno and self._source_purge_seqno:
                purge_seqno = self._source_purge_seqno
        self._offset = offset
        self.phase = Phase.REQUESTING
        self._report(VbucketStatus.REQUESTING, f"asking for what follows {offset.start_seqno}", out)
        out.append(RequestStream(self.vbid, cause, offset, end_seqno, STREAM_FLAGS, purge_seqno))

    def _requested(self, event: ev.StreamRequested, _out: list[Instruction]) -> None:
        self.opaque = event.opaque

    def _accepted(self, event: ev.StreamAccepted, out: list[Instruction]) -> None:
        if self._is_stale(event.opaque):
            return
        self.phase = Phase.STREAMING
        self._new_handshake()
        log = event.failover_log
        features = self._features
        missing_seqno = self._missing_seqno
        if not self._assembler.boundary_seqno:  # the first snapshot begins or goes on, by a source that says its purges
            earlier = missing_seqno if self._offset.start_seqno else 0
            missing_seqno = earlier if features.sends_purge_seqno else SEQNO_MAX
        if (log and log != self.failover_log) or missing_seqno != self._missing_seqno:
            self.failover_log = log or self.failover_log
            self._missing_seqno = missing_seqno
            out.append(SaveFailoverLog(self.vbid, "stream accepted", self.failover_log, missing_seqno=missing_seqno))
        if features.filter is not None and features.filter.text != self._stored_filter:
            self._stored_filter = features.filter.text
            out.append(SaveFilter(self.vbid, "stream accepted", features.filter.text))
        self._assembler.begin_stream(
            inside_snapshot=self._offset.inside_snapshot,
            collections_granted=features.collections,
            stream_filter=features.filter,
            scope_names=features.scope_names,
        )
        self._report_streaming(out)

    def _refused(self, event: ev.StreamRefused, out: list[Instruction]) -> None:
        if self._is_stale(event.opaque):
            return
        self.opaque = None
        reaction = on_refusal(event.status)
        if reaction.action is Action.REFRESH_MAP and self._features.by_mirror:
            held = self._offset.start_seqno
            text = f"the source, a mirror, is being filled or has not published {held} yet; asking again"
            reaction = replace(reaction, text=text)
        self._react(reaction, f"status {event.status:#x}", event.context, out)

    def _rolled_back_by_source(self, event: ev.StreamRollback, out: list[Instruction]) -> None:
        """The decision of docs/protocol.md 2.5: where to go back to."""
        if self._is_stale(event.opaque):
            return
        self.opaque = None
        self._rollback_rounds += 1
        self._go_back(event.seqno, f"the source answered ROLLBACK to {event.seqno}", out)

    def _go_back(self, seqno: int, why: str, out: list[Instruction]) -> None:
        boundary_seqno = self._assembler.boundary_seqno
        if self._offset.inside_snapshot and seqno >= boundary_seqno:
            self._report(
                VbucketStatus.ROLLING_BACK, f"{why}: dropping the open snapshot, back to {boundary_seqno}", out
            )
            self._abandon("rollback inside a snapshot", None, out)
        elif boundary_seqno == 0:
            text = f"{why} although nothing is held here; asking again. If it repeats, look at the source's log"
            self._retry(Reaction(Action.RETRY, text), "rollback from 0", out)
        elif seqno == 0 or self._rollback_rounds > ROLLBACK_ROUNDS_MAX or seqno >= self._offset.start_seqno:
            self._before_zero(why, out)
        else:
            self._next_vbuuid = None
            self._report(VbucketStatus.ROLLING_BACK, f"{why}: going back to the newest kept boundary", out)
            self._roll_back(Seqno(seqno), why, out)

    def _roll_back(self, seqno: Seqno, cause: str, out: list[Instruction]) -> None:
        self.phase = Phase.ROLLING_BACK
        out.append(RollbackTo(self.vbid, cause, seqno))

    def _before_zero(self, why: str, out: list[Instruction]) -> None:
        """Before everything is fetched again, look for common history, once."""
        self._next_vbuuid = None
        if self._common_tried:
            self._resync(why, out)
        elif self._connected:
            self.phase = Phase.ASKING_LOG
            self._report(
                VbucketStatus.ROLLING_BACK, f"{why}: looking for common history in the source's failover log", out
            )
            out.append(GetFailoverLog(self.vbid, why))
        else:
            self._idle(out)

    def _log_received(self, event: ev.FailoverLogReceived, out: list[Instruction]) -> None:
        newest = event.failover_log.newest_vbuuid
        if self._features.by_mirror and newest in [entry.vbuuid for entry in self.failover_log[1:]]:
            # It knows no history that is not known here, so what it lacks is not lost.
            text = "the source, a mirror, has not heard of the newest failover yet; asking again"
            self._retry(Reaction(Action.RETRY, text), "failover log of a mirror", out)
            return
        self._common_tried = True
        boundary_seqno = self._assembler.boundary_seqno
        # Without the source's high seqno: one that was polled earlier may be below what we hold, and would take back
        # what is not lost. Asking again with the common vbuuid has the source say it.
        common = common_history(self.failover_log, boundary_seqno, event.failover_log)
        if common is None:
            self._resync("no common history with the source", out)
            return
        cause = f"common history {common.vbuuid:#x} up to {common.seqno}"
        self._next_vbuuid = common.vbuuid
        # The log is cut only when nothing newer is held any more: a crash in between would leave what is still held to
        # a history that it is not of, and the source would take it for its own.
        if common.seqno < boundary_seqno:
            self._report(VbucketStatus.ROLLING_BACK, f"{cause}: going back to the newest kept boundary", out)
            self._roll_back(common.seqno, cause, out)
        elif self._assembler.holds_part:
            self._abandon(cause, None, out)
        else:
            if common.failover_log != self.failover_log:
                self.failover_log = common.failover_log
                out.append(SaveFailoverLog(self.vbid, cause, common.failover_log))
            self._request(cause, out)

    def _log_refused(self, event: ev.FailoverLogRefused, out: list[Instruction]) -> None:
        reaction = on_refusal(event.status)
        if reaction.action is Action.GO_BACK:  # no answer to this question
            reaction = Reaction(Action.RETRY, reaction.text)
        self._react(reaction, f"failover log: status {event.status:#x}", b"", out)

    def _resync(self, why: str, out: list[Instruction]) -> None:
        if self._assembler.boundary_seqno == 0:  # nothing to keep next to it
            self._begin(why, out)
            return
        self.phase = Phase.OPENING_RESYNC
        self._report(VbucketStatus.RESYNCING, f"{why}: fetching the vbucket again next to the old copy", out)
        out.append(BeginResync(self.vbid, why))

    # --- the store's answers ---

    def _rolled_back(self, event: ev.RolledBack, out: list[Instruction]) -> None:
        self._load(event.state)
        log = self.failover_log.pruned(self._assembler.boundary_seqno, self._next_vbuuid)
        if log != self.failover_log:
            self.failover_log = log
            out.append(SaveFailoverLog(self.vbid, "rolled back", log))
        self._begin("rolled back", out)

    def _no_boundary(self, _event: ev.NoBoundary, out: list[Instruction]) -> None:
        self._before_zero("no boundary is kept that far back", out)

    def _abandoned(self, event: ev.Abandoned, out: list[Instruction]) -> None:
        self._load(event.state)
        reason, self._retry_reason = self._retry_reason, None
        if not self._connected:
            self._idle(out)
        elif reason is not None:
            self._wait(reason, "abandoned", out)
        else:
            self._begin("abandoned", out)

    def _resync_opened(self, event: ev.ResyncOpened, out: list[Instruction]) -> None:
        self._load(event.state)
        self._begin("resync", out)

    def _resync_refused(self, event: ev.ResyncRefused, out: list[Instruction]) -> None:
        """The old copy stays, and from time to time it is tried again: space may have been made."""
        if not self._connected:
            self._idle(out)
            return
        self._new_handshake()
        self._report(VbucketStatus.REFUSED, event.text, out)
        self._wait(RetryReason.REFUSED_FOR_NOW, "resync refused", out)

    def _published(self, event: ev.Published, out: list[Instruction]) -> None:
        if event.seqno > self._assembler.boundary_seqno:
            return  # was rolled back meanwhile
        self.durable_seqno = Seqno(event.seqno)
        if not self._marker_acks:
            return
        due = [opaque for end_seqno, opaque in self._marker_acks if end_seqno <= event.seqno]
        self._marker_acks = [waiting for waiting in self._marker_acks if waiting[0] > event.seqno]
        out.extend(AnswerMarker(self.vbid, "published", opaque) for opaque in due)

    def _prepare_missing(self, event: ev.PrepareMissing, out: list[Instruction]) -> None:
        """Its first half came before anybody here tracked such writes: from 0 the source sends what it holds."""
        self._load(event.state)
        text = f"a durable write that is committed at {event.seqno} was prepared before such writes were tracked here"
        self._close_stream("prepare missing", out)
        if self._assembler.boundary_seqno:
            self._resync(text, out)
        else:
            self._report(VbucketStatus.WAITING, text, out)
            self._abandon("prepare missing", RetryReason.VIOLATION, out)

    def _key_refused(self, event: ev.KeyRefused, out: list[Instruction]) -> None:
        if not self._is_stale(event.opaque):
            self._violated(event.text, out)

    def _staging_refused(self, event: ev.StagingRefused, out: list[Instruction]) -> None:
        self._load(event.state)
        self._violated(event.text, out)

    # --- the stream ---

    def _rows_run(self, event: ev.RowsRun, out: list[Instruction]) -> None:
        out.extend(self.handle_run(event.opaque, event.rows, event.byte_count))

    def _stream_message(self, event: StreamEvent, out: list[Instruction]) -> None:
        if self._is_stale(event.opaque):
            return
        if self._marker_purge_seqno and type(event) is not SnapshotMarker:
            self._save_purge_seqno(out)
        try:
            _ASSEMBLE[type(event)](self._assembler, event, out)
        except Violation as violation:
            self._violated(str(violation), out)
        else:
            self._noticed(out)

    def _marker(self, event: SnapshotMarker, out: list[Instruction]) -> None:
        self._stream_message(event, out)
        if self.phase is not Phase.STREAMING or event.opaque != self.opaque:
            return
        if event.flags & _ACK:
            if event.end_seqno <= self.durable_seqno:
                out.append(AnswerMarker(self.vbid, "already published", event.opaque))
            elif len(self._marker_acks) < MARKER_ACKS_MAX:
                self._marker_acks.append((event.end_seqno, event.opaque))
            else:
                self._violated("too many markers that ask for an answer", out)
                return
        self._marker_purge_seqno = event.purge_seqno
        if event.end_seqno == 0:
            self._perhaps_empty(out)
        self._report_streaming(out)

    def _save_purge_seqno(self, out: list[Instruction]) -> None:
        """Before the first item of a snapshot, so that a mid-snapshot request after a restart can say it."""
        purge_seqno, self._marker_purge_seqno = self._marker_purge_seqno, 0
        missing_seqno = self._missing_seqno
        if not self._assembler.boundary_seqno:
            missing_seqno = max(missing_seqno, purge_seqno)
        if (purge_seqno, missing_seqno) != (self._source_purge_seqno, self._missing_seqno):
            self._source_purge_seqno, self._missing_seqno = purge_seqno, missing_seqno
            out.append(SaveFailoverLog(self.vbid, "first item", self.failover_log, purge_seqno, missing_seqno))

    def _stream_end(self, event: StreamEnd, out: list[Instruction]) -> None:
        if self._is_stale(event.opaque):
            return
        # A stream without end cannot have come to it: then OK says no more than the other codes.
        regular = event.reason == StreamEndReason.OK and self._features.end_seqno != SEQNO_MAX
        if regular:
            self._assembler.stream_ended_regularly(out)
            self._noticed(out)
        self._forget_stream()
        if regular and not self._assembler.holds_part:
            self._finish(out)
            return
        self._react(on_stream_end(event.reason), f"stream end {event.reason}", b"", out)

    def _noticed(self, out: list[Instruction]) -> None:
        """A publish is progress, and on a branch next to the served one it swaps that branch in."""
        if out and type(out[-1]) is PublishSnapshot:
            self._attempt = 0
            self.failing_text = None
            self.resyncing = False
            self._report_streaming(out)

    def _violated(self, text: str, out: list[Instruction]) -> None:
        """The stream cannot be trusted: nothing of its open snapshot is kept, and it is requested again."""
        self._noticed(out)  # what was complete before the break stays so
        self.violation_count += 1
        self.failing_text = (
            f"the source broke the protocol in vb {self.vbid}: {text}; the open snapshot is dropped and requested "
            "again. If it repeats, report it with this line"
        )
        self._close_stream("violation", out)
        self._report(VbucketStatus.WAITING, self.failing_text, out)
        if self._assembler.holds_part:
            self._abandon("violation", RetryReason.VIOLATION, out)
        else:
            self._wait(RetryReason.VIOLATION, "violation", out)

    # --- common ends ---

    def _react(self, reaction: Reaction, cause: str, config: bytes, out: list[Instruction]) -> None:
        if reaction.action is Action.STOP:
            self._refuse(reaction.text, out)
        elif reaction.action is Action.REFUSED:
            self._forget_stream()
            self._report(VbucketStatus.REFUSED, reaction.text, out)
            self._wait(reaction.reason, cause, out)
        elif reaction.action is Action.WAIT_FOR_COLLECTIONS:
            self._refuse(reaction.text, out)
            out.append(RefreshCollections(self.vbid, cause))
        elif reaction.action is Action.GO_BACK:
            self._rollback_rounds += 1
            self._go_back(0, reaction.text, out)
        else:
            if reaction.action is Action.REFRESH_MAP:
                out.append(RefreshMap(self.vbid, cause, config))
            elif reaction.action is Action.REFRESH_COLLECTIONS:
                out.append(RefreshCollections(self.vbid, cause))
            elif reaction.action is Action.REOPEN:
                self._close_stream(cause, out)
            elif reaction.action is Action.RECONNECT:
                out.append(Reconnect(self.vbid, reaction.text))
            self._retry(reaction, cause, out)

    def _retry(self, reaction: Reaction, cause: str, out: list[Instruction]) -> None:
        self._report(VbucketStatus.WAITING, reaction.text, out)
        self._wait(reaction.reason, cause, out)

    def _wait(self, reason: RetryReason, cause: str, out: list[Instruction]) -> None:
        self.phase = Phase.WAITING
        out.append(RetryAfter(self.vbid, cause, reason, self._attempt))
        self._attempt += 1

    def _refuse(self, text: str, out: list[Instruction]) -> None:
        self._forget_stream()
        self.phase = Phase.REFUSED
        self._report(VbucketStatus.REFUSED, text, out)

    def _finish(self, out: list[Instruction]) -> None:
        self.phase = Phase.FINISHED
        self._report(VbucketStatus.FINISHED, f"complete up to {self._assembler.boundary_seqno}", out)

    def _abandon(self, cause: str, reason: RetryReason | None, out: list[Instruction]) -> None:
        self._retry_reason = reason
        self.phase = Phase.ABANDONING
        out.append(AbandonStaged(self.vbid, cause))

    def _close_stream(self, cause: str, out: list[Instruction]) -> None:
        out.append(CloseStream(self.vbid, cause, self.opaque))
        self._forget_stream()

    def _forget_stream(self) -> None:
        self.opaque = None
        self._marker_acks.clear()
        self._marker_purge_seqno = 0
        self._assembler.end_stream()

    def _new_handshake(self) -> None:
        self._next_vbuuid = None
        self._common_tried = False
        self._rollback_rounds = 0

    def _load(self, state: VbucketState) -> None:
        self._assembler.load(state)
        self.failover_log = state.failover_log
        self._source_purge_seqno = int(state.source_purge_seqno)
        self._missing_seqno = state.missing_seqno
        self._stored_filter = state.stream_filter
        self.resyncing = state.staging_branch != state.branch and not self._assembler.boundary_seqno
        self._empty_reported = bool(state.failover_log) and not self.resyncing
        self.durable_seqno = min(self.durable_seqno, state.staging_published_seqno)

    def _is_stale(self, opaque: int) -> bool:
        if opaque == self.opaque:
            return False
        self.ignored_count += 1
        return True

    def _report_streaming(self, out: list[Instruction]) -> None:
        status = (
            VbucketStatus.RESYNCING
            if self.resyncing
            else VbucketStatus.BACKFILLING
            if self._assembler.from_disk
            else VbucketStatus.STREAMING
        )
        if status is not self.status:
            self._report(status, _STREAMING_TEXTS[status], out)

    def _report(self, status: VbucketStatus, text: str, out: list[Instruction]) -> None:
        if (status, text) != (self.status, self.text):
            self.status, self.text = status, text
            out.append(ReportStatus(self.vbid, "state", status, text))

    def validate(self) -> None:
        """Check what must hold between any two events."""
        assembler = self._assembler
        assembler.validate()
        if self.phase is Phase.STREAMING:
            assert self.opaque is not None, "a stream without an opaque"
        elif self.phase is not Phase.REQUESTING:
            assert self.opaque is None, f"an opaque in phase {self.phase.name}"
            assert not assembler.open_snapshot or assembler.holds_part, "a marker outlived its stream"
        if self.phase in (Phase.REQUESTING, Phase.STREAMING, Phase.ASKING_LOG, Phase.WAITING):
            assert self._connected, f"phase {self.phase.name} without a connection"
        if self.phase is Phase.REQUESTING:
            held = self._offset.start_seqno
            assert held == assembler.position_seqno, f"requested from {held}, holding {assembler.position_seqno}"
        assert self._retry_reason is None or self.phase is Phase.ABANDONING
        assert not self._marker_acks or self.phase is Phase.STREAMING
        assert len(self._marker_acks) <= MARKER_ACKS_MAX
        assert not (self.resyncing and assembler.boundary_seqno), "a published resync is no longer one"
        assert self.durable_seqno <= assembler.boundary_seqno


_ASSEMBLE: dict[type, Callable[[Assembler, Any, list[Instruction]], None]] = {
    SnapshotMarker: Assembler.marker,
    SeqnoAdvanced: Assembler.seqno_advanced,
    SystemEvent: Assembler.system_event,
    OsoSnapshot: Assembler.oso_snapshot,
    Prepare: Assembler.prepare,
    Commit: Assembler.commit,
    Abort: Assembler.abort,
}

Move = Callable[[VbucketMachine, Any, list[Instruction]], None]

# Each method is private to the class, and the table that follows is part of it: it stands outside because it needs the
# methods to exist.
_ALWAYS: dict[type, Move] = {
    ev.Start: VbucketMachine._start,
    ev.Stop: VbucketMachine._stop,
    ev.ConnectionLost: VbucketMachine._connection_lost,
    ev.NoActiveNode: VbucketMachine._no_active_node,
    ev.HighSeqno: VbucketMachine._high_seqno,
    ev.Published: VbucketMachine._published,
}

TRANSITIONS: Mapping[Phase, Mapping[type, Move]] = {
    Phase.IDLE: _ALWAYS,
    Phase.REQUESTING: _ALWAYS
    | {
        ev.StreamRequested: VbucketMachine._requested,
        ev.StreamAccepted: VbucketMachine._accepted,
        ev.StreamRollback: VbucketMachine._rolled_back_by_source,
        ev.StreamRefused: VbucketMachine._refused,
    },
    Phase.STREAMING: _ALWAYS
    | {
        ev.RowsRun: VbucketMachine._rows_run,
        ev.StagingRefused: VbucketMachine._staging_refused,
        ev.KeyRefused: VbucketMachine._key_refused,
        ev.PrepareMissing: VbucketMachine._prepare_missing,
        SnapshotMarker: VbucketMachine._marker,
        SeqnoAdvanced: VbucketMachine._stream_message,
        SystemEvent: VbucketMachine._stream_message,
        OsoSnapshot: VbucketMachine._stream_message,
        Prepare: VbucketMachine._stream_message,
        Commit: VbucketMachine._stream_message,
        Abort: VbucketMachine._stream_message,
        StreamEnd: VbucketMachine._stream_end,
    },
    Phase.ASKING_LOG: _ALWAYS
    | {
        ev.FailoverLogReceived: VbucketMachine._log_received,
        ev.FailoverLogRefused: VbucketMachine._log_refused,
    },
    Phase.ROLLING_BACK: _ALWAYS
    | {
        ev.RolledBack: VbucketMachine._rolled_back,
        ev.NoBoundary: VbucketMachine._no_boundary,
    },
    Phase.ABANDONING: _ALWAYS | {ev.Abandoned: VbucketMachine._abandoned},
    Phase.OPENING_RESYNC: _ALWAYS
    | {
        ev.ResyncOpened: VbucketMachine._resync_opened,
        ev.ResyncRefused: VbucketMachine._resync_refused,
    },
    Phase.WAITING: _ALWAYS | {ev.RetryDue: VbucketMachine._retry_due},
    Phase.REFUSED: _ALWAYS,
    Phase.FINISHED: _ALWAYS,
}
"""What is legal: phase -> event -> reaction. Anything absent is stale or illegal, and ignored."""
