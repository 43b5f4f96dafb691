"""The cluster: nodes that die and come back, vbuckets that move, and the maps that show it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mirror.sandbox import SandboxCluster
from mirror.wire import codec_dcp, codec_kv
from mirror.wire import events as ev
from mirror.wire.constants import Status

from .client import Client


async def config_of(cluster: SandboxCluster, node: int) -> dict[str, object]:
    client = await Client.login(cluster, node=node)
    config: dict[str, object] = json.loads((await client.ask(codec_kv.get_cluster_config())).value)
    return config


async def test_vbuckets_are_spread_over_the_nodes() -> None:
    async with SandboxCluster(nodes=3, vbuckets=6) as cluster:
        assert cluster.bucket.map.owners == [0, 1, 2, 0, 1, 2]
        assert cluster.connection_string.startswith("couchbase://demo@127.0.0.1:")
        assert cluster.connection_string.endswith("/demo")
        assert len({node.port for node in cluster.nodes}) == 3
        config = await config_of(cluster, 1)
        assert config["vBucketServerMap"]["vBucketMap"] == [[0], [1], [2], [0], [1], [2]]  # type: ignore[index]


async def test_a_killed_node_breaks_connections_and_comes_back_on_its_port() -> None:
    async with SandboxCluster(nodes=2, vbuckets=2) as cluster:
        cluster.set("k", {}, vbid=1)
        client = await Client.dcp(cluster, node=1)
        await client.stream(1)
        port, uuid = cluster.nodes[1].port, cluster.vbucket(1).vbuuid
        await cluster.kill_node(1)
        await client.until_closed()
        assert not cluster.nodes[1].alive
        with pytest.raises(ConnectionError):
            await Client.connect(cluster, 1)
        await cluster.restart_node(1)
        assert cluster.nodes[1].port == port
        client = await Client.dcp(cluster, node=1)
        await client.stream(1, uuid=uuid)
        await client.until_seqno(1, 1)
        assert client.markers() == [(0, 1, 6)]


async def test_a_crash_loses_the_newest_changes(cluster: SandboxCluster) -> None:
    for index in range(10):
        cluster.set(f"k{index}", {})
    uuid = cluster.vbucket(0).vbuuid
    await cluster.restart_node(0, lose=4)
    assert cluster.vbucket(0).high_seqno == 6
    client = await Client.dcp(cluster)
    answer = await client.stream(0, start=10, uuid=uuid)
    assert codec_dcp.decode_rollback_seqno(answer.value) == 6


async def test_a_failed_over_node_leaves_the_map() -> None:
    async with SandboxCluster(nodes=3, vbuckets=6, replicas=1) as cluster:
        for vbid in range(6):
            cluster.set("k", {}, vbid=vbid)
        rev = cluster.bucket.map.rev
        await cluster.failover_node(1, lose=1)
        assert 1 not in cluster.bucket.map.owners
        assert [cluster.vbucket(vbid).high_seqno for vbid in range(6)] == [1, 0, 1, 1, 0, 1]
        config = await config_of(cluster, 0)
        assert config["rev"] > rev  # type: ignore[operator]
        assert len(config["nodesExt"]) == 2  # type: ignore[arg-type]
        assert all(
            owner != 1 and 1 not in cluster.bucket.map.replicas[v] for v, owner in enumerate(cluster.bucket.map.owners)
        )


async def test_a_vbucket_that_moves_ends_its_streams_and_is_refused_with_the_map() -> None:
    async with SandboxCluster(nodes=2, vbuckets=2) as cluster:
        cluster.set("k", {}, vbid=0)
        client = await Client.streamed(cluster, 1)
        uuid = cluster.vbucket(0).vbuuid
        cluster.move(0, 1)
        await client.until(lambda: client.of(ev.StreamEnd))
        refused = await client.stream(0, start=1, uuid=uuid)
        assert refused.status == Status.NOT_MY_VBUCKET
        assert json.loads(refused.value)["vBucketServerMap"]["vBucketMap"][0] == [1]
        other = await Client.dcp(cluster, node=1)
        assert (await other.stream(0, start=1, uuid=uuid)).status == 0
        assert cluster.failover(0, lose=0) == 1
        assert cluster.bucket.map.owners[0] == 0


async def test_a_node_that_is_split_off_goes_on_with_its_own_data_and_map() -> None:
    async with SandboxCluster(nodes=2, vbuckets=4) as cluster:
        for vbid in range(4):
            cluster.set("k", {}, vbid=vbid)
        client = await Client.dcp(cluster, node=1)
        await client.stream(1)
        alone = cluster.split_off(1)
        await client.until_closed()
        before = await config_of(cluster, 1)
        await cluster.failover_node(1, lose=1)
        cluster.set("new", {}, vbid=1)
        alone.set("stale", {}, vbid=1)
        assert await config_of(cluster, 1) == before
        assert (await config_of(cluster, 0))["rev"] > before["rev"]  # type: ignore[operator]
        assert cluster.nodes[1].alive
        client = await Client.dcp(cluster, node=1)
        assert (await client.stream(1)).status == 0
        await client.until_seqno(1, 2)
        assert cluster.bucket.get("stale", vbid=1) is None
        assert alone.get("new", vbid=1) is None
        assert alone.failover(1) == 2
        assert alone.vbuckets[1].vbuuid != cluster.vbucket(1).vbuuid
        # Killed and started again it is what it was.
        await cluster.kill_node(1)
        await cluster.restart_node(1)
        assert await config_of(cluster, 1) == before
        client = await Client.dcp(cluster, node=1)
        await client.stream(1)
        await client.until_seqno(1, 2)


async def test_nodes_join_and_leave_by_rebalance() -> None:
    async with SandboxCluster(nodes=1, vbuckets=8) as cluster:
        assert await cluster.add_node() == 1
        assert cluster.bucket.map.owners == [0] * 8
        assert await cluster.rebalance() == 4
        assert sorted(cluster.bucket.map.owners) == [0] * 4 + [1] * 4
        assert await cluster.rebalance([1]) == 4
        assert [node.number for node in cluster.bucket.map.nodes] == [1]
        assert cluster.connection_string == f"couchbase://demo@127.0.0.1:{cluster.nodes[1].port}/demo"
        assert await cluster.rebalance([1, 0]) == 4
        config: dict[str, Any] = await config_of(cluster, 0)
        chains = config["vBucketServerMap"]["vBucketMap"]
        assert sorted(chains) == [[0]] * 4 + [[1]] * 4, "a node that left comes back"


async def test_expired_documents_are_found_by_the_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirror.sandbox.cluster.EXPIRY_PAGER_SECONDS", 0.05)
    async with SandboxCluster(vbuckets=1) as cluster:
        cluster.bucket.set("k", {}, expiry=cluster.bucket.documents.now() - 5)
        client = await Client.streamed(cluster, 2)
        assert isinstance(client.events[-1], ev.Deletion)


async def test_closed_connections_leave_no_listener_at_a_vbucket(cluster: SandboxCluster) -> None:
    """Connections that come and go leave no listener at a vbucket."""
    for index in range(5):
        client = await Client.dcp(cluster, name=f"c{index}")
        await client.stream(0)
        await client.close()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not cluster.nodes[0].connections
    assert not cluster.vbucket(0).changed


async def test_a_collection_whose_creation_a_failover_lost_is_made_again_in_the_vbucket(
    cluster: SandboxCluster,
) -> None:
    cluster.bucket.create_scope("shop")
    cluster.bucket.create_collection("shop", "carts")
    cluster.bucket.set(b"a", b"1", collection="shop.carts")
    cluster.failover(0, lose=2)
    assert cluster.vbucket(0).high_seqno == 2
    assert cluster.bucket.get(b"a", collection="shop.carts") is None
    cluster.bucket.set(b"a", b"2", collection="shop.carts")
    assert cluster.vbucket(0).high_seqno == 3
