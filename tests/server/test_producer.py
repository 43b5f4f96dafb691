"""The rules that both producers share: over-acknowledged bytes, unknown streams, noops; by real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mirror.ingest.rollback import Accept, OutOfRange, Rollback
from mirror.sandbox import SandboxCluster
from mirror.server.producer import History, judge
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire.constants import NO_END_SEQNO, Status, StreamRequestFlag
from storage.model import FailoverEntry, Seqno, Vbuuid
from tests.sandbox.client import Client
from tests.serve.dcp_rig import DcpEndpoint, serving_dcp
from tests.serve.kv_rig import Store

HISTORY = History([FailoverEntry(Vbuuid(9), Seqno(50)), FailoverEntry(Vbuuid(7), Seqno(0))], 100, 20)


def request(start: int, vbuuid: int, flags: int = 0, end: int = NO_END_SEQNO) -> ev.StreamRequest:
    return ev.StreamRequest(0, flags, start, end, vbuuid, start, start, opaque=7)


def test_a_request_is_judged_by_the_history() -> None:
    assert isinstance(judge(request(100, 9), HISTORY, None), Accept)
    assert judge(request(60, 7), HISTORY, None) == Rollback(50)
    assert judge(request(10, 7), HISTORY, None) == Rollback(0)
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
