"""DCP_CONTROL at the embedded source and at a mirror: answers, effects, and their differences."""

from __future__ import annotations

from mirror.sandbox.data.profile import DEFAULT_PROFILE, PROFILES
from mirror.serve.dcp.connection import ABILITIES as MIRROR
from mirror.server.controls import Controls
from mirror.wire.constants import DcpOpenFlag, MarkerVersion, Status

SOURCE = PROFILES[DEFAULT_PROFILE].abilities(keeps_history=False)
GOOD, BAD, NOT = Status.SUCCESS, Status.EINVAL, Status.NOT_SUPPORTED


def test_what_is_refused_changes_nothing() -> None:
    fresh = Controls(MIRROR, True, True, 1)
    for name in (b"set_noop_interval", b"connection_buffer_size", b"enable_noop", b"max_marker_version"):
        fresh.set(name, b"nonsense")
    assert fresh == Controls(MIRROR, True, True, 1)


def test_expirations_are_distinguished_only_with_delete_times() -> None:
    """Recorded: success either way (docs/protocol.md 2.3)."""
    for flags, reported in ((1, False), (1 | int(DcpOpenFlag.INCLUDE_DELETE_TIMES), True)):
        controls = Controls(MIRROR, True, True, flags)
        assert controls.set(b"enable_expiry_opcode", b"true") == GOOD
        assert controls.expirations == reported
        assert controls.xattrs is False


def test_what_they_turn_on() -> None:
    controls = Controls(SOURCE, collections=True, snappy=True, open_flags=0x125)
    for name, value in (
        (b"enable_noop", b"true"),
        (b"set_noop_interval", b"1"),
        (b"connection_buffer_size", b"1000"),
        (b"force_value_compression", b"true"),
        (b"include_deleted_user_xattrs", b"true"),
        (b"enable_expiry_opcode", b"true"),
        (b"enable_out_of_order_snapshots", b"true_with_seqno_advanced"),
        (b"flatbuffers_system_events", b"true"),
        (b"max_marker_version", b"2.2"),
        (b"send_stream_end_on_client_close_stream", b"true"),
        (b"enable_stream_id", b"true"),
    ):
        assert controls.set(name, value) == Status.SUCCESS, name
    assert (controls.force_compression, controls.expirations, controls.flat_events) == (True, True, True)
    assert (controls.noop_enabled, controls.noop_interval_s, controls.buffer_bytes) == (True, 1.0, 1000)
    assert controls.marker_version == MarkerVersion.V2_2
    assert (controls.end_on_close, controls.stream_ids) == (True, True)
    assert controls.set(b"enable_sync_writes", b"true") == Status.NOT_SUPPORTED
