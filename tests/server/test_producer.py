"""The rules that both producers share: over-acknowledged bytes, unknown streams, noops; by real connections."""

from __future__ import annotations

import pytest

from mirror.sandbox import SandboxCluster
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import NO_END_SEQNO, Status, StreamRequestFlag
from tests.sandbox.client import Client


def request(start: int, vbuuid: int, flags: int = 0, end: int = NO_END_SEQNO) -> ev.StreamRequest:
    return ev.StreamRequest(0, flags, start, end, vbuuid, start, start, opaque=7)


@pytest.mark.parametrize(
    ("profile", "flags", "status"),
    [
        ("7.2", 0x08, Status.EINVAL),
        ("7.2", 0x40, Status.EINVAL),
        ("8.x", 0x200, Status.EINVAL),
        ("7.0", 0x08, Status.SUCCESS),
        ("7.0", 0x80, Status.SUCCESS),
    ],
)
async def test_flags_that_a_server_does_not_know_are_refused_from_7_2_on(profile: str, flags: int, status: int) -> None:
    """kv_engine, daemon/mcbp_validators.cc of 7.0.0 and 7.2.4."""
    async with SandboxCluster(vbuckets=1, profile=profile) as cluster:
        cluster.set("k", {})
        client = await Client.dcp(cluster)
        assert (await client.ask(codec_dcp.to_frame(request(0, 0, flags)))).status == status


async def test_a_stream_from_the_latest_begins_at_the_high_seqno() -> None:
    """kv_engine 7.6.2, DcpProducer::streamRequest."""
    async with SandboxCluster(vbuckets=1, profile="8.x") as cluster:
        cluster.set("old", {})
        client = await Client.dcp(cluster)
        flags = int(StreamRequestFlag.FROM_LATEST)
        assert (await client.ask(codec_dcp.to_frame(request(0, 0, flags)))).status == Status.SUCCESS
        cluster.set("new", {})
        await client.until(lambda: client.of(ev.Mutation))
        assert [event.seqno for event in client.of(ev.Mutation)] == [2]
