"""The changes that a DCP stream of the embedded source shows; `mirror.server.producer` checks the request.

Invariant: an accepted filter changes only with the collections of its scope, and with those that end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mirror.sandbox.data.item import SYSTEM_EVENT, EventItem, Item
from mirror.sandbox.data.manifest import BucketManifest
from mirror.sandbox.data.vbucket import system_id
from mirror.server.producer import ProducerFilter, requested_filter
from mirror.wire.constants import SystemEventId
from mirror.wire.stream_filter import KEYS


@dataclass(kw_only=True)
class SandboxFilter(ProducerFilter):
    hidden: BucketManifest | None = None
    """The system's collections of this manifest are held back."""

    @property
    def all(self) -> bool:
        return self.collections is None and self.hidden is None

    @property
    def empty(self) -> bool:
        return self.collections is not None and not self.collections and self.scope_id is None

    def holds_all(self, high_seqnos: Mapping[int, int], seqno: int) -> bool:
        """True if the stream shows no version above a seqno, so that its client misses no purged deletion.
        `high_seqnos` are those of the vbucket's collections. False for a scope, whose collections may have ended.
        """
        if not self.collections or self.legacy or self.scope_id is not None:
            return False
        return seqno >= max(high_seqnos.get(id_, 0) for id_ in self.collections)

    def passes(self, item: Item) -> bool:
        """True if the stream shows a change. Called once for each in the order of seqnos: system events that pass
        change the filter (a scope's new collections join, ended ones leave).
        """
        if self.hidden is not None and _is_system(item, self.hidden):
            return False
        if self.collections is None:
            return True
        if item.kind != SYSTEM_EVENT:
            return item.collection_id in self.collections
        if self.legacy:
            return False
        event, id_ = item.event, system_id(item)
        if event in (SystemEventId.SCOPE_CREATE, SystemEventId.SCOPE_DROP):
            if self.scope_id != id_:
                return False
            if event == SystemEventId.SCOPE_DROP:
                self.scope_id = None
                self.collections = frozenset()
            return True
        shown = id_ in self.collections if self.scope_id is None else _scope_of(item) == self.scope_id
        if shown and event == SystemEventId.COLLECTION_BEGIN:
            self.collections |= {id_}
        elif shown and event == SystemEventId.COLLECTION_END:
            self.collections -= {id_}
        return shown


def _is_system(item: Item, manifest: BucketManifest) -> bool:
    if item.kind == SYSTEM_EVENT and item.event in (SystemEventId.SCOPE_CREATE, SystemEventId.SCOPE_DROP):
        return system_id(item) in manifest.system_scopes
    return (system_id(item) if item.kind == SYSTEM_EVENT else item.collection_id) in manifest.system_collections


def _scope_of(item: Item) -> int:
    if isinstance(item, EventItem):
        return item.content.scope_id
    return int.from_bytes(item.value[8:12])


def parse(
    value: bytes,
    manifest: BucketManifest,
    *,
    has_collections: bool,
    has_stream_ids: bool,
    known: frozenset[str] = KEYS,
    sees_system: bool = True,
) -> SandboxFilter:
    """Return the filter of a stream request. Raises Refused.

    `known` are the keys that the server reads. A client that may not see the system's collections gets no message about
    them; only gaps in the seqnos show that they exist (docs/protocol.md 2.2).
    """
    hidden = None if sees_system else manifest
    found = requested_filter(
        SandboxFilter,
        value,
        has_collections=has_collections,
        has_stream_ids=has_stream_ids,
        scopes=manifest.scopes.keys() - (hidden.system_scopes if hidden else set()),
        collections=manifest.collections.keys() - (hidden.system_collections if hidden else set()),
        manifest_uid=manifest.uid,
        known_keys=known,
    )
    if found.scope_id is not None:
        inside = (each.collection_id for each in manifest.collections.values() if each.scope_id == found.scope_id)
        found.collections = frozenset(inside)
    if has_collections:
        found.hidden = hidden
    return found
