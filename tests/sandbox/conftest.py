"""A cluster and a control socket; after each test its clients and clusters are closed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mirror.sandbox import SandboxCluster, Workload, WorkloadOptions
from mirror.sandbox.control import SandboxControl

from .client import Client


@pytest.fixture(autouse=True)
async def _nothing_stays_open() -> AsyncIterator[None]:
    yield
    await Client.close_all()


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    """A cluster of one node with one vbucket."""
    async with SandboxCluster(vbuckets=1) as running:
        yield running


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[SandboxControl]:
    async with SandboxCluster(nodes=2, vbuckets=4) as cluster:
        control = SandboxControl(cluster, Workload(cluster.bucket, WorkloadOptions()), tmp_path / "s.sock")
        await control.start()
        yield control
        await control.stop()
    assert not control.path.exists()
