"""Repairs without an answer: no service, or one whose resync takes too long. tests/whole/test_verify.py repairs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mirror import client
from mirror.errors import SourceTimeout, SupervisionError
from mirror.inspection.repair import resync
from mirror.sandbox.cluster import SandboxCluster
from tests.inspection.test_verify import cluster, filled, write

__all__ = ["cluster"]


async def test_a_repair_needs_a_service_that_finishes_it(
    cluster: SandboxCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cluster, 20)
    mirror = await filled(cluster, tmp_path)
    with pytest.raises(SupervisionError, match=r"no service runs on .*start it"):
        await asyncio.to_thread(resync, mirror.path, [1])
    monkeypatch.setattr(client, "ask", lambda *_: {"result": {"staging_branch": 2}})
    with pytest.raises(SourceTimeout, match=r"vb 1 and 1 more are not whole again.*goes on with the resync"):
        await asyncio.to_thread(resync, mirror.path, [1, 2], timeout_s=0.1)
