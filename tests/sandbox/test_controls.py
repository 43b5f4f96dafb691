"""Settings of a DCP connection; answers of recorded engines are compared in test_dcp_requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mirror.sandbox.controls import Controls
from mirror.sandbox.encoder import ClientFeatures
from mirror.wire.constants import Status


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("set_priority", "high", 0),
        ("set_priority", "no", Status.EINVAL),
        ("set_noop_interval", "0.5", 0),
        ("set_noop_interval", "0.01", Status.EINVAL),
        ("set_noop_interval", "x", Status.EINVAL),
        ("enable_noop", "perhaps", Status.EINVAL),
        ("backfill_order", "sequential", 0),
        ("backfill_order", "random", Status.EINVAL),
        ("supports_cursor_dropping_vulcan", "true", 0),
        ("force_value_compression", "true", Status.EINVAL),
        ("send_stream_end_on_client_close_stream", "false", Status.EINVAL),
        ("include_deleted_user_xattrs", "true", Status.EINVAL),
        ("enable_out_of_order_snapshots", "maybe", Status.EINVAL),
        ("change_streams", "true", Status.NOT_SUPPORTED),
        ("stream_buffer_size", "1", Status.NOT_SUPPORTED),
        ("flatbuffers_system_events", "false", Status.EINVAL),
        ("max_marker_version", "9", Status.EINVAL),
        ("consumer_name", "n", 0),
        ("enable_expiry_opcode", "yes", Status.EINVAL),
        ("enable_sync_writes", "no", Status.EINVAL),
        ("enable_ext_metadata", "true", Status.EINVAL),
    ],
)
def test_names_and_values(name: str, value: str, status: int) -> None:
    controls = Controls(ClientFeatures(collections=True, open_flags=1))
    before = replace(controls, features=replace(controls.features))
    assert controls.set(name.encode(), value.encode()) == status
    if status:
        assert controls == before


def test_what_they_turn_on() -> None:
    controls = Controls(ClientFeatures(collections=True, snappy=True, open_flags=0x125))
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
    features = controls.features
    assert (features.force_compression, features.expiry_opcode, features.flat_events) == (True, True, True)
    assert (controls.noop_enabled, controls.noop_interval, controls.buffer_bytes) == (True, 1.0, 1000)
    assert (controls.oso, controls.oso_with_seqno_advanced, controls.marker_v2_2) == (True, True, True)
    assert (controls.end_on_close, controls.stream_ids) == (True, True)
    assert controls.set(b"enable_sync_writes", b"true") == Status.NOT_SUPPORTED
