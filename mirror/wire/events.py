"""The messages of DCP in both directions, as frozen dataclasses.

A document's `key` begins with the LEB128 collection id if the connection has collections. Fields that a message lacks
are 0 (seqnos of older snapshot markers), empty or None. Sources: kv_engine docs/dcp/documentation/commands/* and
docs/protocol.md 2.4-2.11.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mirror.wire.constants import MarkerVersion

FailoverLog = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A DCP message. All messages of a stream have the opaque of its stream request."""

    opaque: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent(Event):
    stream_id: int | None = None


@dataclass(frozen=True, slots=True)
class DocumentEvent(StreamEvent):
    vbid: int
    key: bytes
    seqno: int
    rev_seqno: int
    cas: int


@dataclass(frozen=True, slots=True)
class PreparedEnd(StreamEvent):
    vbid: int
    key: bytes
    prepared_seqno: int
    seqno: int


# Messages of a producer in a stream.


_WITH_PURGE_SEQNO = frozenset((int(MarkerVersion.V2_2), int(MarkerVersion.V2_2_SHORT)))


@dataclass(frozen=True, slots=True)
class SnapshotMarker(StreamEvent):
    """The next messages up to `end_seqno` are one snapshot. `start_seqno` is not reliable. Fields after `flags` are 0
    if the marker's version does not carry them. `high_completed_seqno` is valid on disk snapshots only. `version` is a
    MarkerVersion.
    """

    vbid: int
    start_seqno: int
    end_seqno: int
    flags: int
    max_visible_seqno: int = 0
    high_completed_seqno: int = 0
    purge_seqno: int = 0
    high_prepared_seqno: int = 0
    version: int = int(MarkerVersion.V1)
    timestamp: int = 0
    """Set only in V2_1, which no release sends."""

    @property
    def reported_purge_seqno(self) -> int | None:
        """The source's purge seqno; None if the marker's version has no place for it (docs/protocol.md 2.6)."""
        return self.purge_seqno if self.version in _WITH_PURGE_SEQNO else None


@dataclass(frozen=True, slots=True)
class Mutation(DocumentEvent):
    """A document as of `seqno`. If `expiry` has passed, the document has expired but is not deleted yet."""

    flags: int = 0
    expiry: int = 0
    lock_time: int = 0
    datatype: int = 0
    value: bytes = b""
    nru: int = 0
    metadata: bytes = b""
    """Extended metadata, which servers before 7.0 append to the value on request."""


@dataclass(frozen=True, slots=True)
class Deletion(DocumentEvent):
    """A tombstone. `datatype` describes `value` (xattrs, if requested), not the old document."""

    datatype: int = 0
    value: bytes = b""
    delete_time: int | None = None
    """None in the form without a time (V1); 0 (unknown) if the source sent the deletion from memory."""
    metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class Expiration(DocumentEvent):
    datatype: int = 0
    value: bytes = b""
    delete_time: int = 0


@dataclass(frozen=True, slots=True)
class Prepare(DocumentEvent):
    """First half of a durable write; not visible until its commit."""

    flags: int = 0
    expiry: int = 0
    lock_time: int = 0
    datatype: int = 0
    value: bytes = b""
    nru: int = 0
    deleted: int = 0
    durability: int = 1


@dataclass(frozen=True, slots=True)
class Commit(PreparedEnd):
    """The write prepared at `prepared_seqno` is visible from `seqno` on."""


@dataclass(frozen=True, slots=True)
class Abort(PreparedEnd):
    """The write prepared at `prepared_seqno` never happened."""


@dataclass(frozen=True, slots=True)
class SystemEvent(StreamEvent):
    """Scopes or collections changed at `seqno`; `system_events.decode_system_event` reads key and value."""

    vbid: int
    seqno: int
    event: int
    version: int
    key: bytes = b""
    value: bytes = b""


@dataclass(frozen=True, slots=True)
class SeqnoAdvanced(StreamEvent):
    """Every change up to `seqno` was sent. A snapshot that ends later stays open."""

    vbid: int
    seqno: int


@dataclass(frozen=True, slots=True)
class OsoSnapshot(StreamEvent):
    """Start (flag 1) or end (flag 2) of a snapshot with unordered seqnos."""

    vbid: int
    flags: int


@dataclass(frozen=True, slots=True)
class StreamEnd(StreamEvent):
    """The stream is over; `reason` is a StreamEndReason, or an unknown newer number."""

    vbid: int
    reason: int


# Messages of a consumer.


@dataclass(frozen=True, slots=True)
class DcpOpen(Event):
    name: bytes
    flags: int
    value: bytes = b""


@dataclass(frozen=True, slots=True)
class DcpControl(Event):
    name: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class StreamRequest(StreamEvent):
    """Request the changes after `start_seqno`. `value` is JSON (filter, uid, sid, purge seqno) or empty."""

    vbid: int
    flags: int
    start_seqno: int
    end_seqno: int
    vbuuid: int
    snap_start_seqno: int
    snap_end_seqno: int
    value: bytes = b""


@dataclass(frozen=True, slots=True)
class CloseStream(StreamEvent):
    vbid: int


@dataclass(frozen=True, slots=True)
class GetFailoverLog(Event):
    vbid: int


@dataclass(frozen=True, slots=True)
class BufferAck(Event):
    """`count` bytes have left the consumer's buffer. The producer does not answer."""

    count: int
    vbid: int = 0


@dataclass(frozen=True, slots=True)
class DcpNoop(Event):
    pass


# Answers.


@dataclass(frozen=True, slots=True)
class Response(Event):
    """An answer; `op` and `opaque` are the request's. The `value` of a refusal may be a JSON error context."""

    op: int
    status: int
    value: bytes = b""
    extras: bytes = b""
    key: bytes = b""
    datatype: int = 0
    cas: int = 0
    request: object | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StreamResponse(Response):
    """Answer to a stream request: accepted with a failover log, rollback with a seqno, or refused with neither."""

    failover_log: FailoverLog = ()
    rollback_seqno: int | None = None


@dataclass(frozen=True, slots=True)
class FailoverLogResponse(Response):
    failover_log: FailoverLog = ()


# Contents of system events.


@dataclass(frozen=True, slots=True)
class CollectionSettings:
    manifest_uid: int
    scope_id: int
    collection_id: int
    name: str
    max_ttl: int | None = None
    history: bool = False
    metered: bool = False
    flush_uid: int = 0
    default_collection_mvs: int = 0


@dataclass(frozen=True, slots=True)
class CollectionCreated(CollectionSettings):
    """A collection was created; or flushed, if the receiver's manifest has it already. `flush_uid` is 0 in versions 0
    and 1 of the system event, which lack it.
    """


@dataclass(frozen=True, slots=True)
class CollectionModified(CollectionSettings):
    pass


@dataclass(frozen=True, slots=True)
class CollectionDropped:
    """A collection was dropped with its documents below the SystemEvent's `seqno`. The source sends no deletions."""

    manifest_uid: int
    scope_id: int
    collection_id: int
    system_collection: bool = False


@dataclass(frozen=True, slots=True)
class ScopeCreated:
    manifest_uid: int
    scope_id: int
    name: str


@dataclass(frozen=True, slots=True)
class ScopeDropped:
    """A scope was dropped; a CollectionDropped is sent for each of its collections."""

    manifest_uid: int
    scope_id: int
    system_scope: bool = False


SystemEventContent = CollectionCreated | CollectionModified | CollectionDropped | ScopeCreated | ScopeDropped

DcpEvent = (
    SnapshotMarker
    | Mutation
    | Deletion
    | Expiration
    | Prepare
    | Commit
    | Abort
    | SystemEvent
    | SeqnoAdvanced
    | OsoSnapshot
    | StreamEnd
    | DcpOpen
    | DcpControl
    | StreamRequest
    | CloseStream
    | GetFailoverLog
    | BufferAck
    | DcpNoop
    | Response
)
