"""The filter of a DCP stream, which selects changes of a vbucket.

A filter by scope selects the collections that the scope has in the manifest at the snapshot's end; only collections
that the reader may read pass.
"""

from __future__ import annotations

from mirror.ingest.selection import StreamFilter
from mirror.serve.access.auth import Reader, visible
from mirror.server.errors import Refused
from mirror.server.producer import ProducerFilter, requested_filter
from mirror.wire.constants import Status
from mirror.wire.events import CollectionCreated, CollectionModified, ScopeCreated, SystemEventContent
from storage.model import Manifest


class ServedFilter(ProducerFilter):
    def begins(self, manifest: Manifest) -> dict[int, int] | None:
        """Return the collections of `manifest` that pass (id -> seqno of the collection's begin); None: all pass."""
        if self.all:
            return None
        return {
            number: int(entry.begin_seqno)
            for number, entry in manifest.collections.items()
            if (entry.scope_id == self.scope_id if self.collections is None else number in self.collections)
        }


def is_replaced(content: SystemEventContent, seqno: int, manifest: Manifest) -> bool:
    """Return True if a later event replaced this one. `manifest` is of the event's seqno or above. Servers keep one
    event of a key (docs/protocol.md 2.11.7): begin, flush and end of a collection share a key, and so do creation and
    drop of a scope. Changed settings have their own key; a flush or the end of the collection replaces them.
    """
    if isinstance(content, ScopeCreated):
        return content.scope_id not in manifest.scopes
    if isinstance(content, (CollectionCreated, CollectionModified)):
        collection = manifest.collections.get(content.collection_id)
        return collection is None or seqno < collection.begin_seqno
    return False


def parse(
    value: bytes, manifest: Manifest, reader: Reader, *, has_collections: bool, has_stream_ids: bool
) -> ServedFilter:
    shown = manifest if reader.reads_all else visible(manifest, reader)
    found = requested_filter(
        ServedFilter,
        value,
        has_collections=has_collections,
        has_stream_ids=has_stream_ids,
        scopes=shown.scopes,
        collections=shown.collections,
        manifest_uid=manifest.uid,
    )
    check_reader(found, manifest, reader)
    return found


def check_reader(found: ServedFilter, manifest: Manifest, reader: Reader) -> None:
    """Raise Refused if the reader may not read all selected collections, including later ones of a selected scope."""
    if reader.reads_all:
        return
    if found.scope_id is not None:
        allowed = f"{manifest.scopes.get(found.scope_id)}.*" in reader.patterns
    else:
        names = [manifest.name_of(number) for number in found.collections or ()]
        allowed = bool(names) and all(name is not None and reader.may_read(name) for name in names)
    if not allowed:
        raise Refused(Status.EACCESS, f"{reader.name or 'anonymous'} may not read everything in the stream")


def check_selected(found: ServedFilter, selected: str, manifest: Manifest) -> None:
    """Raise Refused if a stream asks for more than the collections that this mirror selects (a filter's text).

    Such a stream once passed for one of the whole bucket. A mirror of a cluster that went on here kept the other
    collections as they were, and called itself current; another never got the drop of a collection whose new id this
    mirror had selected meanwhile.
    """
    own = StreamFilter.parse(selected) or StreamFilter()
    held = set(own.collection_ids)
    if own.scope_id is not None:
        held = {number for number, entry in manifest.collections.items() if entry.scope_id == own.scope_id}
    if found.collections is None:
        inside = found.scope_id is not None and found.scope_id == own.scope_id
    else:
        inside = found.collections <= held
    if not inside:
        raise Refused(
            Status.UNKNOWN_COLLECTION, "this mirror has a part of the bucket: request its collections or scope"
        )
