"""Instructions: the values that `VbucketMachine.handle` returns, one class for each action.

A host (`feed.host`) guarantees:
- It executes the instructions of one list in list order. If the sink refuses rows, the host drops the rest of the list
  and hands in StagingRefused. If the store itself fails, a new machine, made from the stored state, replaces the old.
- After an instruction that says "answered by" an event, it hands in that event at once, and executes the machine's new
  instructions before the rest of the list.
- It hands in Published only after the snapshot is durable.

Instances are never changed. They are not frozen, because frozen ones are slower to create.
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
    """The reason to delay the next request; `reactions.SCHEDULES` has the delays."""

    STREAM_ENDED = "stream-ended"
    SOURCE_BUSY = "source-busy"
    NOT_MY_VBUCKET = "not-my-vbucket"
    COLLECTION_UNKNOWN = "collection-unknown"
    VIOLATION = "violation"
    REFUSED_FOR_NOW = "refused-for-now"


@dataclass(slots=True)
class RequestStream:
    """Send STREAM_REQ with an unused opaque. Hand in StreamRequested (or ConnectionLost) at once, the answer later."""

    offset: StreamOffset
    end_seqno: int
    purge_seqno: int | None = None
    """The `purge_seqno` (decimal string) of the request's JSON value; None: leave it out."""


@dataclass(slots=True)
class CloseStream:
    """Send CLOSE_STREAM for the vbucket. Drop later messages with `opaque`, but acknowledge their bytes."""

    opaque: int | None


@dataclass(slots=True)
class GetFailoverLog:
    """Send GET_FAILOVER_LOG. Answered by FailoverLogReceived or FailoverLogRefused."""


@dataclass(slots=True)
class AnswerMarker:
    """Answer the snapshot marker that has this opaque: its snapshot is durable."""

    opaque: int


@dataclass(slots=True)
class RefreshMap:
    """Follow the cluster map in `config`. If `config` is empty or not newer, fetch a map."""

    config: bytes = b""


@dataclass(slots=True)
class RefreshCollections:
    """Fetch the source's current manifest. If the manifest changes the filter, a new Start follows."""


@dataclass(slots=True)
class Reconnect:
    """Close the connection and log in again: the login or the selected bucket is no longer valid."""

    text: str


@dataclass(slots=True)
class StageRows:
    """Stage rows above the staged position. Their bytes may then be acknowledged."""

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
    """The event's change of the manifest; None: unknown."""


@dataclass(slots=True)
class PublishSnapshot:
    """Publish everything staged up to `seqno`, the end of a complete snapshot. Answered by Published once durable.

    Seqno 0 publishes an empty vbucket, in a first fill or a resync.
    """

    seqno: Seqno
    snap_start_seqno: Seqno
    source_purge_seqno: int | None = None


@dataclass(slots=True)
class SaveFacts:
    """Save the given facts before or with the next staged row; keep all other facts."""

    facts: SourceFacts


@dataclass(slots=True)
class RollbackTo:
    """Go back to the newest kept boundary at or below `seqno`, and drop the staged rows. Answered by RolledBack.

    If no such boundary above 0 is kept, change nothing, and answer by NoBoundary.
    """

    seqno: Seqno


@dataclass(slots=True)
class AbandonStaged:
    """Drop the staged rows of the open snapshot; keep published snapshots. Answered by Abandoned."""


@dataclass(slots=True)
class BeginResync:
    """Open a branch without a parent next to the served branch. Answered by ResyncOpened or ResyncRefused."""

    text: str


@dataclass(slots=True)
class RetryAfter:
    """Hand in RetryDue after the delay of `reactions.delay_s` for the reason and the attempt (0 is the first)."""

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
