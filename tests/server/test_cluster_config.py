"""The cluster configuration: what clients need to distinguish its nodes."""

from __future__ import annotations

import json

import pytest

from mirror.ingest.topology import parse_cluster_map
from mirror.sandbox import SandboxCluster
from mirror.serve.kv_map import ServedMap, named_nodes
from mirror.server.cluster_config import ConfigBucket, ConfigNode, render
from mirror.wire import codec_kv
from storage.model import Identity
from tests.sandbox.client import Client


def identities(config: bytes) -> list[tuple[str | None, int]]:
    """What JVM clients take for the identity of a node: its host and management port, without TLS or else with it."""
    nodes = json.loads(config)["nodesExt"]
    return [(node.get("hostname"), node["services"].get("mgmt") or node["services"]["mgmtSSL"]) for node in nodes]


def test_nodes_of_one_host_have_different_management_ports() -> None:
    """Clients refused such maps: "Cluster topology has nodes with non-unique IDs"."""
    nodes = [ConfigNode("a", 1), ConfigNode("b", 2), ConfigNode("a", 3)]
    config = render(7, 1, nodes, ConfigBucket("demo", "ab", [[0], [1], [2]]))
    assert identities(config) == [("a", 18091), ("b", 18091), ("a", 18092)]
    assert [each["hostname"] for each in json.loads(config)["nodes"]] == ["a:8091", "b:8091", "a:8092"]
    seen = parse_cluster_map(config, "a")
    assert [(node.host, node.kv_port) for node in seen.nodes] == [("a", 1), ("b", 2), ("a", 3)]


def test_several_mirrors_on_one_host_are_distinguished() -> None:
    identity = Identity("cluster", "orders", "uuid", 8, 2)
    config = ServedMap(identity, named_nodes("127.0.0.1:1,127.0.0.1:2"), 1).of_bucket
    assert identities(config) == [("127.0.0.1", 18091), ("127.0.0.1", 18092)]


def test_no_client_is_sent_to_a_management_service_of_its_own_kind() -> None:
    """Clients without TLS use `mgmt`, those with it `mgmtSSL`: a port of their own kind they try until a timeout."""
    nodes = [ConfigNode("a", 1), ConfigNode("a", None, 2), ConfigNode("a", 3, 4)]
    services = [each["services"] for each in json.loads(render(7, 1, nodes, None))["nodesExt"]]
    assert services == [
        {"mgmtSSL": 18091, "kv": 1},
        {"mgmt": 8092, "kvSSL": 2},
        {"mgmtSSL": 4, "kv": 3, "kvSSL": 4},  # the server hangs up on what is no request
    ]


@pytest.mark.parametrize(("nodes", "hosts"), [(1, [None]), (3, ["127.0.0.1"] * 3)])
async def test_nodes_of_the_embedded_source_are_distinguished(nodes: int, hosts: list[str | None]) -> None:
    async with SandboxCluster(nodes=nodes, vbuckets=4) as cluster:
        client = await Client.login(cluster)
        config = (await client.ask(codec_kv.get_cluster_config())).value
    found = identities(config)
    assert [host for host, _ in found] == hosts
    assert len(set(found)) == nodes


def test_a_server_without_epochs_names_none() -> None:
    assert "revEpoch" not in json.loads(render(7, None, [ConfigNode(None, 1)], None))
    assert json.loads(render(7, 3, [ConfigNode(None, 1)], None))["revEpoch"] == 3
