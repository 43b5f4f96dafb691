"""Fixtures of the feed's tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CAPTURES = Path(os.environ.get("DCP_MIRROR_CAPTURES", Path(__file__).parents[3] / "shared" / "captures"))


@pytest.fixture
def captures() -> Path:
    """The recordings of real engines."""
    assert CAPTURES.is_dir(), f"the recordings are expected at {CAPTURES} (or set DCP_MIRROR_CAPTURES)"
    return CAPTURES
