"""A start follows the newest map of all nodes that can be reached, within a bounded time."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import AuthRejected, ConnectFailed, NotSupported, TlsFailed
from mirror.feed.cluster import discovery
from mirror.feed.cluster.discovery import check_ports, discover, survey
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import NodeAddress, parse
from mirror.ingest.topology import parse_cluster_map
from mirror.wire.constants import Opcode, Status
from tests.feed.authority import Authority
from tests.feed.name_server import NameServer
from tests.feed.scripted_node import Answer, ScriptedNode, refuse, silent
from tests.feed.test_bootstrap import MAP, SECURE_MAP, access_to, first, secure_access_to


async def test_a_map_without_a_port_of_the_kind_that_is_requested_is_refused(tmp_path: Path) -> None:
    only_tls = MAP | {"nodesExt": [{"services": {"kvSSL": 11207}}]}
    async with ScriptedNode({Opcode.GET_CLUSTER_CONFIG: refuse(Status.SUCCESS, json.dumps(only_tls).encode())}) as node:
        with pytest.raises(NotSupported, match="its data service without TLS") as caught:
            await discover(access_to(node, tmp_path), SystemClock())
    assert "couchbases://" in caught.value.hint
    secure = Access.of(parse("couchbases://demo@h/b"), Settings())
    plain = parse_cluster_map(json.dumps(MAP), "h")
    with pytest.raises(NotSupported, match="its data service with TLS"):
        check_ports(plain, secure, NodeAddress("h", 1))
    assert [secure.address_of(node) for node in plain.nodes] == [None], "nor is its plain port connected to"


async def test_a_network_that_the_cluster_does_not_have_is_refused(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.GET_CLUSTER_CONFIG: refuse(Status.SUCCESS, json.dumps(MAP).encode())}) as node:
        with pytest.raises(NotSupported, match="no addresses of the network external") as caught:
            await discover(access_to(node, tmp_path, network="external"), SystemClock())
    assert "alternate addresses" in caught.value.hint


async def test_one_node_with_a_bad_certificate_does_not_hide_the_others(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    bad = authority.node_context("127.0.0.1", days=-1)
    good = authority.node_context("127.0.0.1")
    answers: dict[int, Answer] = {Opcode.GET_CLUSTER_CONFIG: refuse(Status.SUCCESS, json.dumps(SECURE_MAP).encode())}
    async with ScriptedNode(ssl=bad) as first_node, ScriptedNode(answers, ssl=good) as second_node:
        access = secure_access_to(first_node, tmp_path, authority)
        nodes = [NodeAddress("127.0.0.1", node.port) for node in (first_node, second_node)]
        assert (await discover(access, SystemClock(), addresses=nodes)).rev == 7
        with pytest.raises(TlsFailed, match="expired"):
            await discover(access, SystemClock(), addresses=[nodes[0], NodeAddress("127.0.0.1", 1)])


async def test_discovery_looks_for_the_hosts_behind_a_name_each_time(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.GET_CLUSTER_CONFIG: refuse(Status.SUCCESS, json.dumps(MAP).encode())}) as node:
        records = {"_couchbase._tcp.db.invalid": ["0 0 1 localhost."]}
        with NameServer(records):
            there = access_to(node, tmp_path)
            access = Access(parse("couchbase://demo@db.invalid/b"), there.password, there.settings)
            with pytest.raises(ConnectFailed, match="localhost:1"):
                await discover(access, SystemClock())
            records["_couchbase._tcp.db.invalid"] = [f"0 0 {node.port} localhost."]
            assert (await discover(access, SystemClock())).rev == 7


async def test_an_address_that_answers_is_enough_and_a_refusal_is_raised(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.GET_CLUSTER_CONFIG: refuse(Status.SUCCESS, json.dumps(MAP).encode())}) as node:
        access = access_to(node, tmp_path)
        here = first(access)
        nowhere = NodeAddress("127.0.0.1", 1)
        assert (await discover(access, SystemClock(), addresses=[nowhere, here])).rev == 7
        with pytest.raises(ConnectFailed):
            await discover(access, SystemClock(), addresses=[nowhere])
        wrong = access_to(node, tmp_path, password="wrong")
        requested = node.connections
        with pytest.raises(AuthRejected):
            await discover(wrong, SystemClock(), addresses=[here, here])
        assert node.connections == requested + 1


def map_of(rev: int, *nodes: ScriptedNode, uuid: str = "u") -> Answer:
    """The map of a node that knows these nodes."""
    config = MAP | {
        "rev": rev,
        "uuid": uuid,
        "nodesExt": [{"services": {"kv": node.port}} for node in nodes],
        "vBucketServerMap": {
            "serverList": [f"$HOST:{node.port}" for node in nodes],
            "vBucketMap": [[number] for number in range(len(nodes))],
        },
    }
    return refuse(Status.SUCCESS, json.dumps(config).encode())


async def test_the_newest_map_of_all_hosts_and_nodes_is_chosen(tmp_path: Path) -> None:
    """The first host has an old map; of the second, which that names, comes a newer one, which names a third."""
    async with ScriptedNode() as old, ScriptedNode() as newer, ScriptedNode() as newest:
        old.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(7, old, newer)
        newer.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(8, newer, newest)
        newest.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(9, newer, newest)
        found = await survey(access_to(old, tmp_path), SystemClock())
        assert found.newest.rev == 9
        assert {address.port: each.rev for address, each in found.answers.items()} == {
            old.port: 7,
            newer.port: 8,
            newest.port: 9,
        }
        assert [node.connections for node in (old, newer, newest)] == [1, 1, 1]


async def test_silent_hosts_delay_neither_a_map_nor_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirror.feed.connection.bootstrap.CONNECT_TIMEOUT_S", 600)
    monkeypatch.setattr(discovery, "SURVEY_S", 0.3)
    async with ScriptedNode() as node, ScriptedNode({Opcode.HELLO: silent}) as dead:
        node.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(7, node, dead)
        access = access_to(node, tmp_path)
        hosts = [NodeAddress(host, dead.port) for host in ("127.0.0.1", "127.0.0.2")] + [first(access)]
        async with asyncio.timeout(60):
            assert (await discover(access, SystemClock(), addresses=hosts)).rev == 7
            wrong = access_to(node, tmp_path, password="wrong")
            with pytest.raises(AuthRejected):
                await discover(wrong, SystemClock(), addresses=hosts)


async def test_a_node_that_refuses_the_login_does_not_hide_the_maps_of_others(tmp_path: Path) -> None:
    async with ScriptedNode() as node, ScriptedNode() as refusing, ScriptedNode() as other:
        node.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(7, node, refusing, other)
        refusing.answers[Opcode.SASL_AUTH] = refuse(Status.AUTH_ERROR)
        other.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(8, node, other)
        assert (await discover(access_to(node, tmp_path), SystemClock())).rev == 8


async def test_a_host_that_serves_another_bucket_of_that_name_does_not_count(tmp_path: Path) -> None:
    """As a node that was taken out of the cluster and became one of its own."""
    async with ScriptedNode() as foreign, ScriptedNode() as ours:
        foreign.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(90, foreign, uuid="another")
        ours.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(7, ours)
        access = access_to(foreign, tmp_path)
        hosts = [NodeAddress("127.0.0.1", node.port) for node in (foreign, ours)]
        assert (await discover(access, SystemClock(), addresses=hosts, bucket_uuid="u")).bucket_uuid == "u"
        assert (await discover(access, SystemClock(), addresses=hosts)).bucket_uuid == "another"
        assert (await discover(access, SystemClock(), addresses=hosts[:1], bucket_uuid="u")).bucket_uuid == "another"
