"""The state of one vbucket's machine: the stored position, the stream, and the requests to the source.

The functions of `handshake` and `streaming` decide. They often end by calling a method of the state (such as `wait`),
which appends instructions and returns the next phase.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Unpack

from mirror.ingest import events as ev
from mirror.ingest.assembler import Assembler
from mirror.ingest.instructions import (
    AbandonStaged,
    CloseStream,
    Instruction,
    Reconnect,
    RefreshCollections,
    RefreshMap,
    ReportStatus,
    RetryAfter,
    RetryReason,
    SaveFacts,
    VbucketStatus,
)
from mirror.ingest.offset import StreamOffset
from mirror.ingest.reactions import Action, Reaction
from mirror.wire.events import SnapshotMarker
from storage.model import SourceFacts, VbucketState, Vbuuid

_STREAMING_TEXTS = {
    VbucketStatus.RESYNCING: "fetching the vbucket again next to the old copy",
    VbucketStatus.BACKFILLING: "the source reads a snapshot from its disk",
    VbucketStatus.STREAMING: "following the source",
}


class Phase(StrEnum):
    IDLE = auto()  # no connection: waiting for Start
    REQUESTING = auto()  # a stream was requested: waiting for its answer
    STREAMING = auto()  # the stream is open: waiting for its messages
    ASKING_LOG = auto()  # waiting for the source's failover log, to search common history before a resync
    ROLLING_BACK = auto()  # waiting for the store, as in the next two
    ABANDONING = auto()
    OPENING_RESYNC = auto()
    WAITING = auto()  # waiting for RetryDue
    REFUSED = auto()  # waiting for a new Start, after the cause is removed at the source
    FINISHED = auto()  # the stream has reached the requested end


STORE_PHASES = frozenset((Phase.ROLLING_BACK, Phase.ABANDONING, Phase.OPENING_RESYNC))
"""The phases that only the store's answer ends, even if the connection is lost."""


@dataclass(slots=True)
class Shown:
    status: VbucketStatus = VbucketStatus.WAITING
    text: str = "not started"
    failing_text: str | None = None
    """The source's last protocol violation; None after the next publish."""


@dataclass(slots=True)
class HandshakeState:
    rollback_rounds: int = 0
    common_tried: bool = False
    """True if common history was searched in the source's failover log. One handshake searches once."""
    next_vbuuid: Vbuuid | None = None
    """The common history that was found, for the next request."""


class MachineState:
    def __init__(self, vbid: int, state: VbucketState) -> None:
        self.vbid = vbid
        self.phase = Phase.IDLE
        self.shown = Shown()
        # The connection and its requests.
        self.connected = False
        self.no_node = False
        self.idle_text = self.shown.text
        self.features = ev.Start()
        self.handshake = HandshakeState()
        self.offset = StreamOffset.fresh()
        self.attempts: dict[RetryReason, int] = {}
        """Retries for each reason since the last progress."""
        self.retry_reason: RetryReason | None = None
        """The reason to delay the request that follows AbandonStaged; None: no delay."""
        # The stream.
        self.opaque: int | None = None
        self.assembler = Assembler(self.progressed)
        self.marker_acks: list[tuple[int, int]] = []
        """(End seqno, opaque) of each snapshot marker that is answered once its snapshot is durable."""
        self.unsaved_marker: SnapshotMarker | None = None
        """The newest marker until its purge seqno is saved."""
        self.barren_ends = 0
        """Streams in a row that the source accepted inside a snapshot and ended without a row."""
        self.high_seqno: int | None = None
        # The stored position.
        self.durable_seqno = state.staging_published_seqno
        self.load(state)

    def load(self, state: VbucketState) -> None:
        self.assembler.load(state)
        self.stored = state
        """The loaded state, with the facts that were saved since."""
        self.resyncing = not state.has_served_log and not self.assembler.boundary_seqno
        self.empty_reported = bool(state.failover_log) and not self.resyncing  # used only before the first row
        self.durable_seqno = min(self.durable_seqno, state.staging_published_seqno)

    def save(self, out: list[Instruction], **facts: Unpack[SourceFacts]) -> None:
        """Append SaveFacts if one of the facts is new."""
        changed = self.stored._replace(**facts)
        if changed != self.stored:
            self.stored = changed
            out.append(SaveFacts(facts))

    def report(self, status: VbucketStatus, text: str, out: list[Instruction]) -> None:
        if (status, text) != (self.shown.status, self.shown.text):
            self.shown.status, self.shown.text = status, text
            out.append(ReportStatus(status, text))

    def report_streaming(self, out: list[Instruction]) -> None:
        status = VbucketStatus.STREAMING
        if self.resyncing:
            status = VbucketStatus.RESYNCING
        elif self.assembler.from_disk:
            status = VbucketStatus.BACKFILLING
        if status is not self.shown.status:
            self.report(status, _STREAMING_TEXTS[status], out)

    def progressed(self, out: list[Instruction]) -> None:
        """Note a publish. It also ends a resync."""
        self.attempts.clear()
        self.shown.failing_text = None
        self.resyncing = False
        self.report_streaming(out)

    def close_stream(self, out: list[Instruction]) -> None:
        out.append(CloseStream(self.opaque))
        self.forget_stream()

    def forget_stream(self) -> None:
        self.opaque = None
        self.marker_acks.clear()
        self.unsaved_marker = None
        self.assembler.end_stream()

    def idle(self, out: list[Instruction]) -> Phase:
        status = VbucketStatus.NO_ACTIVE_NODE if self.no_node else VbucketStatus.WAITING
        self.report(status, self.idle_text, out)
        return Phase.IDLE

    def wait(self, reason: RetryReason, out: list[Instruction]) -> Phase:
        attempt = self.attempts.get(reason, 0)
        self.attempts[reason] = attempt + 1
        out.append(RetryAfter(reason, attempt))
        return Phase.WAITING

    def retry(self, reaction: Reaction, out: list[Instruction]) -> Phase:
        self.report(VbucketStatus.WAITING, reaction.text, out)
        return self.wait(reaction.reason, out)

    def abandon(self, reason: RetryReason | None, out: list[Instruction]) -> Phase:
        """Drop the staged rows. The next request follows at once or, with a `reason`, after the delay for it."""
        self.retry_reason = reason
        out.append(AbandonStaged())
        return Phase.ABANDONING

    def react(self, reaction: Reaction, config: bytes, out: list[Instruction]) -> Phase:
        """React to a refusal or a stream's end. The caller handles Action.GO_BACK."""
        action = reaction.action
        if action in (Action.STOP, Action.REFUSED, Action.WAIT_FOR_COLLECTIONS):
            self.forget_stream()
            self.report(VbucketStatus.REFUSED, reaction.text, out)
            if action is Action.REFUSED:
                return self.wait(reaction.reason, out)
            if action is Action.WAIT_FOR_COLLECTIONS:
                out.append(RefreshCollections())
            return Phase.REFUSED
        if action is Action.REFRESH_MAP:
            out.append(RefreshMap(config))
        elif action is Action.REFRESH_COLLECTIONS:
            out.append(RefreshCollections())
        elif action is Action.REOPEN:
            self.close_stream(out)
        elif action is Action.RECONNECT:
            out.append(Reconnect(reaction.text))
        return self.retry(reaction, out)

    @property
    def caught_up(self) -> bool:
        """True if everything up to the source's last known high seqno is durable."""
        return not self.resyncing and self.high_seqno is not None and self.durable_seqno >= self.high_seqno

    @property
    def waits_for_end(self) -> bool:
        """True while the mirror holds part of a snapshot that the source sends from memory: the rest should come soon.
        False on a connection without collections: perhaps no message has the end's seqno (docs/protocol.md 2.6).
        """
        return self.features.collections and self.assembler.holds_part and not self.assembler.from_disk
