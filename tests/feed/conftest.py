"""A cluster and its mirrors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mirror.sandbox.cluster import SandboxCluster
from tests.feed.harness import VBUCKETS, Mirrors


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=1) as running:
        yield running


@pytest.fixture
def options() -> dict[str, Any]:
    """Options of all mirrors of a file's tests, which may give others."""
    return {}


@pytest.fixture(autouse=True)
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirror.feed.follow.watch.POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr("mirror.feed.follow.persistence.POLL_INTERVAL_S", 0.005)
    monkeypatch.setattr("mirror.feed.cluster.connections.FIRST_DELAY_MS", 10)
    monkeypatch.setattr("mirror.feed.follow.group_commits.STORE_RETRY_S", 0.05)


@pytest.fixture
async def mirrors(cluster: SandboxCluster, tmp_path: Path, options: dict[str, Any]) -> AsyncIterator[Mirrors]:
    async with Mirrors(cluster, tmp_path, **options) as made:
        yield made


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once after a refusal."""
    for module in ("host", "cluster.connections"):
        monkeypatch.setattr(f"mirror.feed.{module}.delay_s", lambda reason, attempt, jitter: 0.01)
