"""Style and types, with the settings of pyproject.toml: ruff, and mypy at its strictest."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids=["lint", "format"])
def test_ruff_finds_no_problem(arguments: tuple[str, ...]) -> None:
    result = run("ruff", *arguments, ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_codespell_finds_no_problem() -> None:
    result = run("codespell_lib")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_hooks_before_a_commit_are_well_formed() -> None:
    result = run("pre_commit", "validate-config")
    assert result.returncode == 0, result.stdout + result.stderr


def test_mypy_finds_no_problem() -> None:
    result = run("mypy")
    assert result.returncode == 0, result.stdout + result.stderr


if not (ROOT / ".mypy_cache").is_dir():  # it then takes some 40 s of processor time instead of 5
    test_mypy_finds_no_problem = pytest.mark.ci(test_mypy_finds_no_problem)


@pytest.mark.parametrize("script", ["cli/setup.sh", ".ci/run"])
def test_the_shell_scripts_parse(script: str) -> None:
    shell = "bash" if script == ".ci/run" else "sh"
    assert shutil.which(shell)
    result = subprocess.run([shell, "-n", ROOT / script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
