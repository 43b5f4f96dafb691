"""A library for faults of the disk, and the seed of what is random."""

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
