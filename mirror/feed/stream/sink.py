"""The interface of a sink: where the rows of one vbucket go, whether they are kept or handed on.

Knows the instructions that concern rows, and the events that answer them; must never know how rows are kept. A mirror
has a store behind it (`store_sink`), a bounded reader a spool (`spool_sink`). Invariants that every sink keeps: nothing
that was staged is seen before its publish; what cannot be staged in full is refused, never left out; `state` is what a
machine is started from.
"""

from __future__ import annotations

from typing import Protocol

from mirror.ingest import instructions as ins
from mirror.ingest.events import (
    Abandoned,
    NoBoundary,
    Published,
    ResyncOpened,
    ResyncRefused,
    RolledBack,
    StagingRefused,
)
from storage.model import VbucketState


class Sink(Protocol):
    """Where the rows of one vbucket go. Each instruction is described where it is defined (`ingest.instructions`)."""

    def state(self) -> VbucketState:
        """What is held."""
        ...

    def row_prefix(self) -> bytes:
        """What the keys of rows begin with that are received from now on: the staging branch."""
        ...

    def stage_rows(self, rows: ins.StageRows) -> StagingRefused | None:
        """Accept rows."""
        ...

    def advance(self, step: ins.Advance) -> StagingRefused | None:
        """Move the staged position without a row."""
        ...

    def stage_system_event(self, event: ins.StageSystemEvent) -> StagingRefused | None:
        """Accept a system event's row and the manifest that follows from it."""
        ...

    def publish(self, snapshot: ins.PublishSnapshot) -> Published | None:
        """Take the snapshot for complete; returns Published if it is out already, else that follows its commit."""
        ...

    def save_failover_log(self, log: ins.SaveFailoverLog) -> None:
        """Keep the source's failover log."""
        ...

    def save_filter(self, stream_filter: ins.SaveFilter) -> None:
        """Keep what the streams of the staging branch are filtered to."""
        ...

    def roll_back(self, target: ins.RollbackTo) -> RolledBack | NoBoundary | None:
        """Go back to a boundary; None where nothing more is read of the vbucket after a rollback."""
        ...

    def abandon(self, staged: ins.AbandonStaged) -> Abandoned | None:
        """Drop the staged rows of the open snapshot; None: later, once a complete one before it is published."""
        ...

    def begin_resync(self, cause: str) -> ResyncOpened | ResyncRefused | None:
        """Begin a second copy; None where nothing more is read of the vbucket."""
        ...
