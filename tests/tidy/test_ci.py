"""`.ci/run`: the commit alone, in an empty directory, and no test skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYSTEM = ("apt-get", "chromium", "memcached", "redis-server", "sudo", "systemd-analyze", "systemctl")
SETUP = """\
{ pwd; ls -A; ls -A ..; printf '%s\\n' "$@"; cat; } >"$SEEN"
exit 3
"""


def ci(checkout: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit code of `.ci/run` in a checkout whose setup.sh only notes what it sees, and what it saw."""
    programs = checkout.parent / "programs"
    programs.mkdir()
    for name in SYSTEM:
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    temporary = checkout.parent / "temporary"
    temporary.mkdir()
    seen = checkout.parent / "seen"
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(temporary), "SEEN": str(seen)}
    done = subprocess.run(
        ["bash", ".ci/run", *arguments], cwd=checkout, env=os.environ | environment, input=b"input", check=False
    )
    assert list(temporary.iterdir()) == []
    return done.returncode, seen.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    path = tmp_path / "checkout"
    (path / ".ci").mkdir(parents=True)
    (path / "cli").mkdir()
    shutil.copy(ROOT / ".ci" / "run", path / ".ci" / "run")
    (path / "cli" / "setup.sh").write_text(SETUP)
    return path


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here; .ci/run installs it")
def test_a_clone_is_tested_as_an_export_of_its_commit(checkout: Path) -> None:
    author = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    for command in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "All")):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    (checkout / "not_committed").touch()
    code, (place, *seen) = ci(checkout, "-k", "some words")
    assert code == 3
    assert not Path(place).is_relative_to(checkout)
    assert seen[:3] == [".ci", "cli", Path(place).name], "the commit, and nothing else"
    assert seen[3] == "test"
    assert "--no-skips" in seen
    assert seen[-2:] == ["-k", "some words"], "arguments are passed on, and there is no input"


def test_an_export_is_tested_in_place(checkout: Path) -> None:
    (checkout / "other").touch()
    code, (place, *seen) = ci(checkout)
    assert code == 3
    assert Path(place).samefile(checkout)
    assert seen[:3] == [".ci", "cli", "other"]


SKIPPED = {
    "test_marked.py": "import pytest\n@pytest.mark.skip(reason='no program')\ndef test_it(): pass\n",
    "test_called.py": "import pytest\ndef test_it(): pytest.skip('not root')\n",
    "test_module.py": "import pytest\npytest.skip('not here', allow_module_level=True)\n",
}

GROUP = """
import os
import pytest

@pytest.mark.xdist_group("together")
@pytest.mark.parametrize("number", range(10))
def test_it(number):
    with open(os.environ["PROCESSES"], "a") as file:
        file.write(f"{os.getpid()}\\n")
"""


def test_a_skipped_test_fails_with_no_skips(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "conftest.py")
    for name, text in SKIPPED.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "--continue-on-collection-errors", "--no-skips"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    for reason in ("no program", "not root", "not here"):
        assert f"--no-skips: Skipped: {reason}" in result.stdout


def test_tests_of_one_group_run_in_one_process(tmp_path: Path) -> None:
    """pytest-xdist 3.8 gives a test's group to its scheduler in a way that pytest 9.2 ignores, without a word."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "conftest.py")
    for name in ("test_one.py", "test_other.py"):
        (tmp_path / name).write_text(GROUP)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "--dist=loadgroup"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PROCESSES": str(tmp_path / "processes")}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    processes = (tmp_path / "processes").read_text().split()
    assert len(processes) == 20
    assert len(set(processes)) == 1
