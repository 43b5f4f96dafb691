"""What DCP_CONTROL answers and turns on, at the embedded source and at a mirror: what differs is what each can do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mirror.sandbox.data.profile import DEFAULT_PROFILE, PROFILES
from mirror.serve.dcp.connection import ABILITIES as MIRROR
from mirror.server.controls import Controls
from mirror.wire.constants import DcpOpenFlag, MarkerVersion, Status
from tests import recordings

SOURCE = PROFILES[DEFAULT_PROFILE].abilities(keeps_history=False)
GOOD, BAD, NOT = Status.SUCCESS, Status.EINVAL, Status.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        (b"enable_noop", b"true", GOOD),
        (b"enable_noop", b"yes", BAD),
        (b"set_noop_interval", b"0.5", GOOD),
        (b"set_noop_interval", b"20", GOOD),
        (b"set_noop_interval", b"0", BAD),
        (b"set_noop_interval", b"nan", BAD),
        (b"set_noop_interval", b"soon", BAD),
        (b"connection_buffer_size", b"4294967295", GOOD),
        (b"connection_buffer_size", b"4294967296", BAD),
        (b"connection_buffer_size", b"-1", BAD),
        (b"connection_buffer_size", b"9" * 5000, BAD),
        (b"set_priority", b"high", GOOD),
        (b"set_priority", b"highest", BAD),
        (b"supports_cursor_dropping_vulcan", b"true", GOOD),
        (b"supports_hifi_MFU", b"true", GOOD),
        (b"force_value_compression", b"true", GOOD),
        (b"send_stream_end_on_client_close_stream", b"true", GOOD),
        (b"send_stream_end_on_client_close_stream", b"false", BAD),
        (b"enable_expiry_opcode", b"true", GOOD),
        (b"enable_expiry_opcode", b"1", BAD),
        (b"enable_stream_id", b"true", GOOD),
        (b"enable_stream_id", b"false", BAD),
        (b"backfill_order", b"sequential", GOOD),
        (b"backfill_order", b"any", BAD),
        (b"include_deleted_user_xattrs", b"true", BAD),
        (b"enable_out_of_order_snapshots", b"true_with_seqno_advanced", GOOD),
        (b"enable_out_of_order_snapshots", b"yes", BAD),
        (b"v7_dcp_status_codes", b"true", GOOD),
        (b"flatbuffers_system_events", b"true", GOOD),
        (b"flatbuffers_system_events", b"false", BAD),
        (b"max_marker_version", b"2.2", GOOD),
        (b"max_marker_version", b"3.0", BAD),
        (b"enable_sync_writes", b"true", NOT),
        (b"consumer_name", b"me", NOT),
        (b"change_streams", b"true", NOT),
        (b"cache_transfer", b"true", NOT),
        (b"stream_buffer_size", b"1", NOT),
        (b"no_such_control", b"true", BAD),
    ],
)
def test_each_control_has_its_status(name: bytes, value: bytes, status: Status) -> None:
    assert Controls(MIRROR, True, True, 1).set(name, value) == status


def test_what_is_refused_changes_nothing() -> None:
    fresh = Controls(MIRROR, True, True, 1)
    for name in (b"set_noop_interval", b"connection_buffer_size", b"enable_noop", b"max_marker_version"):
        fresh.set(name, b"nonsense")
    assert fresh == Controls(MIRROR, True, True, 1)


def test_what_needs_a_feature_is_refused_without_it() -> None:
    bare = Controls(MIRROR, False, False, 1)
    for name, value in (
        (b"force_value_compression", b"true"),
        (b"enable_stream_id", b"true"),
        (b"max_marker_version", b"2.2"),
    ):
        assert bare.set(name, value) == BAD
    assert Controls(MIRROR, True, True, 0x101).set(b"include_deleted_user_xattrs", b"true") == GOOD


def test_expirations_are_distinguished_only_with_delete_times() -> None:
    """Recorded: success either way (docs/protocol.md 2.3)."""
    for flags, reported in ((1, False), (1 | int(DcpOpenFlag.INCLUDE_DELETE_TIMES), True)):
        controls = Controls(MIRROR, True, True, flags)
        assert controls.set(b"enable_expiry_opcode", b"true") == GOOD
        assert controls.expirations == reported
        assert controls.xattrs is False


def test_versions_of_markers() -> None:
    controls = Controls(MIRROR, True, True, 1)
    versions = [controls.marker_version]
    controls.set(b"max_marker_version", b"2.0")
    versions.append(controls.marker_version)
    assert versions == [MarkerVersion.V1, MarkerVersion.V2_0]


def test_the_statuses_are_those_that_a_server_gave() -> None:
    """But for what a mirror cannot do."""
    other = {"enable_sync_writes", "consumer_name", "change_streams"}
    compared = 0
    for recording in recordings.names("72_"):
        controls = Controls(MIRROR, True, True, 0x1FF)
        for note in recordings.notes(recording)["notes"]:
            text = note if isinstance(note, str) else str(note)
            if not text.startswith("DCP_CONTROL ") or "=" not in text or " -> " not in text:
                continue
            requested, _, status = text.removeprefix("DCP_CONTROL ").partition(" -> ")
            name, _, value = requested.partition("=")
            if name in other or status not in Status.__members__:
                continue
            if status == "SUCCESS":
                assert controls.set(name.encode(), value.encode()) == Status.SUCCESS, (recording, text)
                compared += 1
    assert compared > 30


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
def test_names_and_values_of_the_embedded_source(name: str, value: str, status: int) -> None:
    controls = Controls(SOURCE, collections=True, open_flags=1)
    before = replace(controls)
    assert controls.set(name.encode(), value.encode()) == status
    if status:
        assert controls == before


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
