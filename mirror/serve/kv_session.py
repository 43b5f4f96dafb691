"""What one KV client said about itself, and the parts of an answer: the shape shared by all operations.

Knows features, the reader behind the connection, the chosen bucket; must never know sockets or what an operation does.
Invariants: an answer goes out in the framing that was negotiated (recordings sdk_72_*: with tracing every answer is
flexible and tells how long it took, but for HELLO's own); error contexts are JSON and only for clients that asked for
them; nothing is read for somebody who is nobody.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from mirror.feed.sasl import ScramServer
from mirror.serve.auth import Reader, Users
from mirror.serve.kv_bucket import KvBucket, Refused
from mirror.serve.kv_map import ClusterMap
from mirror.serve.kv_scan_request import Scan
from mirror.wire import codec_kv
from mirror.wire.constants import Datatype, Feature, Status
from mirror.wire.frame import Frame

JSON = int(Datatype.JSON)

READ_ONLY = "this is a read-only mirror: write to the cluster it mirrors"


@dataclass(slots=True)
class Reply:
    """An answer without its addressing."""

    status: int = Status.SUCCESS
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""
    datatype: int = 0
    cas: int = 0
    before: tuple[Reply, ...] = ()
    """Answers to the same request that go before this one."""
    hang_up: bool = False
    """Close the connection when everything was sent."""


@dataclass(frozen=True, slots=True)
class Later:
    """An answer that takes time: asked for in steps of bounded work, with other clients' requests between them."""

    step: Callable[[], Reply | None]
    """The answer, or None: not yet. Raises Refused."""
    pause_s: float = 0.0
    """Between steps."""


@dataclass(slots=True)
class Session:
    """A client."""

    bucket: KvBucket
    users: Users
    cluster_map: ClusterMap
    secret: bytes
    """Of this process; makes the salt of an unknown user steady."""
    plain_allowed: bool
    """The password may come in the clear: nobody else can hear it."""
    reader: Reader | None = None
    features: frozenset[int] = frozenset()
    agent: str = ""
    bucket_selected: bool = False
    scram: tuple[str, ScramServer] | None = None
    failed_logins: int = 0
    scans: dict[bytes, Scan] = field(default_factory=dict, repr=False)
    told_revision: tuple[int, int] | None = None
    """Of the newest map that this client was sent."""
    xerror: bool = field(default=False, repr=False)
    tracing: bool = field(default=False, repr=False)
    collections: bool = field(default=False, repr=False)
    snappy: bool = field(default=False, repr=False)
    json: bool = field(default=False, repr=False)
    unordered: bool = field(default=False, repr=False)

    def grant(self, features: frozenset[int]) -> None:
        """Take a client's features."""
        self.features = features
        self.xerror = Feature.XERROR in features
        self.tracing = Feature.TRACING in features
        self.collections = Feature.COLLECTIONS in features
        self.snappy = Feature.SNAPPY in features
        self.json = Feature.JSON in features
        self.unordered = Feature.UNORDERED_EXECUTION in features

    def refuse(
        self, status: int, context: str = "", *, with_reference: bool = False, manifest_uid: int | None = None
    ) -> Reply:
        """An error answer, with its context where the client takes one."""
        if not self.xerror:
            return Reply(status)
        error: dict[str, str] = {}
        if context:
            error["context"] = context
        if with_reference:
            error["ref"] = str(uuid.uuid4())
        if not error:
            return Reply(status)
        body: dict[str, object] = {"error": error}
        if manifest_uid is not None:
            body["manifest_uid"] = f"{manifest_uid:x}"
        return Reply(status, value=json.dumps(body, separators=(",", ":")).encode(), datatype=JSON)

    def refused(self, error: Refused) -> Reply:
        """The answer to a request that was refused."""
        if error.status == Status.NOT_MY_VBUCKET:
            return self.elsewhere()
        return self.refuse(error.status, error.context, manifest_uid=error.manifest_uid)

    def map_now(self) -> bytes:
        """The map as it stands, for this client to know from now on."""
        self.told_revision = self.cluster_map.revision
        return self.cluster_map.of_bucket if self.bucket_selected else self.cluster_map.of_node

    def take_map(self, cluster_map: ClusterMap) -> Frame | None:
        """Know another map; what to tell the client of it, if it wants to be told."""
        self.cluster_map = cluster_map
        epoch, revision = cluster_map.revision
        name = self.bucket.name.encode() if self.bucket_selected else b""
        if Feature.DUPLEX not in self.features or self.reader is None:
            return None
        if Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF in self.features:
            return codec_kv.clustermap_notification(epoch, revision, name)
        if Feature.CLUSTERMAP_CHANGE_NOTIFICATION in self.features:
            return codec_kv.clustermap_notification(epoch, revision, name, self.map_now())
        return None

    def elsewhere(self) -> Reply:
        """The vbucket is not here; with the map, unless this client has it and wants nothing twice."""
        known = self.told_revision == self.cluster_map.revision
        if known and Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP in self.features:
            return Reply(Status.NOT_MY_VBUCKET)
        self.told_revision = self.cluster_map.revision
        return Reply(Status.NOT_MY_VBUCKET, value=self.cluster_map.of_bucket, datatype=JSON)


Handler = Callable[[Session, Frame], Reply | Later | None]


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the dispatch table."""

    handle: Handler
    before_login: bool = False
