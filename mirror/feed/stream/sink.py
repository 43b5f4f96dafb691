"""The interface of a sink, which takes the rows of one vbucket.

Knows the instructions that concern rows, and the events that answer them. A mirror has a store behind it
(`store_sink`), a bounded reader a spool (`spool_sink`). Invariants of every sink: a staged row is not seen before its
publish; what cannot be staged in full is refused, never left out; a machine is started from `state`.
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
    """The place where the rows of one vbucket go. `ingest.instructions` describes each instruction."""

    def state(self) -> VbucketState: ...

    def row_prefix(self) -> bytes: ...

    def stage_rows(self, rows: ins.StageRows) -> StagingRefused | None: ...

    def advance(self, step: ins.Advance) -> StagingRefused | None: ...

    def stage_system_event(self, event: ins.StageSystemEvent) -> StagingRefused | None: ...

    def publish(self, snapshot: ins.PublishSnapshot) -> Published | None:
        """Take the snapshot for complete; return Published if it is out already, else that follows its commit."""
        ...

    def save_failover_log(self, log: ins.SaveFailoverLog) -> None: ...

    def save_filter(self, stream_filter: ins.SaveFilter) -> None: ...

    def roll_back(self, target: ins.RollbackTo) -> RolledBack | NoBoundary | None:
        """Go back to a boundary; return None if nothing more is read of the vbucket after a rollback."""
        ...

    def abandon(self, staged: ins.AbandonStaged) -> Abandoned | None:
        """Drop the staged rows of the open snapshot; return None if a complete one must be published before."""
        ...

    def begin_resync(self, cause: str) -> ResyncOpened | ResyncRefused | None:
        """Begin a second copy; return None if nothing more is read of the vbucket."""
        ...
