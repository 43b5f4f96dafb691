"""Answers to the requests of a DCP client, and what its own answers mean.

Knows who may open a DCP connection and in which order things are allowed (docs/protocol.md 2.2, recordings 72_i*: 7.2
answers EINVAL and stays where 6.0.5 hangs up); must never know sockets. Invariant: nothing but DCP_OPEN is accepted on
a connection that is not DCP's, and that only once.
"""

from __future__ import annotations

from mirror.sandbox.session import Operation, Reply, Session
from mirror.sandbox.session_requests import failover_log, not_my_vbucket
from mirror.sandbox.users import DCP_PRODUCER
from mirror.wire import codec_dcp
from mirror.wire.constants import DcpOpenFlag, Opcode, Status
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.events import BufferAck, CloseStream, DcpControl, DcpOpen, StreamRequest
from mirror.wire.frame import Frame


def _open(session: Session, frame: Frame) -> Reply | None:
    if session.producer is not None:
        return _out_of_place(session, "The connection is already opened as a DCP connection")
    event = codec_dcp.decode(frame)
    assert isinstance(event, DcpOpen)
    if event.flags & ~session.bucket.profile.open_flags or not event.flags & DcpOpenFlag.PRODUCER:
        return _invalid(session, "Request contains invalid flags")
    session.port.open_producer(event.name.decode(errors="replace"), event.flags)
    return Reply()


def _control(session: Session, frame: Frame) -> Reply | None:
    producer = session.producer
    if producer is None:
        return _not_dcp(session)
    event = codec_dcp.decode(frame)
    assert isinstance(event, DcpControl)
    return Reply(producer.control(event.name, event.value))


def _stream_request(session: Session, frame: Frame) -> Reply | None:
    producer = session.producer
    if producer is None:
        return _not_dcp(session)
    if len(frame.extras) != 48:
        return _invalid(session, "Request must include extras of length 48")
    event = codec_dcp.decode(frame)
    assert isinstance(event, StreamRequest)
    refusal, log = producer.request_stream(event)
    if refusal is None:
        return Reply(value=log, then=producer.wake)
    if refusal.status == Status.NOT_MY_VBUCKET and not refusal.exact:
        return not_my_vbucket(session)
    if refusal.context:
        return session.refuse_collection(refusal.status)
    return Reply(refusal.status, value=refusal.value)


def _close_stream(session: Session, frame: Frame) -> Reply | None:
    producer = session.producer
    if producer is None:
        return _not_dcp(session)
    event = codec_dcp.decode(frame)
    assert isinstance(event, CloseStream)
    status, end = producer.close_stream(event.vbid, event.stream_id)
    return Reply(status, then=lambda: producer.send_counted(end))


def _failover_log(session: Session, frame: Frame) -> Reply | None:
    return failover_log(session, frame) if session.producer is not None else _not_dcp(session)


def _buffer_ack(session: Session, frame: Frame) -> Reply | None:
    producer = session.producer
    if producer is None:
        return _not_dcp(session)
    event = codec_dcp.decode(frame)
    assert isinstance(event, BufferAck)
    producer.acked(event.count)
    return None


def _noop(session: Session, _frame: Frame) -> Reply | None:
    return Reply() if session.producer is not None else _not_dcp(session)


def heard_answer(session: Session, frame: Frame) -> None:
    """The client answered: a noop, or a marker that asked for it. Anything else breaks the protocol."""
    if session.producer is None or frame.opcode not in (Opcode.DCP_NOOP, Opcode.DCP_SNAPSHOT_MARKER):
        raise RemoteProtocolError("an answer to nothing", op=frame.opcode)
    if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
        session.producer.markers_answered.append(frame.opaque)


def _not_dcp(session: Session) -> Reply | None:
    return _out_of_place(session, "The command can only be sent on a DCP connection")


def _invalid(session: Session, context: str) -> Reply:
    """The answer to what no client may ask; some servers then hang up, and none of those says why."""
    if session.bucket.profile.hangs_up:
        return Reply(Status.EINVAL, then=session.port.close)
    return session.refuse(Status.EINVAL, context)


def _out_of_place(session: Session, context: str) -> Reply | None:
    """The same for what is asked at the wrong time: some servers hang up without an answer."""
    if session.bucket.profile.hangs_up:
        session.port.close()
        return None
    return session.refuse(Status.EINVAL, context)


OPERATIONS: dict[int, Operation] = {
    Opcode.DCP_OPEN: Operation(_open, privilege=DCP_PRODUCER),
    Opcode.DCP_CONTROL: Operation(_control),
    Opcode.DCP_STREAM_REQ: Operation(_stream_request),
    Opcode.DCP_CLOSE_STREAM: Operation(_close_stream),
    Opcode.DCP_GET_FAILOVER_LOG: Operation(_failover_log),
    Opcode.DCP_BUFFER_ACK: Operation(_buffer_ack),
    Opcode.DCP_NOOP: Operation(_noop),
}
