"""Faults: each hits whom it is meant for, and does what it says."""

from __future__ import annotations

import asyncio

from mirror.sandbox import SandboxCluster
from mirror.wire import events as ev

from .client import DATA, Client


async def two(cluster: SandboxCluster) -> tuple[Client, Client]:
    first = await Client.dcp(cluster, name="first")
    second = await Client.dcp(cluster, name="second")
    for client in (first, second):
        await client.stream(0)
    return first, second


async def test_a_cut_breaks_only_the_named_connection(cluster: SandboxCluster) -> None:
    first, second = await two(cluster)
    plain = await Client.login(cluster)
    assert cluster.faults.cut(name="first") == 1
    await first.until_closed()
    cluster.set("k", {})
    await second.until_seqno(0, 1)
    assert cluster.faults.cut(dcp_only=False) == 2
    await plain.until_closed()
    assert cluster.faults.cut() == 0


async def test_a_silenced_connection_sends_nothing_and_stays_open(cluster: SandboxCluster) -> None:
    first, second = await two(cluster)
    cluster.faults.silence(name="first", node=0)
    cluster.set("k", {})
    await second.until_seqno(0, 1)
    await asyncio.sleep(0.02)
    assert not first.events
    assert not first.closed.is_set()


async def test_slow_is_slow_and_complete(cluster: SandboxCluster) -> None:
    first, second = await two(cluster)
    cluster.faults.slow(50, name="first")
    for index in range(40):
        cluster.set(f"k{index}", {})
    await second.until_seqno(0, 40)
    assert first.seqno(0) < 40
    cluster.faults.slow(0, name="first")
    await first.until_seqno(0, 40)
    assert first.state(0) == second.state(0)


async def test_garbled_and_truncated_frames_arrive_as_such(cluster: SandboxCluster) -> None:
    first, second = await two(cluster)
    cluster.faults.truncate(name="second")
    cluster.set("k", {"pad": "x" * 500})
    await second.until_closed()
    assert second.truncated
    await first.until_seqno(0, 1)
    sound = list(first.frames)
    cluster.faults.garble(1, name="first")
    cluster.set("l", {"pad": "x" * 5000})
    await asyncio.sleep(0.02)
    item = cluster.bucket.get("l")
    assert item is not None
    assert item.value not in [e.value for e in first.of(ev.Mutation)]
    assert first.frames[: len(sound)] == sound


async def test_the_source_stops_talking_inside_of_a_snapshot(cluster: SandboxCluster) -> None:
    for index in range(200):
        cluster.set(f"k{index}", {"pad": "x" * 100})
    cluster.bucket.to_disk()
    assert cluster.faults.stop_mid_snapshot(5, future=True) == 0
    client = await Client.dcp(cluster)
    await client.stream(0)
    await client.until(lambda: len(client.of(*DATA)) >= 3)
    await asyncio.sleep(0.05)
    assert client.markers() == [(0, 200, 6)]
    assert 0 < len(client.of(*DATA)) < 200
    assert not client.closed.is_set()
    cluster.faults.clear()
    await Client.streamed(cluster, 200, name="sound")
