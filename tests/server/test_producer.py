"""The rules that both producers share: over-acknowledged bytes, unknown streams, noops; by real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mirror.ingest.rollback import Accept, OutOfRange, RollbackAnswer
from mirror.sandbox import SandboxCluster
from mirror.server.producer import StreamHistory, judge
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import NO_END_SEQNO, Status, StreamRequestFlag
from storage.model import FailoverLog
from tests.sandbox.client import Client
from tests.serve.dcp_rig import DcpEndpoint, serving_dcp
from tests.serve.kv_rig import Store

HISTORY = StreamHistory(FailoverLog.of([(9, 50), (7, 0)]), 100, 20)


def request(start: int, vbuuid: int, flags: int = 0, end: int = NO_END_SEQNO) -> ev.StreamRequest:
    return ev.StreamRequest(0, flags, start, end, vbuuid, start, start, opaque=7)


def test_a_request_is_judged_by_the_history() -> None:
    assert isinstance(judge(request(100, 9), HISTORY, None), Accept)
    assert judge(request(60, 7), HISTORY, None) == RollbackAnswer(50)
    assert judge(request(10, 7), HISTORY, None) == RollbackAnswer(0)
    assert isinstance(judge(request(10, 7), HISTORY, 20), Accept)
    ignoring = request(10, 7, int(StreamRequestFlag.IGNORE_PURGED_TOMBSTONES))
    assert isinstance(judge(ignoring, HISTORY, None), Accept)
    assert isinstance(judge(request(100, 9, end=90), HISTORY, None), OutOfRange)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path, vbuckets=1)
    made.logs()
    yield made
    made.close()


@pytest.fixture
async def endpoint(store: Store) -> AsyncIterator[DcpEndpoint]:
    async with serving_dcp(store.path) as made:
        yield made


async def test_the_newer_status_of_an_unknown_stream_is_for_clients_that_negotiated_it(endpoint: DcpEndpoint) -> None:
    """The mirror granted v7_dcp_status_codes and answered as if it had not."""
    closing = codec_dcp.to_frame(ev.CloseStream(0))
    async with SandboxCluster(vbuckets=1) as cluster:
        old, new = await Client.dcp(cluster, name="o"), await Client.dcp(cluster, name="n", v7_dcp_status_codes="true")
        assert (await old.ask(closing)).status == Status.KEY_ENOENT
        assert (await new.ask(closing)).status == Status.DCP_STREAM_NOT_FOUND
    plain, newer = await endpoint.client(name="o"), await endpoint.client(name="n")
    assert (await plain.ask(closing)).status == Status.KEY_ENOENT
    assert (await newer.ask(codec_dcp.to_frame(ev.DcpControl(b"v7_dcp_status_codes", b"true")))).status == 0
    assert (await newer.ask(closing)).status == Status.DCP_STREAM_NOT_FOUND


async def test_more_bytes_acknowledged_than_sent_are_refused_and_the_connection_stays(endpoint: DcpEndpoint) -> None:
    ack = codec_dcp.to_frame(ev.BufferAck(10))
    async with SandboxCluster(vbuckets=1) as cluster:
        client = await Client.dcp(cluster, connection_buffer_size="4096")
        assert (await client.ask(ack)).status == Status.EINVAL
    liar, other = await endpoint.client(name="liar"), await endpoint.client(name="other")
    assert (await liar.ask(ack)).status == Status.EINVAL
    assert await liar.alive()
    assert await other.alive()


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


@pytest.mark.parametrize(
    ("flags", "status"),
    [(0x01, Status.NOT_SUPPORTED), (0x08, Status.EINVAL), (0x40, Status.EINVAL), (0x100, Status.EINVAL), (0xB4, 0)],
)
async def test_a_mirror_takes_the_flags_of_the_version_that_it_names(
    store: Store, endpoint: DcpEndpoint, flags: int, status: int
) -> None:
    store.put(b"k", b"v", 1)
    client = await endpoint.client()
    assert (await client.stream(0, flags=flags)).status == status
