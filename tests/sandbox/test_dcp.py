"""A producer's connection: the window, names, noops, controls, stream ids, ends, and the rule of rollback."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import groupby

import pytest

from mirror.sandbox import SandboxCluster
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import Status, StreamEndReason, VbucketRole

from .client import DATA, Client


async def test_the_window_is_overshot_by_at_most_the_last_message() -> None:
    async with SandboxCluster(vbuckets=2) as cluster:
        for index in range(300):
            cluster.set(f"k{index}", {"pad": "x" * (index % 90)}, vbid=index % 2)
        client = await Client.dcp(cluster, connection_buffer_size="4096")
        await client.stream(0)
        await client.stream(1)
        acked = 0
        while len(client.of(*DATA)) < 300:
            expected = acked + 4096
            await client.until(
                partial(lambda bytes_: sum(client.sizes) >= bytes_ or len(client.of(*DATA)) == 300, expected)
            )
            await asyncio.sleep(0.002)
            assert sum(client.sizes) - acked < 4096 + max(client.sizes)
            client.ack(sum(client.sizes) - acked)
            acked = sum(client.sizes)
        for vbid in (0, 1):
            assert len(client.state(vbid)) == 150


def vbids_sent(client: Client) -> list[int]:
    """Of each message of a stream, in the order of sending."""
    return [event.vbid for event in client.of(ev.SnapshotMarker, *DATA)]


IN_TURN = [0] + [0, 1, 2] * 10 + [1, 2]
"""Three streams of a marker and ten documents; one message is sent before the second stream is there."""


@pytest.mark.parametrize("in_turn", [True, False])
async def test_streams_take_turns_by_message_or_follow_each_other(in_turn: bool) -> None:
    async with SandboxCluster(vbuckets=3) as cluster:
        cluster.bucket.tuning.in_turn = in_turn
        for index in range(30):
            cluster.set(f"k{index}", {}, vbid=index % 3)
        cluster.bucket.to_disk()
        client = await Client.dcp(cluster, connection_buffer_size="1")
        for vbid in range(3):
            await client.stream(vbid)
        await client.control("connection_buffer_size", "0")
        await client.until(lambda: len(client.of(*DATA)) == 30)
        if in_turn:
            assert vbids_sent(client) == IN_TURN
        else:
            assert [vbid for vbid, _ in groupby(vbids_sent(client))] == [0, 1, 2]


async def test_turns_continue_with_the_next_stream_after_a_closed_window() -> None:
    async with SandboxCluster(vbuckets=3) as cluster:
        for index in range(30):
            cluster.set(f"k{index}", {}, vbid=index % 3)
        cluster.bucket.to_disk()
        client = await Client.dcp(cluster, connection_buffer_size="1")
        for vbid in range(3):
            await client.stream(vbid)
        for count in range(1, len(IN_TURN) + 1):
            await client.until(partial(lambda sent: len(client.sizes) >= sent, count))
            assert len(client.sizes) == count
            client.ack(client.sizes[-1])
        assert vbids_sent(client) == IN_TURN


async def test_a_change_of_state_ends_the_streams_of_its_vbucket() -> None:
    async with SandboxCluster(vbuckets=2) as cluster:
        client = await Client.dcp(cluster)
        await client.stream(0)
        await client.stream(1)
        cluster.bucket.states[0] = VbucketRole.REPLICA
        cluster.bucket.map_changed(0)
        await client.until(lambda: client.of(ev.StreamEnd))
        assert [(e.vbid, e.reason) for e in client.of(ev.StreamEnd)] == [(0, StreamEndReason.STATE_CHANGED)]
        assert (await client.stream(0, flags=0x10)).status == Status.NOT_MY_VBUCKET
        assert (await client.stream(0)).status == 0
        cluster.bucket.states.clear()
        cluster.move(0, 0)
        await client.until(lambda: len(client.of(ev.StreamEnd)) == 2)
        answer = await client.stream(0, flags=0x10)
        assert len(codec_dcp.decode_failover_log(answer.value)) == 2


async def test_a_stream_silently_leaves_out_system_collections_that_its_user_may_not_see(
    cluster: SandboxCluster,
) -> None:
    bucket = cluster.bucket
    bucket.create_scope("_system")
    hidden = bucket.create_collection("_system", "_mobile")
    bucket.create_scope("s")
    bucket.create_collection("s", "c")
    cluster.set("mine", {}, collection="s.c")
    cluster.set("theirs", {}, collection="_system._mobile")
    bucket.to_disk()
    user = cluster.add_user("u", "pw", cluster.user.privileges - {"SystemCollectionLookup"})
    client = await Client.dcp(cluster, user="u", password="pw")
    refused = await client.stream(0, value=b'{"collections":["%x"]}' % hidden)
    assert refused.status == Status.UNKNOWN_COLLECTION
    assert (await client.stream(0, value=b'{"scope":"8"}')).status == Status.UNKNOWN_SCOPE
    assert (await client.stream(0)).status == 0
    await client.until_seqno(0, 6)
    seen = [(type(e).__name__, e.seqno) for e in client.events if not isinstance(e, ev.SnapshotMarker)]
    assert seen == [("SystemEvent", 3), ("SystemEvent", 4), ("Mutation", 5), ("SeqnoAdvanced", 6)]
    bucket.drop_scope("_system")
    cluster.set("more", {}, collection="s.c")
    await client.until_seqno(0, 9)
    assert [e.event for e in client.of(ev.SystemEvent)] == [3, 0]
    whole = await Client.streamed(cluster, 9, name="whole")
    cluster.user.privileges = user.privileges
    cluster.set("again", {}, collection="s.c")
    await whole.until(lambda: whole.of(ev.StreamEnd))
    assert whole.of(ev.StreamEnd)[0].reason == StreamEndReason.LOST_PRIVILEGES
    await client.until_seqno(0, 10)


async def test_a_filtered_stream_is_not_rolled_back_by_a_purge_in_other_collections(cluster: SandboxCluster) -> None:
    cluster.bucket.create_scope("s")
    cluster.bucket.create_collection("s", "c")
    cluster.set("mine", {}, collection="s.c")
    cluster.set("gone", {})
    cluster.delete("gone")
    cluster.set("last", {})
    cluster.bucket.purge()
    uuid = cluster.vbucket(0).vbuuid
    client = await Client.dcp(cluster)
    assert (await client.stream(0, start=3, uuid=uuid)).status == Status.ROLLBACK
    assert (await client.stream(0, start=2, uuid=uuid, value=b'{"collections":["8"]}')).status == Status.ROLLBACK
    assert (await client.stream(0, start=3, uuid=uuid, value=b'{"collections":["8"]}')).status == 0
