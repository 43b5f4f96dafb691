"""Conversion of stored rows to messages for one DCP client, as its features and settings require (docs/protocol.md 2.2,
2.3, 2.11; the recordings 72_h* and 605_h*).

A value with invalid compression or xattrs is sent as stored, with its datatype, and logged. In every message the stream
sets vbucket and opaque.
"""

from __future__ import annotations

import struct
from time import monotonic

from mirror.serve.dcp.filter import ServedFilter, is_replaced
from mirror.server.admission import Periodic
from mirror.server.controls import TIME_UNKNOWN, Controls, DocumentShape
from mirror.wire import codec_dcp
from mirror.wire import frame as fr
from mirror.wire.constants import Magic, Opcode
from mirror.wire.events import CollectionModified, SystemEvent
from mirror.wire.frame import HEADER, with_stream_id
from mirror.wire.system_events import decode_system_event, encode_system_event
from storage.model import Manifest

MUTATION = int(Opcode.DCP_MUTATION)
SYSTEM_EVENT = int(Opcode.DCP_SYSTEM_EVENT)

_AS_STORED = Periodic("error", "a value that cannot be taken apart is sent as it is stored")

_FLAT = 2
"""Version of a system event whose value is FlatBuffers."""
_EVENT_VERSION_AT = 24 + 12
_MUTATION_METADATA = slice(28, 30)
_DELETION_METADATA = slice(16, 18)
_DELETION_V1_SIZE = 18
_NO_METADATA = b"\0\0"
_U16 = struct.Struct(">H")


class RowEncoder:
    def __init__(self, controls: Controls, stream_filter: ServedFilter) -> None:
        """`controls` must not change afterwards."""
        self._shape = DocumentShape(controls)
        self._event_version = _FLAT if controls.flat_events else 1
        self._filter = stream_filter
        self._stream_id = stream_filter.stream_id
        self.manifest = Manifest.initial()
        """The manifest at the snapshot's end. It shows which system events were replaced by later ones."""
        self.unwanted_datatype = self._shape.unwanted_datatype
        self.plain = self._shape.plain and self._stream_id is None
        """True if a mutation without unwanted datatype bits is sent as it is stored."""

    def encode(self, row: bytes) -> bytes:
        message = self._event(row) if row[1] == SYSTEM_EVENT else self._document(row)
        return message if self._stream_id is None or not message else with_stream_id(message, self._stream_id)

    def _event(self, row: bytes) -> bytes:
        """Return a system event's message in the client's version, or b"" if the client does not get the event."""
        event = codec_dcp.decode(fr.decode(row)[0])
        assert isinstance(event, SystemEvent)
        content = decode_system_event(event)
        if is_replaced(content, event.seqno, self.manifest) or not self._filter.shows(content):
            return b""
        if isinstance(content, CollectionModified) and self._event_version != _FLAT:
            return b""
        if (row[_EVENT_VERSION_AT] == _FLAT) == (self._event_version == _FLAT):
            return row
        return codec_dcp.encode(
            encode_system_event(content, vbid=event.vbid, seqno=event.seqno, version=self._event_version)
        )

    def _document(self, row: bytes) -> bytes:
        _, opcode, key_length, extras_length, datatype, vbid, _, opaque, cas = HEADER.unpack_from(row)
        key_at = 24 + extras_length
        value_at = key_at + key_length
        extras, key, value = row[24:key_at], row[key_at:value_at], row[value_at:]
        if opcode == MUTATION:
            extras, value = _without_metadata(extras, value, _MUTATION_METADATA)
            tombstone = False
        else:
            time = extras[16:20]
            if extras_length == _DELETION_V1_SIZE:
                extras, value = _without_metadata(extras, value, _DELETION_METADATA)
                time = TIME_UNKNOWN
            opcode, extras = self._shape.tombstone(opcode, extras[:16], time)
            tombstone = True
        try:
            value, datatype = self._shape.value(value, datatype, tombstone=tombstone)
        except ValueError as error:
            _AS_STORED.note(monotonic(), vbid=vbid, key=key, error=str(error))
        key = self._shape.key(key)
        body_length = len(extras) + len(key) + len(value)
        head = HEADER.pack(int(Magic.REQUEST), opcode, len(key), len(extras), datatype, vbid, body_length, opaque, cas)
        return b"".join((head, extras, key, value))


def _without_metadata(extras: bytes, value: bytes, where: slice) -> tuple[bytes, bytes]:
    """Cut extended metadata, which old servers append to the value."""
    (length,) = _U16.unpack(extras[where])
    if not length:
        return extras, value
    if length > len(value):
        raise ValueError(f"metadata of {length} bytes in {len(value)} bytes of value")
    return extras[: where.start] + _NO_METADATA + extras[where.stop :], value[:-length]
