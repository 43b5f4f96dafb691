"""Durable writes end to end, with and without `track_prepares`: readers see what was committed, over restarts and
failovers between the halves, and the window never leaks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mirror.errors import NotSupported
from mirror.sandbox.cluster import SandboxCluster
from storage.admin.check import check
from storage.read.view import open_view
from tests.feed.harness import Mirror

VBUCKETS = 2


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1) as running:
        yield running


def mirror_of(cluster: SandboxCluster, path: Path, **settings: Any) -> Mirror:
    return Mirror(
        path,
        bucket=cluster.bucket.name,
        bucket_uuid=cluster.bucket.map.bucket_uuid,
        vbuckets=VBUCKETS,
        password="demo",
        settings={"track_prepares": True, **settings},
    )


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
            source = cluster.vbucket(vbid).state_at(view.state(vbid).published_seqno)
            seen = {b"\0" + each.key: (each.seqno, each.cas, each.rev_seqno) for each in view.scan(vbid, now=0)}
            assert seen == {key: (item.seqno, item.cas, item.rev_seqno) for key, item in source.items()}


async def test_both_halves_come_and_readers_see_the_committed_alone(cluster: SandboxCluster, tmp_path: Path) -> None:
    bucket = cluster.bucket
    for number in range(20):
        durable(cluster, f"done-{number}", {"n": number}, number % VBUCKETS)
    bucket.set("old", {"was": 1}, vbid=0)
    bucket.prepare("old", {"will": 2}, vbid=0)
    bucket.prepare("never", {"x": 1}, vbid=0)
    mirror = mirror_of(cluster, tmp_path)
    consumer = mirror.start(cluster.connection_string)
    await follow(mirror, cluster)
    assert mirror.row(0)["open_prepares"] == 2
    with open_view(mirror.path) as view:
        assert view.get("never") is None
    bucket.commit("old", vbid=0)
    bucket.abort("never", vbid=0)
    await follow(mirror, cluster)
    assert mirror.row(0)["open_prepares"] == 0
    assert all(node["controls"]["enable_sync_writes"] for node in consumer.status()["nodes"])
    await mirror.stop()
    assert_equal(mirror, cluster)


async def test_a_restart_and_a_failover_between_the_halves(cluster: SandboxCluster, tmp_path: Path) -> None:
    bucket = cluster.bucket
    mirror = mirror_of(cluster, tmp_path)
    mirror.start(cluster.connection_string)
    bucket.set("base", {"a": 1}, vbid=0)
    bucket.prepare("kept", {"a": 1}, vbid=0)
    await follow(mirror, cluster)
    await mirror.stop()
    mirror.start(cluster.connection_string)
    await mirror.until(lambda: mirror.row(0)["open_prepares"] == 1, "still open after a restart")
    bucket.commit("kept", vbid=0)
    await follow(mirror, cluster)
    cluster.failover(0, lose=1)  # the commit is lost, the prepare is not
    bucket.set("base", {"a": 2}, vbid=0)
    await mirror.until(lambda: mirror.row(0)["rollback_count"] == 1, "rolled back")
    await follow(mirror, cluster)
    await mirror.stop()
    assert_equal(mirror, cluster)


async def test_durable_writes_never_leak_the_window_shut(cluster: SandboxCluster, tmp_path: Path) -> None:
    """A prepare counts for two bytes more than it has: a window of 4,096 would be shut after 2,048 of them."""
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


async def test_without_asking_they_are_plain_documents(cluster: SandboxCluster, tmp_path: Path) -> None:
    mirror = mirror_of(cluster, tmp_path, track_prepares=False)
    mirror.start(cluster.connection_string)
    durable(cluster, "done", {"a": 1}, 0)
    cluster.bucket.prepare("open", {"a": 1}, vbid=0)
    await mirror.until(lambda: mirror.row(0)["published_seqno"] >= 2, "the committed one")
    assert mirror.row(0)["open_prepares"] == 0
    cluster.bucket.commit("open", vbid=0)
    await follow(mirror, cluster)
    await mirror.stop()
    assert_equal(mirror, cluster)


async def test_once_requested_what_was_prepared_before_is_fetched(cluster: SandboxCluster, tmp_path: Path) -> None:
    """Its commit comes without a value, and its value came to nobody: from 0 the source sends what it holds."""
    mirror = mirror_of(cluster, tmp_path, track_prepares=False)
    mirror.start(cluster.connection_string)
    cluster.bucket.set("base", {"a": 1}, vbid=0)
    cluster.bucket.prepare("open", {"a": 1}, vbid=0)
    await mirror.until(lambda: mirror.row(0)["staged_seqno"] == 2, "past the prepare")
    await mirror.stop()
    mirror = mirror_of(cluster, tmp_path)
    mirror.start(cluster.connection_string)
    await mirror.until(lambda: mirror.row(0)["state"] == "streaming", "open")
    cluster.bucket.commit("open", vbid=0)
    await follow(mirror, cluster)
    await mirror.stop()
    assert_equal(mirror, cluster)


async def test_a_source_that_knows_no_sync_writes_is_one_clear_error(tmp_path: Path) -> None:
    async with SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1, profile="6.0") as old:
        mirror = mirror_of(old, tmp_path)
        mirror.start(old.connection_string)
        error = await mirror.fails()
        assert isinstance(error, NotSupported)
        assert "leave the setting out" in str(error)


async def test_a_snapshot_of_durable_writes_takes_no_more_memory_than_one_of_rows(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    """Told by what waits in memory while the source is silent in the middle of it."""
    mirror = mirror_of(cluster, tmp_path, batch_bytes_max=64 * 1024)
    cluster.set("first", {}, vbid=0)
    consumer = mirror.start(cluster.connection_string)
    await follow(mirror, cluster)  # so the connection is there that the fault is put into
    vbucket = cluster.vbucket(0)
    cluster.faults.stop_mid_snapshot(400)
    mark = vbucket.begin_group()
    for number in range(300):
        durable(cluster, f"one-{number}", {"pad": "y" * 2_000}, 0)
    vbucket.end_group(mark)
    await mirror.until(lambda: mirror.row(0)["staged_seqno"] > 300, "most of the snapshot")
    assert mirror.row(0)["published_seqno"] == 1
    assert all(group["pending_bytes"] < 2 * 64 * 1024 for group in consumer.status()["groups"])
    cluster.faults.clear()
    cluster.faults.cut()
    await follow(mirror, cluster)
    await mirror.stop()
    assert_equal(mirror, cluster)
