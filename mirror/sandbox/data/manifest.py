"""Scopes and collections of the bucket, and the system events of their changes (kv_engine docs/Collections.md).

New ids begin at 8. If a change causes several system events, all but the last have the uid from before the change
(recording 72_k1_collections_live).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from mirror.server.cluster_config import render_manifest
from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    CollectionSettings,
    ScopeCreated,
    ScopeDropped,
    SystemEventContent,
)

FIRST_ID = 8
"""Lower ids are reserved for the server."""

DEFAULT = "_default"


def _is_system(name: str) -> bool:
    return name.startswith("_") and name != DEFAULT


class ManifestError(ValueError):
    pass


@dataclass(slots=True)
class BucketManifest:
    """The present manifest. Methods that change it return the contents of the system events."""

    uid: int = 0
    history_default: bool = False
    """True if new collections keep history."""
    scopes: dict[int, str] = field(default_factory=lambda: {0: DEFAULT})
    collections: dict[int, CollectionSettings] = field(default_factory=lambda: {0: CollectionCreated(0, 0, 0, DEFAULT)})
    """The collections, each with the manifest uid of its last event."""
    system_scopes: set[int] = field(default_factory=set)
    system_collections: set[int] = field(default_factory=set)
    """Ids of collections whose name or scope's name is a system name (`_is_system`), dropped collections included."""
    _next_scope_id: int = FIRST_ID
    _next_collection_id: int = FIRST_ID

    def __post_init__(self) -> None:
        self.collections[0] = replace(self.collections[0], history=self.history_default)

    def scope_id(self, name: str) -> int | None:
        name_or_default = name or DEFAULT
        return next((scope_id for scope_id, known in self.scopes.items() if known == name_or_default), None)

    def collection(self, path: str) -> CollectionSettings | None:
        scope, _, name = path.rpartition(".")
        scope_id = self.scope_id(scope)
        name_or_default = name or DEFAULT
        for entry in self.collections.values():
            if entry.scope_id == scope_id and entry.name == name_or_default:
                return entry
        return None

    def create_scope(self, name: str) -> list[SystemEventContent]:
        if self.scope_id(name) is not None:
            raise ManifestError(f"scope {name} exists")
        self.uid += 1
        scope_id, self._next_scope_id = self._next_scope_id, self._next_scope_id + 1
        self.scopes[scope_id] = name
        if _is_system(name):
            self.system_scopes.add(scope_id)
        return [ScopeCreated(self.uid, scope_id, name)]

    def create_collection(
        self, scope: str, name: str, *, max_ttl: int | None = None, collection_id: int | None = None
    ) -> list[SystemEventContent]:
        scope_id = self.scope_id(scope)
        if scope_id is None:
            raise ManifestError(f"no scope {scope}")
        if self.collection(f"{scope}.{name}") is not None or collection_id in self.collections:
            raise ManifestError(f"collection {scope}.{name} exists")
        if collection_id is None:
            collection_id = self._next_collection_id
        self._next_collection_id = max(self._next_collection_id, collection_id + 1)
        self.uid += 1
        if _is_system(name) or scope_id in self.system_scopes:
            self.system_collections.add(collection_id)
        created = CollectionCreated(self.uid, scope_id, collection_id, name, max_ttl, history=self.history_default)
        self.collections[collection_id] = created
        return [created]

    def drop_collection(self, path: str) -> list[SystemEventContent]:
        entry = self._existing(path)
        del self.collections[entry.collection_id]
        self.uid += 1
        return [self._ended(entry.collection_id, entry.scope_id)]

    def flush_collection(self, path: str) -> list[SystemEventContent]:
        entry = self._existing(path)
        self.uid += 1
        return [self._set(CollectionCreated, replace(entry, manifest_uid=self.uid, flush_uid=self.uid))]

    def modify_collection(self, path: str, *, max_ttl: int | None, history: bool) -> list[SystemEventContent]:
        entry = self._existing(path)
        self.uid += 1
        changed = replace(entry, manifest_uid=self.uid, max_ttl=max_ttl, history=history)
        return [self._set(CollectionModified, changed)]

    def drop_scope(self, name: str) -> list[SystemEventContent]:
        scope_id = self.scope_id(name)
        if scope_id is None or scope_id == 0:
            raise ManifestError(f"no scope {name} to drop")
        changes: list[SystemEventContent] = []
        for entry in sorted(self.collections.values(), key=lambda entry: -entry.collection_id):
            if entry.scope_id == scope_id:
                del self.collections[entry.collection_id]
                changes.append(self._ended(entry.collection_id, entry.scope_id))
        self.uid += 1
        del self.scopes[scope_id]
        return [*changes, self._scope_dropped(scope_id)]

    def missed(
        self, known: Sequence[SystemEventContent], lost: Sequence[SystemEventContent]
    ) -> list[SystemEventContent]:
        """Return the changes that bring a vbucket to the bucket's manifest after a failover (kv_engine
        docs/Collections.md). The vbucket has the changes `known` and lost the changes `lost`. All returned changes but
        the last have the vbucket's manifest uid.
        """
        scopes, collections = {0}, {0: 0}
        for each in known:
            match each:
                case ScopeCreated():
                    scopes.add(each.scope_id)
                case ScopeDropped():
                    scopes.discard(each.scope_id)
                case CollectionDropped():
                    collections.pop(each.collection_id, None)
                case _:
                    collections[each.collection_id] = each.scope_id
        touched: dict[int, type[CollectionCreated | CollectionModified]] = {}
        for each in lost:
            if not isinstance(each, ScopeCreated | ScopeDropped):
                modified = isinstance(each, CollectionModified) and touched.get(each.collection_id) != CollectionCreated
                touched[each.collection_id] = CollectionModified if modified else CollectionCreated
        changes: list[SystemEventContent] = [
            ScopeCreated(self.uid, scope_id, name) for scope_id, name in self.scopes.items() if scope_id not in scopes
        ]
        for collection_id, kind in touched.items():
            entry = self.collections.get(collection_id)
            if entry is not None:
                event = kind if collection_id in collections else CollectionCreated
                changes.append(event(**asdict(entry) | {"manifest_uid": self.uid}))
            elif collection_id in collections:
                changes.append(self._ended(collection_id, collections[collection_id]))
        changes += map(self._scope_dropped, scopes - set(self.scopes))
        uid = known[-1].manifest_uid if known else 0
        return [replace(each, manifest_uid=uid) for each in changes[:-1]] + changes[-1:]

    def _set(self, kind: type[CollectionCreated | CollectionModified], entry: CollectionSettings) -> SystemEventContent:
        event = kind(**asdict(entry))
        self.collections[entry.collection_id] = event
        return event

    def _ended(self, collection_id: int, scope_id: int) -> CollectionDropped:
        return CollectionDropped(self.uid, scope_id, collection_id, collection_id in self.system_collections)

    def _scope_dropped(self, scope_id: int) -> ScopeDropped:
        return ScopeDropped(self.uid, scope_id, scope_id in self.system_scopes)

    def _existing(self, path: str) -> CollectionSettings:
        entry = self.collection(path)
        if entry is None:
            raise ManifestError(f"no collection {path}")
        return entry

    def to_json(self, *, with_system: bool = True) -> bytes:
        hidden = set() if with_system else self.system_collections
        scopes = {id_: name for id_, name in self.scopes.items() if with_system or id_ not in self.system_scopes}
        shown = [entry for entry in self.collections.values() if entry.collection_id not in hidden]
        return render_manifest(self.uid, scopes, shown)
