"""A node: order of answers, garbage, and what has to come before what."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial

import pytest

from mirror.sandbox import SandboxCluster
from mirror.wire import codec_kv
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Opcode, Status
from tests.oracle import kv_client

from .client import Client


@pytest.mark.parametrize("turns", range(5))
async def test_a_node_that_stops_breaks_connections_that_it_has_just_accepted(turns: int) -> None:
    cluster = SandboxCluster(vbuckets=1)
    await cluster.start()
    node = cluster.nodes[0]
    with socket.create_connection((cluster.host, node.port)) as client:
        for _ in range(turns):
            await asyncio.sleep(0)
        await node.stop()
        assert not node.connections
        client.settimeout(10)
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    await cluster.stop()


async def test_a_slow_reader_does_not_fill_memory(cluster: SandboxCluster) -> None:
    body = b'"%b"' % (b"x" * 2000)
    cluster.bucket.load(((b"k%d" % i, body) for i in range(10_000)), vbid=0)
    client = await Client.dcp(cluster)
    client.pause()
    await client.stream_without_answer(0)
    connection = next(iter(cluster.nodes[0].connections))
    before = -1
    while before != connection.link.bytes_sent:
        before = connection.link.bytes_sent
        for _ in range(50):
            await client.breathe()
    assert before < 16 * 1024 * 1024
    client.resume()
    await client.until_seqno(0, 10_000)


NOTICES = (Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF)


@pytest.mark.parametrize("notice", NOTICES)
async def test_maps_are_announced_to_subscribed_clients_even_on_dcp_connections(notice: Feature) -> None:
    async with SandboxCluster(nodes=2, vbuckets=2) as cluster:
        features = (Feature.SELECT_BUCKET, Feature.DUPLEX, notice)
        clients = [await Client.login(cluster, features=features), await Client.dcp(cluster, features=features)]
        plain = await Client.login(cluster, features=(Feature.SELECT_BUCKET, Feature.DUPLEX))
        cluster.move(0, 1)
        for client in clients:
            await client.until(partial(getattr, client, "pushed"))
            epoch, rev, bucket, config = kv_client.decode_clustermap_notification(client.pushed[0])
            assert (epoch, rev, bucket) == (cluster.bucket.map.epoch, cluster.bucket.map.rev, b"demo")
            assert bool(config) == (notice == Feature.CLUSTERMAP_CHANGE_NOTIFICATION)
        await plain.ask(kv_client.noop())
        assert plain.pushed == []


async def test_map_announcements_need_the_duplex_feature(cluster: SandboxCluster) -> None:
    for notice in NOTICES:
        client = await Client.connect(cluster)
        assert (await client.ask(kv_client.hello(b"x", (notice,)))).status == Status.EINVAL


async def test_a_client_that_declines_known_maps_gets_none_with_a_refusal() -> None:
    async with SandboxCluster(nodes=2, vbuckets=2) as cluster:
        sent = codec_kv.get_cluster_config()
        elsewhere = fr.request(Opcode.DCP_GET_FAILOVER_LOG, vbucket=1)
        for features, again in (
            ((Feature.SELECT_BUCKET,), True),
            ((Feature.SELECT_BUCKET, Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP), False),
        ):
            client = await Client.dcp(cluster, features=features)
            first = await client.ask(elsewhere)
            assert first.status == Status.NOT_MY_VBUCKET
            assert first.value == (await client.ask(sent)).value
            assert bool((await client.ask(elsewhere)).value) == again
            cluster.bucket.map_changed()
            assert (await client.ask(elsewhere)).value


async def test_a_stopped_node_keeps_its_port() -> None:
    """Another program's connection got it in between, and the node could not come back."""
    async with SandboxCluster(nodes=2, vbuckets=1) as cluster:
        place = cluster.host, cluster.nodes[1].port
        await cluster.kill_node(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*place)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        await cluster.kill_node(1)
        await cluster.restart_node(1)
        assert cluster.nodes[1].port == place[1]
        await Client.connect(cluster, 1)
        await cluster.kill_node(1)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(place)
