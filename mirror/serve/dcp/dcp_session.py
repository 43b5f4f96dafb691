"""The session of a DCP client: a mirror's session to which DCP_OPEN adds a producer, which sends streams.

A new connection closes the user's older connection of the same name, never another user's (kv_engine
docs/dcp/documentation/commands/open-connection.md). If a changed users file forbids a stream, the stream ends within a
second.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial

from mirror.clock import Clock
from mirror.config import Settings
from mirror.log import get_logger
from mirror.serve.access.auth import Users
from mirror.serve.bucket import mirror_session
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.bucket.map import ServedMap
from mirror.serve.bucket.mirror_session import MirrorClients, MirrorSession
from mirror.serve.dcp.producer import DcpCounters, DcpProducer
from mirror.serve.watch import Watch
from mirror.server import dcp_requests
from mirror.server.controls import ALL_CONTROLS, ENABLE_EXT_METADATA, ENABLE_VALUE_COMPRESSION, Abilities, Controls
from mirror.server.endpoint import Endpoint
from mirror.server.errors import Refused
from mirror.server.listener import Address
from mirror.server.session import VbucketHistory
from mirror.wire.constants import CONTACT_STATISTIC, DcpOpenFlag, Feature, Status

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

OPERATIONS = mirror_session.OPERATIONS | dcp_requests.OPERATIONS

NOTED_S = 5.0
"""Age at which a message about contact is outdated. The supervisor sends one every second."""

PERSISTENCE_UNKNOWN = (
    "a DCP client waits until writes are persisted at the source, which this mirror does not know: "
    "set publish = persisted, or turn off the client's rollback mitigation (docs/reading.md)"
)

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


class Producers:
    def __init__(self, bucket: ServedBucket) -> None:
        self.watch = Watch(lambda: bucket.view)
        self.counters = DcpCounters()
        self.contact: SourceContact | None = None
        self.warnings: list[str] = []
        self.named: dict[tuple[str, str], DcpSession] = {}
        """By the names of user and connection."""


class DcpSession(MirrorSession):
    grantable = MirrorSession.grantable | {Feature.MIRROR}
    operations = OPERATIONS
    open_flags = OPEN_FLAGS
    producer: DcpProducer | None

    def __init__(self, producers: Producers, clients: MirrorClients, address: Address, peer: str) -> None:
        super().__init__(clients, address, peer)
        self._producers = producers
        self._name: tuple[str, str] | None = None

    def closed(self) -> None:
        if self._name is not None and self._producers.named.get(self._name) is self:
            del self._producers.named[self._name]

    @property
    def may_be_silent(self) -> bool:
        producer = self.producer
        return producer is not None and bool(producer.streams) and not producer.controls.noop_enabled

    def check_rights(self) -> str:
        if self.producer is not None and self.producer.reader != self.reader:  # a new login, or a failed one
            self.producer.permit(self.reader)
        return super().check_rights()

    def rights_changed(self) -> None:
        if self.producer is None:
            super().rights_changed()
        else:
            self.producer.permit(self.reader)

    def statistics(self, group: str, vbid: int | None) -> dict[str, str]:
        contact = self._producers.contact
        if contact is None or group.encode() != CONTACT_STATISTIC:
            return super().statistics(group, vbid)
        return {group: json.dumps(contact.lost_ms())}

    def vbucket_history(self, vbid: int) -> VbucketHistory:
        served = self.bucket.state_for_dcp(vbid)
        persisted_seqno = served.pub.seqno if self.bucket.publishes_persisted else None
        return VbucketHistory(served.failover_log, served.pub.seqno, persisted_seqno)

    def persistence_unknown(self) -> Refused:
        if not self._producers.warnings:  # such a client gets nothing, and may not say why
            log.warning("persistence-unknown", agent=self.agent[:80], message=PERSISTENCE_UNKNOWN)
            self._producers.warnings.append(PERSISTENCE_UNKNOWN)
        return super().persistence_unknown()

    def open_producer(self, name: str, flags: int) -> None:
        """Make this a DCP connection, and close the user's older connection with the same name."""
        if not self.bucket_selected:
            raise Refused(Status.NO_BUCKET)
        shared = self._producers
        self._name = self.known_reader.name, name
        older, shared.named[self._name] = shared.named.get(self._name), self
        if older is not None:
            log.info("connection-name-taken", name=name)
            older.connection.abort()
        controls = Controls(ABILITIES, self.collections, self.snappy, flags)
        worker = self.connection.host.worker
        self.producer = DcpProducer(self.connection, name, controls, self.bucket, shared.watch, shared.counters, worker)
        self.producer.reader = self.known_reader
        self.producer.start(self._sending_failed)

    def _sending_failed(self, error: BaseException) -> None:
        log.error("sending-failed", name=self.producer.name if self.producer else "", error=repr(error))
        self.connection.abort()


class DcpServer(Endpoint):
    def __init__(
        self, bucket: ServedBucket, users: Users, cluster_map: ServedMap, clock: Clock, settings: Settings
    ) -> None:
        self.producers = Producers(bucket)
        new_session = partial(DcpSession, self.producers)
        super().__init__("dcp", MirrorClients(bucket, users, cluster_map, clock, new_session), clock, settings)

    def status(self) -> dict[str, int]:
        own = asdict(self.producers.counters)
        return super().status() | {f"dcp_{name}": number for name, number in own.items()}
