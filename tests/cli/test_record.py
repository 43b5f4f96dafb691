"""`record`: until caught up, for a time or for so many bytes; and every mistake one line."""

from __future__ import annotations

import stat
from pathlib import Path

from mirror.sandbox.thread import SandboxThread
from mirror.wire.constants import Opcode
from tests.cli.conftest import call, succeed
from tests.recordings import passed


def test_it_ends_after_a_stop_command(source: SandboxThread, tmp_path: Path) -> None:
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
