"""A client's session at a node of the sandbox: its login, and the data that answers need."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Protocol

from mirror.sandbox.data.bucket import Bucket, User
from mirror.sandbox.data.item import Item
from mirror.sandbox.data.sandbox_vbucket import Vbucket
from mirror.server.document_requests import DocumentSession
from mirror.server.errors import Refused, unknown_collection
from mirror.server.session import (
    SYSTEM_COLLECTIONS,
    LoginAttempt,
    Reply,
    Revision,
    VbucketHistory,
    failover_statistics,
)
from mirror.wire import codec_dcp
from mirror.wire.constants import Feature, Opcode, Status, VbucketRole
from mirror.wire.frame import Frame
from mirror.wire.keys import decode_leb128
from mirror.wire.sasl import ScramServer
from storage.model import Document, Kind, Seqno


class SessionPort(Protocol):
    @property
    def bucket(self) -> Bucket: ...

    @property
    def node_number(self) -> int: ...

    def open_producer(self, name: str, flags: int) -> None: ...


def document_of(vbid: int, item: Item) -> Document:
    return Document(
        vbid,
        item.collection_id,
        item.key[decode_leb128(item.key)[1] :],
        Seqno(item.seqno),
        item.rev_seqno,
        item.cas,
        item.flags,
        item.expiry,
        item.datatype,
        item.value,
        Kind.DELETION if item.deleted else Kind.MUTATION,
    )


class SandboxSession(DocumentSession):
    def __init__(self, port: SessionPort) -> None:
        super().__init__()
        self.port = port
        self.user: User | None = None
        self.certified = False
        """True if the user logged in by certificate, not by password."""
        profile = port.bucket.profile
        self.bucket_name = port.bucket.name
        self.grantable = profile.features
        self.version = profile.version
        self.map_needs_bucket = self.hangs_up = not profile.since(6, 5)
        if not profile.collections:
            self.no_collections_status = Status.NOT_SUPPORTED if profile.since(6, 5) else Status.UNKNOWN_COMMAND
        self.open_flags = profile.open_flags

    @property
    def bucket(self) -> Bucket:
        return self.port.bucket

    # -- login and privileges

    @property
    def logged_in(self) -> bool:
        return self.user is not None

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Empty if the client logged in by certificate, because kv_engine then accepts no SASL."""
        return () if self.certified else super().mechanisms

    def password_attempt(self, username: str, password: str) -> LoginAttempt[bool]:
        return self.login_attempt(username, lambda: self.bucket.users.password_of(username) == password or None)

    def scram_server(self, mechanism: str) -> ScramServer:
        return ScramServer(mechanism, self.bucket.users.password_of)

    def log_in(self, username: str) -> None:
        self.user = self.bucket.users.by_name[username]

    def log_out(self) -> None:
        self.user = None

    def may(self, privilege: str) -> bool:
        return self.user is not None and privilege in self.user.privileges

    @property
    def sees_system(self) -> bool:
        return not self.bucket.profile.system_collections or self.may(SYSTEM_COLLECTIONS)

    # -- answers

    def refused(self, error: Refused) -> Reply:
        """Return the answer to a refused request; for an unknown collection, with the manifest uid."""
        if error.status == Status.UNKNOWN_COLLECTION and not (error.bare or error.context):
            error = unknown_collection(self.manifest_uid)
        return super().refused(error)

    def error_reference(self) -> str:
        """Return an id from the bucket's random generator: the same seed gives the same ids."""
        return str(uuid.UUID(int=self.bucket.rng.getrandbits(128)))

    # -- the bucket

    @property
    def map_revision(self) -> Revision:
        return self.bucket.map.epoch, self.bucket.map.rev

    def map_text(self, *, with_bucket: bool) -> bytes:
        return self.bucket.map.to_json(self.port.node_number, with_bucket=with_bucket)

    @property
    def manifest_uid(self) -> int:
        return self.bucket.manifest.uid

    def manifest_text(self) -> bytes:
        return self.bucket.manifest.to_json(with_system=self.sees_system)

    def scope_id(self, name: str) -> int | None:
        manifest = self.bucket.manifest
        found = manifest.scope_id(name)
        return None if found in manifest.system_scopes and not self.sees_system else found

    def collection_id(self, scope: str, name: str) -> int | None:
        manifest = self.bucket.manifest
        entry = manifest.collection(f"{scope}.{name}")
        if entry is None or (entry.collection_id in manifest.system_collections and not self.sees_system):
            return None
        return entry.collection_id

    # -- vbuckets

    def state_of(self, vbid: int) -> VbucketRole:
        return self.bucket.state_on(vbid, self.port.node_number)

    def active_vbucket(self, vbid: int) -> Vbucket:
        if self.state_of(vbid) != VbucketRole.ACTIVE:
            raise Refused(Status.NOT_MY_VBUCKET)
        return self.bucket.vbuckets[vbid]

    def all_vb_seqnos(self, state: int, collection_id: int | None) -> Reply:
        bucket = self.bucket
        if collection_id is not None and collection_id not in bucket.manifest.collections:
            raise unknown_collection(self.manifest_uid)
        states = {VbucketRole.ACTIVE, VbucketRole.REPLICA, VbucketRole.PENDING}
        if state != VbucketRole.ALIVE:
            states = {VbucketRole(state)}
        seqnos = [
            (vbid, self._high_seqno(vbucket, collection_id))
            for vbid, vbucket in enumerate(bucket.vbuckets)
            if self.state_of(vbid) in states
        ]
        return Reply(value=codec_dcp.encode_all_vb_seqnos(seqnos))

    def _high_seqno(self, vbucket: Vbucket, collection_id: int | None) -> int:
        if collection_id is not None:
            return vbucket.collection_high_seqno.get(collection_id, 0)
        return vbucket.high_seqno if Feature.SYNC_REPLICATION in self.features else vbucket.max_visible_seqno

    def vbucket_history(self, vbid: int) -> VbucketHistory:
        if self.state_of(vbid) == VbucketRole.DEAD:
            raise Refused(Status.NOT_MY_VBUCKET)
        vbucket = self.bucket.vbuckets[vbid]
        return VbucketHistory(
            vbucket.failover_log, vbucket.high_seqno, self.bucket.persisted_seqno(vbid, self.port.node_number)
        )

    def statistics(self, group: str, vbid: int | None) -> dict[str, str]:
        if not group:
            count = str(self.bucket.document_count)
            return {"curr_items": count, "version": self.version.decode(), "ep_bucket_type": "ephemeral"}
        describe = _STATISTICS.get(group)
        if describe is None:
            raise Refused(Status.KEY_ENOENT)
        found: dict[str, str] = {}
        for each in range(len(self.bucket.vbuckets)) if vbid is None else [vbid]:
            state = self.state_of(each)
            if state != VbucketRole.DEAD:
                found |= describe(self, each, state)
            elif vbid is not None:
                raise Refused(Status.NOT_MY_VBUCKET)
        return found

    # -- documents

    def find_document(self, frame: Frame, wire_key: bytes, *, deletions: bool = False) -> Document:
        required = VbucketRole.REPLICA if frame.opcode == Opcode.GET_REPLICA else VbucketRole.ACTIVE
        if self.state_of(frame.vbucket) != required:
            raise Refused(Status.NOT_MY_VBUCKET)
        vbucket = self.bucket.vbuckets[frame.vbucket]
        documents = self.bucket.documents
        item = documents.find_any(vbucket, wire_key) if deletions else documents.find(vbucket, wire_key)
        if item is None:
            raise Refused(Status.KEY_ENOENT)
        return document_of(frame.vbucket, item)

    def vbuuid_of(self, vbid: int) -> int:
        return self.bucket.vbuckets[vbid].vbuuid

    def open_producer(self, name: str, flags: int) -> None:
        self.port.open_producer(name, flags)


def _state_statistics(_session: SandboxSession, vbid: int, state: VbucketRole) -> dict[str, str]:
    return {f"vb_{vbid}": state.name.lower()}


def _seqno_statistics(session: SandboxSession, vbid: int, _state: VbucketRole) -> dict[str, str]:
    vbucket = session.bucket.vbuckets[vbid]
    high = str(vbucket.high_seqno)
    names = ("high_seqno", "abs_high_seqno", "last_persisted_seqno")
    return {f"vb_{vbid}:{name}": high for name in names} | {
        f"vb_{vbid}:max_visible_seqno": str(vbucket.max_visible_seqno),
        f"vb_{vbid}:purge_seqno": str(vbucket.purge_seqno),
        f"vb_{vbid}:uuid": str(vbucket.vbuuid),
    }


def _failover_statistics(session: SandboxSession, vbid: int, _state: VbucketRole) -> dict[str, str]:
    return failover_statistics(vbid, session.vbucket_history(vbid).failover_log)


_STATISTICS: dict[str, Callable[[SandboxSession, int, VbucketRole], dict[str, str]]] = {
    "vbucket": _state_statistics,
    "vbucket-seqno": _seqno_statistics,
    "failovers": _failover_statistics,
}
