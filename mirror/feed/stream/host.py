"""The host of one vbucket: its machine, its sink, and the session that carries its stream.

Knows how to hand events to the machine and have its instructions executed, requests of a stream, and the pause before a
retry; must never know how rows are kept, nor how connections are made. Invariants: the machine gets events one at a
time and in order; an opaque of another session, or of a stream that was closed, never reaches it; after `drop_machine`
nothing is sent and no pause is running.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mirror.clock import Clock
from mirror.errors import ConnectFailed
from mirror.feed.connection.session import NodeSession
from mirror.feed.stream.executor import execute
from mirror.feed.stream.sink import Sink
from mirror.ingest import events
from mirror.ingest.backoff import delay_s
from mirror.ingest.events import Row
from mirror.ingest.instructions import Instruction, RequestStream, RetryReason, VbucketStatus
from mirror.ingest.machine import VbucketMachine
from mirror.ingest.state import Phase
from mirror.wire import events as ev
from mirror.wire.codec_dcp import decode_failover_log
from mirror.wire.constants import Status as WireStatus
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame
from storage.model import FailoverLog, Vbid

MachineEvent = events.LocalEvent | ev.Event
"""What a machine is handed: it ignores what is of no concern to it."""


class VbucketHost(ABC):
    """One vbucket that is streamed, once it has a machine and a session. A subclass says what a stream requests."""

    def __init__(self, vbid: int, sink: Sink, clock: Clock) -> None:
        """Idle: without a machine and without a session."""
        self.vbid = vbid
        self.sink = sink
        self.session: NodeSession | None = None
        self.machine: VbucketMachine | None = None
        self.opaque: int | None = None
        self._clock = clock
        self._retry: asyncio.TimerHandle | None = None

    # -- what a subclass decides ----------------------------------------------------------------------------------

    @abstractmethod
    def start_event(self, session: NodeSession) -> events.Start:
        """Returns the event with which the machine asks for streams over a session."""

    @property
    @abstractmethod
    def stream_filter(self) -> dict[str, Any]:
        """What a stream request says in its JSON value."""

    @abstractmethod
    def enter(self, event: MachineEvent) -> None:
        """Hand in an event of a timer or of an answer, and handle what the sink raises."""

    @abstractmethod
    def refresh_map(self, config: bytes) -> None:
        """Get a new cluster map, or read this one."""

    @abstractmethod
    def refresh_collections(self) -> None:
        """Ask which collections there are now."""

    @abstractmethod
    def report(self, status: VbucketStatus, text: str) -> None:
        """Note what the vbucket does."""

    @property
    def source_high_seqno(self) -> int | None:
        """The source's high seqno; None where it is not polled."""
        return None

    # -- life -----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True while there is a machine."""
        return self.machine is not None

    @property
    def streaming(self) -> bool:
        """True while a stream is open."""
        return self.machine is not None and self.machine.phase is Phase.STREAMING

    def start_machine(self) -> None:
        """Make a machine from what the sink holds; what the one before it knew is forgotten."""
        self.drop_machine()
        self.machine = VbucketMachine(Vbid(self.vbid), self.sink.state())

    def drop_machine(self) -> None:
        """Close the stream and forget the machine."""
        if self.session is not None and self.opaque is not None:
            self.session.close_stream(self.vbid, self.opaque)
        self.opaque = None
        self.machine = None
        self._cancel_retry()

    def attach(self, session: NodeSession) -> None:
        """The session of its node is ready: ask for a stream."""
        self.session = session
        self.opaque = None
        self.handle(self.start_event(session))

    def detach(self, event: events.Stop | events.ConnectionLost | events.NoActiveNode) -> None:
        """The session is gone, or no longer the right one."""
        if self.session is None and not isinstance(event, events.NoActiveNode):
            return
        self._cancel_retry()
        self.handle(event)
        self.session = None
        self.opaque = None

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: MachineEvent) -> None:
        """Hand an event to the machine and execute what it returns."""
        if self.machine is not None:
            self.execute(self.machine.handle(event))

    def handle_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        """Hand data to the machine and execute what it returns."""
        if self.machine is not None:
            self.execute(self.machine.handle_run(opaque, rows, byte_count))

    def execute(self, instructions: Sequence[Instruction]) -> None:
        """Execute instructions of the machine, in order."""
        execute(self, instructions)

    # -- what the executor asks for -------------------------------------------------------------------------------

    def answered(self, answer: events.Answer) -> Sequence[Instruction]:
        """Hand the answer of an instruction to the machine; returns what follows from it."""
        return self.machine.handle(answer) if self.machine is not None else ()

    def request_stream(self, request: RequestStream) -> int | None:
        """Send a stream request; returns its opaque, or None without a connection."""
        session = self.session
        if session is None or not session.ready:
            return None
        session.stream_filter = self.stream_filter  # other vbuckets' may differ
        self.opaque = session.request_stream(request, self.sink.row_prefix())
        return self.opaque

    def close_stream(self, opaque: int | None) -> None:
        """Send CLOSE_STREAM."""
        if self.session is not None:
            self.session.close_stream(self.vbid, opaque)
        self.opaque = None

    def get_failover_log(self) -> bool:
        """Ask for the failover log; False without a connection."""
        session = self.session
        if session is None or not session.ready:
            return False

        def settle(outcome: Frame | Exception) -> None:
            if self.session is session and isinstance(outcome, Frame):
                self.enter(failover_log_event(outcome, self.source_high_seqno))

        session.get_failover_log(self.vbid, settle)
        return True

    def answer_marker(self, opaque: int) -> None:
        """Answer a marker, unless its stream is gone."""
        if self.session is not None and self.session.ready and opaque == self.opaque:
            self.session.answer_marker(self.vbid, opaque)

    def reconnect(self, cause: str) -> None:
        """Close the connection and log in again."""
        if self.session is not None:
            asyncio.get_running_loop().call_soon(self.session.close, ConnectFailed(cause, hint=""))

    def retry_after(self, reason: RetryReason, attempt: int) -> None:
        """Hand in RetryDue after a pause."""
        self._cancel_retry()
        delay = delay_s(reason, attempt, self._clock.jitter())
        self._retry = asyncio.get_running_loop().call_later(delay, self._retry_due)

    def _retry_due(self) -> None:
        self._retry = None
        self.enter(self._after_pause())

    def _after_pause(self) -> events.RetryDue | events.Start:
        return events.RetryDue()

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None


def failover_log_event(
    answer: Frame, high_seqno: int | None = None
) -> events.FailoverLogReceived | events.FailoverLogRefused:
    """What an answer to GET_FAILOVER_LOG is to a vbucket's machine."""
    if answer.status != WireStatus.SUCCESS:
        return events.FailoverLogRefused(answer.status)
    try:
        log = FailoverLog.of(decode_failover_log(answer.value))
    except RemoteProtocolError:
        return events.FailoverLogRefused(WireStatus.EINTERNAL)
    return events.FailoverLogReceived(log, high_seqno)
