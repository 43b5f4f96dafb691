"""The DCP endpoint of one process."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from mirror.clock import Clock
from mirror.config import Settings
from mirror.serve.access.auth import Users
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.bucket.map import ServedMap
from mirror.serve.bucket.mirror_session import MirrorClients
from mirror.serve.dcp.dcp_session import DcpSession, Producers
from mirror.server.endpoint import Endpoint


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
