"""What a DCP client negotiated: by HELLO, by the flags of DCP_OPEN, and by DCP_CONTROL.

Knows names and values of controls and what each turns on (docs/protocol.md 2.2, 2.3); must
never know streams or tasks. Invariants: an unknown name or a value that makes no sense is EINVAL and changes nothing;
what is answered with success is honoured, or is a permission that this producer never makes use of (out-of-order
snapshots); what it cannot do (durable writes, histories, cached items) is not supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mirror.wire.constants import ControlKey, DcpOpenFlag, MarkerVersion, Status

NOOP_INTERVAL_DEFAULT_S = 180.0
NOOP_INTERVAL_MIN_S, NOOP_INTERVAL_MAX_S = 0.1, 10_800.0

OPEN_FLAGS = int(
    DcpOpenFlag.PRODUCER
    | DcpOpenFlag.INCLUDE_XATTRS
    | DcpOpenFlag.NO_VALUE
    | DcpOpenFlag.INCLUDE_DELETE_TIMES
    | DcpOpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE
    | DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS
)
"""The flags of DCP_OPEN that are known here."""


@dataclass(slots=True)
class Negotiated:
    """The settings of one DCP connection."""

    collections: bool = False
    snappy: bool = False
    open_flags: int = 0
    noop_enabled: bool = False
    noop_interval_s: float = NOOP_INTERVAL_DEFAULT_S
    buffer_bytes: int = 0
    stream_ids: bool = False
    end_on_close: bool = False
    expiry_asked: bool = False
    force_compression: bool = False
    flat_events: bool = False
    in_parallel: bool = False
    """Backfills of several vbuckets take turns; else one is sent after the other."""
    marker_version: MarkerVersion = MarkerVersion.V1
    """Of disk snapshots; those from memory have nothing that V1 could not say."""

    @property
    def xattrs(self) -> bool:
        """Xattrs are wanted."""
        return bool(self.open_flags & DcpOpenFlag.INCLUDE_XATTRS)

    @property
    def delete_times(self) -> bool:
        """Deletions carry their time."""
        return bool(self.open_flags & DcpOpenFlag.INCLUDE_DELETE_TIMES)

    @property
    def expirations(self) -> bool:
        """Expirations are told apart from deletions; without delete times they are not (docs/protocol.md 2.3)."""
        return self.expiry_asked and self.delete_times

    def set(self, name: bytes, value: bytes) -> Status:
        """DCP_CONTROL: the status is the answer."""
        handler = _CONTROLS.get(name)
        return Status.EINVAL if handler is None else handler(self, value)

    def _set_noop(self, value: bytes) -> Status:
        if value not in _BOOLEANS:
            return Status.EINVAL
        self.noop_enabled = value == b"true"
        return Status.SUCCESS

    def _set_noop_interval(self, value: bytes) -> Status:
        try:
            seconds = float(value)
        except ValueError:
            return Status.EINVAL
        if not NOOP_INTERVAL_MIN_S <= seconds <= NOOP_INTERVAL_MAX_S:
            return Status.EINVAL
        self.noop_interval_s = seconds
        return Status.SUCCESS

    def _set_buffer_size(self, value: bytes) -> Status:
        if not (value.isdigit() and int(value[:11]) < 1 << 32 and len(value) <= 10):
            return Status.EINVAL
        self.buffer_bytes = int(value)
        return Status.SUCCESS

    def _set_force_compression(self, value: bytes) -> Status:
        if value != b"true" or not self.snappy:
            return Status.EINVAL
        self.force_compression = True
        return Status.SUCCESS

    def _set_end_on_close(self, value: bytes) -> Status:
        if value != b"true":
            return Status.EINVAL
        self.end_on_close = True
        return Status.SUCCESS

    def _set_expiry_opcode(self, value: bytes) -> Status:
        if value not in _BOOLEANS:
            return Status.EINVAL
        self.expiry_asked = value == b"true"
        return Status.SUCCESS

    def _set_stream_id(self, value: bytes) -> Status:
        if value != b"true" or not self.collections:
            return Status.EINVAL
        self.stream_ids = True
        return Status.SUCCESS

    def _set_deleted_user_xattrs(self, value: bytes) -> Status:
        took = self.open_flags & DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS
        return Status.SUCCESS if value == b"true" and took else Status.EINVAL

    def _set_out_of_order(self, value: bytes) -> Status:
        return Status.SUCCESS if value in (b"true", b"true_with_seqno_advanced") else Status.EINVAL

    def _set_flat_events(self, value: bytes) -> Status:
        if value != b"true":
            return Status.EINVAL
        self.flat_events = True
        return Status.SUCCESS

    def _set_marker_version(self, value: bytes) -> Status:
        version = _MARKER_VERSIONS.get(value)
        if version is None or not self.collections:
            return Status.EINVAL
        self.marker_version = version
        return Status.SUCCESS

    def _set_priority(self, value: bytes) -> Status:
        return Status.SUCCESS if value in (b"high", b"medium", b"low") else Status.EINVAL

    def _set_order(self, value: bytes) -> Status:
        if value not in (b"round-robin", b"sequential"):
            return Status.EINVAL
        self.in_parallel = value == b"round-robin"
        return Status.SUCCESS

    def _set_flag(self, value: bytes) -> Status:
        return Status.SUCCESS if value in _BOOLEANS else Status.EINVAL

    def _not_supported(self, _value: bytes) -> Status:
        return Status.NOT_SUPPORTED


_BOOLEANS = (b"true", b"false")
_MARKER_VERSIONS = {b"2.0": MarkerVersion.V2_0, b"2.2": MarkerVersion.V2_2}

_CONTROLS: dict[bytes, Callable[[Negotiated, bytes], Status]] = {
    ControlKey.ENABLE_NOOP: Negotiated._set_noop,
    ControlKey.SET_NOOP_INTERVAL: Negotiated._set_noop_interval,
    ControlKey.CONNECTION_BUFFER_SIZE: Negotiated._set_buffer_size,
    ControlKey.SET_PRIORITY: Negotiated._set_priority,
    ControlKey.SUPPORTS_CURSOR_DROPPING: Negotiated._set_flag,
    ControlKey.SUPPORTS_CURSOR_DROPPING_VULCAN: Negotiated._set_flag,
    ControlKey.SUPPORTS_HIFI_MFU: Negotiated._set_flag,
    ControlKey.FORCE_VALUE_COMPRESSION: Negotiated._set_force_compression,
    ControlKey.SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM: Negotiated._set_end_on_close,
    ControlKey.ENABLE_EXPIRY_OPCODE: Negotiated._set_expiry_opcode,
    ControlKey.ENABLE_STREAM_ID: Negotiated._set_stream_id,
    ControlKey.ENABLE_SYNC_WRITES: Negotiated._not_supported,
    ControlKey.CONSUMER_NAME: Negotiated._not_supported,
    ControlKey.BACKFILL_ORDER: Negotiated._set_order,
    ControlKey.INCLUDE_DELETED_USER_XATTRS: Negotiated._set_deleted_user_xattrs,
    ControlKey.ENABLE_OUT_OF_ORDER_SNAPSHOTS: Negotiated._set_out_of_order,
    ControlKey.V7_DCP_STATUS_CODES: Negotiated._set_flag,
    ControlKey.CHANGE_STREAMS: Negotiated._not_supported,
    ControlKey.FLATBUFFERS_SYSTEM_EVENTS: Negotiated._set_flat_events,
    ControlKey.MAX_MARKER_VERSION: Negotiated._set_marker_version,
    ControlKey.CACHE_TRANSFER: Negotiated._not_supported,
    b"stream_buffer_size": Negotiated._not_supported,
}
