"""The bucket: its vbuckets, manifest, users and map, with methods that change its data.

Replicas share the data of the active vbucket, so they never lag.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any
from zlib import crc32

from mirror.clock import Clock
from mirror.document import values
from mirror.sandbox.data.clustermap import SandboxMap
from mirror.sandbox.data.documents import SandboxDocuments
from mirror.sandbox.data.item import EventItem, Item
from mirror.sandbox.data.manifest import BucketManifest, ManifestError
from mirror.sandbox.data.profile import DEFAULT_PROFILE, PROFILES, Profile
from mirror.sandbox.data.sandbox_vbucket import Vbucket
from mirror.sandbox.data.streams import Sent, StreamFaults, StreamTuning
from mirror.server.cluster_config import CAPABILITIES, NOWHERE
from mirror.server.session import ALL_PRIVILEGES, certified_name
from mirror.wire.constants import VbucketRole
from mirror.wire.events import SystemEventContent
from mirror.wire.keys import encode_leb128

DEFAULT_COLLECTION = "_default._default"

Value = bytes | str | dict[str, object] | list[object]


def vbucket_of(key: bytes, vbucket_count: int) -> int:
    return (crc32(key) >> 16 & 0x7FFF) % vbucket_count


@dataclass(slots=True)
class User:
    name: str
    password: str
    privileges: frozenset[str] = ALL_PRIVILEGES


@dataclass(slots=True)
class SandboxUsers:
    """A new password counts from the next login, new privileges from the next operation."""

    by_name: dict[str, User] = field(default_factory=dict)

    def add(self, name: str, password: str, privileges: frozenset[str] = ALL_PRIVILEGES) -> User:
        user = self.by_name.setdefault(name, User(name, password))
        user.password, user.privileges = password, privileges
        return user

    def of_certificate(self, certificate: Mapping[str, Any]) -> User | None:
        return self.by_name.get(certified_name(certificate) or "")

    def password_of(self, name: str) -> str | None:
        user = self.by_name.get(name)
        return None if user is None else user.password


class Bucket:
    def __init__(
        self,
        name: str,
        *,
        vbuckets: int,
        clock: Clock,
        rng: Random,
        replicas: int = 0,
        checkpoint_items_max: int,
        checkpoints_kept: int,
        profile: Profile = PROFILES[DEFAULT_PROFILE],
        keeps_history: bool = False,
        bounded: bool = False,
    ) -> None:
        """Make an empty bucket without nodes. With `keeps_history` it keeps every version, as the engine Magma does."""
        self.name = name
        self.profile = profile
        self.keeps_history = keeps_history
        self.tuning = StreamTuning()
        self.rng = rng
        self.clock = clock
        self.users = SandboxUsers()
        self.manifest = BucketManifest(history_default=keeps_history)
        self.documents = SandboxDocuments(clock, self.manifest)
        self._new_vbucket = partial(
            Vbucket,
            rng=rng,
            checkpoint_items_max=checkpoint_items_max,
            checkpoints_kept=checkpoints_kept,
            keeps_history=keeps_history,
            bounded=bounded,
        )
        self.vbuckets = list(map(self._new_vbucket, range(vbuckets)))
        self.map = SandboxMap(
            name,
            f"{rng.getrandbits(128):032x}",
            [NOWHERE] * vbuckets,
            [[NOWHERE] * replicas for _ in range(vbuckets)],
            sends_epoch=profile.since(7, 0),  # before, maps were ordered by revision alone
            capabilities=[name for name in CAPABILITIES if profile.has_capability(name)],
        )
        self.states: dict[int, VbucketRole] = {}
        """vbid -> state of the vbucket on its active node, if a test set it (dead, replica, pending)."""
        self.persistence_holds: dict[tuple[int, int], int] = {}
        """(vbid, node number) -> highest persisted seqno of the node's copy; no entry: all is persisted."""
        self.sent = [Sent() for _ in range(vbuckets)]
        self.stream_faults = StreamFaults()
        self.on_map_change: list[Callable[[], None]] = []
        self.on_state_change: list[Callable[[int], None]] = []

    # --- copies

    def state_on(self, vbid: int, node_number: int) -> VbucketRole:
        if not 0 <= vbid < len(self.vbuckets):
            return VbucketRole.DEAD
        if self.map.owners[vbid] == node_number:
            return self.states.get(vbid, VbucketRole.ACTIVE)
        return VbucketRole.REPLICA if node_number in self.map.replicas[vbid] else VbucketRole.DEAD

    def persisted_seqno(self, vbid: int, node_number: int) -> int:
        """Return the seqno up to which a node's copy is on disk; 0 in ephemeral buckets."""
        if self.map.ephemeral:
            return 0
        high_seqno = self.vbuckets[vbid].high_seqno
        return min(high_seqno, self.persistence_holds.get((vbid, node_number), high_seqno))

    def map_changed(self, *vbids: int) -> None:
        """Raise the map's revision, end all streams of these vbuckets, and announce the map."""
        self.map.bump()
        for vbid in vbids:
            for inform in tuple(self.on_state_change):
                inform(vbid)
        for call in tuple(self.on_map_change):
            call()

    # --- documents

    def wire_key(self, key: str | bytes, collection: str = DEFAULT_COLLECTION) -> bytes:
        entry = self.manifest.collection(collection)
        if entry is None:
            raise ManifestError(f"no collection {collection}")
        return encode_leb128(entry.collection_id) + _bytes(key)

    def set(
        self,
        key: str | bytes,
        value: Value,
        *,
        collection: str = DEFAULT_COLLECTION,
        vbid: int | None = None,
        flags: int = 0x0200_0000,
        expiry: int = 0,
        xattrs: dict[str, object] | None = None,
        compressed: bool = False,
        durable: bool = False,
    ) -> Item:
        body = _body(value)
        stored, datatype = values.join(_xattrs(xattrs or {}), body, values.datatype_of(body))
        if compressed:
            stored, datatype = values.deflate(stored, datatype)
        return self.documents.store(
            *self._place(key, collection, vbid),
            stored,
            datatype=datatype,
            flags=flags,
            expiry=expiry,
            durability=int(durable),
        )

    def delete(
        self,
        key: str | bytes,
        *,
        collection: str = DEFAULT_COLLECTION,
        vbid: int | None = None,
        xattrs: dict[str, object] | None = None,
    ) -> Item:
        """Delete a document; its tombstone has `xattrs` (None: the document's system xattrs).

        Raises DocumentError if the document does not exist.
        """
        leave = None if xattrs is None else values.join(_xattrs(xattrs), b"", 0)
        return self.documents.remove(*self._place(key, collection, vbid), leave=leave)

    def prepare(
        self,
        key: str | bytes,
        value: Value | None,
        *,
        collection: str = DEFAULT_COLLECTION,
        vbid: int | None = None,
        level: int = 1,
    ) -> Item:
        """Begin a durable write (a deletion if `value` is None), which `commit` or `abort` ends."""
        place = self._place(key, collection, vbid)
        if value is None:
            return self.documents.prepare_removal(*place, level=level)
        body = _body(value)
        return self.documents.prepare(*place, body, datatype=values.datatype_of(body), level=level)

    def commit(self, key: str | bytes, *, collection: str = DEFAULT_COLLECTION, vbid: int | None = None) -> Item:
        return self.documents.commit(*self._place(key, collection, vbid))

    def abort(self, key: str | bytes, *, collection: str = DEFAULT_COLLECTION, vbid: int | None = None) -> Item:
        return self.documents.abort(*self._place(key, collection, vbid))

    def get(self, key: str | bytes, *, collection: str = DEFAULT_COLLECTION, vbid: int | None = None) -> Item | None:
        return self.documents.find(*self._place(key, collection, vbid))

    def multi_write(
        self, vbid: int, writes: Iterable[tuple[str | bytes, Value | None]], *, collection: str = DEFAULT_COLLECTION
    ) -> list[Item]:
        """Write several documents of one vbucket in one snapshot; a value of None deletes."""
        with self.vbuckets[vbid].group():
            return [
                self.delete(key, vbid=vbid, collection=collection)
                if value is None
                else self.set(key, value, vbid=vbid, collection=collection)
                for key, value in writes
            ]

    def load(self, documents: Iterable[tuple[bytes, bytes]], *, vbid: int | None = None, datatype: int = 1) -> int:
        """Add new documents (key, body) to the default collection, as if already on disk; return their number."""
        now_ns = self.clock.wall_ms() * 1_000_000
        if vbid is not None:
            return self.vbuckets[vbid].load(
                ((b"\0" + key, body) for key, body in documents), now_ns=now_ns, datatype=datatype
            )
        count = len(self.vbuckets)
        piles: list[list[tuple[bytes, bytes]]] = [[] for _ in range(count)]
        for key, body in documents:
            piles[vbucket_of(key, count)].append((b"\0" + key, body))
        return sum(
            vbucket.load(pile, now_ns=now_ns, datatype=datatype)
            for vbucket, pile in zip(self.vbuckets, piles, strict=True)
            if pile
        )

    # --- collections

    def create_scope(self, name: str) -> int:
        return self._change(lambda manifest: manifest.create_scope(name))[0].scope_id

    def create_collection(
        self, scope: str, name: str, *, max_ttl: int | None = None, collection_id: int | None = None
    ) -> int:
        self._change(
            lambda manifest: manifest.create_collection(scope, name, max_ttl=max_ttl, collection_id=collection_id)
        )
        return list(self.manifest.collections)[-1]  # the collection just created

    def drop_collection(self, path: str) -> None:
        self._change(lambda manifest: manifest.drop_collection(path))

    def flush_collection(self, path: str) -> None:
        self._change(lambda manifest: manifest.flush_collection(path))

    def modify_collection(self, path: str, *, max_ttl: int | None = None, history: bool = False) -> None:
        self._change(lambda manifest: manifest.modify_collection(path, max_ttl=max_ttl, history=history))

    def drop_scope(self, name: str) -> None:
        self._change(lambda manifest: manifest.drop_scope(name))

    def _change(self, change: Callable[[BucketManifest], list[SystemEventContent]]) -> list[SystemEventContent]:
        if not self.profile.collections:
            raise ManifestError(f"a server of {self.profile.name} has no collections")
        changes = change(self.manifest)
        for vbucket in self.vbuckets:
            self.documents.apply(vbucket, changes)
        return changes

    def failover(self, vbid: int, lose: int = 0) -> int:
        """Give a vbucket a new history without its last `lose` changes; return the seqno at which it begins.

        If the vbucket lost changes of scopes or collections, apply these again.
        """
        vbucket = self.vbuckets[vbid]
        before = [item.content for item in vbucket.log if isinstance(item, EventItem)]
        base = vbucket.failover(lose)
        known = [item.content for item in vbucket.log if isinstance(item, EventItem)]
        if len(known) < len(before):
            self.documents.apply(vbucket, self.manifest.missed(known, before[len(known) :]))
        return base

    # --- disk and history

    def to_disk(self, vbid: int | None = None) -> None:
        """Forget the changes in memory: new streams read them from disk."""
        for vbucket in self._some(vbid):
            vbucket.to_disk()

    def purge(self, vbid: int | None = None, below_seqno: int | None = None) -> None:
        """Compact as `Vbucket.purge` does, up to and including `below_seqno` (None: all but the newest change)."""
        for vbucket in self._some(vbid):
            vbucket.purge(below_seqno)

    def discard_history(self, vbid: int | None = None, below_seqno: int | None = None) -> None:
        """Compact: below `below_seqno` (None: everywhere) drop superseded versions."""
        for vbucket in self._some(vbid):
            vbucket.discard_history(vbucket.high_seqno + 1 if below_seqno is None else below_seqno)

    def expire_all(self, vbid: int | None = None) -> int:
        """Run the expiry pager; return the number of documents that had expired."""
        return sum(self.documents.expire_all(vbucket) for vbucket in self._some(vbid))

    def recreate(self) -> None:
        """Empty the bucket, and give it a new uuid, manifest and histories."""
        self.manifest = BucketManifest(history_default=self.keeps_history)
        self.documents = SandboxDocuments(self.clock, self.manifest)
        self.vbuckets[:] = map(self._new_vbucket, range(len(self.vbuckets)))
        self.map.bucket_uuid = f"{self.rng.getrandbits(128):032x}"
        self.states.clear()
        self.map_changed()

    @property
    def document_count(self) -> int:
        return sum(vbucket.document_count for vbucket in self.vbuckets)

    def _place(self, key: str | bytes, collection: str, vbid: int | None) -> tuple[Vbucket, bytes]:
        number = vbucket_of(_bytes(key), len(self.vbuckets)) if vbid is None else vbid
        return self.vbuckets[number], self.wire_key(key, collection)

    def _some(self, vbid: int | None) -> Iterator[Vbucket]:
        return iter(self.vbuckets if vbid is None else [self.vbuckets[vbid]])


def fork(bucket: Bucket) -> Bucket:
    """Return a copy without observers. Both buckets share clock, users and stream faults."""
    memo: dict[int, object] = {id(each): each for each in (bucket.clock, bucket.users, bucket.stream_faults)}
    memo |= {id(bucket.on_map_change): [], id(bucket.on_state_change): []}
    memo |= {id(vbucket.changed): set() for vbucket in bucket.vbuckets}
    forked = copy.deepcopy(bucket, memo)
    forked.rng.seed(bucket.rng.getrandbits(64))  # else both buckets would give different histories the same ids
    return forked


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _body(value: Value) -> bytes:
    return _bytes(value) if isinstance(value, (bytes, str)) else _json(value)


def _xattrs(contents: dict[str, object]) -> values.Xattrs:
    return {name.encode(): _json(content) for name, content in contents.items()}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
