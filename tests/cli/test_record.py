"""`record`: until caught up, for a time or for so many bytes; and every mistake one line."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from cli.record import record_into
from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.feed.connection.transport import Link
from mirror.inspection.recording import Recorder
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from mirror.wire.constants import Opcode
from tests.cli.conftest import LIMIT_S, call, succeed
from tests.recordings import passed


def test_a_recording_ends_when_caught_up_or_at_its_limit(source: SandboxThread, tmp_path: Path) -> None:
    url = source.connection_string
    result = succeed("record", "--source", url, "--to", tmp_path / "all", "--json")
    facts = result.json
    assert facts["ended_by"] == "caught up"
    frames = list(passed(tmp_path / "all"))
    assert facts["frames"] == len(frames)
    assert facts["snapshots"] >= 16
    assert sum(each.frame.opcode == Opcode.DCP_MUTATION for each in frames) == 183
    assert stat.S_IMODE((tmp_path / "all").stat().st_mode) == 0o600
    result = call("record", "--source", url, "--to", tmp_path / "some", "--vbid", "3", "--json")
    assert (result.code, result.json["ended_by"]) == (0, "caught up")
    assert {each.frame.vbucket for each in passed(tmp_path / "some") if not each.ours} >= {3}
    result = call("record", "--source", url, "--to", tmp_path / "few", "--bytes", "5000", "--json")
    assert (result.code, result.json["ended_by"]) == (0, "bytes")
    result = call("record", "--source", url, "--to", tmp_path / "timed", "--seconds", "0.5")
    assert result.code == 0
    assert "(seconds)" in result.out


class FailsOver(Recorder):
    """Lets the source lose changes: some before its first stream begins, and some of those that it has sent."""

    def __init__(self, path: Path, source: SandboxThread) -> None:
        super().__init__(path, SystemClock())
        self._at = [b"stream request", b"key 3"]
        self._source = source

    def passed(self, link: Link, data: bytes, ours: bool) -> None:
        super().passed(link, data, ours)
        seen = b"stream request" if ours and data[1] == Opcode.DCP_STREAM_REQ else data
        if self._at and self._at[0] in seen:
            del self._at[0]
            self._source.call(self._source.cluster.failover, 0, lose=2)


@pytest.mark.parametrize(("vbuckets", "seconds"), [(2, None), (1, None), (1, LIMIT_S)])
def test_a_recording_ends_if_the_source_rolls_back(vbuckets: int, seconds: float | None, tmp_path: Path) -> None:
    """It waited for the vbucket, which the reader had left, until Ctrl-C."""
    with SandboxThread(SandboxCluster(vbuckets=vbuckets)) as source:
        for number in range(1, 6):
            source.call(source.cluster.set, f"key {number}", {}, vbid=0)
        url = source.connection_string
        settings = replace(Settings(), source=url, password_file=tmp_path / "password")
        (tmp_path / "password").write_text("demo")
        recorder = FailsOver(tmp_path / "recording", source)
        assert record_into(recorder, url, settings, seconds, None) == (1, "rolled back")
        recorder.close()


def test_every_mistake_is_one_line_and_leaves_no_file(source: SandboxThread, tmp_path: Path) -> None:
    url = source.connection_string
    (tmp_path / "there").write_text("mine")
    for code, said, arguments in (
        (2, "no file is named", ["--source", url]),
        (2, "exists already", ["--source", url, "--to", tmp_path / "there"]),
        (2, "there is no vbucket 99", ["--source", url, "--to", tmp_path / "x", "--vbid", "99"]),
        (1, "cannot be reached", ["--source", "couchbase://demo@127.0.0.1:1/demo", "--to", tmp_path / "z"]),
    ):
        call("record", *arguments).assert_complains(code, said)
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "z").exists()
