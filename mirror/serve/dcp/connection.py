"""One DCP client's connection: a KV connection to which DCP_OPEN adds a producer, which sends streams.

Knows the transport and the dispatch tables, not the operations. While its client takes no data, a DCP connection:
- reads on, because acknowledgements and close requests must arrive, until `ANSWERS_BYTES_MAX` of answers are unsent;
- lets its streams have one turn at most.

Invariant: a client's answer without a request, or an acknowledgement of more than was sent, ends only this connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from mirror.clock import Clock
from mirror.log import get_logger
from mirror.serve.access.admission import Slot
from mirror.serve.access.auth import Reader
from mirror.serve.dcp.producer import DcpCounters, DcpProducer
from mirror.serve.kv import connection as kv_connection
from mirror.serve.kv.bucket import KvBucket
from mirror.serve.kv.connection import Host, KvConnection
from mirror.serve.kv.session import KvSession
from mirror.serve.listener import Address
from mirror.serve.watch import Watch
from mirror.server import dcp_requests, dispatch
from mirror.server.controls import ALL_CONTROLS, ENABLE_EXT_METADATA, ENABLE_VALUE_COMPRESSION, Abilities, Controls
from mirror.server.errors import Refused
from mirror.server.session import Later, Operation, Reply, VbucketHistory
from mirror.wire.constants import CONTACT_STATISTIC, DcpOpenFlag, Feature, Magic, Status
from mirror.wire.frame import Frame

ANSWERS_BYTES_MAX = 1024 * 1024
"""Bytes of answers held for a client that takes none; above this, the connection stops reading."""

OPEN_FLAGS = int(
    DcpOpenFlag.PRODUCER
    | DcpOpenFlag.INCLUDE_XATTRS
    | DcpOpenFlag.NO_VALUE
    | DcpOpenFlag.INCLUDE_DELETE_TIMES
    | DcpOpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE
    | DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS
)

ABILITIES = Abilities(ALL_CONTROLS - {ENABLE_EXT_METADATA, ENABLE_VALUE_COMPRESSION})
"""The mirror has no change streams or durable writes. A control (setting) that it accepts takes effect, or permits what
this producer never does."""

OPERATIONS: dict[int, Operation[KvSession]] = {**kv_connection.OPERATIONS, **dcp_requests.OPERATIONS}

NOTED_S = 5.0
"""Age at which a message about contact is outdated. The supervisor sends one every second."""

_RESPONSES = (int(Magic.RESPONSE), int(Magic.FLEX_RESPONSE))

log = get_logger("dcp")


class SourceContact:
    """Lost contact with the source, by the supervisor's last note (docs/protocol.md 4.7). An old note: no contact."""

    def __init__(self, vbids: Iterable[int], clock: Clock) -> None:
        self._vbids = tuple(vbids)
        self._clock = clock
        self._noted_s = clock.monotonic()
        self._lost_ms: Mapping[int, int] = dict.fromkeys(self._vbids, 0)

    def note(self, lost_ms: Mapping[int, int]) -> None:
        """Store, for each vbucket without contact, the milliseconds since contact was lost."""
        self._noted_s = self._clock.monotonic()
        self._lost_ms = lost_ms

    def lost_ms(self) -> dict[int, int]:
        """Return, for each vbucket without contact, the milliseconds since contact was lost."""
        age_s = self._clock.monotonic() - self._noted_s
        lost = self._vbids if age_s > NOTED_S else self._lost_ms
        return {vbid: self._lost_ms.get(vbid, 0) + round(age_s * 1000) for vbid in lost}


class DcpHost(Host, Protocol):
    bucket: KvBucket
    watch: Watch
    dcp_counters: DcpCounters
    contact: SourceContact | None

    def named(self, connection: DcpConnection, name: str) -> None: ...

    def persistence_refused(self, agent: str) -> None: ...


class DcpSession(KvSession):
    grantable = KvSession.grantable | {Feature.MIRROR}
    open_flags = OPEN_FLAGS
    connection: DcpConnection

    def statistics(self, group: str, vbid: int | None) -> Iterator[dict[str, str]]:
        contact = self.connection.contact
        if contact is None or group.encode() != CONTACT_STATISTIC:
            yield from super().statistics(group, vbid)
        else:
            yield {group: json.dumps(contact.lost_ms())}

    def vbucket_history(self, vbid: int) -> VbucketHistory:
        served = self.bucket.state_for_dcp(vbid)
        persisted_seqno = served.pub.seqno if self.bucket.publishes_persisted else None
        return VbucketHistory(served.failover_log, served.pub.seqno, persisted_seqno)

    def persistence_unknown(self) -> Refused:
        self.connection.persistence_refused(self.agent)
        return super().persistence_unknown()

    def open_producer(self, name: str, flags: int) -> None:
        """Make this a DCP connection, and close the user's older connection with the same name."""
        if not self.bucket_selected:
            raise Refused(Status.NO_BUCKET)
        controls = Controls(ABILITIES, self.collections, self.snappy, flags)
        self.producer = self.connection.open_producer(name, controls)


class DcpConnection(KvConnection):
    _host: DcpHost

    def __init__(self, host: DcpHost, address: Address, slot: Slot) -> None:
        super().__init__(host, address, slot)
        assert isinstance(self.session, DcpSession)
        self.session.connection = self
        self.producer: DcpProducer | None = None
        self.name_key: tuple[str, str] | None = None
        self._answer_bytes = 0
        """Bytes of answers written since the client stopped taking data."""

    def rights_changed(self, reader: Reader | None) -> None:
        if self.producer is None:
            super().rights_changed(reader)
        else:
            self.producer.permit(reader)

    @property
    def contact(self) -> SourceContact | None:
        return self._host.contact

    def persistence_refused(self, agent: str) -> None:
        self._host.persistence_refused(agent)

    @property
    def silence_s(self) -> float:
        """Seconds since the client last sent data, accurate to a second."""
        return self._host.now_s - self.last_received_s

    def open_producer(self, name: str, controls: Controls) -> DcpProducer:
        host = self._host
        host.named(self, name)
        self.producer = DcpProducer(self, name, controls, host.bucket, host.watch, host.dcp_counters, host.worker)
        self.producer.reader = self.session.known_reader
        self.producer.start(self._sending_failed)
        return self.producer

    def _sending_failed(self, error: BaseException) -> None:
        log.error("sending-failed", name=self.producer.name if self.producer else "", error=repr(error))
        self.abort()

    # -- asyncio

    def connection_lost(self, error: Exception | None) -> None:
        if self.producer is not None:
            self.producer.stop()
        super().connection_lost(error)

    def pause_writing(self) -> None:
        if self.producer is None:
            super().pause_writing()
        else:
            self.outgoing.pause(self._host.now_s)
            self._host.paused(self)

    def resume_writing(self) -> None:
        self._answer_bytes = 0
        super().resume_writing()

    # -- for the producer

    def write(self, data: bytes) -> None:
        if not (self.ended or self.transport.is_closing()):
            self._host.counters.bytes_sent += len(data)
            self.outgoing.write(data)

    async def writable(self) -> None:
        await self.outgoing.writable.wait()

    # -- work

    def _flush(self, out: list[bytes]) -> None:
        if not self.outgoing.writable.is_set() and self.producer is not None:
            self._answer_bytes += sum(map(len, out))
            if self._answer_bytes > ANSWERS_BYTES_MAX:
                self._paused = True
                self.transport.pause_reading()
        super()._flush(out)

    def _answer(self, frame: Frame) -> bytes:
        if self.producer is not None and frame.magic in _RESPONSES:
            dcp_requests.take_answer(self.session, frame)
            return b""
        return super()._answer(frame)

    def _reply(self, frame: Frame) -> Reply | Later | None:
        return self._guarded(frame, partial(dispatch.answer, self.session, OPERATIONS, frame))
