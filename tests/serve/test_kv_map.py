"""The cluster map: one mirror, several, the names that clients know them by, and who is told of a change."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mirror.errors import ConfigError
from mirror.serve.bucket.map import ServedMap, check_nodes, named_nodes, own_node
from mirror.server.listener import Address
from storage.model import Identity

IDENTITY = Identity("cluster", "orders", "uuid", 8, 2)


def test_a_single_mirror_is_the_node_that_the_client_connected_to() -> None:
    addresses = [Address(path="/x"), Address("127.0.0.1", 5), Address("0.0.0.0", 6, None, True), Address("::1", 7)]
    made = ServedMap(IDENTITY, [own_node(addresses)], 3)
    config = json.loads(made.of_bucket)
    assert (config["rev"], config["name"], config["uuid"]) == (3, "orders", "uuid")
    assert config["nodesExt"] == [{"services": {"mgmt": 5, "kv": 5, "mgmtSSL": 6, "kvSSL": 6}, "thisNode": True}]
    assert config["vBucketServerMap"]["serverList"] == ["$HOST:5"]
    assert config["vBucketServerMap"]["vBucketMap"] == [[0]] * 8
    assert {"rangeScan", "subdoc.ReplicaRead"} <= set(config["bucketCapabilities"])
    assert json.loads(made.of_node).keys() == {
        "rev",
        "revEpoch",
        "nodesExt",
        "clusterCapabilitiesVer",
        "clusterCapabilities",
    }


def test_several_mirrors_share_the_vbuckets_as_actives_and_replicas() -> None:
    nodes = named_nodes("a.example:1, b.example:2,tls://[fd00::1]:3")
    config = json.loads(ServedMap(IDENTITY, nodes, 1).of_bucket)
    served = config["vBucketServerMap"]
    assert served["serverList"] == ["a.example:1", "b.example:2", "[fd00::1]:11210"], (
        "as clusters name nodes with TLS alone"
    )
    assert served["numReplicas"] == 2
    assert served["vBucketMap"][:4] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert [each["hostname"] for each in config["nodesExt"]] == ["a.example", "b.example", "fd00::1"]
    assert config["nodesExt"][2]["services"] == {"mgmtSSL": 3, "kvSSL": 3}
    assert not any("thisNode" in each for each in config["nodesExt"])


def chains(nodes: str) -> list[list[int]]:
    config = json.loads(ServedMap(IDENTITY, named_nodes(nodes), 1).of_bucket)
    found: list[list[int]] = config["vBucketServerMap"]["vBucketMap"]
    assert {len(chain) for chain in found} == {config["vBucketServerMap"]["numReplicas"] + 1}
    return found


def test_each_vbucket_is_mapped_to_the_mirrors_that_hold_it() -> None:
    assert chains("a:1=0-3,b:1=4-7") == [[0]] * 4 + [[1]] * 4
    assert chains("a:1=0-3,b:1=4-7,c:1")[3:5] == [[2, 0], [1, 2]]
    assert chains("a:1=0-5,b:1=4-7") == [[0, -1]] * 4 + [[0, 1], [1, 0]] + [[1, -1]] * 2
    assert chains("a:1,b:1,c:1,d:1,e:1")[7] == [2, 3, 4, 0]


def test_vbuckets_held_by_no_mirror_have_no_node() -> None:
    assert chains("a:1=2-3") == [[-1]] * 2 + [[0]] * 2 + [[-1]] * 4
    assert ServedMap(IDENTITY, named_nodes("a:1=2-3"), 1).uncovered == 6
    assert ServedMap(IDENTITY, [own_node([Address("127.0.0.1", 5)], (0, 6))], 1).uncovered == 1
    assert ServedMap(IDENTITY, named_nodes("a:1=0-3,b:1=4-7"), 1).uncovered == 0


@pytest.mark.parametrize(
    "text", ["a", "a:0", "unix:/x", "a:1=", "a:1=3", "a:1=3-2", "a:1=x-y", "a:1=-1-3", "a:1,a:1", "a:1=0-3,a:1=4-7"]
)
def test_a_malformed_list_of_mirrors_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_nodes"):
        named_nodes(text)


@pytest.mark.parametrize(
    ("text", "held", "complaint"),
    [
        ("a:1=0-8", None, "the bucket has 8"),
        ("a:1=0-5,b:1=4-7", None, "overlap"),
        ("a:1=0-2,b:1=5-7", None, "no mirror for vbuckets 3-4"),
        ("a:1,b:1", (0, 3), "no mirror for vbuckets 0-3 alone"),
        ("a:2,b:3", None, "none for vbuckets 0-7 has port 1"),
        ("a:1=4-7,b:2=0-3", (0, 3), "none for vbuckets 0-3 has port 1"),
    ],
)
def test_a_list_that_contradicts_the_bucket_or_the_mirror_is_refused(
    text: str, held: tuple[int, int] | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_nodes(named_nodes(text), replace(IDENTITY, held=held), {1})


@pytest.mark.parametrize("text", ["a:1", "a:1,b:1", "a:1=0-3,b:1=4-7", "a:1,b:1=0-3,c:1=4-7", "tls://a:1,b:2"])
def test_mirrors_that_hold_all_may_be_named_in_any_parts(text: str) -> None:
    check_nodes(named_nodes(text), IDENTITY, {1})
    check_nodes(named_nodes(text), IDENTITY, ())
