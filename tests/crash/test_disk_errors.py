"""The disk fails in the middle of LMDB's own commit, at one write or sync after another: each failure is an error by
its name, the group goes on from the last commit as soon as the disk works, and what is stored is what was written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EVERY = 10_000
"""More places than there are operations: each of them."""


def run(tmp_path: Path, shim: Path, sync: str, name: str, count: int, places: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.crash.disk_error_writer", tmp_path, sync, name, count, places]
    environment = os.environ | {"LD_PRELOAD": str(shim)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("sync", "name", "count", "places"),
    [
        ("safe", "EIO", 1, 6),
        ("full", "ENOSPC", 3, 6),
        *(
            pytest.param(sync, name, count, 40, marks=pytest.mark.ci)
            for sync, name, count in (("safe", "EIO", 3), ("safe", "ENOSPC", 1), ("full", "EIO", 1))
        ),
        *(
            pytest.param(sync, name, count, EVERY, marks=[pytest.mark.long, pytest.mark.timeout(3_600)])
            for sync in ("safe", "full")
            for name in ("EIO", "ENOSPC")
            for count in (1, 3)
        ),
    ],
)
def test_a_failed_commit_leaves_the_stored_data_as_it_was_acknowledged(
    tmp_path: Path, shim: Path, sync: str, name: str, count: int, places: int
) -> None:
    found = run(tmp_path, shim, sync, name, count, places)
    assert found["problems"] == []
    assert found["healthy"] == {}
    assert found["unnoticed"] == [], "an operation failed, and no error was raised"
    assert found["operations"] > 100
    assert set(found["errors"]) == {"DeviceFailed" if name == "EIO" else "Full"}
