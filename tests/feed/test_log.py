"""Loggers: structlog's, whatever of rich is imported or not."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("before", "loaded"), [("pass", False), pytest.param("import rich", True, marks=pytest.mark.ci)]
)
def test_structlog_is_imported_without_rich_and_rich_stays_importable(before: str, *, loaded: bool) -> None:
    after = "print('rich' in sys.modules, 'rich.traceback' in sys.modules); import rich.table"
    code = f"{before}; import sys, mirror.log; {after}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(loaded), "False"]
