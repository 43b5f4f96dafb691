from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from mirror import __version__
from tests.cli.conftest import call

ROOT = Path(__file__).parents[2]
COMMANDS = ["run", "demo", "sandbox", "status", "top", "get", "scan", "changes", "state", "check", "bench", "config"]


def test_the_version_is_that_of_the_package() -> None:
    assert call("--version").out == f"dcp-mirror {__version__}\n"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__


def test_help_names_every_command() -> None:
    result = call("--help")
    assert result.code == 0
    assert all(f" {command} " in result.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    result = call(command, "--help")
    assert result.code == 0
    assert f"Usage: dcp-mirror {command}" in result.out


def test_without_a_command_it_says_what_there_is() -> None:
    result = call()
    assert "status" in result.out + result.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_completion(shell: str) -> None:
    result = call(env={"_DCP_MIRROR_COMPLETE": f"source_{shell}"})
    assert result.code == 0
    assert "_DCP_MIRROR_COMPLETE" in result.out
    words = call(env={"_DCP_MIRROR_COMPLETE": "complete_bash", "COMP_WORDS": "dcp-mirror sta", "COMP_CWORD": "1"})
    assert words.out.split() == ["status", "state"]
