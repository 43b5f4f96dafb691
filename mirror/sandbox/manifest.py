"""Scopes and collections of the bucket, and the system events that tell of their changes.

Knows the manifest's JSON and the bodies of system events in both shapes: fixed structs, and FlatBuffers for clients
that asked for them (kv_engine docs/Collections.md, collections/events.fbs, system-event.md). Must never know vbuckets
or connections. Invariants: ids and the uid only grow; ids of scopes and of collections begin at 8; a change of several
steps gives all but the last of them the uid before it (captures/72_k1).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field

from mirror.wire.constants import SystemEventId

FIRST_ID = 8
"""Ids below are the server's own."""

DEFAULT = "_default"

_BEGIN = struct.Struct(">QII")
_BEGIN_TTL = struct.Struct(">QIII")
_SCOPE = struct.Struct(">QI")


@dataclass(frozen=True, slots=True)
class CollectionEntry:
    """A collection of the manifest."""

    collection_id: int
    scope_id: int
    name: str
    max_ttl: int | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One step of a change of the manifest, as it becomes a system event of every vbucket."""

    event: SystemEventId
    uid: int
    scope_id: int
    collection_id: int = 0
    name: str = ""
    max_ttl: int | None = None

    @property
    def version(self) -> int:
        """Version byte of the event in the fixed shape: 1 when it carries a maximum time to live."""
        return int(self.max_ttl is not None)

    @property
    def key(self) -> bytes:
        """What stands as key in the event."""
        created = self.event in (SystemEventId.COLLECTION_BEGIN, SystemEventId.SCOPE_CREATE)
        return self.name.encode() if created else b""

    @property
    def about_scope(self) -> bool:
        """True for events of scopes, false for those of collections."""
        return self.event in (SystemEventId.SCOPE_CREATE, SystemEventId.SCOPE_DROP)

    def body(self) -> bytes:
        """The event's value in the fixed shape."""
        if self.about_scope:
            return _SCOPE.pack(self.uid, self.scope_id)
        if self.max_ttl is not None:
            return _BEGIN_TTL.pack(self.uid, self.scope_id, self.collection_id, self.max_ttl)
        return _BEGIN.pack(self.uid, self.scope_id, self.collection_id)

    def flat_body(self) -> bytes:
        """The event's value as FlatBuffers."""
        if self.event == SystemEventId.COLLECTION_BEGIN:
            ttl_valid = self.max_ttl is not None
            return flat_table(
                [
                    ("Q", self.uid),
                    ("I", self.scope_id),
                    ("I", self.collection_id),
                    ("B", int(ttl_valid)),
                    ("I", self.max_ttl or 0),
                    ("s", self.name),
                ]
            )
        if self.event == SystemEventId.SCOPE_CREATE:
            return flat_table([("Q", self.uid), ("I", self.scope_id), ("s", self.name)])
        if self.event == SystemEventId.SCOPE_DROP:
            return flat_table([("Q", self.uid), ("I", self.scope_id)])
        return flat_table([("Q", self.uid), ("I", self.scope_id), ("I", self.collection_id)])


def flat_table(fields: list[tuple[str, int | str]]) -> bytes:
    """A FlatBuffers root table with the given fields (Q, I, B or s for a string), zeros left out as its writers do."""
    sizes = {"Q": 8, "I": 4, "B": 1, "s": 4}
    offsets = [0] * len(fields)
    end = 4  # the table itself stands at 4 beyond a multiple of 8, and larger fields come first: all are aligned
    for index in sorted(range(len(fields)), key=lambda i: -sizes[fields[i][0]]):
        code, content = fields[index]
        if content or code == "s":
            size = sizes[code]
            offsets[index] = end
            end += size
    table_size = -(-end // 4) * 4
    vtable = struct.pack(f"<HH{len(fields)}H", 4 + 2 * len(fields), table_size, *offsets)
    table_pos = -(-(4 + len(vtable) + 4) // 8) * 8 - 4
    table = bytearray(table_size)
    struct.pack_into("<i", table, 0, len(vtable))
    text = b""
    for (code, content), offset in zip(fields, offsets, strict=True):
        if offset and isinstance(content, str):
            struct.pack_into("<I", table, offset, table_size - offset)
            name = content.encode()
            text = struct.pack("<I", len(name)) + name + b"\0"
        elif offset:
            struct.pack_into(f"<{code}", table, offset, content)
    head = struct.pack("<I", table_pos).ljust(table_pos - len(vtable), b"\0")
    out = head + vtable + bytes(table) + text
    return out.ljust(-(-len(out) // 4) * 4, b"\0")


def _is_system(name: str) -> bool:
    return name.startswith("_") and name != DEFAULT


class ManifestError(ValueError):
    """A change that cannot be made: the name is taken, or there is no such scope or collection."""


@dataclass(slots=True)
class BucketManifest:
    """The manifest as it is now; every change returns the system events that it causes."""

    uid: int = 0
    scopes: dict[int, str] = field(default_factory=lambda: {0: DEFAULT})
    collections: dict[int, CollectionEntry] = field(default_factory=lambda: {0: CollectionEntry(0, 0, DEFAULT)})
    system_scopes: set[int] = field(default_factory=set)
    system_collections: set[int] = field(default_factory=set)
    """Ids of what was ever the system's own: names that begin with an underscore, the default's aside."""
    _next_scope_id: int = FIRST_ID
    _next_collection_id: int = FIRST_ID

    def scope_id(self, name: str) -> int | None:
        """Id of a scope; the empty name is the default scope."""
        wanted = name or DEFAULT
        return next((scope_id for scope_id, known in self.scopes.items() if known == wanted), None)

    def collection(self, path: str) -> CollectionEntry | None:
        """The collection at `scope.collection`."""
        scope, _, name = path.rpartition(".")
        scope_id = self.scope_id(scope)
        wanted = name or DEFAULT
        for entry in self.collections.values():
            if entry.scope_id == scope_id and entry.name == wanted:
                return entry
        return None

    def create_scope(self, name: str) -> list[Change]:
        """A new scope."""
        if self.scope_id(name) is not None:
            raise ManifestError(f"scope {name} exists")
        self.uid += 1
        scope_id, self._next_scope_id = self._next_scope_id, self._next_scope_id + 1
        self.scopes[scope_id] = name
        if _is_system(name):
            self.system_scopes.add(scope_id)
        return [Change(SystemEventId.SCOPE_CREATE, self.uid, scope_id, name=name)]

    def create_collection(
        self, scope: str, name: str, *, max_ttl: int | None = None, collection_id: int | None = None
    ) -> list[Change]:
        """A new collection in an existing scope, with the id that is asked for or the next one."""
        scope_id = self.scope_id(scope)
        if scope_id is None:
            raise ManifestError(f"no scope {scope}")
        if self.collection(f"{scope}.{name}") is not None or collection_id in self.collections:
            raise ManifestError(f"collection {scope}.{name} exists")
        if collection_id is None:
            collection_id = self._next_collection_id
        self._next_collection_id = max(self._next_collection_id, collection_id + 1)
        self.uid += 1
        self.collections[collection_id] = CollectionEntry(collection_id, scope_id, name, max_ttl)
        if _is_system(name) or scope_id in self.system_scopes:
            self.system_collections.add(collection_id)
        return [Change(SystemEventId.COLLECTION_BEGIN, self.uid, scope_id, collection_id, name, max_ttl)]

    def drop_collection(self, path: str) -> list[Change]:
        """A collection goes, with all that is in it."""
        entry = self._existing(path)
        del self.collections[entry.collection_id]
        self.uid += 1
        return [Change(SystemEventId.COLLECTION_END, self.uid, entry.scope_id, entry.collection_id)]

    def flush_collection(self, path: str) -> list[Change]:
        """A collection is emptied: it begins anew."""
        entry = self._existing(path)
        self.uid += 1
        return [
            Change(
                SystemEventId.COLLECTION_BEGIN,
                self.uid,
                entry.scope_id,
                entry.collection_id,
                entry.name,
                entry.max_ttl,
            )
        ]

    def drop_scope(self, name: str) -> list[Change]:
        """A scope goes with its collections."""
        scope_id = self.scope_id(name)
        if scope_id is None or scope_id == 0:
            raise ManifestError(f"no scope {name} to drop")
        changes = []
        for entry in sorted(self.collections.values(), key=lambda entry: -entry.collection_id):
            if entry.scope_id == scope_id:
                del self.collections[entry.collection_id]
                changes.append(Change(SystemEventId.COLLECTION_END, self.uid, scope_id, entry.collection_id))
        self.uid += 1
        del self.scopes[scope_id]
        return [*changes, Change(SystemEventId.SCOPE_DROP, self.uid, scope_id)]

    def _existing(self, path: str) -> CollectionEntry:
        entry = self.collection(path)
        if entry is None:
            raise ManifestError(f"no collection {path}")
        return entry

    def to_json(self, *, with_system: bool = True) -> bytes:
        """The manifest as GET_COLLECTIONS_MANIFEST answers it."""
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
                    inside.append(described)
            scopes.append({"name": scope_name, "uid": f"{scope_id:x}", "collections": inside})
        return json.dumps({"uid": f"{self.uid:x}", "scopes": scopes}, separators=(",", ":")).encode()
