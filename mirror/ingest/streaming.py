"""An open stream: its messages and its end.

A marker that asks for an answer gets one only after the snapshot is durable. If the source breaks the rules, the
machine drops the open snapshot and requests the stream again after a delay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mirror.ingest import events as ev
from mirror.ingest.assembler import Assembler, Violation
from mirror.ingest.handshake import finish, resync
from mirror.ingest.instructions import (
    AnswerMarker,
    Instruction,
    PublishSnapshot,
    RetryReason,
    VbucketStatus,
)
from mirror.ingest.reactions import on_stream_end
from mirror.ingest.state import MachineState, Phase
from mirror.wire.constants import SnapshotFlag, StreamEndReason
from mirror.wire.events import (
    Abort,
    Commit,
    OsoSnapshot,
    Prepare,
    SeqnoAdvanced,
    SnapshotMarker,
    StreamEnd,
    StreamEvent,
    SystemEvent,
)
from storage.model import SEQNO_MAX, Seqno, SourceFacts

_ACK = int(SnapshotFlag.ACK)
"""A plain int, because testing an IntFlag takes a microsecond."""

_ROLLED_BACK = (StreamEndReason.STATE_CHANGED, StreamEndReason.ROLLBACK)
"""A source reports a rollback by either (docs/protocol.md 2.5)."""
BARREN_ENDS_MAX = 3
"""After this many streams in a row without a row, inside one snapshot, the end must hide a rollback.

An ephemeral bucket of 8.0 accepts a request with its purge seqno, but then ends the stream, because its backfill does
not look at that (kv_engine v8.0.2 engines/ep/src/dcp/backfill_memory.cc). The first fill never ended.
"""
MARKER_ACKS_MAX = 1024
"""Limit of markers that wait for an answer. Only a faulty source sends more, so one more is a violation."""

_ASSEMBLE: dict[type, Callable[[Assembler, Any, list[Instruction]], None]] = {
    SnapshotMarker: Assembler.marker,
    SeqnoAdvanced: Assembler.seqno_advanced,
    SystemEvent: Assembler.system_event,
    OsoSnapshot: Assembler.oso_snapshot,
    Prepare: Assembler.sync_write,
    Commit: Assembler.sync_write,
    Abort: Assembler.sync_write,
}


def run(machine: MachineState, rows: list[ev.Row], byte_count: int, out: list[Instruction]) -> Phase:
    if machine.unsaved_marker is not None:
        _save_purge_seqno(machine, machine.unsaved_marker, out)
    try:
        machine.assembler.rows(rows, byte_count, out)
    except Violation as violation:
        return violated(machine, str(violation), out)
    return Phase.STREAMING


def message(machine: MachineState, event: StreamEvent, out: list[Instruction]) -> Phase:
    if event.opaque != machine.opaque:
        return Phase.STREAMING
    if machine.unsaved_marker is not None:
        _save_purge_seqno(machine, machine.unsaved_marker, out)
    try:
        _ASSEMBLE[type(event)](machine.assembler, event, out)
    except Violation as violation:
        return violated(machine, str(violation), out)
    return _marked(machine, event, out) if type(event) is SnapshotMarker else Phase.STREAMING


def _marked(machine: MachineState, event: SnapshotMarker, out: list[Instruction]) -> Phase:
    if event.flags & _ACK:
        if event.end_seqno <= machine.durable_seqno:
            out.append(AnswerMarker(event.opaque))
        elif len(machine.marker_acks) < MARKER_ACKS_MAX:
            machine.marker_acks.append((event.end_seqno, event.opaque))
        else:
            return violated(machine, "too many markers that ask for an answer", out)
    start_seqno, reported = machine.offset.start_seqno, event.reported_purge_seqno or 0
    if not machine.offset.inside_snapshot and 0 < start_seqno == machine.assembler.position_seqno < reported:
        # The source should have answered ROLLBACK (docs/protocol.md 2.5, case 2): deletions may be missing. It lets a
        # filtered stream pass if a purge has lowered the collection's high seqno (MB-71917).
        machine.close_stream(out)
        return resync(machine, f"the source purged deletions up to {reported} and let {start_seqno} pass", out)
    machine.unsaved_marker = event
    if event.end_seqno == 0:
        _perhaps_empty(machine, out)
    machine.report_streaming(out)
    return Phase.STREAMING


def _save_purge_seqno(machine: MachineState, marker: SnapshotMarker, out: list[Instruction]) -> None:
    """Save the newest marker's purge seqno before the snapshot's first row: mid-snapshot requests name it.

    The marker decides, not the control: a source that accepted `max_marker_version` may report no purge seqno
    (docs/protocol.md 2.6). All tombstones of the first snapshot may then be missing.
    """
    machine.unsaved_marker = None
    reported = marker.reported_purge_seqno
    facts = SourceFacts()
    if reported is not None:
        facts["source_purge_seqno"] = Seqno(reported)
    if not machine.assembler.boundary_seqno:
        earlier = machine.stored.missing_seqno if machine.assembler.position_seqno else 0
        facts["missing_seqno"] = max(earlier, SEQNO_MAX if reported is None else reported)
    machine.save(out, **facts)


def ended(machine: MachineState, event: StreamEnd, out: list[Instruction]) -> Phase:
    if event.opaque != machine.opaque:
        return Phase.STREAMING
    # A stream that was requested without an end cannot reach one: OK is then handled like the other codes.
    regular = event.reason == StreamEndReason.OK and machine.features.end_seqno != SEQNO_MAX
    if regular:
        if machine.unsaved_marker is not None:
            _save_purge_seqno(machine, machine.unsaved_marker, out)
        machine.assembler.stream_ended_regularly(out)
    # A stream that brought a row proves that the position is good.
    is_barren = machine.offset.inside_snapshot and machine.assembler.position_seqno == machine.offset.start_seqno
    machine.barren_ends = machine.barren_ends + 1 if is_barren else 0
    machine.forget_stream()
    if regular and not machine.assembler.holds_part:
        return finish(machine, out)
    if machine.barren_ends >= BARREN_ENDS_MAX and event.reason in _ROLLED_BACK:
        machine.barren_ends = 0
        text = (
            f"the source accepted the position {machine.offset.start_seqno} inside a snapshot {BARREN_ENDS_MAX} times "
            f"and sent nothing: dropping the open snapshot, back to {machine.assembler.boundary_seqno}"
        )
        machine.report(VbucketStatus.ROLLING_BACK, text, out)
        return machine.abandon(RetryReason.STREAM_ENDED, out)
    return machine.react(on_stream_end(event.reason), b"", out)


def published(machine: MachineState, event: ev.Published, out: list[Instruction]) -> Phase:
    """Answer the markers whose snapshots are durable now."""
    if event.seqno > machine.assembler.boundary_seqno:
        return machine.phase  # rolled back since
    machine.durable_seqno = Seqno(event.seqno)
    if machine.marker_acks:
        due = [opaque for end_seqno, opaque in machine.marker_acks if end_seqno <= event.seqno]
        machine.marker_acks = [waiting for waiting in machine.marker_acks if waiting[0] > event.seqno]
        out.extend(AnswerMarker(opaque) for opaque in due)
    return machine.phase


def high_seqno(machine: MachineState, event: ev.HighSeqno, out: list[Instruction]) -> Phase:
    machine.high_seqno = event.seqno
    if machine.phase is Phase.STREAMING:
        if event.seqno == 0:
            _perhaps_empty(machine, out)
        if machine.caught_up:
            machine.attempts.clear()  # an idle stream has no publish that would reset it
    return machine.phase


def _perhaps_empty(machine: MachineState, out: list[Instruction]) -> None:
    """Publish seqno 0 once if the mirror holds nothing: an empty vbucket has no row that completes a snapshot."""
    assembler = machine.assembler
    if machine.empty_reported or assembler.holds_part or assembler.boundary_seqno or assembler.open_snapshot:
        return
    machine.empty_reported = True
    out.append(PublishSnapshot(Seqno(0), Seqno(0)))
    machine.progressed(out)


def key_refused(machine: MachineState, event: ev.KeyRefused, out: list[Instruction]) -> Phase:
    return Phase.STREAMING if event.opaque != machine.opaque else violated(machine, event.text, out)


def staging_refused(machine: MachineState, event: ev.StagingRefused, out: list[Instruction]) -> Phase:
    machine.load(event.state)
    return violated(machine, event.text, out)


def violated(machine: MachineState, text: str, out: list[Instruction]) -> Phase:
    """Drop the open snapshot, and request the stream again later. Published snapshots stay."""
    shown = machine.shown
    shown.failing_text = (
        f"the source broke the protocol in vb {machine.vbid}: {text}; the open snapshot is dropped and requested "
        "again. If it repeats, report it with this line"
    )
    machine.close_stream(out)
    machine.report(VbucketStatus.WAITING, shown.failing_text, out)
    if machine.assembler.holds_part:
        return machine.abandon(RetryReason.VIOLATION, out)
    return machine.wait(RetryReason.VIOLATION, out)
