"""Instructions: the values that `VbucketMachine.handle` returns, one for each action.

Defines the instructions, and the guarantees of their host (`feed.host`); must never know their execution.

A host guarantees:
- the instructions of one list are executed in list order. If one fails, the rest of the list is dropped, and the
  machine gets StagingRefused. If the store itself failed, a new machine made from the stored state replaces this one;
- an instruction that says "answered by" is followed by that event; until then nothing is sent for the vbucket;
- durable before acknowledged: AnswerMarker is only returned for a snapshot whose Published was handed in.

The instances are not frozen, for speed (each live snapshot makes two). Do not change one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mirror.ingest.events import Row
from mirror.ingest.offset import StreamOffset
from storage.model import Manifest, ManifestChange, Seqno, SnapshotRange, SourceFacts


class VbucketStatus(StrEnum):
    WAITING = "waiting"
    REQUESTING = "requesting"
    BACKFILLING = "backfilling"
    STREAMING = "streaming"
    ROLLING_BACK = "rolling-back"
    RESYNCING = "resyncing"
    REFUSED = "refused"
    DAMAGED = "damaged"
    NO_ACTIVE_NODE = "no-active-node"
    FINISHED = "finished"


class RetryReason(StrEnum):
    """The reason for a later request; `reactions.delay_s` has a schedule for each."""

    STREAM_ENDED = "stream-ended"
    SOURCE_BUSY = "source-busy"
    NOT_MY_VBUCKET = "not-my-vbucket"
    COLLECTION_UNKNOWN = "collection-unknown"
    VIOLATION = "violation"
    REFUSED_FOR_NOW = "refused-for-now"


# --- towards the source ---


@dataclass(slots=True)
class RequestStream:
    """Send STREAM_REQ with a fresh opaque; hand in StreamRequested, later the answer."""

    offset: StreamOffset
    end_seqno: int
    purge_seqno: int | None = None
    """The `purge_seqno` (decimal string) of the request's JSON value; None: leave it out."""


@dataclass(slots=True)
class CloseStream:
    """Send CLOSE_STREAM for the vbucket. Later messages with `opaque` are dropped, and acked."""

    opaque: int | None


@dataclass(slots=True)
class GetFailoverLog:
    """Send GET_FAILOVER_LOG. Answered by FailoverLogReceived or FailoverLogRefused."""


@dataclass(slots=True)
class AnswerMarker:
    """Answer the snapshot marker that requested it, with its opaque. Its snapshot is durable."""

    opaque: int


@dataclass(slots=True)
class RefreshMap:
    """Get a new cluster map; a `config` that is not empty is one."""

    config: bytes = b""


@dataclass(slots=True)
class RefreshCollections:
    """Get the source's current manifest. A changed filter comes with a new Start."""


@dataclass(slots=True)
class Reconnect:
    """Close the connection and log in again: its authentication or bucket is no longer good."""

    text: str


# --- towards the store ---


@dataclass(slots=True)
class StageRows:
    """Accept rows above the staged position, hidden until a publish. Their bytes may then be acked."""

    rows: list[Row]
    byte_count: int
    open_snapshot: SnapshotRange


@dataclass(slots=True)
class Advance:
    seqno: Seqno
    open_snapshot: SnapshotRange | None


@dataclass(slots=True)
class StageSystemEvent:
    """Stage a system event's row, and the manifest from that event on."""

    seqno: Seqno
    row_value: bytes
    manifest: Manifest
    open_snapshot: SnapshotRange
    change: ManifestChange | None = None
    """The change of the manifest; None: not known."""


@dataclass(slots=True)
class PublishSnapshot:
    """A snapshot is complete at `seqno`: make everything staged up to it visible. Answered, once durable, by Published.

    Seqno 0: the source's vbucket is empty, in a first fill or a resync.
    """

    seqno: Seqno
    snap_start_seqno: Seqno
    source_purge_seqno: int | None = None


@dataclass(slots=True)
class SaveFacts:
    """Save the given facts, no later than the first row of their stream; keep the others."""

    facts: SourceFacts


@dataclass(slots=True)
class RollbackTo:
    """Go back to the newest kept boundary at or below `seqno`, staged rows included. Answered by RolledBack.

    Answered by NoBoundary, with no change, if no boundary above 0 is kept there.
    """

    seqno: Seqno


@dataclass(slots=True)
class AbandonStaged:
    """Drop the staged rows of the open snapshot; a complete one before it stays. Answered by Abandoned."""


@dataclass(slots=True)
class BeginResync:
    """Open a branch without a parent next to the served one. Answered by ResyncOpened or ResyncRefused."""

    text: str


# --- towards people and clocks ---


@dataclass(slots=True)
class RetryAfter:
    """Hand in RetryDue after `reactions.delay_s` of the reason and the attempt (0 is the first)."""

    reason: RetryReason
    attempt: int


@dataclass(slots=True)
class ReportStatus:
    status: VbucketStatus
    text: str


Instruction = (
    RequestStream
    | CloseStream
    | GetFailoverLog
    | AnswerMarker
    | RefreshMap
    | RefreshCollections
    | Reconnect
    | StageRows
    | Advance
    | StageSystemEvent
    | PublishSnapshot
    | SaveFacts
    | RollbackTo
    | AbandonStaged
    | BeginResync
    | RetryAfter
    | ReportStatus
)
"""All instructions. The type checker (`assert_never`) rejects a host that leaves one out."""
