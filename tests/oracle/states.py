"""What may be said when: the tables of a DCP connection and of each stream on it.

Two rules. Everything that affects what is legal lives in this file. This file does not know whose side we are on: it
knows who *says* a thing (consumer or producer), and both ends walk the same tables, one when it sends and the other
when it receives, so that they cannot disagree.

Theory of operation. A connection is PLAIN (ordinary key-value protocol: HELLO, SASL, SELECT_BUCKET, ...) until the
consumer sends DCP_OPEN; OPENING until the producer answers; then DCP, or PLAIN again if it was refused. DCP_OPEN twice
is not in the table. On a DCP connection each stream request makes a stream, named by the request's opaque: REQUESTED
until the answer; OPEN when it is accepted, gone when it is refused or is answered by a rollback. Messages of a stream
are legal while it is OPEN, and while it is CLOSING (the consumer sent CLOSE_STREAM; what was under way still arrives,
and is acknowledged). STREAM_END ends it. What is not in a table is an error, for free: local for the one who would say
it, remote for the one who hears it. A message with the opaque of a stream that is over is no error: it was under way.

Sources: kv_engine docs/dcp/documentation/commands/*, protocol-flow.md; docs/protocol.md 2.1, 2.2, 2.10; recordings
72_g*, 72_i*.
"""

from __future__ import annotations

from enum import Enum

from mirror.wire.constants import Opcode, Status

__all__ = [
    "ANSWERED",
    "CLOSE_TRIGGERS",
    "CONNECTION_TRANSITIONS",
    "SAID_BY",
    "STREAM_MESSAGES",
    "STREAM_TRANSITIONS",
    "Answered",
    "ConnectionState",
    "Role",
    "StreamState",
    "Trigger",
    "is_dcp",
]


class Role(Enum):
    """Who says a thing. The consumer is the one who connects and asks."""

    CONSUMER = "consumer"
    PRODUCER = "producer"

    @property
    def peer(self) -> Role:
        """The other one."""
        return Role.PRODUCER if self is Role.CONSUMER else Role.CONSUMER


class ConnectionState(Enum):
    """Where a connection is."""

    PLAIN = "plain"
    OPENING = "opening"
    DCP = "dcp"
    CLOSED = "closed"


class StreamState(Enum):
    """Where a stream is."""

    REQUESTED = "requested"
    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


class Trigger(Enum):
    """What moves a connection or a stream."""

    KV = "a message of the ordinary protocol"
    OPEN = "DCP_OPEN"
    OPEN_ACCEPTED = "DCP_OPEN answered with success"
    OPEN_REFUSED = "DCP_OPEN answered with an error"
    DCP = "any other message of DCP"
    LOST = "the bytes ended"

    ACCEPTED = "stream request answered with success"
    REFUSED = "stream request answered with an error or a rollback"
    MESSAGE = "a message of the stream"
    END = "STREAM_END"
    CLOSE = "CLOSE_STREAM"
    CLOSE_ACCEPTED = "CLOSE_STREAM answered with success"
    CLOSE_UNKNOWN = "CLOSE_STREAM answered: no such stream"
    CLOSE_REFUSED = "CLOSE_STREAM answered with another error"


_C, _S, _T = ConnectionState, StreamState, Trigger

CONNECTION_TRANSITIONS: dict[ConnectionState, dict[Trigger, ConnectionState]] = {
    _C.PLAIN: {_T.KV: _C.PLAIN, _T.OPEN: _C.OPENING, _T.LOST: _C.CLOSED},
    _C.OPENING: {_T.KV: _C.OPENING, _T.OPEN_ACCEPTED: _C.DCP, _T.OPEN_REFUSED: _C.PLAIN, _T.LOST: _C.CLOSED},
    _C.DCP: {_T.KV: _C.DCP, _T.DCP: _C.DCP, _T.LOST: _C.CLOSED},
    _C.CLOSED: {},
}

STREAM_TRANSITIONS: dict[StreamState, dict[Trigger, StreamState]] = {
    _S.REQUESTED: {_T.ACCEPTED: _S.OPEN, _T.REFUSED: _S.ENDED},
    _S.OPEN: {_T.MESSAGE: _S.OPEN, _T.END: _S.ENDED, _T.CLOSE: _S.CLOSING},
    _S.CLOSING: {
        _T.MESSAGE: _S.CLOSING,
        _T.END: _S.ENDED,
        _T.CLOSE: _S.CLOSING,
        _T.CLOSE_ACCEPTED: _S.CLOSING,
        _T.CLOSE_UNKNOWN: _S.ENDED,
        _T.CLOSE_REFUSED: _S.OPEN,
    },
    _S.ENDED: {},
}
"""CLOSE_ACCEPTED does not end a stream: with send_stream_end_on_client_close_stream its STREAM_END is still to come,
and without it nobody says when the last message has passed."""

CLOSE_TRIGGERS: dict[int, Trigger] = {
    Status.SUCCESS: _T.CLOSE_ACCEPTED,
    Status.KEY_ENOENT: _T.CLOSE_UNKNOWN,
    Status.DCP_STREAM_NOT_FOUND: _T.CLOSE_UNKNOWN,
    Status.NOT_MY_VBUCKET: _T.CLOSE_UNKNOWN,
}
"""Status of the answer to CLOSE_STREAM -> trigger; any other is CLOSE_REFUSED."""

SAID_BY: dict[int, Role] = {
    Opcode.DCP_OPEN: Role.CONSUMER,
    Opcode.DCP_CLOSE_STREAM: Role.CONSUMER,
    Opcode.DCP_STREAM_REQ: Role.CONSUMER,
    Opcode.DCP_GET_FAILOVER_LOG: Role.CONSUMER,
    Opcode.DCP_BUFFER_ACK: Role.CONSUMER,
    Opcode.DCP_CONTROL: Role.CONSUMER,
    Opcode.DCP_SEQNO_ACKNOWLEDGED: Role.CONSUMER,
    Opcode.DCP_NOOP: Role.PRODUCER,
    Opcode.DCP_STREAM_END: Role.PRODUCER,
    Opcode.DCP_SNAPSHOT_MARKER: Role.PRODUCER,
    Opcode.DCP_MUTATION: Role.PRODUCER,
    Opcode.DCP_DELETION: Role.PRODUCER,
    Opcode.DCP_EXPIRATION: Role.PRODUCER,
    Opcode.DCP_FLUSH: Role.PRODUCER,
    Opcode.DCP_SET_VBUCKET_STATE: Role.PRODUCER,
    Opcode.DCP_SYSTEM_EVENT: Role.PRODUCER,
    Opcode.DCP_PREPARE: Role.PRODUCER,
    Opcode.DCP_COMMIT: Role.PRODUCER,
    Opcode.DCP_ABORT: Role.PRODUCER,
    Opcode.DCP_SEQNO_ADVANCED: Role.PRODUCER,
    Opcode.DCP_OSO_SNAPSHOT: Role.PRODUCER,
    Opcode.DCP_CACHE_TRANSFER: Role.PRODUCER,
    Opcode.DCP_CACHE_TRANSFER_END: Role.PRODUCER,
}
"""Who makes a request of DCP. DCP_ADD_STREAM is said by neither: a cluster manager says it to a node."""

STREAM_MESSAGES: dict[int, Trigger] = {
    Opcode.DCP_STREAM_END: _T.END,
    **dict.fromkeys(
        (
            Opcode.DCP_SNAPSHOT_MARKER,
            Opcode.DCP_MUTATION,
            Opcode.DCP_DELETION,
            Opcode.DCP_EXPIRATION,
            Opcode.DCP_FLUSH,
            Opcode.DCP_SET_VBUCKET_STATE,
            Opcode.DCP_SYSTEM_EVENT,
            Opcode.DCP_PREPARE,
            Opcode.DCP_COMMIT,
            Opcode.DCP_ABORT,
            Opcode.DCP_SEQNO_ADVANCED,
            Opcode.DCP_OSO_SNAPSHOT,
            Opcode.DCP_CACHE_TRANSFER,
            Opcode.DCP_CACHE_TRANSFER_END,
        ),
        _T.MESSAGE,
    ),
}
"""Messages that belong to a stream, by its opaque."""


class Answered(Enum):
    """Whether a request gets an answer."""

    ALWAYS = "always"
    SOMETIMES = "sometimes"
    NEVER = "never"


_QUIET = (
    Opcode.GETQ,
    Opcode.GETKQ,
    Opcode.SETQ,
    Opcode.ADDQ,
    Opcode.REPLACEQ,
    Opcode.DELETEQ,
    Opcode.INCREMENTQ,
    Opcode.DECREMENTQ,
    Opcode.QUITQ,
    Opcode.FLUSHQ,
    Opcode.APPENDQ,
    Opcode.PREPENDQ,
    Opcode.GATQ,
    Opcode.GETQ_META,
    Opcode.SETQ_WITH_META,
    Opcode.ADDQ_WITH_META,
    Opcode.DELQ_WITH_META,
)

ANSWERED: dict[int, Answered] = {
    **dict.fromkeys(map(int, _QUIET), Answered.SOMETIMES),
    **dict.fromkeys(map(int, STREAM_MESSAGES), Answered.SOMETIMES),
    Opcode.DCP_SEQNO_ACKNOWLEDGED: Answered.SOMETIMES,
    Opcode.DCP_BUFFER_ACK: Answered.SOMETIMES,
}
"""Requests that need no answer. SOMETIMES: only an error is answered, or a marker that asks for it. Any other request
is answered always."""


def is_dcp(opcode: int) -> bool:
    """True for the opcodes of DCP."""
    return Opcode.DCP_OPEN <= opcode <= Opcode.DCP_CACHE_TRANSFER_END
