"""Reactions to the end of a stream and to a refused request (docs/protocol.md 2.4 and 2.10), and the delays after them.

Only codes named here stop a vbucket. The caller's jitter (a random number) spreads delays between half and all of the
full delay, because vbuckets that were refused together must not retry together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from mirror.ingest.instructions import RetryReason
from mirror.wire.constants import Status, StreamEndReason, status_name


class Action(Enum):
    RETRY = auto()
    REFRESH_MAP = auto()
    REOPEN = auto()
    """Close the stream that the source reports as open, and request it again after a delay."""
    RECONNECT = auto()
    REFRESH_COLLECTIONS = auto()
    WAIT_FOR_COLLECTIONS = auto()
    """Wait until a selected collection exists."""
    GO_BACK = auto()
    """The source cannot continue from the position. Search common history, or begin at 0 if no snapshot is complete.
    """
    REFUSED = auto()
    """Report the refusal and retry within a minute, because an administrator may grant the privilege."""
    STOP = auto()
    """Report the refusal and stop, because only a person can help."""


@dataclass(frozen=True, slots=True)
class Reaction:
    action: Action
    text: str
    reason: RetryReason = RetryReason.REFUSED_FOR_NOW


_ENDED = RetryReason.STREAM_ENDED
_BUSY = RetryReason.SOURCE_BUSY

STREAM_ENDS: dict[int, Reaction] = {
    StreamEndReason.OK: Reaction(
        Action.RETRY, "the source ended the stream as complete; requesting later seqnos", _ENDED
    ),
    StreamEndReason.CLOSED: Reaction(Action.RETRY, "the source closed the stream; asking again", _ENDED),
    StreamEndReason.STATE_CHANGED: Reaction(
        Action.REFRESH_MAP, "the vbucket changed its state on that node (moved, or rolled back); asking again", _ENDED
    ),
    StreamEndReason.DISCONNECTED: Reaction(Action.RETRY, "the source is disconnecting; asking again", _ENDED),
    StreamEndReason.SLOW: Reaction(
        Action.RETRY,
        "the source gave up on us as too slow; asking again. If it repeats, look at disk and CPU load here",
        _ENDED,
    ),
    StreamEndReason.BACKFILL_FAIL: Reaction(
        Action.RETRY, "the source could not read its own disk; asking again. If it repeats, look at its log", _BUSY
    ),
    StreamEndReason.ROLLBACK: Reaction(Action.RETRY, "the source rolled back; asking where to", _ENDED),
    StreamEndReason.FILTER_EMPTY: Reaction(
        Action.WAIT_FOR_COLLECTIONS,
        "every collection that is mirrored here was dropped at the source; waiting for one of that name to be created",
    ),
    StreamEndReason.LOST_PRIVILEGES: Reaction(
        Action.REFUSED,
        "the user lost the privilege to stream; grant it DcpProducer and DcpStream (role data_dcp_reader)",
    ),
}

REFUSALS: dict[int, Reaction] = {
    Status.KEY_EEXISTS: Reaction(
        Action.REOPEN, "the source says that this stream is open already; closing it and asking again", _ENDED
    ),
    Status.EINVAL: Reaction(
        Action.STOP, "the source calls the stream request invalid: a defect of this program, report it with this line"
    ),
    Status.NOT_MY_VBUCKET: Reaction(
        Action.REFRESH_MAP,
        "that node does not serve the vbucket, or not yet; asking again at the node that the newest map names",
        RetryReason.NOT_MY_VBUCKET,
    ),
    Status.NO_BUCKET: Reaction(Action.RECONNECT, "the bucket is gone from that connection; selecting it again", _BUSY),
    Status.AUTH_STALE: Reaction(Action.RECONNECT, "the login is too old; logging in again"),
    Status.ERANGE: Reaction(Action.GO_BACK, "the source calls the position out of range"),
    Status.ROLLBACK: Reaction(Action.GO_BACK, "the source demands a rollback without saying where to"),
    Status.EACCESS: Reaction(
        Action.REFUSED, "the user may not stream this bucket; grant it DcpProducer and DcpStream (role data_dcp_reader)"
    ),
    Status.ENOMEM: Reaction(Action.RETRY, "the source is short of memory and starts no backfills; asking again", _BUSY),
    Status.EBUSY: Reaction(Action.RETRY, "the source is busy; asking again", _BUSY),
    Status.ETMPFAIL: Reaction(
        Action.RETRY, "the source is warming up, fills this vbucket or cannot read it; asking again", _BUSY
    ),
    Status.NOT_INITIALIZED: Reaction(Action.RETRY, "the source is not initialised yet; asking again", _BUSY),
    Status.BUCKET_PAUSED: Reaction(Action.RETRY, "the bucket is paused; asking again", _BUSY),
    Status.NOT_SUPPORTED: Reaction(
        Action.STOP, "the source streams with xattrs only if noops are on: the control enable_noop was not accepted"
    ),
    Status.UNKNOWN_COLLECTION: Reaction(
        Action.REFRESH_COLLECTIONS,
        "the node does not know a requested collection: its manifest is older, or the collection is dropped; "
        "looking at the manifest, then asking again",
        RetryReason.COLLECTION_UNKNOWN,
    ),
    Status.UNKNOWN_SCOPE: Reaction(
        Action.REFRESH_COLLECTIONS,
        "the node does not know a requested scope: its manifest is older, or the scope is dropped; "
        "looking at the manifest, then asking again",
        RetryReason.COLLECTION_UNKNOWN,
    ),
    Status.DCP_STREAM_ID_INVALID: Reaction(
        Action.STOP, "the source misses a stream id, or refuses one: a defect of this program, report it with this line"
    ),
}


def on_stream_end(reason: int) -> Reaction:
    """Return the reaction to a stream's end; RETRY for an unknown code."""
    known = STREAM_ENDS.get(reason)
    return known or Reaction(Action.RETRY, f"the source ended the stream with code {reason}; asking again", _ENDED)


def on_refusal(status: int, *, filtered: bool = True) -> Reaction:
    """Return the reaction to the refusal of a stream with or without a filter; RETRY, with growing delays, for an
    unknown status.
    """
    if status == Status.UNKNOWN_COLLECTION and not filtered:
        text = "the source is a mirror of a part of the bucket; make this mirror with its --collection or --scope"
        return Reaction(Action.REFUSED, text)
    known = REFUSALS.get(status)
    return known or Reaction(Action.RETRY, f"the source answered {status_name(status)}; asking again")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The full delay doubles with each attempt, from `first_s` up to `cap_s`."""

    first_s: float
    cap_s: float


SCHEDULES: dict[RetryReason, Schedule] = {
    RetryReason.STREAM_ENDED: Schedule(0.05, 10.0),  # short, for low lag: a failover takes less than a second
    RetryReason.SOURCE_BUSY: Schedule(0.2, 10.0),  # warmup and memory pressure last seconds to minutes
    RetryReason.NOT_MY_VBUCKET: Schedule(0.05, 5.0),  # a new map arrives soon
    RetryReason.COLLECTION_UNKNOWN: Schedule(1.0, 60.0),  # manifests spread in seconds, or the collection is gone
    RetryReason.VIOLATION: Schedule(1.0, 300.0),  # a source that breaks the protocol will do so again
    RetryReason.REFUSED_FOR_NOW: Schedule(1.0, 60.0),
}


def delay_s(reason: RetryReason, attempt: int, jitter: float) -> float:
    """Return the delay before retry number `attempt` (0 is the first); `jitter` is clamped to 0..1."""
    schedule = SCHEDULES[reason]
    doublings = min(max(attempt, 0), 32)  # bounds the power: 2**32 times any `first_s` exceeds every cap
    full_s = min(schedule.first_s * 2.0**doublings, schedule.cap_s)
    return full_s * (0.5 + 0.5 * min(max(jitter, 0.0), 1.0))
