"""Print the kills at the end of a run: their numbers by kind, and the seed that repeats them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.seeds import seed_from


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that logs the writes of a process, or makes them fail; for LD_PRELOAD."""
    built = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).parent / "shim.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
    return built


@pytest.fixture
def seed(record_property: Any) -> int:
    """The seed of everything that is random in a test; CRASH_SEED repeats one."""
    chosen = seed_from("CRASH_SEED")
    record_property("seed", chosen)
    return chosen


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was killed, also when all went well."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        facts = dict(report.user_properties)
        if "kills" in facts:
            seed = f"; CRASH_SEED={facts['seed']}" if "seed" in facts else ""
            terminalreporter.write_line(f"{report.nodeid}: {facts['kills']}{seed}")
