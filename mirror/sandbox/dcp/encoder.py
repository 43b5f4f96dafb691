"""Encodes versions in the form that a DCP client negotiated (docs/protocol.md 2.2, 2.3, 2.11; recordings 72_h*,
605_h*). The caller sets the opaque.
"""

from __future__ import annotations

from mirror.sandbox.data.item import (
    ABORT,
    BETWEEN,
    DELETION,
    EXPIRATION,
    MUTATION,
    PREPARE,
    SYSTEM_EVENT,
    EventItem,
    Item,
)
from mirror.server.controls import TIME_UNKNOWN, Controls, DocumentShape
from mirror.wire import codec_dcp
from mirror.wire.constants import SystemEventId
from mirror.wire.frame import HEADER, with_stream_id
from mirror.wire.system_events import encode_system_event


class ItemEncoder:
    def __init__(self, controls: Controls) -> None:
        self._controls = controls
        self._shape = DocumentShape(controls)
        self.unwanted_datatype = self._shape.unwanted_datatype
        self.plain = self._shape.plain
        """True if the frame of a mutation without unwanted datatype bits is sent unchanged."""

    def shows(self, item: Item) -> bool:
        """True if the client gets this item: no prepare or abort, a modified collection only if it asked for them."""
        kind = item.kind
        if kind == SYSTEM_EVENT:
            return self._controls.flat_events or item.event != SystemEventId.COLLECTION_MODIFY
        return kind not in (PREPARE, ABORT)

    def encode(self, item: Item, *, from_disk: bool, stream_id: int | None = None) -> bytes:
        kind = item.kind
        if self.plain and kind == MUTATION and stream_id is None and not item.datatype & self.unwanted_datatype:
            return item.frame
        if kind == SYSTEM_EVENT:
            frame = self._event(item)
        elif kind in BETWEEN:
            frame = item.frame
        else:
            frame = self._document(item, kind, from_disk=from_disk)
        return frame if stream_id is None else with_stream_id(frame, stream_id)

    def _event(self, item: Item) -> bytes:
        if not (self._controls.flat_events and isinstance(item, EventItem)):
            return item.frame
        flat = encode_system_event(item.content, vbid=_vbid(item), seqno=item.seqno, version=2)
        return codec_dcp.encode(flat)

    def _document(self, item: Item, kind: int, *, from_disk: bool) -> bytes:
        value, datatype = self._shape.value(item.value, item.datatype, tombstone=item.deleted)
        extras = item.frame[24 : 24 + item.frame[4]]
        if kind in (DELETION, EXPIRATION):
            kind, extras = self._shape.tombstone(kind, extras[:16], extras[16:20] if from_disk else TIME_UNKNOWN)
        key = self._shape.key(item.key)
        length = len(extras) + len(key) + len(value)
        head = (item.frame[0], kind, len(key), len(extras), datatype, _vbid(item), length, 0, item.cas)
        return b"".join((HEADER.pack(*head), extras, key, value))


def _vbid(item: Item) -> int:
    return int.from_bytes(item.frame[6:8])
