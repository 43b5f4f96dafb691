"""Each broken rule is noticed by the tests that are named for it.

pytest tests/mutation                        each mutation still applies to the source text
pytest -m long -n0 tests/mutation            each is applied to a copy of the source, and its tests must fail there
pytest -m long -n0 tests/mutation -k writer  those of one file
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mutation.table import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
COPIED = ("mirror", "storage", "cli", "tests", "pyproject.toml", "pyspark_mirror.py")
AT_LEAST = 40
TESTS_FAILED = 1
"""Exit code of pytest."""


def name_of(mutation: Mutation) -> str:
    return f"{mutation.file} {MUTATIONS.index(mutation)}"


def run_tests(folder: Path, suite: str) -> subprocess.CompletedProcess[str]:
    options = ["-q", "-x", "-n0", "-p", "no:cacheprovider", "--hypothesis-profile=untimed"]
    command = [sys.executable, "-m", "pytest", *options, *shlex.split(suite)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@cache
def passes_unbroken(suite: str) -> bool:
    return run_tests(ROOT, suite).returncode == 0


@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_a_mutation_applies_to_the_source_as_it_is(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1, f"{mutation.old!r} occurs {text.count(mutation.old)} times in {mutation.file}"
    words = shlex.split(mutation.suite)
    files = [ROOT / word for word in words if word.endswith(".py")]
    assert files
    tests = "".join(file.read_text() for file in files)
    chosen = words[words.index("-k") + 1] if "-k" in words else ""
    assert [word for word in re.findall(r"\w+", chosen) if word not in ("and", "or", "not") and word not in tests] == []
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")


def test_the_table_is_long_enough() -> None:
    assert len(MUTATIONS) >= AT_LEAST
    assert len(set(MUTATIONS)) == len(MUTATIONS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=name_of)
def test_a_broken_rule_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    assert passes_unbroken(mutation.suite), f"{mutation.suite} fails without the mutation"
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path / name)
    target = tmp_path / mutation.file
    target.write_text(target.read_text().replace(mutation.old, mutation.new))
    outcome = run_tests(tmp_path, mutation.suite)
    assert outcome.returncode == TESTS_FAILED, f"{mutation} survived {mutation.suite}:\n{outcome.stdout[-2000:]}"
