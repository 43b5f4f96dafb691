"""The executor: does what a vbucket's machine decided, in the order in which it was decided.

Knows every instruction, and which call of the vbucket's connection or of its sink it means; decides nothing, and must
never know what a sink is made of. Invariants (`ingest.instructions`): a list is executed in list order; an answer is
handed to the machine, and what it returns is executed, before the next instruction of the list; what the sink refuses
ends its list; without a machine nothing is executed. Errors of the store itself pass through: the group's owner drops
its machines and starts them again from what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, assert_never

from mirror.feed.stream.sink import Sink
from mirror.ingest import instructions as ins
from mirror.ingest.events import Answer, ConnectionLost, PrepareMissing, StagingRefused, StreamRequested

NOT_CONNECTED = "there is no connection to the node"


class Executing(Protocol):
    """What the executor uses of a vbucket: its machine, its sink, and its connection to the source."""

    @property
    def sink(self) -> Sink:
        """Where rows go."""
        ...

    @property
    def running(self) -> bool:
        """True while the vbucket has a machine."""
        ...

    def answered(self, answer: Answer) -> Sequence[ins.Instruction]:
        """Hand the answer of an instruction to the machine; returns what follows from it."""
        ...

    def request_stream(self, request: ins.RequestStream) -> int | None:
        """Send a stream request; returns its opaque, or None without a connection."""
        ...

    def close_stream(self, opaque: int | None) -> None:
        """Send CLOSE_STREAM."""
        ...

    def get_failover_log(self) -> bool:
        """Ask for the failover log; False without a connection."""
        ...

    def answer_marker(self, opaque: int) -> None:
        """Answer a snapshot marker."""
        ...

    def refresh_map(self, config: bytes) -> None:
        """Get a new cluster map, or read this one."""
        ...

    def refresh_collections(self) -> None:
        """Ask which collections there are now."""
        ...

    def reconnect(self, cause: str) -> None:
        """Close the connection and log in again."""
        ...

    def retry_after(self, reason: ins.RetryReason, attempt: int) -> None:
        """Hand in RetryDue later."""
        ...

    def report(self, status: ins.VbucketStatus, text: str) -> None:
        """Note what the vbucket does."""
        ...


def execute(vbucket: Executing, instructions: Sequence[ins.Instruction]) -> None:
    """Execute a list of instructions. Raises StorageError as the store raised it, except SeqnoOrder of a staging."""
    for instruction in instructions:
        if not vbucket.running:
            return
        answer = _execute_one(vbucket, vbucket.sink, instruction)
        if answer is None:
            continue
        execute(vbucket, vbucket.answered(answer))
        if isinstance(answer, (StagingRefused, PrepareMissing)):
            return  # the rest of the list relied on what was refused


def _execute_one(vbucket: Executing, sink: Sink, instruction: ins.Instruction) -> Answer | None:
    """Execute one instruction; returns its answer, if there is one already. The most frequent ones come first."""
    match instruction:
        case ins.StageRows():
            return sink.stage_rows(instruction)
        case ins.PublishSnapshot():
            return sink.publish(instruction)
        case ins.Advance():
            return sink.advance(instruction)
        case ins.AnswerMarker():
            vbucket.answer_marker(instruction.opaque)
        case ins.StageSystemEvent():
            return sink.stage_system_event(instruction)
        case ins.StagePrepare():
            return sink.stage_prepare(instruction)
        case ins.CommitPrepare():
            return sink.commit_prepare(instruction)
        case ins.AbortPrepare():
            return sink.abort_prepare(instruction)
        case ins.ReportStatus():
            vbucket.report(instruction.status, instruction.text)
        case ins.SaveFailoverLog():
            sink.save_failover_log(instruction)
        case ins.SaveFilter():
            sink.save_filter(instruction)
        case ins.RequestStream():
            opaque = vbucket.request_stream(instruction)
            return ConnectionLost(NOT_CONNECTED) if opaque is None else StreamRequested(opaque)
        case ins.CloseStream():
            vbucket.close_stream(instruction.opaque)
        case ins.GetFailoverLog():
            return None if vbucket.get_failover_log() else ConnectionLost(NOT_CONNECTED)
        case ins.RollbackTo():
            return sink.roll_back(instruction)
        case ins.AbandonStaged():
            return sink.abandon(instruction)
        case ins.BeginResync():
            return sink.begin_resync(instruction.cause)
        case ins.RefreshMap():
            vbucket.refresh_map(instruction.config)
        case ins.RefreshCollections():
            vbucket.refresh_collections()
        case ins.Reconnect():
            vbucket.reconnect(instruction.cause)
        case ins.RetryAfter():
            vbucket.retry_after(instruction.reason, instruction.attempt)
        case _:
            assert_never(instruction)
    return None
