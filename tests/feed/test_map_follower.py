"""Which cluster map is followed: never an older one, nor that of another bucket; the rest is the user's to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mirror.errors import OlderMap
from mirror.feed.connection.connection_string import parse
from mirror.ingest.topology import ClusterMap
from tests.feed.consumer_rig import write
from tests.feed.test_map_poll import followed, half_of
from tests.feed.test_topology_followed import source_of


async def test_a_host_that_serves_another_bucket_now_does_not_end_a_mirror(tmp_path: Path) -> None:
    """It was taken out of the cluster, and has a bucket of that name of its own; it is still named as a host."""
    async with source_of() as cluster:
        write(cluster, 50)
        url = cluster.connection_string
        mirror = half_of(cluster, tmp_path)
        mirror.start(url)
        await followed(mirror, cluster)
        alone = cluster.split_off(1)
        await cluster.failover_node(1)
        write(cluster, 50, "good")
        await followed(mirror, cluster)
        alone.map.rev += 1000
        alone.recreate()
        for number in range(20):
            write(cluster, 5, f"later-{number}")
            await followed(mirror, cluster)
            await asyncio.sleep(0.05)
        assert mirror.row(1)["published_seqno"] == cluster.vbucket(1).high_seqno > alone.vbuckets[1].high_seqno
        await mirror.stop()


async def test_no_map_older_than_the_floor_is_followed_and_the_reason_is_said(tmp_path: Path) -> None:
    async with source_of() as cluster:
        write(cluster, 50)
        mirror = half_of(cluster, tmp_path, bootstrap_timeout_s=0.3)
        consumer = mirror.start(cluster.connection_string)
        consumer.map_follower.maps.floor = (1, 1000)
        error = await mirror.fails()
        assert isinstance(error, OlderMap)
        assert "--accept-older-map" in str(error)


async def test_a_map_is_handed_to_who_shares_it_and_followed_when_it_comes_back(tmp_path: Path) -> None:
    async with source_of() as cluster:
        write(cluster, 50)
        mirror = half_of(cluster, tmp_path)
        consumer = mirror.start(cluster.connection_string)
        shared: list[ClusterMap] = []
        consumer._share_map = shared.append
        await mirror.until(lambda: bool(shared), "a map to share")
        assert consumer.map_follower.current is None
        consumer.follow(shared[0])
        await followed(mirror, cluster)
        assert parse(cluster.connection_string).bucket == shared[0].bucket_name
        await mirror.stop()
