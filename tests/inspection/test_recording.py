"""Recordings: whole frames with their times, no secrets, and whatever can be wrong with a file said in one line."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from mirror.errors import ConfigError
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.transport import Link
from mirror.inspection.recording import Recorder, Recording
from mirror.wire.constants import Opcode
from mirror.wire.frame import Frame, encode, request, response
from tests.manual_clock import ManualClock
from tests.recordings import unpack

HELLO = request(Opcode.HELLO, opaque=1, key=b"me", value=b"\0\x08")
LOGIN = request(Opcode.SASL_AUTH, opaque=2, key=b"PLAIN", value=b"\0demo\0hunter2")
STREAM = request(Opcode.DCP_STREAM_REQ, opaque=3, vbucket=7, extras=bytes(48), value=b"{}")


def recorder(path: Path, **options: Any) -> tuple[Recorder, ManualClock]:
    clock = ManualClock()
    return Recorder(path, clock, **options), clock


def link(clock: ManualClock, port: int = 1) -> Link:
    return Link(NodeAddress("host", port), clock)


def frames(path: Path) -> list[tuple[float, int, bool, Frame]]:
    return [(each.t, each.conn, each.ours, each.frame) for each in Recording(path).frames()]


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
    assert frames(path) == [
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
    recording = Recording(path)
    assert list(recording.frames())
    assert (recording.header["bucket"], recording.header["vbuckets"]) == ("b", 64)
    nodes = [line["node"] for line in map(json.loads, path.read_text().splitlines()) if "node" in line]
    assert nodes == ["host:1", "host:2"]


def test_it_ends_with_the_frame_that_makes_it_full(tmp_path: Path) -> None:
    made, clock = recorder(tmp_path / "file", bytes_max=100)
    one = link(clock)
    for _ in range(9):
        made.passed(one, encode(STREAM), ours=False)
    made.close()
    assert made.full
    assert len(frames(tmp_path / "file")) == 2


def test_garbage_of_a_peer_ends_nothing_but_itself(tmp_path: Path) -> None:
    made, clock = recorder(tmp_path / "file")
    one = link(clock)
    made.passed(one, encode(HELLO), ours=False)
    made.passed(one, b"garbage that is no frame at all", ours=False)
    made.passed(link(clock, 2), encode(STREAM), ours=False)
    made.close()
    assert [frame for _, _, _, frame in frames(tmp_path / "file")] == [HELLO, STREAM]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        recorder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be made"):
        recorder(tmp_path / "no" / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
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


def test_a_line_that_was_cut_off_is_the_last(tmp_path: Path) -> None:
    made, clock = recorder(tmp_path / "file")
    made.passed(link(clock), encode(HELLO), ours=True)
    made.close()
    with (tmp_path / "file").open("a") as file:
        file.write('{"t":1.0,"conn":0,"di')
    assert len(frames(tmp_path / "file")) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("root:x:0:0\n", "line 1"),
        ('{"a": 1}\n', "is no recording"),
        ("[1]\n", "line 1"),
        ('{"format": "dcp-mirror-recording", "version": 2}\n', "version 2"),
        ('{"t": 1, "dir": "c2s", "hex": "80"}\n{"t": 1, "dir": "c2s", "hex": "zz"}\n', "line 2"),
        ('{"t": 1, "dir": "c2s", "hex": "' + "ff" * 30 + '"}\n', "line 1"),
        ('{"t": "x", "dir": "c2s", "hex": "' + encode(HELLO).hex() + '"}\n', "line 1"),
    ],
)
def test_what_is_no_recording_is_one_clear_error(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as found:
        frames(path)
    assert str(path) in str(found.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        Recording(tmp_path / "absent")


def test_recordings_of_real_engines_are_read_too(tmp_path: Path) -> None:
    found = frames(unpack("72_b_multiplex_8vb", tmp_path))
    assert len({frame.vbucket for _, _, ours, frame in found if ours and frame.opcode == Opcode.DCP_STREAM_REQ}) == 8
