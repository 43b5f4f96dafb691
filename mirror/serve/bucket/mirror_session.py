"""The session of a client of the mirror's KV or DCP port: its login, features and answers about the bucket.

`mirror.server` has the protocol, this module the policy of a mirror. A KV client gets the published seqno both as a
vbucket's current and as its persisted seqno. How much of the data below it a crash can undo depends on the setting
`sync`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from mirror.clock import Clock
from mirror.serve.access.auth import Reader, Users, current
from mirror.serve.access.logins import Logins
from mirror.serve.access.tls import certified_reader
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.bucket.map import ServedMap
from mirror.server import document_requests, requests
from mirror.server.connection import ServedSession
from mirror.server.document_requests import ACCESS_DELETED, REPLICA_READ
from mirror.server.errors import NeedsMemory, Refused
from mirror.server.listener import Address
from mirror.server.session import LoginAttempt, Operation, Reply, Revision, VbucketHistory, failover_statistics
from mirror.server.turns import LARGE_BYTES
from mirror.wire import codec_dcp
from mirror.wire.constants import SUBDOC_CHANGES, Feature, Opcode, Status, VbucketRole
from mirror.wire.frame import Frame
from mirror.wire.sasl import ScramServer
from storage.model import Document
from storage.model import VbucketState as StoredState

T = TypeVar("T")

READ_ONLY = "this is a read-only mirror: write to the cluster it mirrors"

VERSION = b"7.2.0"
"""The version of the Couchbase server that a mirror resembles. Clients choose their requests by it."""

FAILED_LOGINS_MAX = 3
"""Wrong passwords on one connection before it is closed."""

STATISTICS_BYTES = 4096
"""Memory for the statistics of one vbucket."""

GRANTED = frozenset(map(int, (
    Feature.TCP_NODELAY, Feature.MUTATION_SEQNO, Feature.XATTR, Feature.XERROR, Feature.SELECT_BUCKET, Feature.SNAPPY,
    Feature.JSON, Feature.TRACING,
    Feature.ALT_REQUEST, Feature.SYNC_REPLICATION, Feature.COLLECTIONS, Feature.PRESERVE_TTL, Feature.VATTR,
    Feature.SUBDOC_CREATE_AS_DELETED, Feature.SUBDOC_REPLICA_READ, Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
    Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP,
    Feature.RANGE_SCAN_INCLUDE_XATTR,
)))  # fmt: skip
"""Features of Couchbase 7.2.0 that clients request, and newer ones for reading and for sending fewer cluster maps."""

CHANGES = frozenset(map(int, (
    Opcode.SET, Opcode.SETQ, Opcode.ADD, Opcode.ADDQ, Opcode.REPLACE, Opcode.REPLACEQ, Opcode.DELETE, Opcode.DELETEQ,
    Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ, Opcode.APPEND, Opcode.APPENDQ,
    Opcode.PREPEND, Opcode.PREPENDQ, Opcode.FLUSH, Opcode.FLUSHQ, Opcode.TOUCH, Opcode.GAT, Opcode.GATQ,
    Opcode.GET_LOCKED, Opcode.UNLOCK_KEY, Opcode.SET_WITH_META, Opcode.SETQ_WITH_META, Opcode.ADD_WITH_META,
    Opcode.ADDQ_WITH_META, Opcode.DEL_WITH_META, Opcode.DELQ_WITH_META, Opcode.MUTATE_WITH_META,
    Opcode.SUBDOC_MULTI_MUTATION, *SUBDOC_CHANGES,
)))  # fmt: skip
"""Requests that would change a document, its expiry or its lock."""


class MirrorClients:
    """The clients of one endpoint: the users, and the bucket that they read."""

    def __init__(
        self,
        bucket: ServedBucket,
        users: Users,
        cluster_map: ServedMap,
        clock: Clock,
        session_type: Callable[[MirrorClients, Address, str], MirrorSession],
    ) -> None:
        self.bucket = bucket
        self.users = users
        self.cluster_map = cluster_map
        self.logins = Logins(users, clock)
        self._session_type = session_type

    @property
    def failed_login_count(self) -> int:
        return self.logins.failed_count

    def new_session(self, address: Address, peer: str) -> MirrorSession:
        return self._session_type(self, address, peer)

    def reopen_if_replaced(self) -> None:
        self.bucket.reopen_if_replaced()

    def close(self) -> None:
        self.logins.close()


class MirrorSession(ServedSession):
    grantable = GRANTED
    version = VERSION
    needs_bucket = False  # plain memcached clients select no bucket
    lookup_flags = ACCESS_DELETED | REPLICA_READ
    changes = CHANGES
    reader: Reader | None

    def __init__(self, clients: MirrorClients, address: Address, peer: str) -> None:
        super().__init__()
        self.bucket = clients.bucket
        self.bucket_name = clients.bucket.name
        self.users = clients.users
        self.plain_allowed = address.local or address.tls
        self.reader = clients.users.anonymous if address.local else None
        self._failed_login_count = 0
        self._is_revoked = False
        """True if the user was removed or has another password; the next sweep closes the connection."""
        self._clients = clients
        self._peer = peer

    def connected(self) -> None:
        self.reader = certified_reader(self.users, self.connection.transport) or self.reader

    def check_rights(self) -> str:
        if self._is_revoked:
            return "the user may not log in any more"
        if self.reader is not None and (now := current(self.users, self.reader)) != self.reader:
            self._is_revoked, self.reader = now is None, now
            self.rights_changed()
        return ""

    def rights_changed(self) -> None:
        if self.reader is None:
            self.connection.hang_up()

    # -- login

    @property
    def logged_in(self) -> bool:
        return self.reader is not None

    @property
    def known_reader(self) -> Reader:
        """The reader; only for requests that need a login."""
        assert self.reader is not None, "the request needs a login"
        return self.reader

    def password_attempt(self, username: str, password: str) -> LoginAttempt[Reader]:
        return self._clients.logins.by_password(username, password, self._peer)

    def scram_server(self, mechanism: str) -> ScramServer:
        users = self.users
        verifier_of, decoy_of = partial(users.verifier, mechanism), partial(users.decoy, mechanism)
        return ScramServer(mechanism, verifier_of=verifier_of, decoy_of=decoy_of)

    def login_attempt(self, username: str, check: Callable[[], T | None]) -> LoginAttempt[T]:
        return self._clients.logins.begin(username, self._peer, check)

    def log_in(self, username: str) -> None:
        self.reader = self.users.reader(username)

    def log_out(self) -> None:
        self.reader = None

    def login_failed(self) -> bool:
        self._failed_login_count += 1
        return self._failed_login_count >= FAILED_LOGINS_MAX

    # -- the bucket

    @property
    def map_revision(self) -> Revision:
        return self._clients.cluster_map.revision

    def map_text(self, *, with_bucket: bool) -> bytes:
        return self._clients.cluster_map.of_bucket if with_bucket else self._clients.cluster_map.of_node

    @property
    def manifest_uid(self) -> int:
        return self.bucket.manifest().uid

    def manifest_text(self) -> bytes:
        return self.bucket.visible(self.known_reader).text

    def scope_id(self, name: str) -> int | None:
        return self.bucket.visible(self.known_reader).scope_ids.get(name)

    def collection_id(self, scope: str, name: str) -> int | None:
        return self.bucket.visible(self.known_reader).collection_ids.get((scope, name))

    # -- vbuckets

    def need_worker(self, byte_count: int = 0) -> None:
        """Go on only in the worker thread, with this much memory. Raises NeedsMemory."""
        if self.granted_bytes <= LARGE_BYTES:
            raise NeedsMemory(LARGE_BYTES + max(byte_count, 1))

    def all_vb_seqnos(self, state: int, collection_id: int | None) -> Reply:
        self.need_worker()  # may read in every vbucket
        if collection_id is not None:
            self.bucket.check_newest_collection(collection_id, self.known_reader)
        if state not in (VbucketRole.ALIVE, VbucketRole.ACTIVE):
            return Reply()
        return Reply(value=codec_dcp.encode_all_vb_seqnos(_all_vb_seqnos(self.bucket, collection_id)))

    def vbucket_history(self, vbid: int) -> VbucketHistory:
        state = self.bucket.history_state(vbid)
        published = int(state.published_seqno)
        return VbucketHistory(state.failover_log, published, published)

    def statistics(self, group: str, vbid: int | None) -> dict[str, str]:
        bucket = self.bucket
        if not group:
            return {"version": VERSION.decode(), "ep_bucket_type": "persistent", "bucket": bucket.name}
        describe = _STATISTICS.get(group)
        if describe is None:
            raise Refused(Status.KEY_ENOENT)
        if vbid is not None:
            return describe(vbid, bucket.state(vbid))
        self.need_worker(STATISTICS_BYTES * len(bucket.view.vbids))
        found: dict[str, str] = {}
        for each in bucket.view.vbids:
            found |= describe(each, bucket.state(each))
        return found

    # -- documents

    def find_document(self, frame: Frame, wire_key: bytes, *, deletions: bool = False) -> Document:
        """Return the request's document. After SELECT_BUCKET, it must be in the vbucket that the client names."""
        vbid = None
        if self.bucket_selected:
            vbid = frame.vbucket
            if vbid not in self.bucket.view.vbids:
                raise Refused(Status.NOT_MY_VBUCKET)
        document = self.bucket.find(
            wire_key, vbid, self.known_reader, deletions=deletions, bytes_max=self.granted_bytes
        )
        if document is None:
            raise Refused(Status.KEY_ENOENT)
        return document

    def vbuuid_of(self, vbid: int) -> int:
        return self.bucket.served_vbuuid(vbid)


def _all_vb_seqnos(bucket: ServedBucket, collection_id: int | None) -> list[tuple[int, int]]:
    """Return vbuckets with their seqnos. A server leaves out vbuckets that are not active (kv_engine,
    getAllVBucketSequenceNumbers). A mirror leaves out those without a complete first snapshot, those being resynced,
    and those without the collection. With seqno 0 they would look empty, and a client that reads up to the present
    would miss them.
    """
    seqnos = []
    for vbid, published in bucket.published().items():
        newest: int | None = int(published.pub.seqno)
        if published.pub.is_stale or (not newest and not bucket.state(vbid).is_whole):
            continue
        if collection_id is not None:
            newest = bucket.newest_of(bucket.pin(vbid), collection_id)
        if newest is not None:
            seqnos.append((vbid, newest))
    return seqnos


def _state_statistics(vbid: int, _state: StoredState) -> dict[str, str]:
    return {f"vb_{vbid}": "active"}


def _seqno_statistics(vbid: int, state: StoredState) -> dict[str, str]:
    if not state.has_served_log:
        return {}
    published = str(state.published_seqno)
    names = ("high_seqno", "abs_high_seqno", "last_persisted_seqno", "max_visible_seqno", "last_persisted_snap_end")
    return {f"vb_{vbid}:{name}": published for name in names} | {
        f"vb_{vbid}:purge_seqno": str(state.purge_seqno),
        f"vb_{vbid}:uuid": str(state.failover_log.newest_vbuuid),
    }


def _failover_statistics(vbid: int, state: StoredState) -> dict[str, str]:
    return failover_statistics(vbid, state.failover_log) if state.has_served_log else {}


_STATISTICS: dict[str, Callable[[int, StoredState], dict[str, str]]] = {
    "vbucket": _state_statistics,
    "vbucket-seqno": _seqno_statistics,
    "failovers": _failover_statistics,
}


def _refuse_change(_session: MirrorSession, _frame: Frame) -> Reply:
    raise Refused(Status.NOT_SUPPORTED, READ_ONLY)


def _list_buckets(session: MirrorSession, _frame: Frame) -> Reply:
    return Reply(value=session.bucket_name.encode())


OPERATIONS: dict[int, Operation[Any]] = {
    **requests.OPERATIONS,
    **document_requests.OPERATIONS,
    **{opcode: Operation(_refuse_change, checked=False) for opcode in CHANGES},
    int(Opcode.LIST_BUCKETS): Operation(_list_buckets, checked=False),
}
