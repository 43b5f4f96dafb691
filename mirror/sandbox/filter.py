"""Which changes of a vbucket a DCP stream shows: what a stream request asks for, judged and remembered.

Knows manifests and collection ids before keys; the request's value is taken apart in `mirror.wire.stream_filter`. Must
never know seqnos, snapshots or connections. Invariants: a filter that was accepted changes only with the collections of
its scope, and by those that end; a client without collections sees the default collection and no system events.
"""

from __future__ import annotations

from mirror.sandbox.item import SYSTEM_EVENT, EventItem, Item
from mirror.sandbox.manifest import BucketManifest
from mirror.sandbox.vbucket import system_id
from mirror.wire.constants import Status, SystemEventId
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.stream_filter import KEYS, parse_filter


class FilterError(Exception):
    """The value is refused with `status`."""

    def __init__(self, status: Status) -> None:
        """`status` is what a server answers."""
        super().__init__(status.name)
        self.status = status


class StreamFilter:
    """What passes. `all` passes everything; else `collections` (and `scope_id`, when the filter is a scope)."""

    def __init__(
        self,
        *,
        collections: set[int] | None = None,
        scope_id: int | None = None,
        legacy: bool = False,
        stream_id: int | None = None,
        purge_seqno: int | None = None,
        hidden: BucketManifest | None = None,
    ) -> None:
        """Without collections everything passes; but what is the system's in the manifest `hidden`."""
        self.collections = collections
        self.scope_id = scope_id
        self.legacy = legacy
        self.stream_id = stream_id
        self.purge_seqno = purge_seqno
        self._hidden = hidden

    @property
    def all(self) -> bool:
        """True when nothing is held back."""
        return self.collections is None and self._hidden is None

    @property
    def sees_system(self) -> bool:
        """True unless the system's collections are held back."""
        return self._hidden is None

    @property
    def empty(self) -> bool:
        """True when nothing can ever pass again."""
        return self.collections is not None and not self.collections and self.scope_id is None

    def passes(self, item: Item) -> bool:
        """Whether the stream shows a change. To be asked in the order of seqnos, once each: system events that pass
        change what follows (a scope's new collections join, ended ones leave).
        """
        if self._hidden is not None and _is_system(item, self._hidden):
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
                self.collections.clear()
            return True
        shown = id_ in self.collections if self.scope_id is None else _scope_of(item) == self.scope_id
        if shown and event == SystemEventId.COLLECTION_BEGIN:
            self.collections.add(id_)
        elif shown and event == SystemEventId.COLLECTION_END:
            self.collections.discard(id_)
        return shown


def _is_system(item: Item, manifest: BucketManifest) -> bool:
    if item.kind == SYSTEM_EVENT and item.event in (SystemEventId.SCOPE_CREATE, SystemEventId.SCOPE_DROP):
        return system_id(item) in manifest.system_scopes
    return (system_id(item) if item.kind == SYSTEM_EVENT else item.collection_id) in manifest.system_collections


def _scope_of(item: Item) -> int:
    if isinstance(item, EventItem):
        return item.change.scope_id
    return int.from_bytes(item.value[8:12])


def parse(
    value: bytes,
    manifest: BucketManifest,
    *,
    has_collections: bool,
    has_stream_ids: bool,
    known: frozenset[str] = KEYS,
    sees_system: bool = True,
) -> StreamFilter:
    """The filter that a stream request asks for, or a FilterError.

    `known` are the keys that the server reads. Who may not see the system's collections is not told that they are left
    out, and that they exist only as far as by the seqnos that are missing (docs/protocol.md 2.2).
    """
    if not has_collections:
        if value:
            raise FilterError(Status.EINVAL)
        return StreamFilter(collections={0}, legacy=True)
    try:
        asked = parse_filter(value, has_stream_ids=has_stream_ids, known=known)
    except RemoteProtocolError as error:
        raise FilterError(Status(error.status)) from None
    hidden = None if sees_system else manifest
    result = StreamFilter(
        scope_id=asked.scope_id, stream_id=asked.stream_id, purge_seqno=asked.purge_seqno, hidden=hidden
    )
    if asked.scope_id is not None:
        if asked.scope_id not in manifest.scopes or (hidden and asked.scope_id in hidden.system_scopes):
            raise FilterError(Status.UNKNOWN_SCOPE)
        result.collections = {
            entry.collection_id for entry in manifest.collections.values() if entry.scope_id == asked.scope_id
        }
    elif asked.collections is not None:
        result.collections = set(asked.collections)
        if not result.collections <= manifest.collections.keys() - (hidden.system_collections if hidden else set()):
            raise FilterError(Status.UNKNOWN_COLLECTION)
    return result
