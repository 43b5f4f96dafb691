"""Controls: the statuses of a server, and what each turns on."""

from __future__ import annotations

import pytest

from mirror.serve.dcp_controls import Negotiated
from mirror.wire.constants import DcpOpenFlag, MarkerVersion, Status
from tests import recordings

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
    assert Negotiated(True, True, 1).set(name, value) == status


def test_what_is_refused_changes_nothing() -> None:
    fresh = Negotiated(True, True, 1)
    for name in (b"set_noop_interval", b"connection_buffer_size", b"enable_noop", b"max_marker_version"):
        fresh.set(name, b"nonsense")
    assert fresh == Negotiated(True, True, 1)


def test_what_needs_a_feature_is_refused_without_it() -> None:
    bare = Negotiated(False, False, 1)
    for name, value in (
        (b"force_value_compression", b"true"),
        (b"enable_stream_id", b"true"),
        (b"max_marker_version", b"2.2"),
    ):
        assert bare.set(name, value) == BAD
    assert Negotiated(True, True, 0x101).set(b"include_deleted_user_xattrs", b"true") == GOOD


def test_expirations_are_told_apart_only_with_delete_times() -> None:
    """docs/protocol.md 2.3: success either way."""
    for flags, told in ((1, False), (1 | int(DcpOpenFlag.INCLUDE_DELETE_TIMES), True)):
        negotiated = Negotiated(True, True, flags)
        assert negotiated.set(b"enable_expiry_opcode", b"true") == GOOD
        assert negotiated.expirations == told
        assert negotiated.xattrs is False


def test_versions_of_markers() -> None:
    negotiated = Negotiated(True, True, 1)
    versions = [negotiated.marker_version]
    negotiated.set(b"max_marker_version", b"2.0")
    versions.append(negotiated.marker_version)
    assert versions == [MarkerVersion.V1, MarkerVersion.V2_0]


def test_the_statuses_are_those_that_a_server_gave() -> None:
    """But for what a mirror cannot do."""
    other = {"enable_sync_writes", "consumer_name", "change_streams"}
    compared = 0
    for recording in recordings.names("72_"):
        negotiated = Negotiated(True, True, 0x1FF)
        for note in recordings.notes(recording)["notes"]:
            text = note if isinstance(note, str) else str(note)
            if not text.startswith("DCP_CONTROL ") or "=" not in text or " -> " not in text:
                continue
            asked, _, status = text.removeprefix("DCP_CONTROL ").partition(" -> ")
            name, _, value = asked.partition("=")
            if name in other or status not in Status.__members__:
                continue
            if status == "SUCCESS":
                assert negotiated.set(name.encode(), value.encode()) == Status.SUCCESS, (recording, text)
                compared += 1
    assert compared > 30
