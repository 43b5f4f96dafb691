"""Scopes and collections of the bucket, and the system events of their changes (kv_engine docs/Collections.md).

Invariants: ids and the uid only grow; ids begin at 8; a change of several steps gives all but the last step the uid
before it (recording 72_k1_collections_live).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mirror.wire.constants import SystemEventId
from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    ScopeCreated,
    ScopeDropped,
    SystemEventContent,
)
from mirror.wire.system_events import encode_system_event

FIRST_ID = 8
"""Ids below are the server's own."""

DEFAULT = "_default"


@dataclass(frozen=True, slots=True)
class CollectionEntry:
    collection_id: int
    scope_id: int
    name: str
    max_ttl: int | None = None
    history: bool = False
    """Every version is kept if the storage keeps history."""
    flush_uid: int = 0


@dataclass(frozen=True, slots=True)
class ManifestStep:
    """One step of a change of the manifest, as it becomes a system event of every vbucket."""

    event: SystemEventId
    uid: int
    scope_id: int
    collection_id: int = 0
    name: str = ""
    max_ttl: int | None = None
    history: bool = False
    flush_uid: int = 0
    system: bool = False

    @property
    def version(self) -> int:
        """Version byte of `body`: 1 when it carries a maximum time to live."""
        return 2 if self.event == SystemEventId.COLLECTION_MODIFY else int(self.max_ttl is not None)

    @property
    def key(self) -> bytes:
        return self.name.encode()

    @property
    def about_scope(self) -> bool:
        return self.event in (SystemEventId.SCOPE_CREATE, SystemEventId.SCOPE_DROP)

    def body(self) -> bytes:
        """The event's value in the fixed shape; a modification has none, and is sent in FlatBuffers alone."""
        version = 2 if self.event == SystemEventId.COLLECTION_MODIFY else 1
        return encode_system_event(self._content(), vbid=0, seqno=0, version=version).value

    def flat_body(self) -> bytes:
        return encode_system_event(self._content(), vbid=0, seqno=0, version=2).value

    def _content(self) -> SystemEventContent:
        if self.event == SystemEventId.SCOPE_CREATE:
            return ScopeCreated(self.uid, self.scope_id, self.name)
        if self.event == SystemEventId.SCOPE_DROP:
            return ScopeDropped(self.uid, self.scope_id, system_scope=self.system)
        if self.event == SystemEventId.COLLECTION_END:
            return CollectionDropped(self.uid, self.scope_id, self.collection_id, system_collection=self.system)
        kind = CollectionCreated if self.event == SystemEventId.COLLECTION_BEGIN else CollectionModified
        return kind(
            self.uid,
            self.scope_id,
            self.collection_id,
            self.name,
            self.max_ttl,
            history=self.history,
            flush_uid=self.flush_uid,
        )


def _is_system(name: str) -> bool:
    return name.startswith("_") and name != DEFAULT


class ManifestError(ValueError):
    pass


@dataclass(slots=True)
class BucketManifest:
    """The manifest as it is now; every change returns the system events that it causes."""

    uid: int = 0
    history_default: bool = False
    """True if new collections keep history."""
    scopes: dict[int, str] = field(default_factory=lambda: {0: DEFAULT})
    collections: dict[int, CollectionEntry] = field(default_factory=lambda: {0: CollectionEntry(0, 0, DEFAULT)})
    system_scopes: set[int] = field(default_factory=set)
    system_collections: set[int] = field(default_factory=set)
    """Ids of all present and former collections whose name begins with an underscore, except the default one."""
    _next_scope_id: int = FIRST_ID
    _next_collection_id: int = FIRST_ID

    def __post_init__(self) -> None:
        self.collections[0] = replace(self.collections[0], history=self.history_default)

    def scope_id(self, name: str) -> int | None:
        name_or_default = name or DEFAULT
        return next((scope_id for scope_id, known in self.scopes.items() if known == name_or_default), None)

    def collection(self, path: str) -> CollectionEntry | None:
        scope, _, name = path.rpartition(".")
        scope_id = self.scope_id(scope)
        name_or_default = name or DEFAULT
        for entry in self.collections.values():
            if entry.scope_id == scope_id and entry.name == name_or_default:
                return entry
        return None

    def create_scope(self, name: str) -> list[ManifestStep]:
        if self.scope_id(name) is not None:
            raise ManifestError(f"scope {name} exists")
        self.uid += 1
        scope_id, self._next_scope_id = self._next_scope_id, self._next_scope_id + 1
        self.scopes[scope_id] = name
        if _is_system(name):
            self.system_scopes.add(scope_id)
        return [ManifestStep(SystemEventId.SCOPE_CREATE, self.uid, scope_id, name=name)]

    def create_collection(
        self, scope: str, name: str, *, max_ttl: int | None = None, collection_id: int | None = None
    ) -> list[ManifestStep]:
        scope_id = self.scope_id(scope)
        if scope_id is None:
            raise ManifestError(f"no scope {scope}")
        if self.collection(f"{scope}.{name}") is not None or collection_id in self.collections:
            raise ManifestError(f"collection {scope}.{name} exists")
        if collection_id is None:
            collection_id = self._next_collection_id
        self._next_collection_id = max(self._next_collection_id, collection_id + 1)
        self.uid += 1
        entry = CollectionEntry(collection_id, scope_id, name, max_ttl, self.history_default)
        self.collections[collection_id] = entry
        if _is_system(name) or scope_id in self.system_scopes:
            self.system_collections.add(collection_id)
        return [self._step_of(SystemEventId.COLLECTION_BEGIN, entry)]

    def drop_collection(self, path: str) -> list[ManifestStep]:
        entry = self._existing(path)
        del self.collections[entry.collection_id]
        self.uid += 1
        return [self._ended(entry.collection_id, entry.scope_id)]

    def flush_collection(self, path: str) -> list[ManifestStep]:
        entry = self._existing(path)
        self.uid += 1
        entry = self.collections[entry.collection_id] = replace(entry, flush_uid=self.uid)
        return [self._step_of(SystemEventId.COLLECTION_BEGIN, entry)]

    def modify_collection(self, path: str, *, max_ttl: int | None, history: bool) -> list[ManifestStep]:
        entry = self._existing(path)
        self.uid += 1
        entry = self.collections[entry.collection_id] = replace(entry, max_ttl=max_ttl, history=history)
        return [self._step_of(SystemEventId.COLLECTION_MODIFY, entry)]

    def drop_scope(self, name: str) -> list[ManifestStep]:
        scope_id = self.scope_id(name)
        if scope_id is None or scope_id == 0:
            raise ManifestError(f"no scope {name} to drop")
        changes = []
        for entry in sorted(self.collections.values(), key=lambda entry: -entry.collection_id):
            if entry.scope_id == scope_id:
                del self.collections[entry.collection_id]
                changes.append(self._ended(entry.collection_id, entry.scope_id))
        self.uid += 1
        del self.scopes[scope_id]
        return [*changes, self._scope_dropped(scope_id)]

    def missed(self, known: Sequence[ManifestStep], lost: Sequence[ManifestStep]) -> list[ManifestStep]:
        """Return the changes from the vbucket's manifest, which lost some, to the bucket's (kv_engine
        docs/Collections.md). All but the last one have the uid of the vbucket's manifest.
        """
        scopes, collections = {0}, {0: 0}
        for each in known:
            if each.event == SystemEventId.SCOPE_CREATE:
                scopes.add(each.scope_id)
            elif each.event == SystemEventId.SCOPE_DROP:
                scopes.discard(each.scope_id)
            elif each.event == SystemEventId.COLLECTION_END:
                collections.pop(each.collection_id, None)
            else:
                collections[each.collection_id] = each.scope_id
        begin = SystemEventId.COLLECTION_BEGIN
        touched: dict[int, SystemEventId] = {}
        for each in lost:
            if not each.about_scope and touched.get(each.collection_id) != begin:
                touched[each.collection_id] = each.event
        changes = [
            ManifestStep(SystemEventId.SCOPE_CREATE, self.uid, scope_id, name=name)
            for scope_id, name in self.scopes.items()
            if scope_id not in scopes
        ]
        for collection_id, event in touched.items():
            entry = self.collections.get(collection_id)
            if entry is not None:
                changes.append(self._step_of(event if collection_id in collections else begin, entry))
            elif collection_id in collections:
                changes.append(self._ended(collection_id, collections[collection_id]))
        changes += map(self._scope_dropped, scopes - set(self.scopes))
        uid = known[-1].uid if known else 0
        return [replace(each, uid=uid) for each in changes[:-1]] + changes[-1:]

    def _step_of(self, event: SystemEventId, entry: CollectionEntry) -> ManifestStep:
        return ManifestStep(
            event,
            self.uid,
            entry.scope_id,
            entry.collection_id,
            entry.name,
            entry.max_ttl,
            history=entry.history,
            flush_uid=entry.flush_uid,
        )

    def _ended(self, collection_id: int, scope_id: int) -> ManifestStep:
        system = collection_id in self.system_collections
        return ManifestStep(SystemEventId.COLLECTION_END, self.uid, scope_id, collection_id, system=system)

    def _scope_dropped(self, scope_id: int) -> ManifestStep:
        return ManifestStep(SystemEventId.SCOPE_DROP, self.uid, scope_id, system=scope_id in self.system_scopes)

    def _existing(self, path: str) -> CollectionEntry:
        entry = self.collection(path)
        if entry is None:
            raise ManifestError(f"no collection {path}")
        return entry

    def to_json(self, *, with_system: bool = True) -> bytes:
        scopes = []
        for scope_id, scope_name in sorted(self.scopes.items()):
            if not with_system and scope_id in self.system_scopes:
                continue
            inside: list[dict[str, object]] = []
            for entry in sorted(self.collections.values(), key=lambda entry: entry.collection_id):
                if entry.scope_id == scope_id and (with_system or entry.collection_id not in self.system_collections):
                    described: dict[str, object] = {"name": entry.name, "uid": f"{entry.collection_id:x}"}
                    if entry.max_ttl is not None:
                        described["maxTTL"] = entry.max_ttl
                    if entry.history:
                        described["history"] = True
                    inside.append(described)
            scopes.append({"name": scope_name, "uid": f"{scope_id:x}", "collections": inside})
        return json.dumps({"uid": f"{self.uid:x}", "scopes": scopes}, separators=(",", ":")).encode()
