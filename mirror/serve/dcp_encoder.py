"""A stored row as one particular DCP client gets it: features and open flags decide about key, value and opcode.

Knows the shape of rows (`storage/FORMAT.md`) and which negotiated feature alters what (docs/protocol.md 2.2, 2.3, 2.11;
the recordings 72_h* and 605_h*); must never know streams, windows or seqnos. Invariants: where nothing has to be
altered the row itself is the message; vbucket and opaque are set by whoever sends; a row that cannot be taken apart is
a ValueError or a ProtocolError, never a message that says something else.
"""

from __future__ import annotations

import struct

from mirror.document import values
from mirror.serve.dcp_controls import Negotiated
from mirror.serve.dcp_filter import StreamFilter
from mirror.wire import codec_dcp, leb128
from mirror.wire import frame as fr
from mirror.wire.constants import DcpOpenFlag, Magic, Opcode
from mirror.wire.events import CollectionModified, SystemEvent
from mirror.wire.frame import HEADER, with_stream_id
from mirror.wire.system_events import decode_system_event, encode_system_event

MUTATION = int(Opcode.DCP_MUTATION)
DELETION = int(Opcode.DCP_DELETION)
EXPIRATION = int(Opcode.DCP_EXPIRATION)
SYSTEM_EVENT = int(Opcode.DCP_SYSTEM_EVENT)

_FLAT = 2
"""Version of a system event whose value is FlatBuffers."""
_EVENT_VERSION_AT = 24 + 12
_MUTATION_METADATA = slice(28, 30)
_DELETION_METADATA = slice(16, 18)
_DELETION_V1_SIZE, _DELETION_V2_SIZE = 18, 21
_NO_METADATA = b"\0\0"
_TIME_UNKNOWN = b"\0\0\0\0"
_U16 = struct.Struct(">H")


class RowEncoder:
    """Messages for one stream."""

    def __init__(self, negotiated: Negotiated, stream_filter: StreamFilter, *, no_value: bool = False) -> None:
        """`no_value`: this stream leaves values out, whatever the connection does."""
        flags = negotiated.open_flags
        self._collections = negotiated.collections
        self._snappy = negotiated.snappy
        self._xattrs = negotiated.xattrs
        self._deleted_user_xattrs = bool(flags & DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS)
        self._no_value = no_value or bool(flags & DcpOpenFlag.NO_VALUE)
        self._no_value_true_datatype = bool(flags & DcpOpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE)
        self._delete_times = negotiated.delete_times
        self._expirations = negotiated.expirations
        self._compress = negotiated.force_compression
        self._event_version = _FLAT if negotiated.flat_events else 1
        self._filter = stream_filter
        self._stream_id = stream_filter.stream_id
        self.unwanted_datatype = (0 if self._xattrs else values.XATTR) | (0 if self._snappy else values.SNAPPY)
        """Datatype bits that this client must not get."""
        self.plain = (
            self._collections
            and self._stream_id is None
            and not (self._no_value or self._no_value_true_datatype or self._compress)
        )
        """True when a mutation without unwanted datatype bits is sent as it is stored."""

    def encode(self, row: bytes) -> bytes:
        """The message; empty for what this client does not get."""
        message = self._event(row) if row[1] == SYSTEM_EVENT else self._document(row)
        return message if self._stream_id is None or not message else with_stream_id(message, self._stream_id)

    def _event(self, row: bytes) -> bytes:
        """A system event in the form that the client reads. Changed settings exist in one form only."""
        as_wanted = (row[_EVENT_VERSION_AT] == _FLAT) == (self._event_version == _FLAT)
        if as_wanted and self._filter.all:
            return row
        event = codec_dcp.decode(fr.decode(row)[0])
        assert isinstance(event, SystemEvent)
        content = decode_system_event(event)
        if not self._filter.shows(content) or (
            isinstance(content, CollectionModified) and self._event_version != _FLAT
        ):
            return b""
        if as_wanted:
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
        else:
            if extras_length == _DELETION_V1_SIZE:
                extras, value = _without_metadata(extras, value, _DELETION_METADATA)
            opcode, extras = self._tombstone(opcode, extras)
            if datatype & values.XATTR and not self._deleted_user_xattrs:
                value, datatype = values.tombstone_value(value, datatype)
        value, datatype = self._value(value, datatype)
        if not self._collections:
            key = key[leb128.decode(key)[1] :]
        body_length = len(extras) + len(key) + len(value)
        head = HEADER.pack(int(Magic.REQUEST), opcode, len(key), len(extras), datatype, vbid, body_length, opaque, cas)
        return b"".join((head, extras, key, value))

    def _tombstone(self, opcode: int, extras: bytes) -> tuple[int, bytes]:
        """Opcode and extras of a deletion or an expiration: in which of the three shapes, and with which time."""
        when = _TIME_UNKNOWN if len(extras) == _DELETION_V1_SIZE else extras[16:20]
        if opcode == EXPIRATION and self._expirations:
            return EXPIRATION, extras[:16] + when
        return DELETION, extras[:16] + (when + b"\0" if self._delete_times else _NO_METADATA)

    def _value(self, value: bytes, datatype: int) -> tuple[bytes, int]:
        if self._no_value_true_datatype:
            return b"", datatype
        if not self._xattrs:
            value, datatype = values.without_xattrs(value, datatype)
        if self._no_value:
            value, datatype = values.without_body(value, datatype)
        if not self._snappy:
            value, datatype = values.inflate(value, datatype)
        elif self._compress:
            value, datatype = values.deflate(value, datatype)
        return value, datatype


def _without_metadata(extras: bytes, value: bytes, where: slice) -> tuple[bytes, bytes]:
    """Extended metadata of old servers stands behind the value and is not part of the document."""
    (length,) = _U16.unpack(extras[where])
    if not length:
        return extras, value
    if length > len(value):
        raise ValueError(f"metadata of {length} bytes in {len(value)} bytes of value")
    return extras[: where.start] + _NO_METADATA + extras[where.stop :], value[:-length]
