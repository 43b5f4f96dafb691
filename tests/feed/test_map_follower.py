"""The follower of cluster maps takes none that is older or of another bucket, and asks every node in each round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import Clock, SystemClock
from mirror.errors import MirrorError, OlderMap
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.connection.connection_string import NodeAddress, parse
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap
from mirror.wire.constants import Opcode, Status
from tests.feed.harness import VBUCKETS, write
from tests.feed.scripted_node import ScriptedNode, refuse, silent
from tests.feed.test_bootstrap import access_to
from tests.feed.test_discovery import map_of
from tests.feed.test_topology_followed import source_of


class Polling(MapFollower):
    """A follower that runs, beginning with the map of `first`, and is its own user."""

    def __init__(self, path: Path, first: ScriptedNode, clock: Clock | None = None, **settings: Any) -> None:
        access = access_to(first, path, **{"map_poll_interval_s": 0.05, "retry_delay_max_ms": 100, **settings})
        super().__init__(access, clock or SystemClock(), NewestMap(), self)
        self.received: list[tuple[int, int]] = []

    def on_map(self, address: NodeAddress, found: ClusterMap) -> None:
        self.received.append((address.port, found.rev))
        super().on_map(address, found)

    def check_map(self, found: ClusterMap, verdict: MapVerdict) -> None: ...

    def on_newer_map(self, found: ClusterMap) -> None:
        self.take(found)

    def on_map_refused(self, error: MirrorError) -> None:
        raise error

    async def __aenter__(self) -> Polling:
        self.task = asyncio.create_task(self.queries.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(30):
            while not holds():  # noqa: ASYNC110 - looks on from outside
                await asyncio.sleep(0.01)


async def test_a_round_of_polling_ends_with_its_last_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the source answers at once, with an old map; one that it names is silent, another knows better."""
    monkeypatch.setattr("mirror.feed.connection.bootstrap.CONNECT_TIMEOUT_S", 600)
    async with ScriptedNode() as stale, ScriptedNode({Opcode.HELLO: silent}) as dead, ScriptedNode() as newer:
        stale.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(7, stale, dead, newer)
        newer.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(8, newer)
        async with Polling(tmp_path, stale) as polling:
            await polling.until(lambda: polling.maps.floor == (2, 8))
            assert polling.error is None
            # The host of the source is queried further, and its old map does not come back.
            before = len(stale.received_requests(Opcode.GET_CLUSTER_CONFIG))
            await polling.until(lambda: len(stale.received_requests(Opcode.GET_CLUSTER_CONFIG)) > before + 2)
            assert polling.maps.floor == (2, 8)
            assert (stale.connections, newer.connections) == (1, 1), "connections stay open"
            assert len(newer.received_requests(Opcode.SASL_AUTH)) == 1


async def test_a_map_that_a_node_sent_before_is_not_read_again(tmp_path: Path) -> None:
    async with ScriptedNode() as node:
        node.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(7, node)
        async with Polling(tmp_path, node) as polling:
            await polling.until(lambda: len(node.received_requests(Opcode.GET_CLUSTER_CONFIG)) > 5)
            assert polling.received == [(node.port, 7)]


async def test_repeated_requests_for_a_newer_map_are_served_with_growing_pauses(tmp_path: Path) -> None:
    """The vbuckets of a mirror that is still filling are refused until they are complete, and no map says more."""
    pauses: list[float] = []

    class Recorded(SystemClock):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            await super().sleep(0.001)

    async with ScriptedNode() as node:
        node.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(7, node)
        async with Polling(tmp_path, node, Recorded(), map_poll_interval_s=600) as polling:

            async def woken_until(holds: Callable[[], bool]) -> None:
                async with asyncio.timeout(30):
                    while not holds():
                        polling.queries.wake()
                        await asyncio.sleep(0.001)

            await woken_until(lambda: polling.maps.floor == (2, 7))
            before = len(pauses)
            await woken_until(lambda: len(pauses) >= before + 20)
            found = pauses[before + 1 :]
            assert found == sorted(found)
            assert sum(found) > 10
            assert max(found) <= 1.0
            before = len(pauses)
            node.answers[Opcode.GET_CLUSTER_CONFIG] = map_of(8, node)
            await woken_until(lambda: polling.maps.floor == (2, 8))
            taken = len(pauses)
            await woken_until(lambda: len(pauses) >= taken + 3)
            assert min(pauses[before:]) <= 0.05, "a newer map may be the first of several"


async def test_a_node_that_refuses_the_login_is_reported_and_retried_with_pauses(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.SASL_STEP: refuse(Status.AUTH_ERROR)}) as node, Polling(tmp_path, node) as polling:
        await polling.until(lambda: polling.error is not None)
        for _ in range(3):
            polling.queries.wake()
            await asyncio.sleep(0.1)
        assert node.connections == 1
        assert "wrong user or password" in str(polling.error)


# -- a consumer that is connected to a stale node alone --------------------------------------------------------------


@pytest.mark.parametrize("profile", ["6.6", pytest.param("7.2", marks=pytest.mark.ci), "8.0"])
async def test_a_stale_node_that_was_failed_over_is_left(profile: str, tmp_path: Path) -> None:
    """The consumer is connected to this node only, but queries the other one, too."""
    async with source_of(tmp_path, profile=profile) as (cluster, mirrors):
        write(cluster, 100)
        mirror = mirrors.start(groups=2, own_groups=[1])  # whose vbuckets all lie on node 1
        await mirror.follow()
        alone = cluster.split_off(1)
        await cluster.failover_node(1)
        for vbid in range(1, VBUCKETS, 2):
            alone.set("stale", {}, vbid=vbid)
        write(cluster, 100, "good")
        await mirror.follow()
        streams = [len(alone.sent[vbid].stream_requests) for vbid in range(VBUCKETS)]
        for vbid in range(1, VBUCKETS, 2):
            alone.set("stale again", {}, vbid=vbid)
        write(cluster, 100, "later")
        await mirror.follow()
        assert [len(alone.sent[vbid].stream_requests) for vbid in range(VBUCKETS)] == streams


async def test_a_vbucket_that_gets_a_node_again_is_found_by_polling(tmp_path: Path) -> None:
    """The consumer has no session at all, and the nodes that announce maps are none of its own."""
    async with source_of(tmp_path, profile="8.0") as (cluster, mirrors):
        write(cluster, 50)
        mirror = mirrors.start(groups=2, own_groups=[1])  # whose vbuckets all lie on node 1
        await mirror.follow()
        ours = range(1, VBUCKETS, 2)
        for vbid in ours:
            cluster.bucket.map.owners[vbid] = -1
        cluster.bucket.map_changed(*ours)
        await mirror.until(lambda: not mirror.consumer.connections.ready_sessions(), "no session")
        await asyncio.sleep(0.2)  # the requests for a map that this led to are over
        for vbid in ours:
            cluster.bucket.map.owners[vbid] = 0
        cluster.bucket.map.bump()  # silently
        write(cluster, 50, "after")
        await mirror.follow()
        assert mirror.consumer.connections.ready_sessions()


async def test_a_host_that_serves_another_bucket_now_does_not_end_a_mirror(tmp_path: Path) -> None:
    """The host left the cluster and has its own bucket of that name, but the settings still name it."""
    async with source_of(tmp_path) as (cluster, mirrors):
        write(cluster, 50)
        mirror = mirrors.start(groups=2, own_groups=[1])  # whose vbuckets all lie on node 1
        await mirror.follow()
        alone = cluster.split_off(1)
        await cluster.failover_node(1)
        write(cluster, 50, "good")
        await mirror.follow()
        alone.map.rev += 1000
        alone.recreate()
        for number in range(10):
            write(cluster, 5, f"later-{number}")
            await mirror.follow()
            await asyncio.sleep(0.05)
        assert mirror.row(1)["published_seqno"] == cluster.vbucket(1).high_seqno > alone.vbuckets[1].high_seqno


async def test_a_map_older_than_the_floor_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with source_of(tmp_path) as (cluster, mirrors):
        write(cluster, 50)
        mirror = mirrors.start(groups=2, own_groups=[1], bootstrap_timeout_s=0.3)
        mirror.consumer.map_follower.maps.floor = (1, 1000)
        error = await mirror.fails()
        assert isinstance(error, OlderMap)
        assert "map.json" in str(error)


async def test_a_map_is_shared_and_followed_when_it_is_returned(tmp_path: Path) -> None:
    async with source_of(tmp_path) as (cluster, mirrors):
        write(cluster, 50)
        mirror = mirrors.start(groups=2, own_groups=[1])  # whose vbuckets all lie on node 1
        shared: list[ClusterMap] = []
        mirror.consumer._share_map = shared.append
        await mirror.until(lambda: bool(shared), "a map to share")
        assert mirror.consumer.map_follower.current is None
        mirror.consumer.follow(shared[0])
        await mirror.follow()
        assert parse(cluster.connection_string).bucket == shared[0].bucket_name
