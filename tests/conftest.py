"""Fixtures that every room may use: the recordings of real servers that lie beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CAPTURES = Path(os.environ.get("DCP_MIRROR_CAPTURES", Path(__file__).parents[1].parent / "shared" / "captures"))


def pytest_report_header() -> str:
    count = len(list(CAPTURES.glob("*.jsonl")))
    if count == 0:
        where = "DCP_MIRROR_CAPTURES names another place"
        return f"recordings of real servers: NONE at {CAPTURES} ({where}); tests that replay them are skipped"
    return f"recordings of real servers: {count} at {CAPTURES}"


@pytest.fixture(scope="session")
def captures() -> Path:
    """The folder with the recordings; tests that need it are skipped, and say so, where it is absent."""
    if not any(CAPTURES.glob("*.jsonl")):
        pytest.skip(f"no recordings at {CAPTURES}")
    return CAPTURES
