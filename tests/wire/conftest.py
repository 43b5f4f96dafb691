"""Recordings, read once; and how many examples hypothesis makes."""

from __future__ import annotations

import pytest

from tests.recordings import Recording, names, read


@pytest.fixture(scope="session")
def recordings() -> list[Recording]:
    """All of them: data-driven tests go through the list and name the recording that fails."""
    return [read(name) for name in names()]
