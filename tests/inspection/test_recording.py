"""Recordings: whole frames with their times, and no secrets."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from mirror.errors import ConfigError
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.transport import Link
from mirror.inspection.recording import Recorder
from mirror.wire.constants import Opcode
from mirror.wire.frame import Frame, encode, request, response
from tests.manual_clock import ManualClock
from tests.recordings import passed

HELLO = request(Opcode.HELLO, opaque=1, key=b"me", value=b"\0\x08")
LOGIN = request(Opcode.SASL_AUTH, opaque=2, key=b"PLAIN", value=b"\0demo\0hunter2")
STREAM = request(Opcode.DCP_STREAM_REQ, opaque=3, vbucket=7, extras=bytes(48), value=b"{}")


def recorder(path: Path, **options: Any) -> tuple[Recorder, ManualClock]:
    clock = ManualClock()
    return Recorder(path, clock, **options), clock


def link(clock: ManualClock, port: int = 1) -> Link:
    return Link(NodeAddress("host", port), clock)


def test_frames_of_all_connections_come_back_with_their_times_and_without_passwords(tmp_path: Path) -> None:
    path = tmp_path / "file"
    made, clock = recorder(path)
    first, second = link(clock), link(clock, 2)
    made.passed(first, encode(HELLO), ours=True)
    clock.advance(1.5)
    answer = encode(response(HELLO, value=b"\0\x08"))
    made.passed(first, answer[:10], ours=False)
    made.passed(second, encode(LOGIN), ours=True)
    made.passed(first, answer[10:], ours=False)
    made.passed(second, encode(STREAM) * 2, ours=True)
    made.names(bucket="b", bucket_uuid="u", vbuckets=64)
    made.close()
    empty = Frame(LOGIN.magic, LOGIN.opcode, 0, 0, 2, 0, b"", b"", b"PLAIN", b"")
    assert list(passed(path)) == [
        (0.0, 0, True, HELLO),
        (1.5, 1, True, empty),
        (1.5, 0, False, response(HELLO, value=b"\0\x08")),
        (1.5, 1, True, STREAM),
        (1.5, 1, True, STREAM),
    ]
    assert made.frame_count == 5
    assert b"hunter2" not in path.read_bytes()
    assert b"hunter2".hex().encode() not in path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["bucket"], line["vbuckets"]) for line in lines if "bucket" in line] == [("b", 64)]
    assert [line["node"] for line in lines if "node" in line] == ["host:1", "host:2"]


def test_a_recording_ends_with_the_frame_that_makes_it_full(tmp_path: Path) -> None:
    made, clock = recorder(tmp_path / "file", bytes_max=100)
    one = link(clock)
    for _ in range(9):
        made.passed(one, encode(STREAM), ours=False)
    made.close()
    assert made.full
    assert len(list(passed(tmp_path / "file"))) == 2


def test_garbage_of_one_peer_does_not_end_the_recording(tmp_path: Path) -> None:
    made, clock = recorder(tmp_path / "file")
    one = link(clock)
    made.passed(one, encode(HELLO), ours=False)
    made.passed(one, b"garbage that is no frame at all", ours=False)
    made.passed(link(clock, 2), encode(STREAM), ours=False)
    made.close()
    assert [each.frame for each in passed(tmp_path / "file")] == [HELLO, STREAM]


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        recorder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be created"):
        recorder(tmp_path / "no" / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_ends_only_the_recording() -> None:
    made, clock = recorder(Path("/dev/shm") / "dcp-mirror-test-recording")
    try:
        made._file.close()
        made._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closed by the recorder
        one = link(clock)
        for _ in range(3):
            made.passed(one, encode(STREAM), ours=True)
        made.close()
        assert made.full
        assert made.error == "No space left on device"
    finally:
        (Path("/dev/shm") / "dcp-mirror-test-recording").unlink()
