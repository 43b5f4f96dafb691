"""The KV endpoint of one process."""

from __future__ import annotations

from mirror.clock import Clock
from mirror.config import Settings
from mirror.serve.access.auth import Users
from mirror.serve.bucket import mirror_session
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.bucket.map import ServedMap
from mirror.serve.bucket.mirror_session import MirrorClients
from mirror.serve.kv import gets, scans
from mirror.serve.kv.scans import ScanSession
from mirror.server.endpoint import Endpoint

OPERATIONS = mirror_session.OPERATIONS | scans.OPERATIONS


class KvSession(ScanSession):
    operations = OPERATIONS
    answer_gets = gets.answer_gets


class KvServer(Endpoint):
    def __init__(
        self, bucket: ServedBucket, users: Users, cluster_map: ServedMap, clock: Clock, settings: Settings
    ) -> None:
        super().__init__("kv", MirrorClients(bucket, users, cluster_map, clock, KvSession), clock, settings)
