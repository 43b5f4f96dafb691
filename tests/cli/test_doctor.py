"""`doctor`: a line for each step, and the exit code of the first that failed."""

from __future__ import annotations

from pathlib import Path

from mirror.sandbox.thread import SandboxThread
from tests.cli.conftest import call, succeed


def test_a_sound_source_and_its_mirror_pass_every_step(source: SandboxThread, mirrored: Path) -> None:
    result = succeed("doctor", "--source", source.connection_string, "--data", mirrored, "--json")
    facts = result.json
    assert (facts["ok"], facts["service"], facts["data"]) == (True, "down", str(mirrored))
    steps = {finding["step"]: finding for finding in facts["findings"]}
    assert steps["positions"]["text"].startswith("16 vbuckets resume")
    assert steps["privileges"] == {
        "step": "privileges",
        "verdict": "ok",
        "text": "the user may open DCP connections and streams",
        "remedy": None,
    }
    plain = call("doctor", "--source", source.connection_string)
    assert plain.code == 0
    assert all(line.startswith(("ok  ", "warn")) for line in plain.out.splitlines()), plain.out
    assert "\x1b" not in plain.out


def test_the_exit_code_is_that_of_the_first_failure(source: SandboxThread) -> None:
    result = call("doctor", "--source", source.connection_string, env={"DCP_MIRROR_PASSWORD": "wrong"})
    assert result.code == 4
    assert result.out.splitlines()[-1].startswith("fail  login")
    assert result.err == ""
    assert call("doctor", "--source", "couchbase://demo@127.0.0.1:1/demo").code == 1
    for arguments, said in (([], "no source is given"), (["--source", "nonsense"], "not a scheme")):
        result = call("doctor", *arguments)
        result.assert_complains(2, said)
