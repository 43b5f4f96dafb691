"""Durable writes end to end: readers see what was committed, over restarts and failovers between the halves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from mirror.sandbox.cluster import SandboxCluster
from storage.read.view import open_view
from tests.feed.harness import Mirrors

VBUCKETS = 2


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1) as running:
        yield running


def durable(cluster: SandboxCluster, key: str, value: dict[str, object], vbid: int) -> None:
    cluster.bucket.prepare(key, value, vbid=vbid)
    cluster.bucket.commit(key, vbid=vbid)


async def test_readers_see_only_committed_writes(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    bucket = cluster.bucket
    for number in range(20):
        durable(cluster, f"done-{number}", {"n": number}, number % VBUCKETS)
    bucket.set("old", {"was": 1}, vbid=0)
    bucket.prepare("old", {"will": 2}, vbid=0)
    bucket.prepare("never", {"x": 1}, vbid=0)
    mirror = mirrors.start()
    await mirror.until_published(0, cluster.vbucket(0).high_seqno - 2)
    with open_view(mirror.path, partial=True) as view:
        found = {each.key: each.value for each in view.scan(0, now=0)}
    assert found[b"old"] == b'{"was":1}'
    assert b"never" not in found
    bucket.commit("old", vbid=0)
    bucket.abort("never", vbid=0)
    await mirror.follow()
    assert all("enable_sync_writes" not in node["controls"] for node in mirror.status()["nodes"])


async def test_a_durable_write_survives_a_restart_and_a_failover_before_its_commit(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    bucket = cluster.bucket
    mirror = mirrors.start()
    bucket.set("base", {"a": 1}, vbid=0)
    bucket.prepare("kept", {"a": 1}, vbid=0)
    await mirror.until_published(0, 1)
    await mirror.stop()
    mirror.start(cluster.connection_string)
    bucket.commit("kept", vbid=0)
    await mirror.follow()
    cluster.failover(0, lose=1)  # the commit is lost, the prepare is not
    bucket.set("base", {"a": 2}, vbid=0)
    await mirror.until(lambda: mirror.row(0)["rollback_count"] == 1, "rolled back")
    await mirror.follow()
