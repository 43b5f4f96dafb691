"""Durable writes end to end: readers see what was committed, over restarts and failovers between the halves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mirror.sandbox.cluster import SandboxCluster
from storage.admin.check import check
from storage.read.view import open_view
from tests.feed.harness import Mirror, mirror_of
from tests.sandbox.past import state_at

VBUCKETS = 2


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1) as running:
        yield running


def durable(cluster: SandboxCluster, key: str, value: dict[str, object], vbid: int) -> None:
    cluster.bucket.prepare(key, value, vbid=vbid)
    cluster.bucket.commit(key, vbid=vbid)


async def follow(mirror: Mirror, cluster: SandboxCluster) -> None:
    for vbid in range(VBUCKETS):
        seqno = cluster.vbucket(vbid).high_seqno
        await mirror.until(lambda: mirror.row(vbid)["published_seqno"] == seqno, f"vb {vbid} at {seqno}")  # noqa: B023


def assert_equal(mirror: Mirror, cluster: SandboxCluster) -> None:
    assert check(mirror.path).problems == []
    with open_view(mirror.path) as view:
        for vbid in range(VBUCKETS):
            source = state_at(cluster.vbucket(vbid), view.state(vbid).published_seqno)
            seen = {b"\0" + each.key: (each.seqno, each.cas, each.rev_seqno) for each in view.scan(vbid, now=0)}
            assert seen == {key: (item.seqno, item.cas, item.rev_seqno) for key, item in source.items()}


async def until_published(mirror: Mirror, vbid: int, seqno: int) -> None:
    await mirror.until(lambda: mirror.row(vbid)["published_seqno"] >= seqno, f"vb {vbid} at {seqno}")


async def test_readers_see_the_committed_alone(cluster: SandboxCluster, tmp_path: Path) -> None:
    bucket = cluster.bucket
    for number in range(20):
        durable(cluster, f"done-{number}", {"n": number}, number % VBUCKETS)
    bucket.set("old", {"was": 1}, vbid=0)
    bucket.prepare("old", {"will": 2}, vbid=0)
    bucket.prepare("never", {"x": 1}, vbid=0)
    mirror = mirror_of(cluster, tmp_path)
    consumer = mirror.start(cluster.connection_string)
    await until_published(mirror, 0, cluster.vbucket(0).high_seqno - 2)
    with open_view(mirror.path) as view:
        found = {each.key: each.value for each in view.scan(0, now=0)}
    assert found[b"old"] == b'{"was":1}'
    assert b"never" not in found
    bucket.commit("old", vbid=0)
    bucket.abort("never", vbid=0)
    await follow(mirror, cluster)
    assert all("enable_sync_writes" not in node["controls"] for node in consumer.status()["nodes"])
    await mirror.stop()
    assert_equal(mirror, cluster)


async def test_a_restart_and_a_failover_between_the_halves(cluster: SandboxCluster, tmp_path: Path) -> None:
    bucket = cluster.bucket
    mirror = mirror_of(cluster, tmp_path)
    mirror.start(cluster.connection_string)
    bucket.set("base", {"a": 1}, vbid=0)
    bucket.prepare("kept", {"a": 1}, vbid=0)
    await until_published(mirror, 0, 1)
    await mirror.stop()
    mirror.start(cluster.connection_string)
    bucket.commit("kept", vbid=0)
    await follow(mirror, cluster)
    cluster.failover(0, lose=1)  # the commit is lost, the prepare is not
    bucket.set("base", {"a": 2}, vbid=0)
    await mirror.until(lambda: mirror.row(0)["rollback_count"] == 1, "rolled back")
    await follow(mirror, cluster)
    await mirror.stop()
    assert_equal(mirror, cluster)


async def test_durable_writes_never_leak_the_window_shut(cluster: SandboxCluster, tmp_path: Path) -> None:
    mirror = mirror_of(cluster, tmp_path, connection_buffer_size=4096, stall_timeout_s=600)
    consumer = mirror.start(cluster.connection_string)
    await mirror.until(lambda: mirror.row(0)["state"] == "streaming", "open")
    for round_ in range(8):
        for number in range(300):
            durable(cluster, f"k-{number}", {"round": round_}, number % VBUCKETS)
        await follow(mirror, cluster)
    (node,) = consumer.status()["nodes"]
    assert node["reconnects"] == 0
    assert node["unacked_bytes"] < 4096
    await mirror.stop()
    assert_equal(mirror, cluster)
