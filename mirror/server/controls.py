"""A DCP client's settings, negotiated by HELLO, DCP_OPEN and DCP_CONTROL, and their effect on documents.

A control is a setting of DCP_CONTROL. Names, values and statuses are those of docs/protocol.md 2.2, 2.3 and 2.11
(recorded). A name that is not in `Abilities.controls`, or an invalid value, gets EINVAL. A control that the server
cannot fulfil, or that excludes one set before, gets NOT_SUPPORTED.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mirror.document import values
from mirror.wire.constants import ControlKey, DcpOpenFlag, MarkerVersion, Opcode, Status, StreamRequestFlag
from mirror.wire.keys import decode_leb128

NOOP_INTERVAL_DEFAULT_S = 180.0
NOOP_INTERVAL_MIN_S, NOOP_INTERVAL_MAX_S = 0.1, 10_800.0

STREAM_BUFFER_SIZE = b"stream_buffer_size"
ENABLE_EXT_METADATA = b"enable_ext_metadata"
ENABLE_VALUE_COMPRESSION = b"enable_value_compression"

STREAM_FLAGS_7_2 = int(
    StreamRequestFlag.TAKEOVER
    | StreamRequestFlag.DISK_ONLY
    | StreamRequestFlag.TO_LATEST
    | StreamRequestFlag.ACTIVE_VB_ONLY
    | StreamRequestFlag.STRICT_VBUUID
    | StreamRequestFlag.IGNORE_PURGED_TOMBSTONES
)
"""Flags of a stream request in 7.2 (kv_engine 7.2.4, daemon/mcbp_validators.cc)."""

DELETION = int(Opcode.DCP_DELETION)
EXPIRATION = int(Opcode.DCP_EXPIRATION)

TIME_UNKNOWN = b"\0\0\0\0"
_NO_METADATA = b"\0\0"
_UNUSED = b"\0"

_TRUE = b"true"
_OSO_WITH_SEQNO_ADVANCED = b"true_with_seqno_advanced"


@dataclass(frozen=True, slots=True)
class Abilities:
    controls: frozenset[bytes]
    fractional_noop_interval: bool = True
    """True if noop intervals may be a fraction of a second (7.6 and newer)."""
    change_streams: bool = False
    oso_with_seqno_advanced: bool = True
    """True if the server accepts `true_with_seqno_advanced` for out-of-order snapshots (7.1 and newer)."""
    stream_flags: int = STREAM_FLAGS_7_2
    refuses_unknown_stream_flags: bool = True
    """True if unknown flags are EINVAL (7.2 and newer); older servers ignore them."""


@dataclass(slots=True)
class Controls:
    abilities: Abilities
    collections: bool = False
    snappy: bool = False
    open_flags: int = 0
    noop_enabled: bool = False
    noop_interval_s: float = NOOP_INTERVAL_DEFAULT_S
    buffer_bytes: int = 0
    stream_ids: bool = False
    end_on_close: bool = False
    expiry_opcode: bool = False
    force_compression: bool = False
    flat_events: bool = False
    change_streams: bool = False
    v7_status_codes: bool = False
    round_robin: bool = False
    """True if backfills of several vbuckets take turns."""
    marker_version: MarkerVersion = MarkerVersion.V1
    """The version of the markers of disk snapshots."""

    @property
    def xattrs(self) -> bool:
        return bool(self.open_flags & DcpOpenFlag.INCLUDE_XATTRS)

    @property
    def deleted_user_xattrs(self) -> bool:
        return bool(self.open_flags & DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS)

    @property
    def delete_times(self) -> bool:
        return bool(self.open_flags & DcpOpenFlag.INCLUDE_DELETE_TIMES)

    @property
    def expirations(self) -> bool:
        """True if expirations have their own opcode. `enable_expiry_opcode` works only with delete times (recorded)."""
        return self.expiry_opcode and self.delete_times

    @property
    def no_value(self) -> bool:
        """True if bodies are left out, and their datatype bits too."""
        return bool(self.open_flags & DcpOpenFlag.NO_VALUE)

    @property
    def no_value_with_underlying_datatype(self) -> bool:
        """True if values are left out, but the datatype is the document's."""
        return bool(self.open_flags & DcpOpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE)

    def set(self, name: bytes, value: bytes) -> Status:
        handler = _CONTROLS.get(name) if name in self.abilities.controls else None
        return Status.EINVAL if handler is None else handler(self, value)

    def _set_noop_interval(self, value: bytes) -> Status:
        fractional = self.abilities.fractional_noop_interval
        try:
            seconds = float(value)
        except ValueError:
            return Status.EINVAL
        least = NOOP_INTERVAL_MIN_S if fractional else 1
        if not least <= seconds <= NOOP_INTERVAL_MAX_S or not (fractional or value.isdigit()):
            return Status.EINVAL
        self.noop_interval_s = seconds
        return Status.SUCCESS

    def _set_buffer_size(self, value: bytes) -> Status:
        if not (value.isdigit() and len(value) <= 10 and int(value) < 1 << 32):
            return Status.EINVAL
        self.buffer_bytes = int(value)
        return Status.SUCCESS

    def _set_stream_id(self, value: bytes) -> Status:
        if value != _TRUE or not self.collections:
            return Status.EINVAL
        self.stream_ids = True
        return Status.SUCCESS

    def _set_deleted_user_xattrs(self, value: bytes) -> Status:
        return Status.SUCCESS if value == _TRUE and self.deleted_user_xattrs else Status.EINVAL

    def _accept_oso(self, value: bytes) -> Status:
        """Accept the permission to send out-of-order snapshots, which no producer here sends (docs/protocol.md 4.4)."""
        with_seqno_advanced = value == _OSO_WITH_SEQNO_ADVANCED and self.abilities.oso_with_seqno_advanced
        return Status.SUCCESS if value == _TRUE or with_seqno_advanced else Status.EINVAL

    def _set_change_streams(self, value: bytes) -> Status:
        """Turn on change streams, if the server has them. A client cannot turn them off (docs/protocol.md 2.3)."""
        if value != _TRUE:
            return Status.EINVAL
        if not self.abilities.change_streams:
            return Status.NOT_SUPPORTED
        self.change_streams = True
        return Status.SUCCESS

    def _set_marker_version(self, value: bytes) -> Status:
        if value != b"2.2":
            return Status.EINVAL
        if not self.collections:
            return Status.NOT_SUPPORTED
        self.marker_version = MarkerVersion.V2_2
        return Status.SUCCESS


_Setter = Callable[[Controls, bytes], Status]


def _choice(values: Mapping[bytes, bool], attribute: str = "", needs: str = "") -> _Setter:
    """Return the setter of a control with these values. Without `attribute`, the setter only checks the value. `needs`
    names an attribute that must be true.
    """

    def set_to(controls: Controls, value: bytes) -> Status:
        if value not in values or (needs and not getattr(controls, needs)):
            return Status.EINVAL
        if attribute:
            setattr(controls, attribute, values[value])
        return Status.SUCCESS

    return set_to


def _not_supported(_controls: Controls, _value: bytes) -> Status:
    return Status.NOT_SUPPORTED


_ONLY_TRUE = {_TRUE: True}
_BOOLEAN = {_TRUE: True, b"false": False}
_PRIORITY = dict.fromkeys((b"high", b"medium", b"low"), True)


_CONTROLS: dict[bytes, _Setter] = {
    ControlKey.ENABLE_NOOP: _choice(_BOOLEAN, "noop_enabled"),
    ControlKey.SET_NOOP_INTERVAL: Controls._set_noop_interval,
    ControlKey.CONNECTION_BUFFER_SIZE: Controls._set_buffer_size,
    ControlKey.SET_PRIORITY: _choice(_PRIORITY),
    ControlKey.SUPPORTS_CURSOR_DROPPING: _choice(_BOOLEAN),
    ControlKey.SUPPORTS_CURSOR_DROPPING_VULCAN: _choice(_BOOLEAN),
    ControlKey.SUPPORTS_HIFI_MFU: _choice(_BOOLEAN),
    ControlKey.FORCE_VALUE_COMPRESSION: _choice(_ONLY_TRUE, "force_compression", needs="snappy"),
    ControlKey.SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM: _choice(_ONLY_TRUE, "end_on_close"),
    ControlKey.ENABLE_EXPIRY_OPCODE: _choice(_BOOLEAN, "expiry_opcode"),
    ControlKey.ENABLE_STREAM_ID: Controls._set_stream_id,
    ControlKey.ENABLE_SYNC_WRITES: _not_supported,
    ControlKey.CONSUMER_NAME: _not_supported,
    ControlKey.BACKFILL_ORDER: _choice({b"round-robin": True, b"sequential": False}, "round_robin"),
    ControlKey.INCLUDE_DELETED_USER_XATTRS: Controls._set_deleted_user_xattrs,
    ControlKey.ENABLE_OUT_OF_ORDER_SNAPSHOTS: Controls._accept_oso,
    ControlKey.V7_DCP_STATUS_CODES: _choice(_ONLY_TRUE, "v7_status_codes"),
    ControlKey.CHANGE_STREAMS: Controls._set_change_streams,
    ControlKey.FLATBUFFERS_SYSTEM_EVENTS: _choice(_ONLY_TRUE, "flat_events"),
    ControlKey.MAX_MARKER_VERSION: Controls._set_marker_version,
    STREAM_BUFFER_SIZE: _not_supported,
    ENABLE_EXT_METADATA: _choice(_BOOLEAN),
    ENABLE_VALUE_COMPRESSION: _choice(_BOOLEAN),
}

ALL_CONTROLS = frozenset(_CONTROLS)


class DocumentShape:
    def __init__(self, controls: Controls) -> None:
        """`controls` must not change afterwards."""
        self._controls = controls
        self.unwanted_datatype = (0 if controls.xattrs else values.XATTR) | (0 if controls.snappy else values.SNAPPY)
        """Datatype bits that this client must not get."""
        self.plain = controls.collections and not (
            controls.no_value or controls.no_value_with_underlying_datatype or controls.force_compression
        )
        """True if a mutation without unwanted datatype bits needs no change."""

    def key(self, wire_key: bytes) -> bytes:
        return wire_key if self._controls.collections else wire_key[decode_leb128(wire_key)[1] :]

    def value(self, value: bytes, datatype: int, *, tombstone: bool) -> tuple[bytes, int]:
        """Return value and datatype for the client. Raises ValueError for invalid compression or xattrs."""
        controls = self._controls
        if controls.no_value_with_underlying_datatype:
            return b"", datatype
        if not controls.xattrs:
            value, datatype = values.without_xattrs(value, datatype)
        elif tombstone and not controls.deleted_user_xattrs:
            value, datatype = _without_user_xattrs(value, datatype)
        if controls.no_value:
            value, datatype = values.without_body(value, datatype)
        if not controls.snappy:
            value, datatype = values.inflate(value, datatype)
        elif controls.force_compression:
            value, datatype = values.deflate(value, datatype)
        return value, datatype

    def tombstone(self, opcode: int, seqnos: bytes, time: bytes) -> tuple[int, bytes]:
        """Return opcode and extras of a deletion or expiration. `seqnos`: seqno and rev_seqno; `time`: 4 bytes."""
        if opcode == EXPIRATION and self._controls.expirations:
            return EXPIRATION, seqnos + time
        return DELETION, seqnos + (time + _UNUSED if self._controls.delete_times else _NO_METADATA)


def _without_user_xattrs(value: bytes, datatype: int) -> tuple[bytes, int]:
    if not datatype & values.XATTR or all(name.startswith(b"_") for name in values.split(value, datatype)[0]):
        return value, datatype
    return values.tombstone_value(value, datatype)
