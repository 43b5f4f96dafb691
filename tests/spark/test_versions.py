"""The other minor versions of PySpark that the extra allows. The suite itself runs with the newest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.cli.conftest import environment

VERSIONS = ("4.2",)
"""All from the lowest of `pyspark>=` in pyproject.toml up to the one before the newest."""
ROOT = Path(__file__).parents[2]
FILES = (
    "source/test_source.py",
    "source/test_stream.py",
    "test_session.py",
    "pipeline/test_runner.py",
)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_tests_of_spark_pass_with_this_version(version: str, tmp_path: Path) -> None:
    target = tmp_path / "pyspark"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--target", str(target)]
    subprocess.run([*install, f"pyspark=={version}.*"], check=True, stdin=subprocess.DEVNULL)
    names = [f"tests/spark/{name}" for name in FILES]
    # A time limit that ends one test within a call to Java leaves Py4J out of step for all that follow.
    limits = ["--timeout=1800", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", *limits, "-m", "not long", *names]
    path = os.pathsep.join([str(target), str(ROOT)])
    done = subprocess.run(
        command, cwd=ROOT, env=environment(PYTHONPATH=path), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    print(f"pyspark {version}: {done.stdout.splitlines()[-1]}")  # noqa: T201 - what was run, for the log
    assert done.returncode == 0, done.stdout[-5000:]


def test_all_minor_versions_that_the_extra_allows_are_run() -> None:
    lowest = re.search(r'"pyspark>=(\d+)\.(\d+),<5"', (ROOT / "pyproject.toml").read_text())
    assert lowest is not None
    major, newest = map(int, pyspark.__version__.split(".")[:2])
    allowed = [f"{major}.{minor}" for minor in range(int(lowest[2]), newest)]
    assert list(VERSIONS) == allowed
