"""`replay`: a recording as a source for the program itself; and every mistake one line."""

from __future__ import annotations

import signal
from pathlib import Path

from mirror.sandbox.thread import SandboxThread
from tests.cli.conftest import LIMIT_S, background, call


def test_a_mirror_of_a_recording_equals_the_source_that_was_recorded(source: SandboxThread, tmp_path: Path) -> None:
    url = source.connection_string
    assert call("record", "--source", url, "--to", tmp_path / "file").code == 0
    with background("replay", tmp_path / "file") as replay:
        assert replay.stdout is not None
        replayed = replay.stdout.readline().strip()
        assert replayed.startswith("couchbase://demo@127.0.0.1:")
        result = call("run", "--source", replayed, "--data", tmp_path / "data", "--groups", "2", "--until-caught-up")
        assert result.code == 0, result.err
        replay.send_signal(signal.SIGTERM)
        out, err = replay.communicate(timeout=LIMIT_S)
    assert (replay.returncode, out) == (0, "")
    assert "16 vbuckets" in err
    assert "Traceback" not in err
    result = call("verify", "--data", tmp_path / "data", "--source", url, "--json")
    assert (result.code, result.json["totals"]["documents"]) == (0, 183), result.out


def test_every_mistake_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a recording\n")
    (tmp_path / "silent").write_text('{"format":"dcp-mirror-recording","version":1,"time_ms":0}\n')
    for said, name in (("cannot be read", "absent"), ("is empty", "empty"), ("line 1", "text"), ("no DCP", "silent")):
        result = call("replay", tmp_path / name)
        assert (result.code, said in result.complaint, result.out) == (2, True, ""), result.err
