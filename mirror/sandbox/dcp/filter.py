"""The filter of a DCP stream of the sandbox; `mirror.server.producer` checks the stream request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mirror.sandbox.data.item import SYSTEM_EVENT, EventItem, Item
from mirror.sandbox.data.manifest import BucketManifest
from mirror.sandbox.data.sandbox_vbucket import system_id
from mirror.server.producer import ProducerFilter, requested_filter
from mirror.wire import codec_dcp
from mirror.wire import frame as fr
from mirror.wire.constants import SystemEventId
from mirror.wire.events import CollectionCreated, CollectionDropped, SystemEvent, SystemEventContent
from mirror.wire.stream_filter import KEYS
from mirror.wire.system_events import decode_system_event


@dataclass(kw_only=True)
class SandboxFilter(ProducerFilter):
    hidden: BucketManifest | None = None
    """The manifest whose system collections are hidden from the client; None: nothing is hidden."""
    shown: frozenset[int] = field(default=frozenset(), init=False)
    """Ids of the requested collections, or of the collections in the requested scope as of the last system event."""

    def holds_all(self, high_seqnos: Mapping[int, int], seqno: int) -> bool:
        """True if no version above `seqno` passes the filter, so a client with that seqno misses no purged deletion.
        `high_seqnos` maps collections to their high seqnos. False for a scope, because a collection of it may have been
        dropped.
        """
        if self.collections is None or not self.shown or self.legacy:
            return False
        return seqno >= max(high_seqnos.get(id_, 0) for id_ in self.shown)

    def passes(self, item: Item) -> bool:
        """True if a change passes. Call this in the order of seqnos, because system events change the filter."""
        if self.hidden is not None and _is_system(item, self.hidden):
            return False
        if item.kind != SYSTEM_EVENT:
            return self.all or item.collection_id in self.shown
        content = content_of(item)
        if not self.shows(content):
            return False
        if isinstance(content, CollectionCreated):
            self.shown |= {content.collection_id}
        elif isinstance(content, CollectionDropped):
            self.shown -= {content.collection_id}
        return True


def _is_system(item: Item, manifest: BucketManifest) -> bool:
    if item.kind == SYSTEM_EVENT and item.event in (SystemEventId.SCOPE_CREATE, SystemEventId.SCOPE_DROP):
        return system_id(item) in manifest.system_scopes
    return (system_id(item) if item.kind == SYSTEM_EVENT else item.collection_id) in manifest.system_collections


def content_of(item: Item) -> SystemEventContent:
    if isinstance(item, EventItem):
        return item.content
    event = codec_dcp.decode(fr.decode(item.frame)[0])
    assert isinstance(event, SystemEvent)
    return decode_system_event(event)


def parse(
    value: bytes,
    manifest: BucketManifest,
    *,
    has_collections: bool,
    has_stream_ids: bool,
    known: frozenset[str] = KEYS,
    may_be_empty: bool = False,
    sees_system: bool = True,
) -> SandboxFilter:
    """Return the filter of a stream request. Raises Refused.

    The server ignores keys that are not in `known`. Without `sees_system` the client gets no message of the system's
    collections; only gaps in the seqnos show that they exist (docs/protocol.md 2.2).
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
        may_be_empty=may_be_empty,
    )
    inside = (each.collection_id for each in manifest.collections.values() if each.scope_id == found.scope_id)
    found.shown = frozenset(inside) if found.collections is None else found.collections
    if has_collections:
        found.hidden = hidden
    return found
