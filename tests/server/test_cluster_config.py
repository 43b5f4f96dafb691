"""The cluster configuration: what clients need to distinguish its nodes."""

from __future__ import annotations

import json

import pytest

from mirror.ingest.topology import parse_cluster_map
from mirror.sandbox import SandboxCluster
from mirror.server.cluster_config import ConfigBucket, ConfigNode, render
from mirror.wire import codec_kv
from tests.sandbox.client import Client


def identities(config: bytes) -> list[tuple[str | None, int]]:
    """A node's identity to JVM clients: its host and management port, without TLS or else with it."""
    nodes = json.loads(config)["nodesExt"]
    return [(node.get("hostname"), node["services"].get("mgmt") or node["services"]["mgmtSSL"]) for node in nodes]


def usable_by_gocbcore(config: bytes) -> bool:
    """`routeConfig.IsValid` (gocbcore v9.1 to v10.9): a key-value and a management endpoint of one kind, and a first
    vbucket with a chain.
    """
    found = json.loads(config)
    services = {name for node in found["nodesExt"] for name in node["services"]}
    endpoints = {"kv", "mgmt"} <= services or {"kvSSL", "mgmtSSL"} <= services
    return endpoints and ("vBucketServerMap" not in found or bool(found["vBucketServerMap"]["vBucketMap"][0]))


def test_nodes_of_one_host_have_different_management_ports() -> None:
    """Clients refused such maps: "Cluster topology has nodes with non-unique IDs"."""
    nodes = [ConfigNode("a", 1), ConfigNode("b", 2), ConfigNode("a", 3)]
    config = render(7, 1, nodes, ConfigBucket("demo", "ab", [[0], [1], [2]]))
    assert identities(config) == [("a", 1), ("b", 2), ("a", 3)]
    assert [each["hostname"] for each in json.loads(config)["nodes"]] == ["a:1", "b:2", "a:3"]
    seen = parse_cluster_map(config, "a")
    assert [(node.host, node.kv_port) for node in seen.nodes] == [("a", 1), ("b", 2), ("a", 3)]


@pytest.mark.parametrize("node", [ConfigNode(None, 1), ConfigNode("a", None, 2), ConfigNode("a", 3, 4)])
@pytest.mark.parametrize("bucket", [None, ConfigBucket("demo", "ab", [[0]])])
def test_a_node_is_usable_by_each_client_with_and_without_tls(node: ConfigNode, bucket: ConfigBucket | None) -> None:
    config = render(7, 1, [node], bucket)
    assert usable_by_gocbcore(config)
    assert identities(config)
    services = json.loads(config)["nodesExt"][0]["services"]
    assert services.get("mgmt") == services.get("kv")
    assert services.get("mgmtSSL") == services.get("kvSSL")


@pytest.mark.parametrize(("nodes", "hosts"), [(1, [None]), (3, ["127.0.0.1"] * 3)])
async def test_nodes_of_the_embedded_source_are_distinguished(nodes: int, hosts: list[str | None]) -> None:
    async with SandboxCluster(nodes=nodes, vbuckets=4) as cluster:
        client = await Client.login(cluster)
        config = (await client.ask(codec_kv.get_cluster_config())).value
    found = identities(config)
    assert [host for host, _ in found] == hosts
    assert len(set(found)) == nodes


def test_a_map_of_a_server_without_epochs_has_none() -> None:
    assert "revEpoch" not in json.loads(render(7, None, [ConfigNode(None, 1)], None))
    assert json.loads(render(7, 3, [ConfigNode(None, 1)], None))["revEpoch"] == 3
