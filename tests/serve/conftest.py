"""Fixtures: an empty store with its writers, and a server over it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.http_site import Site, Source, made, running


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with made(tmp_path) as opened:
        yield opened


@pytest.fixture
def site(source: Source, tmp_path: Path) -> Iterator[Site]:
    with running(tmp_path / "data", source) as served:
        yield served


@pytest.fixture
def all_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first backfill is one snapshot, up to what is published."""
    monkeypatch.setattr("storage.read.stream.SETTLED_MS", 0)
