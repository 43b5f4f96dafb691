"""The state machine of one vbucket: takes events, returns instructions. No I/O, no clock, no random numbers.

TRANSITIONS lists the legal events of each phase, and the phases that may follow. The machine ignores any other event:
it is stale, or its sender breaks the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mirror.ingest import events as ev
from mirror.ingest import handshake, streaming
from mirror.ingest.instructions import Instruction
from mirror.ingest.state import STORE_PHASES, HandshakeState, MachineState, Phase
from mirror.wire.events import (
    Abort,
    Commit,
    Event,
    OsoSnapshot,
    Prepare,
    SeqnoAdvanced,
    SnapshotMarker,
    StreamEnd,
    SystemEvent,
)


class VbucketMachine(MachineState):
    """The machine of one vbucket, made from the stored state. After a store failure, a new machine replaces it."""

    def handle(self, event: ev.LocalEvent | Event) -> list[Instruction]:
        """Take one event; return the instructions that follow, in order."""
        move = TRANSITIONS[self.phase].get(type(event))
        if move is None:
            return []
        out: list[Instruction] = []
        phase = move.decide(self, event, out)
        assert phase in move.to, f"{self.phase} to {phase} by {type(event).__name__}"
        self.phase = phase
        return out

    def handle_run(self, opaque: int, rows: list[ev.Row], byte_count: int) -> list[Instruction]:
        """Take consecutive data frames of one stream, in stored form (see wire.scan.Run)."""
        if opaque != self.opaque or self.phase is not Phase.STREAMING or not rows:
            return []
        out: list[Instruction] = []
        self.phase = streaming.run(self, rows, byte_count, out)
        return out


def _start(machine: MachineState, event: ev.Start, out: list[Instruction]) -> Phase:
    if machine.opaque is not None or machine.phase is Phase.REQUESTING:
        machine.close_stream(out)
    machine.connected = True
    machine.no_node = False
    machine.features = event
    if machine.phase in STORE_PHASES:
        return machine.phase  # the store's answer leads to the request
    machine.handshake = HandshakeState()
    return handshake.begin(machine, out)


def _disconnected(
    machine: MachineState, event: ev.Stop | ev.ConnectionLost | ev.NoActiveNode, out: list[Instruction]
) -> Phase:
    stream = machine.opaque is not None or machine.phase is Phase.REQUESTING
    if stream and type(event) is not ev.ConnectionLost:
        machine.close_stream(out)
    machine.no_node = machine.no_node or type(event) is ev.NoActiveNode
    machine.connected = False
    machine.idle_text = event.text
    machine.forget_stream()
    if machine.phase in STORE_PHASES:
        return machine.phase  # the store's answer leads to IDLE
    machine.handshake = HandshakeState()
    machine.attempts.clear()
    if machine.phase in (Phase.REFUSED, Phase.FINISHED) and not machine.no_node:
        return machine.phase
    return machine.idle(out)


def _retry_due(machine: MachineState, _event: ev.RetryDue, out: list[Instruction]) -> Phase:
    return handshake.begin(machine, out)


class Move(NamedTuple):
    decide: Callable[[VbucketMachine, Any, list[Instruction]], Phase]
    to: tuple[Phase, ...]


_BEGUN = (Phase.REQUESTING, Phase.ABANDONING, Phase.OPENING_RESYNC, Phase.FINISHED)
_WENT_BACK = (Phase.ABANDONING, Phase.WAITING, Phase.ASKING_LOG, Phase.OPENING_RESYNC, Phase.ROLLING_BACK)
_BROKEN = (Phase.ABANDONING, Phase.WAITING)


def _always(phase: Phase) -> dict[type, Move]:
    """Return the moves for the events that are legal in every phase. Only the store's answer ends a store phase."""
    stays = phase in STORE_PHASES
    idle = Move(_disconnected, (phase,) if stays or phase in (Phase.REFUSED, Phase.FINISHED) else (Phase.IDLE,))
    return {
        ev.Start: Move(_start, (phase,) if stays else _BEGUN),
        ev.Stop: idle,
        ev.ConnectionLost: idle,
        ev.NoActiveNode: Move(_disconnected, (phase,) if stays else (Phase.IDLE,)),
        ev.HighSeqno: Move(streaming.high_seqno, (phase,)),
        ev.Published: Move(streaming.published, (phase,)),
    }


_MESSAGE = Move(streaming.message, (Phase.STREAMING, *_BROKEN))

_ROWS: Mapping[Phase, Mapping[type, Move]] = {
    Phase.REQUESTING: {
        ev.StreamRequested: Move(handshake.requested, (Phase.REQUESTING,)),
        ev.StreamAccepted: Move(handshake.accepted, (Phase.STREAMING, Phase.REQUESTING)),
        ev.StreamRollback: Move(handshake.rolled_back_by_source, (*_WENT_BACK, Phase.REQUESTING)),
        ev.StreamRefused: Move(handshake.refused, (*_WENT_BACK, Phase.REFUSED, Phase.REQUESTING)),
    },
    Phase.STREAMING: {
        SnapshotMarker: Move(streaming.message, (Phase.STREAMING, *_BROKEN, Phase.OPENING_RESYNC)),
        SeqnoAdvanced: _MESSAGE,
        SystemEvent: _MESSAGE,
        OsoSnapshot: _MESSAGE,
        Prepare: _MESSAGE,
        Commit: _MESSAGE,
        Abort: _MESSAGE,
        StreamEnd: Move(
            streaming.ended, (Phase.STREAMING, Phase.FINISHED, Phase.WAITING, Phase.REFUSED, Phase.ABANDONING)
        ),
        ev.KeyRefused: Move(streaming.key_refused, (Phase.STREAMING, *_BROKEN)),
        ev.StagingRefused: Move(streaming.staging_refused, _BROKEN),
    },
    Phase.ASKING_LOG: {
        ev.FailoverLogReceived: Move(handshake.log_received, (Phase.WAITING, Phase.ROLLING_BACK, *_BEGUN)),
        ev.FailoverLogRefused: Move(handshake.log_refused, (Phase.WAITING, Phase.REFUSED)),
    },
    Phase.ROLLING_BACK: {
        ev.RolledBack: Move(handshake.rolled_back, (*_BEGUN, Phase.IDLE)),
        ev.NoBoundary: Move(handshake.no_boundary, (Phase.ASKING_LOG, Phase.OPENING_RESYNC, Phase.IDLE)),
    },
    Phase.ABANDONING: {ev.Abandoned: Move(handshake.abandoned, (*_BEGUN, Phase.WAITING, Phase.IDLE))},
    Phase.OPENING_RESYNC: {
        ev.ResyncOpened: Move(handshake.resync_opened, (*_BEGUN, Phase.IDLE)),
        ev.ResyncRefused: Move(handshake.resync_refused, (Phase.WAITING, Phase.IDLE)),
    },
    Phase.WAITING: {ev.RetryDue: Move(_retry_due, _BEGUN)},
}

TRANSITIONS: Mapping[Phase, Mapping[type, Move]] = {
    phase: {**_always(phase), **_ROWS.get(phase, {})} for phase in Phase
}
"""The legal events by phase, each with its decision and the phases that may follow. Other events are ignored."""
