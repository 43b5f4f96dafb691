"""Answers to the requests of a DCP client, and the handling of the client's own answers.

A connection accepts DCP_OPEN once, and other DCP requests only after it. In any other order they are refused with
EINVAL, and the connection stays (7.2 as recorded). Servers of 6.0 and older hang up (`Session.hangs_up`).
"""

from __future__ import annotations

from typing import Any, TypeVar

from mirror.server.errors import OutOfPlace, Refused
from mirror.server.producer import Producer
from mirror.server.requests import failover_log
from mirror.server.session import DCP_PRODUCER, Handler, Operation, Reply, Session
from mirror.wire import codec_dcp
from mirror.wire.constants import DcpOpenFlag, Opcode, Status
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.events import BufferAck, CloseStream, DcpControl, DcpOpen, StreamRequest
from mirror.wire.frame import Frame

STREAM_REQUEST_EXTRAS_BYTES = 48

_NOT_DCP = "The command can only be sent on a DCP connection"
_OPENED_BEFORE = "The connection is already opened as a DCP connection"
T = TypeVar("T")

_ANSWERABLE = (int(Opcode.DCP_NOOP), int(Opcode.DCP_SNAPSHOT_MARKER))


def _open(session: Session, frame: Frame) -> Reply:
    if session.producer is not None:
        raise _out_of_place(session, _OPENED_BEFORE)
    event = _event(frame, DcpOpen)
    if event.flags & ~session.open_flags or not event.flags & DcpOpenFlag.PRODUCER:
        return _invalid(session, "Request contains invalid flags")
    session.open_producer(event.name.decode(errors="replace"), event.flags)
    return Reply()


def _control(session: Session, frame: Frame) -> Reply:
    producer, event = _producer(session), _event(frame, DcpControl)
    return Reply(producer.control(event.name, event.value))


def _stream_request(session: Session, frame: Frame) -> Reply:
    producer = _producer(session)
    if len(frame.extras) != STREAM_REQUEST_EXTRAS_BYTES:
        return _invalid(session, f"Request must include extras of length {STREAM_REQUEST_EXTRAS_BYTES}")
    log = producer.request_stream(_event(frame, StreamRequest))
    return Reply(value=codec_dcp.encode_failover_log(log))


def _close_stream(session: Session, frame: Frame) -> Reply:
    producer, event = _producer(session), _event(frame, CloseStream)
    producer.close_stream(event.vbid, event.stream_id)
    return Reply()


def _failover_log(session: Session, frame: Frame) -> Reply:
    _producer(session)
    return failover_log(session, frame)


def _buffer_ack(session: Session, frame: Frame) -> None:
    _producer(session).acked(_event(frame, BufferAck).count)


def _noop(session: Session, _frame: Frame) -> Reply:
    _producer(session)
    return Reply()


def take_answer(session: Session, frame: Frame) -> None:
    """Handle a client's answer to a noop or snapshot marker. Raises RemoteProtocolError for other answers."""
    if session.producer is None or frame.opcode not in _ANSWERABLE:
        raise RemoteProtocolError("an answer without a request", op=frame.opcode)
    if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
        session.producer.marker_answered(frame.opaque)


def _producer(session: Session) -> Producer[Any, Any]:
    if session.producer is None:
        raise _out_of_place(session, _NOT_DCP)
    return session.producer


def _event(frame: Frame, kind: type[T]) -> T:
    event = codec_dcp.decode(frame)
    assert isinstance(event, kind)
    return event


def _out_of_place(session: Session, context: str) -> Exception:
    return OutOfPlace(context) if session.hangs_up else Refused(Status.EINVAL, context)


def _invalid(session: Session, context: str) -> Reply:
    """Refuse an invalid request, and give the reason. With `hangs_up`, hang up without a reason."""
    return Reply(Status.EINVAL, hang_up=True) if session.hangs_up else session.refuse(Status.EINVAL, context)


_HANDLERS: dict[int, Handler[Session]] = {
    Opcode.DCP_CONTROL: _control,
    Opcode.DCP_STREAM_REQ: _stream_request,
    Opcode.DCP_CLOSE_STREAM: _close_stream,
    Opcode.DCP_GET_FAILOVER_LOG: _failover_log,
    Opcode.DCP_BUFFER_ACK: _buffer_ack,
    Opcode.DCP_NOOP: _noop,
}

OPERATIONS: dict[int, Operation[Session]] = {
    int(Opcode.DCP_OPEN): Operation(_open, privilege=DCP_PRODUCER, checked=False),
    **{int(opcode): Operation(handler, checked=False) for opcode, handler in _HANDLERS.items()},
}
