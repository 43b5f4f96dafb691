"""A version as one particular DCP client gets it: features and open flags decide about key, value and opcode.

Knows which negotiated feature alters what (docs/protocol.md 2.2, 2.3, 2.11; recordings 72_h*, 605_h*); must never
know streams, windows or seqnos. Invariant: where nothing has to be altered the item's own frame is used as it is, so
the common case costs one test per item; the opaque is set by whoever sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirror.document import values
from mirror.sandbox.item import (
    ABORT,
    BETWEEN,
    COMMIT,
    DELETION,
    EXPIRATION,
    MUTATION,
    PREPARE,
    SYSTEM_EVENT,
    CommitItem,
    EventItem,
    Item,
    commit_frame,
)
from mirror.wire import leb128
from mirror.wire.constants import DcpOpenFlag, SystemEventId
from mirror.wire.frame import HEADER, with_stream_id


@dataclass(slots=True)
class ClientFeatures:
    """What HELLO, DCP_OPEN and DCP_CONTROL said."""

    collections: bool = False
    snappy: bool = False
    open_flags: int = 0
    expiry_opcode: bool = False
    force_compression: bool = False
    sync_writes: bool = False
    flat_events: bool = False

    @property
    def xattrs(self) -> bool:
        """Xattrs are wanted."""
        return bool(self.open_flags & DcpOpenFlag.INCLUDE_XATTRS)

    @property
    def deleted_user_xattrs(self) -> bool:
        """Deletions keep the users' xattrs, too."""
        return bool(self.open_flags & DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS)

    @property
    def delete_times(self) -> bool:
        """Deletions carry their time."""
        return bool(self.open_flags & DcpOpenFlag.INCLUDE_DELETE_TIMES)


class ItemEncoder:
    """Frames for one client."""

    def __init__(self, features: ClientFeatures) -> None:
        """The features must not change any more."""
        self._features = features
        self._no_value = bool(features.open_flags & DcpOpenFlag.NO_VALUE)
        self._no_value_true_datatype = bool(features.open_flags & DcpOpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE)
        unwanted = 0
        if not features.xattrs:
            unwanted |= values.XATTR
        if not features.snappy:
            unwanted |= values.SNAPPY
        self.unwanted_datatype = unwanted
        """Datatype bits that this client must not get."""
        self.plain = (
            features.collections
            and not self._no_value
            and not self._no_value_true_datatype
            and not features.force_compression
            and not features.sync_writes
        )
        """True when a mutation without unwanted datatype bits is sent as it is."""

    def shows(self, item: Item) -> bool:
        """Whether the client gets this kind of message at all: prepares, aborts and modifications of collections are
        for those who ask.
        """
        kind = item.kind
        if kind == SYSTEM_EVENT:
            return self._features.flat_events or item.event != SystemEventId.COLLECTION_MODIFY
        return self._features.sync_writes or kind not in (PREPARE, ABORT)

    def encode(self, item: Item, *, from_disk: bool, stream_id: int | None = None) -> bytes:
        """The frame, with opaque 0."""
        kind = item.kind
        if self.plain and kind == MUTATION and stream_id is None and not item.datatype & self.unwanted_datatype:
            return item.frame
        if kind == SYSTEM_EVENT:
            frame = self._event(item)
        elif kind in BETWEEN or (kind == ABORT and self._features.collections):
            frame = item.frame
        elif kind == ABORT:
            frame = _build(item.frame, ABORT, item.frame[24 : 24 + item.frame[4]], self._key(item), b"", 0)
        elif self._features.sync_writes and isinstance(item, CommitItem) and not from_disk:
            frame = commit_frame(_vbid(item), self._key(item), item.prepared_seqno, item.seqno)
        else:
            frame = self._document(item, kind, from_disk=from_disk)
        return frame if stream_id is None else with_stream_id(frame, stream_id)

    def _event(self, item: Item) -> bytes:
        if not (self._features.flat_events and isinstance(item, EventItem)):
            return item.frame
        value = item.change.flat_body()
        extras = item.frame[24:36] + b"\x02"
        return _build(item.frame, SYSTEM_EVENT, extras, item.change.key, value, 0)

    def _document(self, item: Item, kind: int, *, from_disk: bool) -> bytes:
        value, datatype = self._value(item)
        key = self._key(item)
        extras = item.frame[24 : 24 + item.frame[4]]
        if kind in (DELETION, EXPIRATION):
            when = extras[16:20] if from_disk else b"\0\0\0\0"
            if kind == EXPIRATION and self._features.expiry_opcode and self._features.delete_times:
                extras = extras[:16] + when
            else:
                kind = DELETION
                extras = extras[:16] + (when + b"\0" if self._features.delete_times else b"\0\0")
        return _build(item.frame, kind, extras, key, value, datatype)

    def _key(self, item: Item) -> bytes:
        """Without its collection id for clients that know none."""
        return item.key if self._features.collections else item.key[leb128.decode(item.key)[1] :]

    def _value(self, item: Item) -> tuple[bytes, int]:
        value, datatype = item.value, item.datatype
        if self._no_value_true_datatype:
            return b"", datatype
        if not self._features.xattrs:
            value, datatype = values.without_xattrs(value, datatype)
        elif (item.deleted or item.deletes) and not self._features.deleted_user_xattrs:
            value, datatype = _without_user_xattrs(value, datatype)
        if self._no_value:
            value, datatype = values.without_body(value, datatype)
        if not self._features.snappy:
            value, datatype = values.inflate(value, datatype)
        elif self._features.force_compression:
            value, datatype = values.deflate(value, datatype)
        return value, datatype


def _without_user_xattrs(value: bytes, datatype: int) -> tuple[bytes, int]:
    if not datatype & values.XATTR or all(name.startswith(b"_") for name in values.split(value, datatype)[0]):
        return value, datatype
    return values.tombstone_value(value, datatype)


def _vbid(item: Item) -> int:
    return int.from_bytes(item.frame[6:8])


def _build(frame: bytes, kind: int, extras: bytes, key: bytes, value: bytes, datatype: int) -> bytes:
    length = len(extras) + len(key) + len(value)
    cas = 0 if kind in (SYSTEM_EVENT, COMMIT, ABORT) else int.from_bytes(frame[16:24])
    vbid = int.from_bytes(frame[6:8])
    return b"".join(
        (HEADER.pack(frame[0], kind, len(key), len(extras), datatype, vbid, length, 0, cas), extras, key, value)
    )
