"""The map's JSON: revisions, nodes, who answers, and vbuckets that are nowhere."""

from __future__ import annotations

import json

from mirror.ingest.topology import parse_cluster_map
from mirror.sandbox.data.clustermap import SandboxAddress, SandboxMap
from mirror.server.cluster_config import NOWHERE


def made() -> SandboxMap:
    nodes = [SandboxAddress(0, 1000), SandboxAddress(2, 1002)]
    return SandboxMap("demo", "ab" * 16, [0, 2, 1], [[2], [0], [NOWHERE]], nodes)


def test_the_map_names_nodes_by_their_place_in_it() -> None:
    config = json.loads(made().to_json(2, with_bucket=True))
    assert config["vBucketServerMap"]["vBucketMap"] == [[0, 1], [1, 0], [-1, -1]]
    assert config["vBucketServerMap"]["serverList"] == ["$HOST:1000", "$HOST:1002"]
    assert [node.get("thisNode", False) for node in config["nodesExt"]] == [False, True]
    assert (config["rev"], config["revEpoch"], config["uuid"]) == (1, 1, "ab" * 16)


def test_a_change_has_a_higher_revision() -> None:
    cluster_map = made()
    before = cluster_map.to_json(0, with_bucket=True)
    assert cluster_map.to_json(0, with_bucket=True) is before
    cluster_map.owners[0] = 2
    cluster_map.bump()
    after = json.loads(cluster_map.to_json(0, with_bucket=True))
    assert (after["rev"], after["vBucketServerMap"]["vBucketMap"][0][0]) == (2, 1)


def test_nodes_have_a_name_inside_and_one_outside_and_ports_with_and_without_tls() -> None:
    cluster_map = made()
    cluster_map.nodes = [SandboxAddress(0, 1000, 2000), SandboxAddress(2, None, 2002)]
    cluster_map.host, cluster_map.external_host = "fd00::1", "outside.example"
    config = json.loads(cluster_map.to_json(0, with_bucket=True))
    services = [{"mgmt": 1000, "kv": 1000, "mgmtSSL": 2000, "kvSSL": 2000}, {"mgmtSSL": 2002, "kvSSL": 2002}]
    assert [node["services"] for node in config["nodesExt"]] == services
    assert [node["hostname"] for node in config["nodesExt"]] == ["fd00::1"] * 2
    assert config["nodesExt"][1]["alternateAddresses"] == {
        "external": {"hostname": "outside.example", "ports": services[1]}
    }
    assert config["vBucketServerMap"]["serverList"] == ["[fd00::1]:1000", "[fd00::1]:11210"]
    for network, host in (("default", "fd00::1"), ("external", "outside.example")):
        seen = parse_cluster_map(json.dumps(config), "127.0.0.1", network=network)
        assert [(node.host, node.kv_port, node.tls_port) for node in seen.nodes] == [
            (host, 1000, 2000),
            (host, None, 2002),
        ]
