"""Requests of DCP clients and their answers: bootstrap, controls, stream requests, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mirror.serve.dcp import producer as dcp_producer
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status, StreamRequestFlag
from storage.format import keys
from storage.history.purge import Window
from storage.model import SEQNO_MAX, Seqno, SnapshotRange
from tests.serve.dcp_rig import XATTRS, DcpEndpoint, serving_dcp
from tests.serve.kv_rig import Store
from tests.storage.rig import purge

VBUCKETS = 4
UUID = 77


async def test_stream_requests_are_counted_by_their_answers(store: Store, dcp: DcpEndpoint) -> None:
    vbid = store.put(b"a", b"1", 5)
    client = await dcp.client()
    assert (await client.stream(vbid, 5, vbuuid=UUID + 1)).status == Status.ROLLBACK
    assert (await client.stream(vbid, flags=int(StreamRequestFlag.FROM_LATEST))).status == Status.EINVAL
    missing = await client.stream(4)
    assert (missing.status, json.loads(missing.value)["name"]) == (Status.NOT_MY_VBUCKET, "orders")
    assert (await client.stream(vbid, 5, vbuuid=UUID)).status == Status.SUCCESS
    counters = dcp.server.producers.counters
    assert (counters.streams_opened, counters.rollbacks, counters.streams_refused) == (1, 1, 2)


async def test_an_interrupted_first_backfill_resumes_if_no_tombstone_is_purged(store: Store, dcp: DcpEndpoint) -> None:
    vbid = store.put(b"a", b"1", 601)
    client = await dcp.client()
    assert (await client.stream(vbid, 141, vbuuid=UUID, snap=(0, 601))).status == 0


async def test_a_position_below_the_first_snapshot_may_lack_deletions(store: Store, dcp: DcpEndpoint) -> None:
    """The source had purged who knows what when it sent that snapshot."""
    vbid = keys.vbid_of(b"a", store.identity.vbucket_count)
    store.writer.vbuckets[vbid].save(
        failover_log=store.writer.vbuckets[vbid].state.failover_log, missing_seqno=SEQNO_MAX
    )
    store.put(b"a", b"1", 50)
    client = await dcp.client()
    answer = await client.stream(vbid, 49, vbuuid=UUID)
    assert (answer.status, answer.rollback_seqno) == (Status.ROLLBACK, 0)
    ignoring = int(StreamRequestFlag.IGNORE_PURGED_TOMBSTONES)
    assert (await client.stream(vbid, 49, vbuuid=UUID, flags=ignoring)).status == 0
    same = await dcp.client(name="other")
    assert (await same.stream(vbid, 49, vbuuid=UUID, snap=(0, 50), value=b'{"purge_seqno":"50"}')).status == 0


async def test_a_client_right_before_a_purged_deletion_begins_again(store: Store, dcp: DcpEndpoint) -> None:
    vbid = store.put(b"a", b"1", 1)
    store.put(b"a", b"2", 2)
    store.delete(b"a", 3)
    store.put(b"a", b"3", 4)
    store.delete(b"a", 5)
    purge(store.writer, Window(boundaries=1))
    client = await dcp.client()
    for snap in (None, (3, 5)):
        answer = await client.stream(vbid, 4, vbuuid=UUID, snap=snap)
        assert (answer.status, answer.rollback_seqno) == (Status.ROLLBACK, 0)
    assert (await client.stream(vbid, 5, vbuuid=UUID)).status == Status.SUCCESS


async def test_a_client_inside_a_snapshot_goes_back_to_its_start(store: Store, dcp: DcpEndpoint) -> None:
    """The mirror went back below it, but the client has all of the shared history up to there."""
    vbid = store.put(b"a", b"1", 10)
    store.clock.now += 1_000  # 20 is not settled
    for seqno in (20, 30):
        store.put(b"a", b"1", seqno)
    store.writer.vbuckets[vbid].rollback(10)
    store.log(vbid, (UUID + 1, 25), (UUID, 0))
    client = await dcp.client()
    store.put(b"a", b"1", 40)
    for start, snap, back_to in ((30, None, 10), (22, (20, 30), 20)):
        answer = await client.stream(vbid, start, vbuuid=UUID, snap=snap)
        assert (answer.status, answer.rollback_seqno) == (Status.ROLLBACK, back_to)


@pytest.mark.parametrize(("start", "snap"), [(7, None), (9, None), (7, (7, 12)), (3, (2, 7)), (3, (0, 7))])
async def test_a_client_ahead_of_the_mirror_waits_until_it_has_caught_up(
    store: Store, dcp: DcpEndpoint, start: int, snap: tuple[int, int] | None
) -> None:
    """5 is published here, and no failover has lost 7."""
    vbid = store.put(b"a", b"1", 5)
    store.log(vbid, (UUID + 1, 9), (UUID, 0))
    client = await dcp.client()
    answer = await client.stream(vbid, start, vbuuid=UUID, snap=snap)
    assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, b"")
    store.put(b"a", b"2", 9)
    accepted = await client.stream(vbid, start, vbuuid=UUID, snap=snap)
    assert accepted.failover_log == ((UUID + 1, 9), (UUID, 0))


async def test_a_vbucket_without_a_complete_snapshot_is_not_my_vbucket(store: Store, dcp: DcpEndpoint) -> None:
    """Official clients give up after a temporary failure, and ask again after this one; a map would not help them."""
    client = await dcp.client()
    vbid = store.put(b"a", b"1", 5, publish=False)
    other = store.put(b"b", b"1", 5)
    assert other != vbid
    store.writer.vbuckets[other].begin_resync()
    for each in (vbid, other):
        refused = await client.stream(each)
        assert (refused.status, refused.value) == (Status.NOT_MY_VBUCKET, b"")
        for opcode in (Opcode.DCP_GET_FAILOVER_LOG, Opcode.GET_FAILOVER_LOG):
            answer = await client.ask(fr.request(opcode, vbucket=each))
            assert (answer.status, answer.value) == (Status.NOT_MY_VBUCKET, b"")
    empty = next(each for each in range(4) if each not in (vbid, other))
    assert (await client.stream(empty)).status == 0
    store.publish(vbid, 5)
    assert (await client.stream(vbid)).status == 0


async def test_streams_of_one_vbucket_are_distinguished_by_their_ids(store: Store, dcp: DcpEndpoint) -> None:
    vbid = store.put(b"a", b"1", 5)
    client = await dcp.client(controls={b"enable_stream_id": b"true"})
    assert (await client.stream(vbid, value=b'{"sid":5}', opaque=1)).status == 0
    assert (await client.stream(vbid, value=b'{"sid":6,"collections":["0"]}', opaque=3)).status == 0
    marker, mutation, marker2, mutation2 = await client.events(4)
    assert isinstance(marker, ev.SnapshotMarker)
    assert isinstance(mutation, ev.Mutation)
    assert (marker.stream_id, mutation.stream_id, mutation.opaque, mutation.key) == (5, 5, 1, b"\0a")
    assert isinstance(marker2, ev.SnapshotMarker)
    assert isinstance(mutation2, ev.Mutation)
    assert (marker2.stream_id, mutation2.stream_id, mutation2.value) == (6, 6, b"1")


@pytest.mark.parametrize(("name", "count"), [("STREAMS_MAX", 3), ("PROCESS_STREAMS_MAX", 2)])
async def test_a_stream_beyond_the_limit_is_refused(
    dcp: DcpEndpoint, monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    """With stream ids one client once had as many as it requested, 6 KiB each."""
    monkeypatch.setattr(dcp_producer, name, count)
    other = await dcp.client(name="other", controls={b"enable_stream_id": b"true"})
    assert (await other.stream(0, value=b'{"sid":1}')).status == 0
    client = await dcp.client(controls={b"enable_stream_id": b"true"})
    free = count if name == "STREAMS_MAX" else count - 1
    found = [(await client.stream(1, value=b'{"sid":%d}' % each, opaque=each)).status for each in range(1, free + 3)]
    assert found == [0] * free + [Status.ENOMEM] * 2
    assert (await client.say(ev.CloseStream(1, stream_id=1))).status == 0
    assert (await client.stream(1, value=b'{"sid":9}', opaque=9)).status == 0, "there is a place again"


async def test_a_client_gets_the_statistics_of_its_own_connection(store: Store, dcp: DcpEndpoint) -> None:
    vbid = store.put(b"a", b"1", 5)
    client = await dcp.client(name="reader", controls={b"connection_buffer_size": b"4096"})
    await client.stream(vbid)
    await client.events(2)
    await client.send(fr.request(Opcode.STAT, key=b"dcp"))
    reported = {}
    while (frame := await client.receive()) is not None and frame.key:
        reported[frame.key.decode()] = frame.value.decode()
    head = "eq_dcpq:reader:"
    assert reported[f"{head}max_buffer_bytes"] == "4096"
    assert reported[f"{head}unacked_bytes"] == str(client.counted)
    assert reported[f"{head}stream_{vbid}_last_read_seqno"] == "5"
    await client.send(fr.request(Opcode.STAT, key=b"vbucket"))
    assert (await client.receive()) is not None


async def test_a_stream_ends_with_the_snapshot_that_reaches_its_end(store: Store, dcp: DcpEndpoint) -> None:
    vbid = store.put(b"a", b"1", 5)
    client = await dcp.client()
    assert (await client.stream(vbid, end=3)).status == 0
    marker, mutation, end = await client.events(3)
    assert isinstance(marker, ev.SnapshotMarker)
    assert (marker.start_seqno, marker.end_seqno) == (0, 5)
    assert isinstance(mutation, ev.Mutation)
    assert end == ev.StreamEnd(vbid, 0, opaque=0x77)
    assert (await client.stream(vbid, 5, vbuuid=UUID, end=5)).status == 0
    assert await client.event() == ev.StreamEnd(vbid, 0, opaque=0x77)


@pytest.mark.usefixtures("all_settled")
async def test_a_snapshot_end_without_a_row_is_sent_as_seqno_advanced(store: Store, dcp: DcpEndpoint) -> None:
    vbid = store.put(b"a", b"1", 5)
    store.writer.vbuckets[vbid].advance(9, SnapshotRange(Seqno(5), Seqno(9)))
    store.publish(vbid, 9)
    client = await dcp.client(flags=XATTRS)
    await client.stream(vbid)
    found = await client.events(3)
    assert found[2] == ev.SeqnoAdvanced(vbid, 9, opaque=0x77)


async def test_a_vbucket_of_another_mirror_is_not_my_vbucket(tmp_path: Path) -> None:
    store = Store(tmp_path, vbuckets=4, held=(2, 3))
    store.logs(UUID)
    async with serving_dcp(store.path) as dcp:
        client = await dcp.client()
        assert (await client.stream(3)).status == 0
        assert (await client.stream(1)).status == Status.NOT_MY_VBUCKET
        for vbid, status in ((3, Status.KEY_ENOENT), (1, Status.NOT_MY_VBUCKET)):
            assert (await client.get(b"\0k", vbid=vbid)).status == status
        seqnos = codec_dcp.decode_all_vb_seqnos((await client.ask(fr.request(Opcode.GET_ALL_VB_SEQNOS))).value)
        assert seqnos == [(2, 0), (3, 0)]
    store.close()
