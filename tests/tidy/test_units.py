"""The units pass systemd's own check. `.ci/run` installs systemd, so there it always runs."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from mirror.config import Settings

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNIT = SYSTEMD / "dcp-mirror@.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here; .ci/run installs it")
def test_systemd_accepts_the_unit() -> None:
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", UNIT], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_unit_and_the_program_agree_on_how_long_a_stop_may_take() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > Settings().stop_timeout_s
    assert service["Type"] == "notify"
    assert service["KillMode"] == "mixed"
    assert service["LoadCredential"].startswith("password:")
