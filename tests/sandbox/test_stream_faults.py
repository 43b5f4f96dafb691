"""Streams in trouble on request: every refusal, every reason to end, silence, and no more noops."""

from __future__ import annotations

import asyncio

import pytest

from mirror.sandbox import SandboxCluster
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import Status, StreamEndReason

from .client import Client


@pytest.mark.parametrize("status", [Status.ROLLBACK, Status.EACCESS, Status.UNKNOWN_COLLECTION])
async def test_a_stream_request_is_refused_as_often_as_requested(status: Status) -> None:
    async with SandboxCluster(vbuckets=3) as cluster:
        cluster.faults.streams.refuse(status, [0, 1], times=2)
        client = await Client.dcp(cluster)
        answers = [await client.stream(vbid) for vbid in (0, 2, 1, 0)]
        assert [answer.status for answer in answers] == [status, Status.SUCCESS, status, Status.SUCCESS]
        if status == Status.ROLLBACK:
            assert codec_dcp.decode_rollback_seqno(answers[0].value) == 0
        elif status == Status.UNKNOWN_COLLECTION:
            assert b"manifest_uid" in answers[0].value
        else:
            assert answers[0].value == b""


async def test_a_refusal_has_any_status_and_ends_when_cleared(cluster: SandboxCluster) -> None:
    cluster.faults.streams.refuse(Status.NOT_MY_VBUCKET, value=b"")
    cluster.faults.streams.refuse(Status.ROLLBACK, times=1, value=(7).to_bytes(8))
    client = await Client.dcp(cluster)
    assert codec_dcp.decode_rollback_seqno((await client.stream(0)).value) == 7
    for _ in range(2):
        refused = await client.stream(0)
        assert (refused.status, refused.value) == (Status.NOT_MY_VBUCKET, b"")
    cluster.faults.clear()
    assert (await client.stream(0)).status == 0


@pytest.mark.parametrize("reason", list(StreamEndReason))
async def test_a_stream_ends_for_any_reason(reason: StreamEndReason) -> None:
    async with SandboxCluster(vbuckets=2) as cluster:
        client = await Client.dcp(cluster)
        await client.stream(0)
        await client.stream(1)
        assert cluster.faults.end_streams(reason, [1]) == 1
        await client.until(lambda: client.of(ev.StreamEnd))
        assert [(e.vbid, e.reason) for e in client.of(ev.StreamEnd)] == [(1, reason)]
        assert (await client.stream(1)).status == 0


async def test_a_muted_stream_is_accepted_and_continues_when_cleared() -> None:
    async with SandboxCluster(nodes=2, vbuckets=4) as cluster:
        client = await Client.dcp(cluster)
        await client.stream(0)
        for vbid in range(3):
            cluster.set("k", {}, vbid=vbid)
        await client.until_seqno(0, 1)
        cluster.faults.streams.mute([0, 1], node=0)
        cluster.set("l", {}, vbid=0)
        await client.stream(2)
        await client.until_seqno(2, 1)
        other = await Client.dcp(cluster, node=1)
        await other.stream(1)
        await other.until_seqno(1, 1)
        assert client.seqno(0) == 1
        cluster.faults.clear()
        await client.until_seqno(0, 2)


async def test_noops_are_withheld_on_request(cluster: SandboxCluster) -> None:
    client = await Client.dcp(cluster, set_noop_interval="0.1")
    cluster.faults.streams.noops_withheld = True
    await client.stream(0)
    await asyncio.sleep(0.25)
    assert not client.of(ev.DcpNoop)
    cluster.faults.clear()
    await client.until(lambda: client.of(ev.DcpNoop))
