"""Cluster maps: what is read from the JSON, what differs between two, and that bad JSON has one kind of error."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.ingest.topology import (
    ClusterMap,
    MalformedClusterMap,
    MapVerdict,
    NewestMap,
    Node,
    network_of,
    newest_of,
    parse_cluster_map,
)

A = Node("a.example", 11210, 11207)
B = Node("b.example", 11210, 11207)


def config(**changes: Any) -> dict[str, Any]:
    services = {"kv": 11210, "kvSSL": 11207, "mgmt": 8091}
    external = {"external": {"hostname": "b.outside", "ports": {"kv": 31210, "mgmt": 38091}}}
    whole: dict[str, Any] = {
        "rev": 7,
        "revEpoch": 2,
        "name": "orders",
        "uuid": "0123",
        "nodesExt": [
            {"hostname": "query.example", "services": {"n1ql": 8093}},
            {"services": services, "thisNode": True},
            {"hostname": "b.example", "services": services, "alternateAddresses": external},
        ],
        "vBucketServerMap": {
            "serverList": ["b.example:11210", "$HOST:11210"],
            "vBucketMap": [[0, 1], [1, 0], [-1, 0], []],
        },
    }
    return whole | changes


def parsed(network: str = "default", **changes: Any) -> ClusterMap:
    return parse_cluster_map(json.dumps(config(**changes)), "a.example", network=network)


def test_a_bucket_map_names_the_node_of_each_vbucket_in_the_order_of_the_server_list() -> None:
    cluster_map = parsed()
    assert (cluster_map.rev_epoch, cluster_map.rev) == (2, 7)
    assert (cluster_map.bucket_name, cluster_map.bucket_uuid) == ("orders", "0123")
    assert cluster_map.nodes == (B, A)
    assert [cluster_map.node_of(vbid) for vbid in range(5)] == [B, A, None, None, None]
    assert cluster_map.vbids_of(B) == [0]


def test_the_placeholder_is_the_host_of_the_request_even_if_it_is_ipv6() -> None:
    text = json.dumps(config(vBucketServerMap={"serverList": ["$HOST:11210"], "vBucketMap": [[0]]}))
    assert parse_cluster_map(text, "::1").node_of(0) == Node("::1", 11210, 11207)
    assert parse_cluster_map(text, "::1").nodes[0].name == "[::1]:11210"


def test_alternate_addresses_are_used_for_the_nodes_that_have_them() -> None:
    assert parsed("external").nodes == (Node("b.outside", 31210, None), A)


def test_a_network_that_no_node_has_is_reported() -> None:
    assert parsed("external").network_offered
    assert parsed("default").network_offered
    assert not parsed("external", nodesExt=[]).network_offered


def test_an_alternate_address_without_ports_keeps_the_ports() -> None:
    row = {"hostname": "b.example", "services": {"kv": 11210}, "alternateAddresses": {"external": {"hostname": "out"}}}
    assert parsed("external", nodesExt=[row]).nodes[0] == Node("out", 11210)


def test_the_network_is_the_one_whose_address_was_contacted() -> None:
    assert network_of(json.dumps(config()), "b.outside") == "external"
    assert network_of(json.dumps(config()), "b.example") == "default"


def test_host_and_port_together_distinguish_the_networks_of_one_host() -> None:
    rows = [
        {
            "hostname": "127.0.0.1",
            "services": {"kv": 10 + number, "kvSSL": 20 + number},
            "alternateAddresses": {
                "external": {"hostname": "127.0.0.1", "ports": {"kv": 30 + number, "kvSSL": 40 + number}}
            },
        }
        for number in range(2)
    ]
    text = json.dumps(config(nodesExt=rows))
    for port, network in ((11, "default"), (21, "default"), (31, "external"), (41, "external"), (99, "default")):
        assert network_of(text, "127.0.0.1", port) == network
    assert network_of(text, "elsewhere", 31) == "default"


def test_nodes_that_offer_only_tls_are_found_by_host_and_order() -> None:
    rows = [{"services": {"kvSSL": port}, "hostname": host} for host, port in (("a", 1), ("b", 2), ("b", 3))]
    found = parsed(
        nodesExt=rows, vBucketServerMap={"serverList": ["b:11210", "b:11210", "a:11210"], "vBucketMap": [[0], [1], [2]]}
    )
    assert [(node.host, node.kv_port, node.tls_port) for node in found.nodes] == [
        ("b", None, 2),
        ("b", None, 3),
        ("a", None, 1),
    ]


def test_a_map_without_extended_nodes_uses_its_server_list() -> None:
    assert parsed(nodesExt=[]).nodes == (Node("b.example", 11210), Node("a.example", 11210))


def test_a_cluster_level_map_has_data_nodes_and_no_vbuckets() -> None:
    text = json.dumps({"rev": 1, "nodesExt": config()["nodesExt"]})
    cluster_map = parse_cluster_map(text, "a.example")
    assert cluster_map.nodes == (A, B)
    assert cluster_map.bucket_name is None
    assert cluster_map.vbucket_count == 0


def test_the_epoch_outranks_the_revision_and_neither_is_bound_to_32_bits() -> None:
    huge = 2**40
    for older, newer in ((parsed(), parsed(revEpoch=3, rev=1)), (parsed(rev=huge), parsed(rev=huge + 1))):
        newest = NewestMap()
        assert newest.take(older)
        assert newest.judge(newer) is MapVerdict.NEWER
        assert newest.take(newer)
        assert newest.judge(older) is MapVerdict.OLDER
        assert not newest.take(older)
        assert newest.current == newer


def test_servers_without_epochs_are_ordered_by_revision_and_are_older_than_any_with_one() -> None:
    def without(rev: int) -> ClusterMap:
        return parse_cluster_map(json.dumps({k: v for k, v in config(rev=rev).items() if k != "revEpoch"}), "h")

    newest = NewestMap()
    assert [newest.take(without(rev)) for rev in (5, 4, 5, 6)] == [True, False, False, True]
    assert newest.take(parsed(revEpoch=1, rev=7))
    assert newest.judge(without(8)) is MapVerdict.OLDER


def test_a_restarted_mirror_follows_the_same_map_and_no_older_one() -> None:
    newest = NewestMap("0123", (2, 7))
    assert newest.judge(parsed(rev=6)) is MapVerdict.OLDER
    assert newest.judge(parsed(revEpoch=1, rev=99)) is MapVerdict.OLDER
    assert newest.judge(parsed(rev=6, uuid="another")) is MapVerdict.OTHER_BUCKET
    assert newest.judge(parsed(rev=9, vBucketServerMap={"serverList": [], "vBucketMap": []})) is MapVerdict.KNOWN
    assert newest.take(parsed(rev=7))
    assert newest.judge(parsed(rev=7)) is MapVerdict.KNOWN


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from(["0123", "another"])), max_size=20))
def test_the_followed_revision_only_rises_in_any_order_of_maps(revisions: list[tuple[int, int, str]]) -> None:
    newest = NewestMap("0123", (1, 2))
    followed = [(1, 2)]
    for epoch, rev, uuid in revisions:
        found = parsed(revEpoch=epoch, rev=rev, uuid=uuid)
        verdict = newest.judge(found)
        if newest.take(found):
            assert verdict is MapVerdict.NEWER
            assert uuid == "0123"
            assert found.revision > followed[-1] or len(followed) == 1
            followed.append(found.revision)
        assert newest.floor == followed[-1]
    ours = [(epoch, rev) for epoch, rev, uuid in revisions if uuid == "0123"]
    assert followed[-1] == max([(1, 2), *ours])


def test_a_mirrors_map_is_not_compared_with_the_clusters() -> None:
    """Its revision is the second of its start; a client that goes from one to the other is not kept out for ever."""
    newest = NewestMap("0123", (2, 7))
    assert newest.take(parsed(mirror=True, revEpoch=1, rev=1_700_000_000))
    assert newest.floor == (2, 7)
    assert newest.judge(parsed(rev=6)) is MapVerdict.OLDER
    assert newest.take(parsed(rev=7))
    assert newest.judge(parsed(mirror=True, revEpoch=1, rev=1_800_000_000)) is MapVerdict.KNOWN


def test_the_newest_map_of_the_bucket_is_chosen() -> None:
    old, new, foreign = parsed(rev=6), parsed(rev=9), parsed(rev=50, uuid="another")
    mirrors = parsed(mirror=True, rev=90), parsed(mirror=True, rev=91)
    assert newest_of([old, new, foreign, *mirrors]) == new
    assert newest_of([foreign, old, new]) == foreign
    assert newest_of([foreign, old, new], "0123") == new
    assert newest_of([foreign], "0123") == foreign
    assert newest_of(mirrors) == mirrors[0]


def test_a_map_is_unchanged_after_a_pipe() -> None:
    whole = parse_cluster_map(json.dumps(config()), "a.example", network="external")
    assert ClusterMap.from_wire(msgpack.unpackb(msgpack.packb(whole.to_wire()))) == whole


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rev": "7"}, "rev"),
        ({"rev": True}, "rev"),
        ({"name": 5}, "name"),
        ({"nodesExt": {}}, "nodesExt"),
        ({"nodesExt": [5]}, "nodesExt"),
        ({"nodesExt": [{"hostname": ""}]}, "hostname"),
        ({"nodesExt": [{"services": {"kv": 70_000}}]}, "kv"),
        ({"vBucketServerMap": []}, "vBucketServerMap"),
        ({"vBucketServerMap": {"vBucketMap": []}}, "serverList"),
        ({"vBucketServerMap": {"serverList": ["a"], "vBucketMap": []}}, "serverList"),
        ({"vBucketServerMap": {"serverList": ["a:0"], "vBucketMap": []}}, "serverList"),
        ({"vBucketServerMap": {"serverList": [5], "vBucketMap": []}}, "serverList"),
        ({"vBucketServerMap": {"serverList": ["a:1"], "vBucketMap": [[1]]}}, "vBucketMap"),
        ({"vBucketServerMap": {"serverList": ["a:1"], "vBucketMap": [[-2]]}}, "vBucketMap"),
        ({"vBucketServerMap": {"serverList": ["a:1"], "vBucketMap": [[]] * 65_537}}, "vBucketMap"),
    ],
)
def test_an_impossible_map_is_an_error_that_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(MalformedClusterMap, match=field):
        parsed(**changes)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"7"])
def test_a_map_that_is_not_json_is_a_malformed_map(text: bytes) -> None:
    with pytest.raises(MalformedClusterMap, match="cluster map"):
        parse_cluster_map(text, "a.example")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70_000) | st.text(max_size=3) | st.just("a:1"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "rev", "revEpoch", "name", "uuid", "nodesExt", "vBucketServerMap", "bucketCapabilities", "bucketType",
    "nodeLocator",
]  # fmt: skip
BUCKET_FIELDS = ["serverList", "vBucketMap"]


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON), st.none() | st.dictionaries(st.sampled_from(BUCKET_FIELDS), JSON)
)
def test_any_json_is_a_map_with_valid_indices_or_a_malformed_one(
    whole: dict[str, Any], server_map: dict[str, Any] | None
) -> None:
    if server_map is not None:
        whole["vBucketServerMap"] = server_map
    try:
        cluster_map = parse_cluster_map(json.dumps(whole), "h")
    except MalformedClusterMap:
        return
    for vbid in range(cluster_map.vbucket_count):
        node = cluster_map.node_of(vbid)
        assert node is None or node in cluster_map.nodes


@pytest.mark.parametrize(
    "config",
    [
        {"bucketCapabilities": 5, "bucketType": "membase"},
        {"bucketCapabilities": [{}], "bucketType": "membase"},
        {"nodesExt": [], "vBucketServerMap": {"serverList": ["h:06553599"], "vBucketMap": []}},
    ],
    ids=["capabilities", "a capability", "a port"],
)
def test_a_member_of_another_type_or_beyond_its_bounds_is_malformed(config: dict[str, Any]) -> None:
    with pytest.raises(MalformedClusterMap):
        parse_cluster_map(json.dumps(config), "h")


def test_copies_are_the_active_node_and_the_replicas_that_have_one() -> None:
    config = {
        "nodesExt": [{"services": {"kv": port}, "hostname": "h"} for port in (1, 2, 3)],
        "vBucketServerMap": {
            "serverList": ["h:1", "h:2", "h:3"],
            "vBucketMap": [[0, 1, 2], [1, -1, 0], [-1, 2, 1], [2]],
        },
    }
    found = parse_cluster_map(json.dumps(config), "h")
    assert [[node.kv_port for node in found.copies_of(vbid)] for vbid in range(4)] == [[1, 2, 3], [2, 1], [], [3]]
    assert found.copies_of(9) == []
    config["vBucketServerMap"]["vBucketMap"][0][2] = 3  # type: ignore[index]
    with pytest.raises(MalformedClusterMap, match="on node 3 of 3"):
        parse_cluster_map(json.dumps(config), "h")


@pytest.mark.parametrize(
    ("more", "ephemeral"),
    [
        ({}, False),
        ({"nodeLocator": "vbucket", "bucketCapabilities": ["dcp", "couchapi"]}, False),
        ({"nodeLocator": "vbucket", "bucketCapabilities": ["dcp"]}, True),
        ({"bucketCapabilities": ["dcp"]}, False),
        ({"nodeLocator": "vbucket", "bucketCapabilities": ["dcp"], "bucketType": "membase"}, False),
        ({"nodeLocator": "vbucket", "bucketCapabilities": ["dcp"], "bucketType": "ephemeral"}, True),
    ],
)
def test_a_bucket_is_ephemeral_by_its_type_or_else_by_its_lack_of_views(
    more: dict[str, object], ephemeral: bool
) -> None:
    config = {"vBucketServerMap": {"serverList": ["h:1"], "vBucketMap": [[0]]}} | more
    assert parse_cluster_map(json.dumps(config), "h").ephemeral is ephemeral
