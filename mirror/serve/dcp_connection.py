"""One DCP client's connection: a KV client's connection that can become a producer's.

Knows the transport and which dispatch table a request belongs to; what operations do, they know. Invariants: as a DCP
connection it goes on reading while the client does not take what was written, or acknowledgements and close requests
would never be heard; but no more than `ANSWERS_BYTES_MAX` of answers are then held beside a turn of its streams; an
answer to nothing, or an acknowledgement of more than was sent, ends this connection and no other.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import structlog

from mirror.serve.dcp_controls import Negotiated
from mirror.serve.dcp_producer import Counters, DcpProducer
from mirror.serve.dcp_requests import OPERATIONS
from mirror.serve.dcp_watch import Watch
from mirror.serve.kv_bucket import KvBucket
from mirror.serve.kv_connection import Host, KvConnection
from mirror.serve.kv_session import Later, Reply
from mirror.serve.listener import Address
from mirror.wire import codec_dcp
from mirror.wire.constants import Magic, Opcode, Status
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.events import BufferAck
from mirror.wire.frame import Frame

ANSWERS_BYTES_MAX = 1024 * 1024
"""Answers to a client that takes nothing; above it nothing more of it is read."""

_RESPONSES = (int(Magic.RESPONSE), int(Magic.FLEX_RESPONSE))
_ANSWERABLE = (int(Opcode.DCP_NOOP), int(Opcode.DCP_SNAPSHOT_MARKER))
_BUFFER_ACK = int(Opcode.DCP_BUFFER_ACK)

log = structlog.get_logger("dcp")


class DcpHost(Host, Protocol):
    """What a connection asks of the process that it is in."""

    bucket: KvBucket
    watch: Watch
    dcp_counters: Counters

    def named(self, connection: DcpConnection, name: str) -> None:
        """The connection took a name; another one that has it is hung up on."""


class DcpConnection(KvConnection):
    """A client."""

    def __init__(self, host: DcpHost, address: Address) -> None:
        """Not connected yet; `address` is the listener's."""
        super().__init__(host, address)
        self.producer: DcpProducer | None = None
        self._dcp_host = host
        self._answer_bytes = 0
        """Answers written since the client stopped taking."""

    @property
    def now_s(self) -> float:
        """The process's clock."""
        return self._dcp_host.now_s

    def open_producer(self, name: str, negotiated: Negotiated) -> None:
        """From now on this is a DCP connection; another one of that name is closed."""
        host = self._dcp_host
        host.named(self, name)
        self.producer = DcpProducer(self, name, negotiated, host.bucket, host.watch, host.dcp_counters)
        self.producer.failed(self._sending_failed)

    def _sending_failed(self, error: BaseException) -> None:
        log.error("sending failed", name=self.producer.name if self.producer else "", error=repr(error))
        self.abort()

    # -- asyncio

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone."""
        if self.producer is not None:
            self.producer.stop()
        super().connection_lost(error)

    def pause_writing(self) -> None:
        """The client does not take what is sent."""
        if self.producer is None:
            super().pause_writing()
            return
        self._writable.clear()
        self.paused_s = self._host.now_s
        self.unsent_seen = self.unsent_bytes
        self._host.paused(self)

    def resume_writing(self) -> None:
        """The client takes again."""
        self._answer_bytes = 0
        super().resume_writing()

    # -- what the producer asks

    def write(self, data: bytes) -> None:
        """Send now, or as soon as the client takes it."""
        if not (self._ended or self.transport.is_closing()):
            self._host.counters.bytes_sent += len(data)
            self.transport.write(data)

    async def writable(self) -> None:
        """Return when the client takes what was written."""
        await self._writable.wait()

    # -- work

    def _flush(self, out: list[bytes]) -> None:
        if not self._writable.is_set() and self.producer is not None:
            self._answer_bytes += sum(map(len, out))
            if self._answer_bytes > ANSWERS_BYTES_MAX:
                self._paused = True
                self.transport.pause_reading()
        super()._flush(out)

    def _answer(self, frame: Frame) -> bytes:
        if self.producer is not None:
            if frame.opcode == _BUFFER_ACK and frame.magic == Magic.REQUEST and len(frame.extras) == 4:
                event = codec_dcp.decode(frame)
                assert isinstance(event, BufferAck)
                self.producer.acked(event.count)
                return b""
            if frame.magic in _RESPONSES:
                if frame.opcode not in _ANSWERABLE:
                    raise RemoteProtocolError("an answer to nothing", op=frame.opcode)
                return b""
        return super()._answer(frame)

    def _reply(self, frame: Frame) -> Reply | Later | None:
        operation = OPERATIONS.get(frame.opcode)
        if operation is None:
            return super()._reply(frame)
        if self.session.reader is None:
            return self.session.refuse(Status.EACCESS, "log in first")
        return self._guarded(frame, partial(operation, self, frame))
