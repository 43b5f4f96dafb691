"""The host of one vbucket's machine: executes the machine's instructions on a sink and a session.

    NodeSession --rows, messages, answers--> the owner: MirroredVbucket (follow/) or ReadVbucket (read/)
         ^                                     |  handle            ^  start_event, enter, report, refresh_*
         |                                     v                    |
         +------- requests of streams ---- VbucketHost -------------+
                                               |  instructions
                                               v
                                             Sink: StoreSink (follow/) or SpoolSink (read/)

`ingest.instructions` has the rules of execution. A message of another session, or of a closed stream, never reaches the
machine. Errors of the store are raised to the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, assert_never

from mirror.clock import Clock
from mirror.errors import ConnectFailed
from mirror.feed.connection.node_session import NodeSession, StreamOwner
from mirror.ingest import events
from mirror.ingest import instructions as ins
from mirror.ingest.events import Row, StagingRefused
from mirror.ingest.machine import VbucketMachine
from mirror.ingest.reactions import delay_s
from mirror.ingest.selection import FilterFields
from mirror.ingest.state import Phase
from mirror.wire import events as ev
from mirror.wire.codec_dcp import decode_failover_log
from mirror.wire.constants import Status as WireStatus
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame
from storage.model import FailoverLog, SourceFacts, VbucketState

MachineEvent = events.LocalEvent | ev.Event


Staging = ins.StageRows | ins.Advance | ins.StageSystemEvent


class Sink(Protocol):
    """The destination of one vbucket's rows: a store, or a spool (memory and a temporary file).

    `ingest.instructions` describes each instruction. Invariants of every sink: a staged row is invisible until it is
    published; a run of rows is staged in full or refused; a new machine starts from `state`.
    """

    def state(self) -> VbucketState: ...

    def row_prefix(self) -> bytes: ...

    def stage(self, staging: Staging) -> StagingRefused | None: ...

    def publish(self, snapshot: ins.PublishSnapshot) -> events.Published | None:
        """Mark the snapshot complete. Return Published if it is visible at once, or None if that needs a commit."""
        ...

    def save(self, facts: SourceFacts) -> None: ...

    def roll_back(self, target: ins.RollbackTo) -> events.RolledBack | events.NoBoundary | None:
        """Go back to a boundary. A spool ends the vbucket's read instead, and returns None."""
        ...

    def abandon(self, staged: ins.AbandonStaged) -> events.Abandoned | None:
        """Drop the staged rows of the open snapshot. Return None if a complete snapshot must be published first."""
        ...

    def begin_resync(self, cause: str) -> events.ResyncOpened | events.ResyncRefused | None:
        """Begin a second copy. A spool ends the vbucket's read instead, and returns None."""
        ...

    def forget(self) -> None:
        """Forget what was kept for the machine, which is dropped."""
        ...


class HostOwner(StreamOwner, Protocol):
    """Gets the messages of the stream, counts them, and hands them to the host."""

    def start_event(self, session: NodeSession) -> events.Start: ...

    def enter(self, event: MachineEvent) -> None:
        """Hand an answer, or the end of a pause, to the host (`handle`)."""
        ...

    def report(self, status: ins.VbucketStatus, text: str) -> None: ...

    def refresh_map(self, config: bytes) -> None: ...

    def refresh_collections(self) -> None: ...


class VbucketHost:
    def __init__(self, vbid: int, sink: Sink, owner: HostOwner, clock: Clock) -> None:
        self.vbid = vbid
        self.sink = sink
        self.owner = owner
        self.session: NodeSession | None = None
        self.machine: VbucketMachine | None = None
        self.opaque: int | None = None
        self.stream_filter: FilterFields = {}
        """The JSON value of the stream requests."""
        self.retries = 0
        self._clock = clock
        self._retry: asyncio.TimerHandle | None = None
        self._abandon_waits = False

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def streaming(self) -> bool:
        return self.machine is not None and self.machine.phase is Phase.STREAMING

    def start_machine(self) -> None:
        self.drop_machine()
        self.machine = VbucketMachine(self.vbid, self.sink.state())

    def drop_machine(self) -> None:
        if self.session is not None and self.opaque is not None:
            self.session.close_stream(self.vbid, self.opaque)
        self.opaque = None
        self.machine = None
        self._abandon_waits = False
        self._cancel_retry()
        self.sink.forget()

    def attach(self, session: NodeSession) -> None:
        self.session = session
        self.opaque = None
        self.handle(self.owner.start_event(session))

    def detach(self, event: events.Stop | events.ConnectionLost | events.NoActiveNode) -> None:
        if self.session is None and not isinstance(event, events.NoActiveNode):
            return
        self._cancel_retry()
        self.handle(event)
        self.session = None
        self.opaque = None

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: MachineEvent) -> None:
        if self.machine is None:
            return
        self.execute(self.machine.handle(event))
        if self._abandon_waits and isinstance(event, events.Published):
            self.execute([ins.AbandonStaged()])

    def on_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        if self.machine is not None:
            self.execute(self.machine.handle_run(opaque, rows, byte_count))

    # -- instructions ---------------------------------------------------------------------------------------------

    def execute(self, instructions: Sequence[ins.Instruction]) -> None:
        """Execute instructions of the machine. Raises StorageError, except for refused rows (StagingRefused)."""
        for instruction in instructions:
            if self.machine is None:
                return
            answer = self._execute_one(instruction)
            if answer is None:
                continue
            self.execute(self.machine.handle(answer) if self.machine is not None else ())
            if isinstance(answer, StagingRefused):
                return  # the rest of the list depends on the refused rows

    def _execute_one(self, instruction: ins.Instruction) -> events.Answer | None:
        """Execute one instruction; return its answer if that is known at once. Frequent instructions come first."""
        sink = self.sink
        match instruction:
            case ins.StageRows() | ins.Advance() | ins.StageSystemEvent():
                return sink.stage(instruction)
            case ins.PublishSnapshot():
                return sink.publish(instruction)
            case ins.AnswerMarker():
                self.answer_marker(instruction.opaque)
            case ins.ReportStatus():
                self.owner.report(instruction.status, instruction.text)
            case ins.SaveFacts():
                sink.save(instruction.facts)
            case ins.RequestStream() | ins.GetFailoverLog() if not self.connected:
                return events.ConnectionLost("there is no connection to the node")
            case ins.RequestStream():
                return events.StreamRequested(self.request_stream(instruction))
            case ins.CloseStream():
                self.close_stream(instruction.opaque)
            case ins.GetFailoverLog():
                self.get_failover_log()
            case ins.RollbackTo():
                return sink.roll_back(instruction)
            case ins.AbandonStaged():
                answer = sink.abandon(instruction)
                self._abandon_waits = answer is None  # until the snapshot whose key rows are being written is visible
                return answer
            case ins.BeginResync():
                return sink.begin_resync(instruction.text)
            case ins.RefreshMap():
                self.owner.refresh_map(instruction.config)
            case ins.RefreshCollections():
                self.owner.refresh_collections()
            case ins.Reconnect():
                self.reconnect(instruction.text)
            case ins.RetryAfter():
                self.retry_after(instruction.reason, instruction.attempt)
            case _:
                assert_never(instruction)
        return None

    @property
    def connected(self) -> bool:
        return self.session is not None and self.session.ready

    def request_stream(self, request: ins.RequestStream) -> int:
        session = self.session
        assert session is not None, "it is connected"
        prefix = self.sink.row_prefix()
        opaque = self.opaque = session.request_stream(self.vbid, request, prefix, self.owner, self.stream_filter)
        return opaque

    def close_stream(self, opaque: int | None) -> None:
        if self.session is not None:
            self.session.close_stream(self.vbid, opaque)
        self.opaque = None

    def get_failover_log(self) -> None:
        session = self.session
        assert session is not None, "it is connected"

        def settle(outcome: Frame | Exception) -> None:
            if self.session is session and isinstance(outcome, Frame):
                self.owner.enter(failover_log_event(outcome))

        session.get_failover_log(self.vbid, settle)

    def answer_marker(self, opaque: int) -> None:
        if self.session is not None and self.connected and opaque == self.opaque:
            self.session.answer_marker(self.vbid, opaque)

    def reconnect(self, cause: str) -> None:
        if self.session is not None:
            # Not now: closing detaches this vbucket, which is still executing its instructions.
            asyncio.get_running_loop().call_soon(self.session.close, ConnectFailed(cause, hint=""))

    def retry_after(self, reason: ins.RetryReason, attempt: int) -> None:
        self.retries += 1
        self._cancel_retry()
        delay = delay_s(reason, attempt, self._clock.jitter())
        self._retry = asyncio.get_running_loop().call_later(delay, self._retry_due)

    def _retry_due(self) -> None:
        self._retry = None
        self.owner.enter(events.RetryDue())

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None


def failover_log_event(answer: Frame) -> events.FailoverLogReceived | events.FailoverLogRefused:
    if answer.status != WireStatus.SUCCESS:
        return events.FailoverLogRefused(answer.status)
    try:
        return events.FailoverLogReceived(FailoverLog.of(decode_failover_log(answer.value)))
    except RemoteProtocolError:
        return events.FailoverLogRefused(WireStatus.EINTERNAL)
