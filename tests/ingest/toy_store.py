"""A store of dicts that performs a machine's instructions, and checks what the instructions promise.

Checked in every test that uses it: rows strictly rise; a publish stands where staging
stands, or above it where the source skipped the end; nothing is staged while the store is at work for the machine; a
stream is requested only at what the store holds; the failover log is saved before rows; a marker is answered only when
its snapshot is durable. Not checked: bytes, durability, time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mirror.ingest import events as ev
from mirror.ingest import instructions as ins
from mirror.ingest.assembler import Assembler
from mirror.ingest.events import Row
from mirror.ingest.machine import VbucketMachine
from mirror.ingest.state import MachineState, Phase
from mirror.wire import frame as wire_frame
from mirror.wire.codec_dcp import decode, encode
from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    Deletion,
    Expiration,
    Mutation,
    StreamEvent,
    SystemEvent,
)
from mirror.wire.keys import decode_leb128
from mirror.wire.system_events import decode_system_event
from storage.model import SEQNO_MAX, Branch, FailoverLog, Manifest, Seqno, SnapshotRange, VbucketState

Documents = dict[bytes, Mutation | Deletion | Expiration]


@dataclass(frozen=True)
class ToyBoundary:
    seqno: int
    documents: Documents
    manifest: Manifest


@dataclass
class Line:
    """A branch: what was published on it, newest last, and what is staged above."""

    boundaries: list[ToyBoundary] = field(default_factory=lambda: [ToyBoundary(0, {}, Manifest.initial())])
    staged: list[tuple[int, bytes]] = field(default_factory=list)
    position: int = 0
    open_snapshot: SnapshotRange | None = None
    manifest: Manifest = field(default_factory=Manifest.initial)
    published: bool = False


class ToyStore:
    """A vbucket; readers see `served`."""

    def __init__(self, vbid: int = 0) -> None:
        self.vbid = vbid
        self.branch = 1
        self.lines = {1: Line()}
        self.served_branch = 1
        self.staging_branch = 1
        self.failover_log = FailoverLog()
        self.purge_seqno = 0
        self.missing_seqno = 0
        self.stream_filter: str | None = None
        self.rollbacks: list[tuple[int, int]] = []
        self.published: list[int] = []

    @property
    def served(self) -> ToyBoundary:
        return self.lines[self.served_branch].boundaries[-1]

    @property
    def staging(self) -> Line:
        return self.lines[self.staging_branch]

    def state(self) -> VbucketState:
        line = self.staging
        return VbucketState(
            vbid=self.vbid,
            branch=Branch(self.served_branch),
            published_seqno=Seqno(self.served.seqno),
            history_floor_seqno=Seqno(0),
            staging_branch=Branch(self.staging_branch),
            staged_seqno=Seqno(line.position),
            staging_published_seqno=Seqno(line.boundaries[-1].seqno),
            open_snapshot=line.open_snapshot,
            failover_log=self.failover_log,
            source_purge_seqno=Seqno(self.purge_seqno),
            local_purge_seqno=Seqno(0),
            manifest=line.manifest,
            stream_filter=self.stream_filter,
            missing_seqno=self.missing_seqno,
        )

    def holding(
        self,
        boundary: int,
        failover_log: FailoverLog | None = None,
        staged: int = 0,
        open_snapshot: tuple[int, int] | None = None,
    ) -> ToyStore:
        """Begin with a published boundary, and perhaps a part of the snapshot after it, without documents."""
        if boundary:
            self.staging.boundaries.append(ToyBoundary(boundary, {}, Manifest.initial()))
        self.staging.published = bool(boundary)
        self.staging.position = max(boundary, staged)
        if open_snapshot is not None:
            self.staging.open_snapshot = SnapshotRange(Seqno(open_snapshot[0]), Seqno(open_snapshot[1]))
        self.failover_log = failover_log or FailoverLog()
        return self

    # --- instructions ---

    def perform(self, instruction: ins.Instruction) -> Any:
        """Perform an instruction; return its answer, if it has one."""
        return getattr(self, f"_{type(instruction).__name__}", lambda _instruction: None)(instruction)

    def _StageRows(self, instruction: ins.StageRows) -> Any:
        line = self.staging
        seqnos = [int.from_bytes(key[4:]) for key, _ in instruction.rows]
        before = [line.position, *seqnos[:-1]]
        if any(seqno <= last for last, seqno in zip(before, seqnos, strict=True)):
            return ev.StagingRefused(self.state(), f"{seqnos} do not rise above {line.position}")
        assert seqnos[-1] <= instruction.open_snapshot.end_seqno
        line.staged += [(seqno, value) for seqno, (_, value) in zip(seqnos, instruction.rows, strict=True)]
        line.position = max(line.position, *seqnos)
        line.open_snapshot = instruction.open_snapshot
        return None

    def _StageSystemEvent(self, instruction: ins.StageSystemEvent) -> None:
        line = self.staging
        assert instruction.seqno > line.position
        line.staged.append((instruction.seqno, instruction.row_value))
        line.position = max(line.position, instruction.seqno)
        line.open_snapshot = instruction.open_snapshot
        line.manifest = instruction.manifest

    def _Advance(self, instruction: ins.Advance) -> None:
        assert instruction.seqno > self.staging.position
        self.staging.position = instruction.seqno
        self.staging.open_snapshot = instruction.open_snapshot

    def _PublishSnapshot(self, instruction: ins.PublishSnapshot) -> Any:
        line = self.staging
        assert instruction.seqno >= line.position
        assert instruction.seqno >= line.boundaries[-1].seqno
        assert instruction.snap_start_seqno <= instruction.seqno
        documents = dict(line.boundaries[-1].documents)
        for _, value in sorted(line.staged):
            _apply(documents, value)
        line.boundaries.append(ToyBoundary(instruction.seqno, documents, line.manifest))
        line.staged.clear()
        line.position, line.open_snapshot, line.published = instruction.seqno, None, True
        self.served_branch = self.staging_branch
        self.published.append(instruction.seqno)
        return ev.Published(instruction.seqno)

    def _SaveFacts(self, instruction: ins.SaveFacts) -> None:
        facts = instruction.facts
        self.failover_log = facts.get("failover_log", self.failover_log)
        self.purge_seqno = facts.get("source_purge_seqno", self.purge_seqno)
        self.missing_seqno = facts.get("missing_seqno", self.missing_seqno)
        self.stream_filter = facts.get("stream_filter", self.stream_filter)

    def _RollbackTo(self, instruction: ins.RollbackTo) -> Any:
        assert self.staging_branch == self.served_branch, "a resync has nothing to roll back"
        line = self.staging
        kept = [boundary for boundary in line.boundaries if boundary.seqno <= instruction.seqno]
        if kept[-1].seqno == 0:
            return ev.NoBoundary()
        self.rollbacks.append((line.boundaries[-1].seqno, kept[-1].seqno))
        self._open_branch(Line(kept, [], kept[-1].seqno, None, kept[-1].manifest, True))
        self.served_branch = self.staging_branch
        self.failover_log = self.failover_log.pruned(kept[-1].seqno)
        return ev.RolledBack(self.state())

    def _AbandonStaged(self, _instruction: ins.AbandonStaged) -> Any:
        line = self.staging
        served = self.staging_branch == self.served_branch
        self._open_branch(
            replace(line, staged=[], position=line.boundaries[-1].seqno, open_snapshot=None)
            if line.published or served
            else Line()
        )
        self.staging.manifest = line.boundaries[-1].manifest
        if served:
            self.served_branch = self.staging_branch
        return ev.Abandoned(self.state())

    def _BeginResync(self, _instruction: ins.BeginResync) -> Any:
        assert self.served.seqno, "a resync without anything to keep"
        self._open_branch(Line())
        self.stream_filter = None
        return ev.ResyncOpened(self.state())

    def _open_branch(self, line: Line) -> None:
        self.branch += 1
        self.lines[self.branch] = line
        self.staging_branch = self.branch


def _apply(documents: Documents, row_value: bytes) -> None:
    frame, size = wire_frame.decode(row_value)
    assert size == len(row_value), "a row is one frame"
    event = decode(frame)
    if isinstance(event, SystemEvent):
        content = decode_system_event(event)
        if isinstance(content, (CollectionCreated, CollectionDropped)):
            for key in [key for key in documents if decode_leb128(key)[0] == content.collection_id]:
                del documents[key]
        return
    assert isinstance(event, (Mutation, Deletion, Expiration))
    documents[event.key] = event


def row(seqno: int, key: bytes, value: bytes) -> Row:
    """Return a row as the scanner makes it."""
    return b"\0\0\0\1" + seqno.to_bytes(8), encode(Mutation(0, b"\0" + key, seqno, 1, seqno, value=value))


def validate(machine: MachineState) -> None:
    """Check the invariants that hold between two events."""
    assembler, phase = machine.assembler, machine.phase
    validate_assembler(assembler)
    if phase is Phase.STREAMING:
        assert machine.opaque is not None, "a stream without an opaque"
    elif phase is not Phase.REQUESTING:
        assert machine.opaque is None, f"an opaque in phase {phase.name}"
        assert not assembler.open_snapshot or assembler.holds_part, "a marker outlived its stream"
    if phase in (Phase.REQUESTING, Phase.STREAMING, Phase.ASKING_LOG, Phase.WAITING):
        assert machine.connected, f"phase {phase.name} without a connection"
    if phase is Phase.REQUESTING:
        held = machine.offset.start_seqno
        assert held == assembler.position_seqno, f"requested from {held}, holding {assembler.position_seqno}"
    assert machine.retry_reason is None or phase is Phase.ABANDONING
    assert not machine.marker_acks or phase is Phase.STREAMING
    assert not (machine.resyncing and assembler.boundary_seqno), "a published resync is no longer one"
    assert machine.durable_seqno <= assembler.boundary_seqno


def validate_assembler(assembler: Assembler) -> None:
    snapshot = assembler.open_snapshot
    assert 0 <= assembler.boundary_seqno <= assembler.position_seqno <= SEQNO_MAX
    if snapshot is not None:
        assert assembler.position_seqno < snapshot.end_seqno, "the end was reached and not published"
        assert snapshot.start_seqno <= snapshot.end_seqno
    assert assembler._held_snapshot is None or assembler.holds_part, "a range without its part"
    if assembler._replaces_end:
        assert assembler.resumable, "a mid-snapshot stream without anything to continue"


FOR_THE_SOURCE = (ins.CloseStream, ins.GetFailoverLog, ins.RetryAfter, ins.AnswerMarker, ins.RefreshCollections)


class Rig:
    """A machine and its store: performs, answers, validates after every event, and keeps what goes to the source."""

    def __init__(self, store: ToyStore) -> None:
        self.store = store
        self.machine = VbucketMachine(store.vbid, store.state())
        self.outbox: list[ins.Instruction] = []
        self.reports: list[ins.ReportStatus] = []
        self.opaque_counter = 0x1000
        self._durable = store.served.seqno
        self._acks_due: list[tuple[int, int]] = []

    @property
    def violation_count(self) -> int:
        return sum("broke the protocol" in each.text for each in self.reports)

    def restart(self) -> None:
        """Restart the process: only the store remains."""
        self.machine = VbucketMachine(self.store.vbid, self.store.state())
        self.outbox.clear()
        self._acks_due.clear()

    def feed(self, event: ev.LocalEvent | StreamEvent) -> list[ins.Instruction]:
        """Hand an event in and perform everything that comes of it. Returns the instructions, in order."""
        done = self._perform(self.machine.handle(event))
        if isinstance(event, ev.StreamAccepted) and event.opaque == self.machine.opaque and event.failover_log:
            assert self.store.failover_log == event.failover_log, "rows may follow, and the log is not saved"
        return done

    def feed_rows(self, opaque: int, rows: list[Row]) -> list[ins.Instruction]:
        """Hand in a run of rows."""
        return self._perform(self.machine.handle_run(opaque, rows, sum(len(value) for _, value in rows)))

    def _perform(self, instructions: list[ins.Instruction]) -> list[ins.Instruction]:
        done: list[ins.Instruction] = []
        for instruction in instructions:
            done.append(instruction)
            answer = None
            if isinstance(instruction, ins.RequestStream):
                self._check_request(instruction)
                self.outbox.append(instruction)
                self.opaque_counter += 1
                answer = ev.StreamRequested(self.opaque_counter)
            elif isinstance(instruction, ins.ReportStatus):
                self.reports.append(instruction)
            elif isinstance(instruction, FOR_THE_SOURCE):
                self.outbox.append(instruction)
            else:
                answer = self.store.perform(instruction)
            if answer is not None:
                done += self._perform(self.machine.handle(answer))
            if isinstance(answer, ev.StagingRefused):
                break
        validate(self.machine)
        return done

    def _check_request(self, instruction: ins.RequestStream) -> None:
        line = self.store.staging
        offset = instruction.offset
        assert offset.snap_start_seqno <= offset.start_seqno <= offset.snap_end_seqno <= 2**64 - 1
        assert offset.start_seqno == line.position, "requested from what the store does not hold"
        assert offset.start_seqno <= instruction.end_seqno
        if offset.inside_snapshot:
            assert offset.snap_start_seqno == line.boundaries[-1].seqno
            assert line.open_snapshot is not None
            assert offset.snap_end_seqno == line.open_snapshot.end_seqno
        else:
            assert line.position == line.boundaries[-1].seqno
        if offset.start_seqno == 0:
            assert offset.vbuuid == 0

    def last(self, kind: type[Any]) -> Any:
        """The newest instruction of a kind that went to the source."""
        return next(instruction for instruction in reversed(self.outbox) if isinstance(instruction, kind))
