"""The rules of document operations: CAS, revision numbers, expiry and durable writes (kv_engine
docs/BinaryProtocol.md, docs/protocol.md 2.11).

A new CAS is above every earlier CAS in the vbucket. The next operation on an expired document first writes its
expiration.
"""

from __future__ import annotations

from enum import Enum

from mirror.clock import Clock
from mirror.document import values
from mirror.sandbox.data.item import NRU, EventItem, Item, mutation_frame
from mirror.sandbox.data.manifest import BucketManifest
from mirror.sandbox.data.sandbox_vbucket import Vbucket, system_key
from mirror.server.errors import Refused
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import Status, SystemEventId
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.keys import decode_leb128
from mirror.wire.system_events import encode_system_event

RELATIVE_EXPIRY_MAX = 30 * 24 * 3600
"""Expiry times up to this are seconds from now; larger times are Unix times."""


class Mode(Enum):
    SET = 1
    ADD = 2
    REPLACE = 3


class DocumentError(Refused):
    def __init__(self, status: Status) -> None:
        super().__init__(status)

    def __str__(self) -> str:
        return Status(self.status).name


class SandboxDocuments:
    def __init__(self, clock: Clock, manifest: BucketManifest) -> None:
        self._clock = clock
        self._manifest = manifest

    def now(self) -> int:
        return self._clock.wall_ms() // 1000

    def next_cas(self, vbucket: Vbucket) -> int:
        return vbucket.next_cas(self._clock.wall_ms() * 1_000_000)

    # --- reading

    def find(self, vbucket: Vbucket, key: bytes) -> Item | None:
        """Return the document of a wire key (collection id and key); None if it is absent, deleted or expired."""
        item = self.find_any(vbucket, key)
        return None if item is None or item.deleted else item

    def find_any(self, vbucket: Vbucket, key: bytes) -> Item | None:
        item = vbucket.newest[self._collection_of(vbucket, key)].get(key)
        if item is not None and self._is_due(vbucket, item):
            return self.expire(vbucket, item)
        return item

    def get(self, vbucket: Vbucket, key: bytes) -> Item:
        item = self.find(vbucket, key)
        if item is None:
            raise DocumentError(Status.KEY_ENOENT)
        return item

    # --- changing

    def store(
        self,
        vbucket: Vbucket,
        key: bytes,
        value: bytes,
        *,
        datatype: int = 0,
        flags: int = 0,
        expiry: int = 0,
        cas: int = 0,
        mode: Mode = Mode.SET,
        preserve_expiry: bool = False,
        durability: int = 0,
    ) -> Item:
        old = self.find_any(vbucket, key)
        alive = old is not None and not old.deleted
        _check_free(vbucket, key)
        if mode is Mode.ADD and alive:
            raise DocumentError(Status.KEY_EEXISTS)
        if not alive and (mode is Mode.REPLACE or cas):
            raise DocumentError(Status.KEY_ENOENT)
        if old is not None and alive:
            self._check_cas(vbucket, old, cas)
        keep = preserve_expiry and old is not None and alive
        expiry = old.expiry if keep and old is not None else self._absolute_expiry(key, expiry)
        rev_seqno = _next_rev_seqno(vbucket, old)
        if durability:
            self._prepare(vbucket, key, value, rev_seqno, datatype, flags, expiry, durability)
            return self._commit_at_once(vbucket, key)
        seqno, new_cas = vbucket.high_seqno + 1, self.next_cas(vbucket)
        frame = mutation_frame(
            vbucket.vbid, key, seqno, rev_seqno, new_cas, value, flags=flags, expiry=expiry, datatype=datatype
        )
        return vbucket.append(Item(seqno, key, frame))

    def remove(
        self, vbucket: Vbucket, key: bytes, *, cas: int = 0, durability: int = 0, leave: tuple[bytes, int] | None = None
    ) -> Item:
        """Delete a document. The tombstone has the document's system xattrs, or the value and datatype in `leave`."""
        if durability:
            self.prepare_removal(vbucket, key, cas=cas, level=durability)
            return self._commit_at_once(vbucket, key)
        old = self.get(vbucket, key)
        self._check_cas(vbucket, old, cas)
        return self._bury(vbucket, old, ev.Deletion, leave)

    def expire(self, vbucket: Vbucket, old: Item) -> Item:
        _check_free(vbucket, old.key)
        return self._bury(vbucket, old, ev.Expiration)

    def expire_all(self, vbucket: Vbucket) -> int:
        due = [item for items in vbucket.newest.values() for item in items.values() if self._is_due(vbucket, item)]
        for item in due:
            self.expire(vbucket, item)
        return len(due)

    # --- durable writes in their steps

    def prepare(
        self, vbucket: Vbucket, key: bytes, value: bytes, *, datatype: int = 0, flags: int = 0, level: int = 1
    ) -> Item:
        """Begin a durable write. Until it ends, readers see the old document, and writers are refused."""
        old = self.find_any(vbucket, key)
        _check_free(vbucket, key)
        expiry = self._absolute_expiry(key, 0)
        return self._prepare(vbucket, key, value, _next_rev_seqno(vbucket, old), datatype, flags, expiry, level)

    def prepare_removal(self, vbucket: Vbucket, key: bytes, *, cas: int = 0, level: int = 1) -> Item:
        old = self.get(vbucket, key)
        self._check_cas(vbucket, old, cas)
        value, datatype = values.tombstone_value(old.value, old.datatype)
        return self._prepare(vbucket, key, value, old.rev_seqno + 1, datatype, 0, 0, level, deleted=True)

    def commit(self, vbucket: Vbucket, key: bytes) -> Item:
        prepare = _pending(vbucket, key)
        seqno = vbucket.high_seqno + 1
        head = (vbucket.vbid, key, seqno, prepare.rev_seqno, prepare.cas)
        if prepare.deletes:
            deletion = ev.Deletion(*head, prepare.datatype, prepare.value, delete_time=self.now())
            frame = codec_dcp.encode(deletion)
        else:
            frame = mutation_frame(
                *head, prepare.value, flags=prepare.flags, expiry=prepare.expiry, datatype=prepare.datatype
            )
        return vbucket.append(Item(seqno, key, frame))

    def abort(self, vbucket: Vbucket, key: bytes) -> Item:
        """End a durable write without effect, as if too few replicas had taken it."""
        prepare, seqno = _pending(vbucket, key), vbucket.high_seqno + 1
        return vbucket.append(Item(seqno, key, codec_dcp.encode(ev.Abort(vbucket.vbid, key, prepare.seqno, seqno))))

    def apply(self, vbucket: Vbucket, changes: list[ev.SystemEventContent]) -> None:
        for content in changes:
            about_scope = isinstance(content, ev.ScopeCreated | ev.ScopeDropped)
            id_ = content.scope_id if isinstance(content, ev.ScopeCreated | ev.ScopeDropped) else content.collection_id
            modified = isinstance(content, ev.CollectionModified)
            seqno = vbucket.high_seqno + 1
            event = encode_system_event(content, vbid=vbucket.vbid, seqno=seqno, version=2 if modified else 1)
            key = system_key(about_scope=about_scope, id_=id_, modified=modified)
            if not about_scope:
                kept = isinstance(content, ev.CollectionSettings) and content.history
                (vbucket.without_history.discard if kept else vbucket.without_history.add)(id_)
            item = EventItem(seqno, key, codec_dcp.encode(event), content)
            vbucket.append_event(item, SystemEventId(event.event), id_, new_checkpoint=not about_scope)

    # --- rules

    def _prepare(
        self,
        vbucket: Vbucket,
        key: bytes,
        value: bytes,
        rev_seqno: int,
        datatype: int,
        flags: int,
        expiry: int,
        level: int,
        *,
        deleted: bool = False,
    ) -> Item:
        seqno, cas = vbucket.high_seqno + 1, self.next_cas(vbucket)
        lock_time = 0
        prepare = ev.Prepare(
            vbucket.vbid, key, seqno, rev_seqno, cas, flags, expiry, lock_time, datatype, value, NRU, deleted, level
        )
        return vbucket.append(Item(seqno, key, codec_dcp.encode(prepare)))

    def _commit_at_once(self, vbucket: Vbucket, key: bytes) -> Item:
        """Commit the prepare that was just made. A failover loses both changes or neither."""
        begun = vbucket.high_seqno
        item = self.commit(vbucket, key)
        vbucket.lose_together(begun)
        return item

    def _is_due(self, vbucket: Vbucket, item: Item) -> bool:
        return not item.deleted and 0 < item.expiry <= self.now() and item.key not in vbucket.prepared

    def _bury(
        self,
        vbucket: Vbucket,
        old: Item,
        kind: type[ev.Deletion | ev.Expiration],
        leave: tuple[bytes, int] | None = None,
    ) -> Item:
        seqno, cas = vbucket.high_seqno + 1, self.next_cas(vbucket)
        value, datatype = values.tombstone_value(old.value, old.datatype) if leave is None else leave
        rev_seqno = old.rev_seqno + 1
        event = kind(vbucket.vbid, old.key, seqno, rev_seqno, cas, datatype, value, delete_time=self.now())
        return vbucket.append(Item(seqno, old.key, codec_dcp.encode(event)))

    def _collection_of(self, vbucket: Vbucket, key: bytes) -> int:
        try:
            collection_id, length = decode_leb128(key)
        except RemoteProtocolError:
            raise DocumentError(Status.EINVAL) from None
        if collection_id not in vbucket.newest:
            raise DocumentError(Status.UNKNOWN_COLLECTION)
        if length == len(key):
            raise DocumentError(Status.EINVAL)
        return collection_id

    def _absolute_expiry(self, key: bytes, expiry: int) -> int:
        now = self.now()
        if 0 < expiry <= RELATIVE_EXPIRY_MAX:
            expiry += now
        entry = self._manifest.collections.get(decode_leb128(key)[0])
        if entry is not None and entry.max_ttl:
            expiry = min(expiry, now + entry.max_ttl) if expiry else now + entry.max_ttl
        return expiry

    def _check_cas(self, vbucket: Vbucket, old: Item, cas: int) -> None:
        _check_free(vbucket, old.key)
        if cas and cas != old.cas:
            raise DocumentError(Status.KEY_EEXISTS)


def _pending(vbucket: Vbucket, key: bytes) -> Item:
    prepare = vbucket.prepared.get(key)
    if prepare is None:
        raise DocumentError(Status.KEY_ENOENT)
    return prepare


def _check_free(vbucket: Vbucket, key: bytes) -> None:
    if key in vbucket.prepared:
        raise DocumentError(Status.SYNC_WRITE_IN_PROGRESS)


def _next_rev_seqno(vbucket: Vbucket, old: Item | None) -> int:
    return vbucket.rev_seqno_max_deleted + 1 if old is None else old.rev_seqno + 1
