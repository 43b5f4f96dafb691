"""What DCP_CONTROL sets: names, values, and what they turn on.

Knows the values of docs/protocol.md 2.3 and what recorded engines answered; which names there are is the profile's.
Must never know streams or tasks. Invariants: an unknown name or value is EINVAL and changes nothing; what turns on a
shape of messages is noted in the client's features, the rest here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mirror.sandbox.encoder import ClientFeatures
from mirror.sandbox.profile import DEFAULT_PROFILE, PROFILES, Profile
from mirror.wire.constants import ControlKey, DcpOpenFlag, Status

NOOP_INTERVAL_DEFAULT = 180.0


@dataclass(slots=True)
class Controls:
    """The settings of one DCP connection."""

    features: ClientFeatures
    noop_enabled: bool = False
    noop_interval: float = NOOP_INTERVAL_DEFAULT
    buffer_bytes: int = 0
    stream_ids: bool = False
    end_on_close: bool = False
    oso: bool = False
    oso_with_seqno_advanced: bool = False
    consumer_name: bool = False
    marker_v2_2: bool = False
    change_streams: bool = False
    v7_status_codes: bool = False
    profile: Profile = PROFILES[DEFAULT_PROFILE]
    keeps_history: bool = False
    """The bucket's storage can tell of every version."""

    def set(self, name: bytes, value: bytes) -> Status:
        """Set one; the status is the answer."""
        handler = _CONTROLS.get(name)
        known = handler is not None and self.profile.has_control(name)
        return handler(self, value) if known and handler is not None else Status.EINVAL

    def _set_noop(self, value: bytes) -> Status:
        if value not in (b"true", b"false"):
            return Status.EINVAL
        self.noop_enabled = value == b"true"
        return Status.SUCCESS

    def _set_noop_interval(self, value: bytes) -> Status:
        try:
            seconds = float(value)
        except ValueError:
            return Status.EINVAL
        least = 0.1 if self.profile.fractional_noops else 1
        if not least <= seconds <= 10_800 or (not self.profile.fractional_noops and not value.isdigit()):
            return Status.EINVAL
        self.noop_interval = seconds
        return Status.SUCCESS

    def _set_buffer_size(self, value: bytes) -> Status:
        if not (value.isdigit() and int(value) < 1 << 32):
            return Status.EINVAL
        self.buffer_bytes = int(value)
        return Status.SUCCESS

    def _set_force_compression(self, value: bytes) -> Status:
        if value != b"true" or not self.features.snappy:
            return Status.EINVAL
        self.features.force_compression = True
        return Status.SUCCESS

    def _set_end_on_close(self, value: bytes) -> Status:
        if value != b"true":
            return Status.EINVAL
        self.end_on_close = True
        return Status.SUCCESS

    def _set_expiry_opcode(self, value: bytes) -> Status:
        """Success always; without delete times it stays without effect (docs/protocol.md 2.3)."""
        if value not in (b"true", b"false"):
            return Status.EINVAL
        self.features.expiry_opcode = value == b"true"
        return Status.SUCCESS

    def _set_stream_id(self, value: bytes) -> Status:
        if value != b"true" or not self.features.collections:
            return Status.EINVAL
        if self.features.sync_writes:
            return Status.NOT_SUPPORTED
        self.stream_ids = True
        return Status.SUCCESS

    def _set_sync_writes(self, value: bytes) -> Status:
        if value != b"true":
            return Status.EINVAL
        if self.stream_ids:
            return Status.NOT_SUPPORTED
        self.features.sync_writes = True
        return Status.SUCCESS

    def _set_consumer_name(self, value: bytes) -> Status:
        if not 0 < len(value) <= 200:
            return Status.EINVAL
        self.consumer_name = True
        return Status.SUCCESS

    def _set_deleted_user_xattrs(self, value: bytes) -> Status:
        took = self.features.open_flags & DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS
        return Status.SUCCESS if value == b"true" and took else Status.EINVAL

    def _set_oso(self, value: bytes) -> Status:
        takes_seqno = self.profile.since(7, 1)
        if value != b"true" and not (takes_seqno and value == b"true_with_seqno_advanced"):
            return Status.EINVAL
        self.oso = True
        self.oso_with_seqno_advanced = value != b"true"
        return Status.SUCCESS

    def _set_change_streams(self, value: bytes) -> Status:
        """Only where the storage keeps history; nobody turns it off again (docs/protocol.md 2.3)."""
        if value != b"true":
            return Status.EINVAL
        if not self.keeps_history:
            return Status.NOT_SUPPORTED
        self.change_streams = True
        return Status.SUCCESS

    def _set_v7_status_codes(self, value: bytes) -> Status:
        if value != b"true":
            return Status.EINVAL
        self.v7_status_codes = True
        return Status.SUCCESS

    def _set_flat_events(self, value: bytes) -> Status:
        if value != b"true":
            return Status.EINVAL
        self.features.flat_events = True
        return Status.SUCCESS

    def _set_marker_version(self, value: bytes) -> Status:
        if value not in (b"2.0", b"2.2") or not self.features.collections:
            return Status.EINVAL
        self.marker_v2_2 = value == b"2.2"
        return Status.SUCCESS

    def _set_priority(self, value: bytes) -> Status:
        return Status.SUCCESS if value in (b"high", b"medium", b"low") else Status.EINVAL

    def _set_order(self, value: bytes) -> Status:
        return Status.SUCCESS if value in (b"round-robin", b"sequential") else Status.EINVAL

    def _set_flag(self, value: bytes) -> Status:
        return Status.SUCCESS if value in (b"true", b"false") else Status.EINVAL

    def _not_supported(self, _value: bytes) -> Status:
        return Status.NOT_SUPPORTED


_CONTROLS: dict[bytes, Callable[[Controls, bytes], Status]] = {
    ControlKey.ENABLE_NOOP: Controls._set_noop,
    ControlKey.SET_NOOP_INTERVAL: Controls._set_noop_interval,
    ControlKey.CONNECTION_BUFFER_SIZE: Controls._set_buffer_size,
    ControlKey.SET_PRIORITY: Controls._set_priority,
    ControlKey.SUPPORTS_CURSOR_DROPPING_VULCAN: Controls._set_flag,
    ControlKey.SUPPORTS_HIFI_MFU: Controls._set_flag,
    ControlKey.FORCE_VALUE_COMPRESSION: Controls._set_force_compression,
    ControlKey.SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM: Controls._set_end_on_close,
    ControlKey.ENABLE_EXPIRY_OPCODE: Controls._set_expiry_opcode,
    ControlKey.ENABLE_STREAM_ID: Controls._set_stream_id,
    ControlKey.ENABLE_SYNC_WRITES: Controls._set_sync_writes,
    ControlKey.CONSUMER_NAME: Controls._set_consumer_name,
    ControlKey.BACKFILL_ORDER: Controls._set_order,
    ControlKey.INCLUDE_DELETED_USER_XATTRS: Controls._set_deleted_user_xattrs,
    ControlKey.ENABLE_OUT_OF_ORDER_SNAPSHOTS: Controls._set_oso,
    ControlKey.V7_DCP_STATUS_CODES: Controls._set_v7_status_codes,
    ControlKey.CHANGE_STREAMS: Controls._set_change_streams,
    ControlKey.FLATBUFFERS_SYSTEM_EVENTS: Controls._set_flat_events,
    ControlKey.MAX_MARKER_VERSION: Controls._set_marker_version,
    b"stream_buffer_size": Controls._not_supported,
    b"enable_ext_metadata": Controls._set_flag,
    b"enable_value_compression": Controls._set_flag,
    ControlKey.SUPPORTS_CURSOR_DROPPING: Controls._set_flag,
}
