"""Answers to the requests of a DCP client.

Knows in which order things are allowed (docs/protocol.md 2.2; recordings 72_i*: 7.2 answers EINVAL and stays)
and what each operation answers; must never know sockets. Invariants: nothing but DCP_OPEN is accepted on a connection
that is not DCP's, and that only once, after a bucket was selected; a request that breaks a rule is refused, and the
connection stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mirror.serve import kv_requests
from mirror.serve.dcp_controls import OPEN_FLAGS, Negotiated
from mirror.serve.dcp_producer import DcpProducer, RolledBack
from mirror.serve.kv_bucket import Refused
from mirror.serve.kv_session import Later, Reply, Session
from mirror.wire import codec_dcp
from mirror.wire.constants import DcpOpenFlag, Opcode, Status, VbucketState
from mirror.wire.events import BufferAck, CloseStream, DcpControl, DcpOpen, StreamRequest
from mirror.wire.frame import Frame
from storage.errors import StorageError

STREAM_REQUEST_EXTRAS = 48


class DcpClient(Protocol):
    """The connection that a request came by."""

    session: Session
    producer: DcpProducer | None

    def open_producer(self, name: str, negotiated: Negotiated) -> None:
        """From now on this is a DCP connection; another one of that name is closed."""


Handler = Callable[[DcpClient, Frame], "Reply | Later | None"]


def _open(client: DcpClient, frame: Frame) -> Reply:
    session = client.session
    if not session.bucket_selected:
        return session.refuse(Status.NO_BUCKET, "select a bucket first")
    if client.producer is not None:
        return session.refuse(Status.EINVAL, "The connection is already opened as a DCP connection")
    event = codec_dcp.decode(frame)
    assert isinstance(event, DcpOpen)
    if event.flags & ~OPEN_FLAGS or not event.flags & DcpOpenFlag.PRODUCER:
        return session.refuse(Status.EINVAL, "Request contains invalid flags")
    negotiated = Negotiated(session.collections, session.snappy, event.flags)
    client.open_producer(event.name.decode(errors="replace"), negotiated)
    return Reply()


def _control(client: DcpClient, frame: Frame) -> Reply:
    producer = _producer(client)
    event = codec_dcp.decode(frame)
    assert isinstance(event, DcpControl)
    status = producer.control(event.name, event.value)
    return Reply() if status == Status.SUCCESS else client.session.refuse(status)


def _stream_request(client: DcpClient, frame: Frame) -> Reply:
    producer = _producer(client)
    if len(frame.extras) != STREAM_REQUEST_EXTRAS:
        raise Refused(Status.EINVAL, f"Request must include extras of length {STREAM_REQUEST_EXTRAS}")
    event = codec_dcp.decode(frame)
    assert isinstance(event, StreamRequest)
    assert client.session.reader is not None, "nobody gets here without being somebody"
    try:
        log = producer.request_stream(event, client.session.reader)
    except RolledBack as error:
        return Reply(Status.ROLLBACK, value=codec_dcp.encode_rollback_seqno(error.seqno))
    return Reply(value=codec_dcp.encode_failover_log([(int(each.vbuuid), int(each.seqno)) for each in log]))


def _close_stream(client: DcpClient, frame: Frame) -> Reply:
    producer = _producer(client)
    event = codec_dcp.decode(frame)
    assert isinstance(event, CloseStream)
    producer.close_stream(event.vbid, event.stream_id)
    return Reply()


def _failover_log(client: DcpClient, frame: Frame) -> Reply | Later | None:
    _producer(client)
    return kv_requests.OPERATIONS[int(Opcode.GET_FAILOVER_LOG)].handle(client.session, frame)


def _buffer_ack(client: DcpClient, frame: Frame) -> None:
    producer = _producer(client)
    event = codec_dcp.decode(frame)
    assert isinstance(event, BufferAck)
    producer.acked(event.count)


def _noop(client: DcpClient, _frame: Frame) -> Reply:
    _producer(client)
    return Reply()


def _all_vb_seqnos(client: DcpClient, frame: Frame) -> Reply | Later | None:
    """What is published of every vbucket, in one look at each group: clients ask for it every second."""
    wanted, collection_id = codec_dcp.decode_all_vb_seqnos_request(frame)
    if collection_id is not None or wanted not in (VbucketState.ALIVE, VbucketState.ACTIVE):
        return kv_requests.OPERATIONS[int(Opcode.GET_ALL_VB_SEQNOS)].handle(client.session, frame)
    view = client.session.bucket.view
    try:
        seqnos = [(vbid, int(each.seqno)) for vbid, each in zip(view.vbids, view.published(), strict=True)]
    except StorageError as error:
        raise Refused(Status.ETMPFAIL, "the store cannot be read") from error
    return Reply(value=codec_dcp.encode_all_vb_seqnos(seqnos))


def _stat(client: DcpClient, frame: Frame) -> Reply | Later | None:
    if frame.key != b"dcp":
        return kv_requests.OPERATIONS[int(Opcode.STAT)].handle(client.session, frame)
    told = {"ep_dcp_count": str(int(client.producer is not None))}
    if client.producer is not None:
        told |= _stats_of(client.producer)
    return Reply(before=tuple(Reply(key=name.encode(), value=text.encode()) for name, text in told.items()))


def _stats_of(producer: DcpProducer) -> dict[str, str]:
    """Statistics of one's own connection, by the names that the server's have."""
    head = f"eq_dcpq:{producer.name}:"
    negotiated = producer.negotiated
    told = {
        f"{head}type": "producer",
        f"{head}num_streams": str(len(producer.streams)),
        f"{head}max_buffer_bytes": str(producer.window.window_bytes),
        f"{head}unacked_bytes": str(producer.window.outstanding),
        f"{head}noop_enabled": str(negotiated.noop_enabled).lower(),
        f"{head}noop_tx_interval": f"{negotiated.noop_interval_s:g}",
        f"{head}collections_enabled": str(negotiated.collections).lower(),
    }
    for stream in producer.streams.values():
        name = f"{head}stream_{stream.vbid}_"
        told[f"{name}opaque"] = str(stream.opaque)
        told[f"{name}last_read_seqno"] = str(stream.position_seqno)
        told[f"{name}end_seqno"] = str(stream.end_seqno)
        told[f"{name}items_sent"] = str(stream.row_count)
        told[f"{name}snapshots_sent"] = str(stream.snapshot_count)
    return told


def _producer(client: DcpClient) -> DcpProducer:
    if client.producer is None:
        raise Refused(Status.EINVAL, "The command can only be sent on a DCP connection")
    return client.producer


OPERATIONS: dict[int, Handler] = {
    int(Opcode.DCP_OPEN): _open,
    int(Opcode.DCP_CONTROL): _control,
    int(Opcode.DCP_STREAM_REQ): _stream_request,
    int(Opcode.DCP_CLOSE_STREAM): _close_stream,
    int(Opcode.DCP_GET_FAILOVER_LOG): _failover_log,
    int(Opcode.DCP_BUFFER_ACK): _buffer_ack,
    int(Opcode.DCP_NOOP): _noop,
    int(Opcode.GET_ALL_VB_SEQNOS): _all_vb_seqnos,
    int(Opcode.STAT): _stat,
}
