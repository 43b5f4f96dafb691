"""The events that `VbucketMachine.handle` takes, besides wire events of a stream, which `mirror.wire` decodes.

Wire events carry the opaque (the number) of the stream's request. The machine ignores messages with another opaque,
such as late messages of an older stream. So a vbucket must never get the same opaque twice, even over another
connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mirror.ingest.selection import StreamFilter
from storage.model import SEQNO_MAX, FailoverLog, VbucketState

Row = tuple[bytes, bytes]
"""Key: branch u32, seqno u64 (big endian). Value: the event's whole frame in stored form."""


@dataclass(frozen=True, slots=True)
class Start:
    """A connection to the vbucket's node is ready: streams may be requested.

    Start also ends the phase REFUSED. If a stream is still open, the machine closes that stream first.
    """

    collections: bool = True
    """True if the node granted collections: keys carry a collection id, and each snapshot's end seqno is sent."""
    sends_purge_seqno: bool = False
    """True if the source accepted V2.2 markers (8.0): a mid-snapshot request may name the last reported purge seqno."""
    by_mirror: bool = False
    """True if the node is a mirror: it may be behind this mirror for a while."""
    end_seqno: int = SEQNO_MAX
    filter: StreamFilter | None = None
    scope_names: Mapping[int, str] = field(default_factory=dict)
    """Names by scope id, for streams of single collections, which carry no scope events."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Close the stream and request none until Start: the vbucket moves, or the program stops."""

    text: str = "stopped"


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The connection that carried (or was to carry) the stream is gone."""

    text: str = "the connection was lost"


@dataclass(frozen=True, slots=True)
class NoActiveNode:
    """The cluster map names no active node for the vbucket. Start follows once a map names one."""

    text: str = "the cluster map names no active node; waiting for a map that does"


@dataclass(frozen=True, slots=True)
class RetryDue: ...


@dataclass(frozen=True, slots=True)
class HighSeqno:
    """The source's high seqno of the vbucket, as polled. A filtered stream may end below it."""

    seqno: int


@dataclass(frozen=True, slots=True)
class StreamRequested:
    """RequestStream was sent with this opaque. The host hands in this event before any message with the opaque."""

    opaque: int


@dataclass(frozen=True, slots=True)
class StreamAccepted:
    opaque: int
    failover_log: FailoverLog


@dataclass(frozen=True, slots=True)
class StreamRollback:
    opaque: int
    seqno: int


@dataclass(frozen=True, slots=True)
class StreamRefused:
    """The stream request got another status than success or rollback; `context` is the answer's body."""

    opaque: int
    status: int
    context: bytes = b""


@dataclass(frozen=True, slots=True)
class FailoverLogReceived:
    failover_log: FailoverLog


@dataclass(frozen=True, slots=True)
class FailoverLogRefused:
    status: int


@dataclass(frozen=True, slots=True)
class Published:
    """The boundary `seqno` is published and durable."""

    seqno: int


@dataclass(frozen=True, slots=True)
class RolledBack:
    """RollbackTo was executed: `state` is at the newest kept boundary at or below the seqno."""

    state: VbucketState


@dataclass(frozen=True, slots=True)
class NoBoundary:
    """RollbackTo was not executed: no boundary above 0 is kept at or below the seqno. No row was dropped."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """AbandonStaged was executed: `state` is at the newest complete boundary of the staging branch."""

    state: VbucketState


@dataclass(frozen=True, slots=True)
class ResyncOpened:
    """BeginResync was executed: `state.staging_branch` is a new, empty branch next to the served branch."""

    state: VbucketState


@dataclass(frozen=True, slots=True)
class ResyncRefused:
    """BeginResync was not executed, for lack of space. The old copy is kept."""

    text: str


@dataclass(frozen=True, slots=True)
class StagingRefused:
    """The sink refused rows whose seqnos do not rise. The host dropped the rest of the instructions."""

    state: VbucketState
    text: str


@dataclass(frozen=True, slots=True)
class KeyRefused:
    """The stream brought a document with an invalid key."""

    opaque: int
    text: str


Answer = (
    StreamRequested
    | ConnectionLost
    | Published
    | RolledBack
    | NoBoundary
    | Abandoned
    | ResyncOpened
    | ResyncRefused
    | StagingRefused
)
"""The events that the execution of an instruction can return at once."""

FromTheSource = StreamAccepted | StreamRollback | StreamRefused | FailoverLogReceived | FailoverLogRefused | KeyRefused
LocalEvent = Start | Stop | NoActiveNode | RetryDue | HighSeqno | FromTheSource | Answer
