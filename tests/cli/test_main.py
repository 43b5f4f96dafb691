from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.main import COMMANDS as SECTIONS
from cli.main import EXAMPLES, MODULES, application
from mirror import __version__
from tests.cli.conftest import call_here

ROOT = Path(__file__).parents[2]


def test_the_version_is_that_of_the_package() -> None:
    assert call_here("--version").out == call_here("-V").out == f"dcp-mirror {__version__}\n"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__


def test_the_help_names_every_command() -> None:
    result = call_here("--help")
    assert result.code == 0
    assert all(f" {name} " in result.out for lines in SECTIONS.values() for name in lines)


@pytest.mark.parametrize("command", ["", "config"])
def test_a_call_without_a_command_prints_the_usage(command: str) -> None:
    result = call_here(*command.split())
    assert result.code == 2
    assert result.out.startswith(f"Usage: dcp-mirror {command}".rstrip())


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [("--version", {}), ("--help", {}), ("", {"COMP_WORDS": "dcp-mirror sta", "COMP_CWORD": "1"})],
)
def test_help_version_and_completion_import_no_command(arguments: str, environment: dict[str, str]) -> None:
    """Each Tab took 0.6 s of processor time."""
    if environment:
        environment |= {"_DCP_MIRROR_COMPLETE": "complete_bash"}
    program = "import sys; from cli.main import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", program, *arguments.split()]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    imported = set(ended.stderr.split())
    assert {module for module in imported if module.startswith("cli.")} == {"cli.main", "cli.exits"}
    assert not imported & {"rich", "mirror.config_reader", "mirror.serve", "mirror.supervise"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_each_command_parses(name: str) -> None:
    _, *arguments = shlex.split(EXAMPLES[name])
    command: Any = typer.main.get_command(application(name))
    while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        command = command.commands[arguments.pop(0)]
    command.make_context(name, arguments)  # raises UsageError
    shown = " ".join(call_here(name, "--help").out.split())
    assert f"Usage: dcp-mirror {name}" in shown
    assert f"Example: {EXAMPLES[name]}" in shown


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("status --wa", {"--wait-ready"}),
        ("run --set history_s", {"history_s="}),
        ("config explain history_b", {"history_bytes", "history_boundaries"}),
        ("sandbox fault kill", {"kill-node"}),
        ("sync --on-lost-history ", {"fail", "resync"}),
    ],
)
def test_a_shell_completes_options_and_values(words: str, completed: set[str]) -> None:
    line = f"dcp-mirror {words}"
    count = len(line.split()) - (not line.endswith(" "))
    given = {"_DCP_MIRROR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    assert set(call_here(env=given).out.split()) == completed


def test_every_command_has_its_line_of_help_and_its_example() -> None:
    listed = [name for lines in SECTIONS.values() for name in lines]
    modules = {file.stem for file in (ROOT / "cli").glob("*.py")}
    assert {MODULES.get(name, name) for name in listed} <= modules
    assert set(EXAMPLES) == set(listed)
    assert all(len(line) <= 66 for lines in SECTIONS.values() for line in lines.values())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion_script(shell: str) -> None:
    result = call_here(env={"_DCP_MIRROR_COMPLETE": f"source_{shell}"})
    assert result.code == 0
    assert "_DCP_MIRROR_COMPLETE" in result.out
    words = call_here(env={"_DCP_MIRROR_COMPLETE": "complete_bash", "COMP_WORDS": "dcp-mirror sta", "COMP_CWORD": "1"})
    assert words.out.split() == ["status", "state"]
