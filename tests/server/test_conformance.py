"""One suite for both producers: the requests of a DCP 7.2 client and their answers.

The expectations are those of docs/protocol.md, and of the embedded source's own books where they name seqnos. A case
runs against the embedded source and against a mirror of it, with one expectation but for `DIFFERENCES`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.sandbox_vbucket import Vbucket
from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Opcode, Status, StreamEndReason, StreamRequestFlag
from storage.format import seal
from storage.history.purge import Window
from tests.feed.harness import Mirror
from tests.oracle import kv_client
from tests.sandbox.past import state_at
from tests.serve.dcp_rig import ALL, TIMES, DcpClient, serving_dcp
from tests.serve.kv_rig import mirror_of
from tests.storage.rig import flip

VBUCKETS = 4
CARTS = 8
OK = Status.SUCCESS


@dataclass
class Server:
    """The embedded source, or a mirror of it."""

    cluster: SandboxCluster
    name: str
    port: int
    mirror: Mirror | None = None
    clients: list[DcpClient] = field(default_factory=list)

    async def connect(self) -> DcpClient:

        client = DcpClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def client(self, **options: Any) -> DcpClient:
        options.setdefault("name", f"client-{len(self.clients)}")
        return await (await self.connect()).open(self.cluster.bucket.name, **options)

    def vbucket(self, vbid: int) -> Vbucket:
        return self.cluster.vbucket(vbid)


def prepare_all(cluster: SandboxCluster) -> None:
    """Durable writes in vbucket 2: `settle` leaves two of them open, one of which deletes."""
    bucket = cluster.bucket
    bucket.prepare("committed", {"durable": 1}, vbid=2)
    bucket.prepare("aborted", {"durable": 2}, vbid=2)
    bucket.prepare("open", {"durable": 3}, vbid=2)
    bucket.prepare("d5", None, vbid=2)
    bucket.prepare("d6", {"durable": 4}, vbid=2)


def settle(cluster: SandboxCluster) -> None:
    """In a snapshot of their own."""
    cluster.bucket.commit("committed", vbid=2)
    cluster.bucket.abort("aborted", vbid=2)
    cluster.bucket.commit("d6", vbid=2)
    cluster.bucket.to_disk()


@pytest.fixture(params=["sandbox", "mirror"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    """Vbucket 0 is plain, 1 lost two changes in a failover, 2 has durable writes, 3 only the events of collections."""
    async with SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=5, profile="7.2") as cluster:
        cluster.bucket.create_scope("shop")
        cluster.bucket.create_collection("shop", "carts")
        for vbid in (0, 1, 2):
            for number in range(10):
                cluster.set(f"d{number}", {"n": number}, vbid=vbid)
            cluster.set("c", {"cart": 1}, vbid=vbid, collection="shop.carts")
            cluster.delete("d3", vbid=vbid)
        cluster.failover(1, lose=2)
        cluster.set("d4", {"n": "new"}, vbid=1)
        prepare_all(cluster)
        cluster.bucket.to_disk()
        if request.param == "sandbox":
            settle(cluster)
            port = cluster.nodes[0].port
            assert port is not None
            made = Server(cluster, request.param, port)
            yield made
        else:
            mirror = mirror_of(cluster, tmp_path)
            mirror.start(cluster.connection_string)
            for vbid in range(VBUCKETS):
                await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)
            settle(cluster)
            await mirror.until_published(2, cluster.vbucket(2).high_seqno)
            async with serving_dcp(mirror.path) as endpoint:
                made = Server(cluster, request.param, endpoint.port, mirror)
                yield made
            await mirror.stop()
        for client in made.clients:
            await client.close()


CONTROLS = [
    ("enable_noop", "true", OK),
    ("enable_noop", "yes", Status.EINVAL),
    ("set_noop_interval", "1", OK),
    ("set_noop_interval", "10800", OK),
    ("set_noop_interval", "0", Status.EINVAL),
    ("set_noop_interval", "10801", Status.EINVAL),
    ("set_noop_interval", "soon", Status.EINVAL),
    ("set_noop_interval", "nan", Status.EINVAL),
    ("connection_buffer_size", "0", OK),
    ("connection_buffer_size", "4294967295", OK),
    ("connection_buffer_size", "4294967296", Status.EINVAL),
    ("connection_buffer_size", "-1", Status.EINVAL),
    ("connection_buffer_size", "9" * 5000, Status.EINVAL),
    ("set_priority", "high", OK),
    ("set_priority", "medium", OK),
    ("set_priority", "low", OK),
    ("set_priority", "urgent", Status.EINVAL),
    ("supports_cursor_dropping", "true", OK),
    ("supports_cursor_dropping_vulcan", "true", OK),
    ("supports_hifi_MFU", "true", OK),
    ("force_value_compression", "true", OK),
    ("force_value_compression", "false", Status.EINVAL),
    ("send_stream_end_on_client_close_stream", "true", OK),
    ("send_stream_end_on_client_close_stream", "no", Status.EINVAL),
    ("enable_expiry_opcode", "true", OK),
    ("enable_expiry_opcode", "maybe", Status.EINVAL),
    ("backfill_order", "round-robin", OK),
    ("backfill_order", "sequential", OK),
    ("backfill_order", "random", Status.EINVAL),
    ("include_deleted_user_xattrs", "true", Status.EINVAL),
    ("enable_out_of_order_snapshots", "true", OK),
    ("enable_out_of_order_snapshots", "true_with_seqno_advanced", OK),
    ("enable_out_of_order_snapshots", "false", Status.EINVAL),
    ("v7_dcp_status_codes", "true", OK),
    ("v7_dcp_status_codes", "false", Status.EINVAL),
    ("change_streams", "true", Status.NOT_SUPPORTED),
    ("change_streams", "false", Status.EINVAL),
    ("flatbuffers_system_events", "true", OK),
    ("flatbuffers_system_events", "false", Status.EINVAL),
    ("stream_buffer_size", "1", Status.NOT_SUPPORTED),
    ("enable_ext_metadata", "true", Status.EINVAL),
    ("enable_value_compression", "true", Status.EINVAL),
    ("enable_stream_id", "false", Status.EINVAL),
    ("enable_stream_id", "true", OK),
    ("enable_sync_writes", "true", Status.NOT_SUPPORTED),
    ("consumer_name", "me", Status.NOT_SUPPORTED),
    ("max_marker_version", "2.0", Status.EINVAL),
    ("max_marker_version", "2.3", Status.EINVAL),
    ("cache_transfer", "true", Status.EINVAL),
    ("no_such_control", "true", Status.EINVAL),
]


async def test_a_control_has_the_same_answer_from_both_servers(server: Server) -> None:
    client = await server.client(noop=False)
    found = [(name, value, await client.control(name.encode(), value.encode())) for name, value, _ in CONTROLS]
    assert found == CONTROLS


DIFFERENCES = [
    ("max_marker_version", "2.2", Status.EINVAL, OK),  # what 7.2 does not know yet and costs nothing
    ("set_noop_interval", "0.5", Status.EINVAL, OK),
]
"""Name, value, and what the embedded source and the mirror answer, which knows more than 7.2 and can do less."""


async def test_a_control_with_another_answer_of_the_mirror_is_listed(server: Server) -> None:
    client = await server.client(noop=False)
    for name, value, *answers in DIFFERENCES:
        expected = answers[server.name == "mirror"]
        assert await client.control(name.encode(), value.encode()) == expected, name


async def test_a_control_that_needs_a_feature_is_refused_without_it(server: Server) -> None:
    plain = await server.client(features=(Feature.XATTR, Feature.SELECT_BUCKET), noop=False)
    for name in (b"force_value_compression", b"enable_stream_id"):
        assert await plain.control(name, b"true") == Status.EINVAL
    expected = Status.NOT_SUPPORTED if server.name == "mirror" else Status.EINVAL  # as 8.0, as 7.2
    assert await plain.control(b"max_marker_version", b"2.2") == expected
    xattrs = await server.client(flags=TIMES | 0x100, noop=False)
    assert await xattrs.control(b"include_deleted_user_xattrs", b"true") == OK


OPEN_FLAGS = [
    (0x01, OK), (0x05, OK), (0x09, OK), (0x21, OK), (0x25, OK), (0x41, OK), (0x105, OK), (0x4D, OK),
    (0x00, Status.EINVAL), (0x02, Status.EINVAL), (0x03, Status.EINVAL), (0x1001, Status.EINVAL),
]  # fmt: skip


async def test_the_flags_of_an_open_request_are_checked(server: Server) -> None:
    found = []
    for flags, _ in OPEN_FLAGS:
        client = await server.connect()
        await client.hello(*ALL)
        await client.login()
        await client.ask(kv_client.select_bucket(server.cluster.bucket.name.encode()))
        found.append((flags, (await client.say(ev.DcpOpen(b"open-%d" % flags, flags))).status))
    assert found == OPEN_FLAGS


async def test_a_request_in_the_wrong_order_is_refused(server: Server) -> None:
    client = await server.connect()
    await client.hello(*ALL)
    await client.login()
    await client.ask(kv_client.select_bucket(server.cluster.bucket.name.encode()))
    for event in (ev.DcpControl(b"enable_noop", b"true"), ev.GetFailoverLog(0), ev.CloseStream(0), ev.BufferAck(1)):
        assert (await client.say(event)).status == Status.EINVAL, event
    assert (await client.stream(0)).status == Status.EINVAL
    assert (await client.say(ev.DcpOpen(b"x", 1))).status == OK
    assert (await client.say(ev.DcpOpen(b"x", 1))).status == Status.EINVAL
    assert (await client.say(ev.DcpNoop())).status == OK
    short = await client.ask(fr.request(Opcode.DCP_STREAM_REQ, extras=bytes(40)))
    assert short.status == Status.EINVAL
    assert (await client.say(ev.BufferAck(1 << 30))).status == Status.EINVAL
    assert await client.alive()


Answer = tuple[Status | int, int | None]


async def test_stream_requests_are_answered_by_the_rollback_rule(server: Server) -> None:
    """Start, snapshot, end, vbuuid, flags -> status, and where a client goes back to."""
    high, (newest, *_) = server.vbucket(0).high_seqno, server.vbucket(0).failover_log
    uuid = newest.vbuuid
    strict, refused = int(StreamRequestFlag.STRICT_VBUUID), (Status.EINVAL, None)
    # a mirror may be behind the source that the client followed: the client waits until it has caught up
    ahead = (Status.ROLLBACK, high) if server.mirror is None else (Status.NOT_MY_VBUCKET, None)
    takeover = OK if server.mirror is None else Status.NOT_SUPPORTED
    cases: list[tuple[dict[str, Any], Answer]] = [
        ({}, (OK, None)),
        ({"vbuuid": 1}, (OK, None)),
        ({"vbuuid": 1, "flags": strict}, (Status.ROLLBACK, 0)),
        ({"flags": strict}, (OK, None)),
        ({"start": high, "vbuuid": uuid}, (OK, None)),
        ({"start": high, "vbuuid": uuid, "end": high}, (OK, None)),
        ({"start": high, "vbuuid": uuid, "end": high - 1}, (Status.ERANGE, None)),
        ({"start": high, "vbuuid": uuid, "snap": (0, high)}, (OK, None)),
        ({"start": high, "vbuuid": uuid, "snap": (high, high + 9)}, (OK, None)),
        ({"start": 5, "vbuuid": uuid, "snap": (6, 7)}, (Status.ERANGE, None)),
        ({"start": 5, "vbuuid": uuid, "snap": (1, 4)}, (Status.ERANGE, None)),
        ({"start": high, "vbuuid": 1}, (Status.ROLLBACK, 0)),
        ({"start": high + 4, "vbuuid": uuid}, ahead),
        ({"start": high, "vbuuid": uuid, "snap": (high, high)}, (OK, None)),
        ({"flags": 0x01}, (takeover, None)),
        *(({"flags": flag}, (OK, None)) for flag in (0x02, 0x04, 0x10, 0x80, 0x10 | 0x20)),
        *(({"flags": flag}, refused) for flag in (0x08, 0x40, 0x100, 0x80000000)),
    ]
    client = await server.client(controls={b"send_stream_end_on_client_close_stream": b"true"})
    found = []
    for request, _ in cases:
        start = request.get("start", 0)
        answer = await client.stream(0, **({"start": start} | request))
        found.append((request, (answer.status, answer.rollback_seqno)))
        if answer.status == OK:
            assert [(each.vbuuid, each.seqno) for each in server.vbucket(0).failover_log] == list(answer.failover_log)
            client = await server.client()
    assert found == cases


async def test_an_impossible_stream_request_is_refused(server: Server) -> None:
    client = await server.client()
    assert (await client.stream(VBUCKETS)).status == Status.NOT_MY_VBUCKET
    assert (await client.stream(0)).status == OK
    assert (await client.stream(0)).status == Status.KEY_EEXISTS
    silent = await server.client(noop=False)
    assert (await silent.stream(0)).status == Status.NOT_SUPPORTED
    plain = await server.client(noop=False, flags=1)
    assert (await plain.stream(0, value=b'{"uid":"0"}')).status == Status.NOT_SUPPORTED
    assert (await plain.stream(0)).status == OK


FILTERS = [
    (b"", OK),
    (b'{"uid":"0"}', OK),
    (b'{"collections":["0"]}', OK),
    (b'{"collections":["0","8"]}', OK),
    (b'{"collections":["8"],"uid":"1"}', OK),
    (b'{"scope":"0"}', OK),
    (b'{"scope":"8"}', OK),
    (b'{"collections":["77"]}', Status.UNKNOWN_COLLECTION),
    (b'{"scope":"77"}', Status.UNKNOWN_SCOPE),
    (b"{}", Status.EINVAL),
    (b"[]", Status.EINVAL),
    (b"no json", Status.EINVAL),
    (b'{"collections":[]}', Status.EINVAL),
    (b'{"collections":"8"}', Status.EINVAL),
    (b'{"collections":[8]}', Status.EINVAL),
    (b'{"collections":["zz"]}', Status.EINVAL),
    (b'{"scope":8}', Status.EINVAL),
    (b'{"scope":"8","collections":["8"]}', Status.EINVAL),
    (b'{"uid":5}', Status.EINVAL),
    (b'{"sid":1}', Status.DCP_STREAM_ID_INVALID),
]


async def test_a_filter_is_accepted_or_refused_with_its_status(server: Server) -> None:
    found = []
    for value, _ in FILTERS:
        client = await server.client()
        found.append((value, (await client.stream(0, value=value)).status))
    assert found == FILTERS


async def test_streams_of_one_vbucket_are_distinguished_by_stream_id(server: Server) -> None:
    client = await server.client(controls={b"enable_stream_id": b"true"})
    assert (await client.stream(0)).status == Status.DCP_STREAM_ID_INVALID
    for sid in (1, 2):
        assert (await client.stream(0, value=b'{"collections":["8"],"sid":%d}' % sid)).status == OK
    assert (await client.stream(0, value=b'{"collections":["0"],"sid":1}')).status == Status.KEY_EEXISTS
    assert (await client.say(ev.CloseStream(0))).status == Status.DCP_STREAM_ID_INVALID
    assert (await client.say(ev.CloseStream(0, stream_id=1))).status == OK
    assert (await client.say(ev.CloseStream(0, stream_id=3))).status == Status.KEY_ENOENT


@pytest.mark.parametrize("form", [b"true", b"true_with_seqno_advanced"])
async def test_out_of_order_snapshots_are_permitted_and_not_promised(server: Server, form: bytes) -> None:
    vbucket = server.vbucket(0)
    high = vbucket.high_seqno
    client = await server.client(controls={b"enable_out_of_order_snapshots": form})
    assert (await client.stream(0, value=b'{"collections":["0"]}', end=high)).status == OK
    events: list[ev.DcpEvent] = []
    while not events or not isinstance(events[-1], ev.StreamEnd):
        events.append(await client.event())
    assert events[-1] == ev.StreamEnd(0, int(StreamEndReason.OK), opaque=0x77)
    assert not any(isinstance(each, ev.OsoSnapshot) for each in events)
    advanced = sum(isinstance(each, ev.SeqnoAdvanced) for each in events)
    assert advanced == (high != vbucket.collection_high_seqno[0])
    held = {each.key: each.seqno for each in events if isinstance(each, ev.Mutation)}
    assert held == {item.key: item.seqno for key, item in state_at(vbucket, high).items() if key[0] == 0}


async def test_a_closed_stream_ends_as_negotiated(server: Server) -> None:
    old = await server.client()
    assert (await old.say(ev.CloseStream(0))).status == Status.KEY_ENOENT
    new = await server.client(
        controls={b"v7_dcp_status_codes": b"true", b"send_stream_end_on_client_close_stream": b"true"}
    )
    assert (await new.say(ev.CloseStream(0))).status == Status.DCP_STREAM_NOT_FOUND
    high = server.vbucket(0).high_seqno
    assert (await new.stream(0)).status == OK
    await new.until_end(high)
    assert (await new.say(ev.CloseStream(0))).status == OK
    assert await new.event() == ev.StreamEnd(0, int(StreamEndReason.CLOSED), opaque=0x77)
    assert (await new.stream(0)).status == OK, "it can be opened again"
    assert (await old.stream(0)).status == OK
    await old.until_end(high)
    assert (await old.say(ev.CloseStream(0))).status == OK
    assert (await old.say(ev.DcpNoop())).status == OK
    assert old.early == [], "no end of the stream was negotiated"


async def end_of(client: DcpClient) -> ev.StreamEnd:
    """The end of the client's stream; what comes before it is acknowledged."""
    acked = 0
    while True:
        event = await client.event()
        if isinstance(event, ev.StreamEnd):
            return event
        await client.send(codec_dcp.to_frame(ev.BufferAck(client.counted - acked)))
        acked = client.counted


async def lose_writes(server: Server, _client: DcpClient) -> None:
    server.cluster.failover(0, lose=2)


async def drop_the_collection(server: Server, _client: DcpClient) -> None:
    server.cluster.bucket.drop_collection("shop.carts")


async def log_in_in_vain(server: Server, client: DcpClient) -> None:
    assert (await client.say_frame(kv_client.sasl_auth(b"PLAIN", b"\0demo\0wrong"))).status == Status.AUTH_ERROR
    server.cluster.set("d1", {"n": "news"}, vbid=0)  # a server looks at privileges when there is something to send


async def pass_the_clients_snapshot(server: Server, _client: DcpClient) -> None:
    """A mirror purges history that the client has not taken yet; the embedded source has no limit, it is commanded."""
    if server.mirror is None:
        server.cluster.faults.end_streams(StreamEndReason.SLOW, [0])
        return
    (writer,) = server.mirror.writers
    snapshot_end = server.vbucket(0).high_seqno
    writer.background.window = writer.background.purger.window = Window(boundaries=1)
    for number in range(3):
        server.cluster.set("d2", {"n": number}, vbid=0)
        await server.mirror.until_published(0, server.vbucket(0).high_seqno)
    await server.mirror.until(
        lambda: writer.vbuckets[0].state.history_floor_seqno > snapshot_end, "the floor to pass it"
    )


async def damage_the_store(server: Server, _client: DcpClient) -> None:
    """The last row of the client's snapshot, on the mirror; the embedded source is commanded."""
    if server.mirror is None:
        server.cluster.faults.end_streams(StreamEndReason.BACKFILL_FAIL, [0])
    else:
        flip(server.mirror.writers[0], server.vbucket(0).high_seqno, -seal.SIZE - 1)


REASONS: dict[StreamEndReason, tuple[Callable[[Server, DcpClient], Awaitable[None]], bytes, Status]] = {
    StreamEndReason.STATE_CHANGED: (lose_writes, b"", Status.ROLLBACK),
    StreamEndReason.SLOW: (pass_the_clients_snapshot, b"", OK),
    StreamEndReason.BACKFILL_FAIL: (damage_the_store, b"", OK),
    StreamEndReason.FILTER_EMPTY: (drop_the_collection, b'{"collections":["8"]}', Status.UNKNOWN_COLLECTION),
    StreamEndReason.LOST_PRIVILEGES: (log_in_in_vain, b"", Status.EACCESS),
}
"""What ends a stream, the filter of the stream, and the answer to a client that asks for it again."""


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.name)
async def test_a_stream_ends_with_its_reason_and_is_requested_again(server: Server, reason: StreamEndReason) -> None:
    """The client has taken the beginning of its first snapshot (docs/protocol.md 4.5)."""
    cause, value, again = REASONS[reason]
    high, uuid = server.vbucket(0).high_seqno, server.vbucket(0).vbuuid
    window = b"100000" if reason == StreamEndReason.LOST_PRIVILEGES else b"100"  # no ack may be needed
    client = await server.client(controls={b"connection_buffer_size": window})
    assert (await client.stream(0, value=value)).status == OK
    assert isinstance(await client.event(), ev.SnapshotMarker)
    await cause(server, client)
    assert await end_of(client) == ev.StreamEnd(0, int(reason), opaque=0x77)
    if (mirror := server.mirror) is not None and again == Status.ROLLBACK:
        await mirror.until(lambda: mirror.row(0)["vbuuid"] == server.vbucket(0).vbuuid, "the new history")
        await mirror.until_published(0, server.vbucket(0).high_seqno)
    start = 0 if again == OK else high
    assert (await client.stream(0, start, vbuuid=uuid, value=value)).status == again


def test_every_reason_that_is_sent_has_a_case() -> None:
    never = {StreamEndReason.DISCONNECTED, StreamEndReason.ROLLBACK}
    assert REASONS.keys() | {StreamEndReason.OK, StreamEndReason.CLOSED} | never == set(StreamEndReason)


async def test_a_client_without_a_login_or_a_bucket_cannot_open_a_connection(server: Server) -> None:
    client = await server.connect()
    await client.hello(*ALL)
    refused = Status.EACCESS if server.mirror is None else Status.NO_BUCKET  # no login without a users file
    assert (await client.say(ev.DcpOpen(b"x", 1))).status == refused
    await client.login()
    assert (await client.say(ev.DcpOpen(b"x", 1))).status == Status.NO_BUCKET


ENDS: list[dict[str, Any]] = [{}, {"flags": 0x04}, {"flags": 0x02}]
"""Up to the high seqno by its number, to the latest one, and to the latest one on disk."""


@pytest.mark.parametrize("request_", ENDS)
async def test_a_bounded_stream_sends_every_document_and_ends(server: Server, request_: dict[str, Any]) -> None:
    client = await server.client()
    for vbid in range(VBUCKETS):
        vbucket = server.vbucket(vbid)
        high = vbucket.high_seqno
        assert (await client.stream(vbid, **(request_ or {"end": high}))).status == OK
        events = await client.until_end(high)
        ends = [(each.start_seqno, each.end_seqno) for each in events if isinstance(each, ev.SnapshotMarker)]
        assert ends[0][0] == 0
        assert all(start - end in (0, 1) for (_, end), (start, _) in pairwise(ends)), "one goes on from the other"
        assert ends[-1][1] == high
        assert len(ends) == 1 or server.mirror is not None, "a mirror sends the boundaries that it published"
        seqnos = [each.seqno for each in events if not isinstance(each, ev.SnapshotMarker)]  # type: ignore[union-attr]
        assert seqnos == sorted(set(seqnos))
        assert not any(isinstance(each, (ev.Prepare, ev.Commit, ev.Abort)) for each in events)
        assert held_after(events) == {item.key: item.seqno for item in state_at(vbucket, high).values()}
        assert await client.event() == ev.StreamEnd(vbid, int(StreamEndReason.OK), opaque=0x77)


def held_after(events: list[ev.DcpEvent], held: dict[bytes, int] | None = None) -> dict[bytes, int]:
    """The keys that a client holds, and their seqnos."""
    found = dict(held or {})
    for each in events:
        if isinstance(each, ev.Mutation):
            found[each.key] = each.seqno
        elif isinstance(each, ev.Deletion):
            found.pop(each.key, None)
    return found


async def test_a_client_of_a_lost_history_rolls_back_and_ends_equal(server: Server) -> None:
    vbucket = server.vbucket(1)
    newest, first = vbucket.failover_log[:2]
    client = await server.client()
    answer = await client.stream(1, newest.seqno + 2, vbuuid=first.vbuuid)
    assert answer.status == Status.ROLLBACK
    assert answer.rollback_seqno is not None
    assert answer.rollback_seqno <= newest.seqno
    back = answer.rollback_seqno
    held = {item.key: item.seqno for item in state_at(vbucket, back).values()} if back else {}
    assert (await client.stream(1, back, vbuuid=first.vbuuid if back else 0)).status == OK
    held = held_after(await client.until_end(vbucket.high_seqno), held)
    assert held == {item.key: item.seqno for item in state_at(vbucket, vbucket.high_seqno).values()}


async def test_high_seqnos_and_failover_logs_equal_those_of_the_source(server: Server) -> None:
    highs = {vbid: server.vbucket(vbid).high_seqno for vbid in range(VBUCKETS)}
    client = await server.client()
    plain = await server.client(features=(Feature.XATTR, Feature.SELECT_BUCKET), flags=1)

    async def seqnos(asker: DcpClient, extras: bytes) -> Any:
        answer = await asker.ask(fr.request(Opcode.GET_ALL_VB_SEQNOS, extras=extras))
        return answer.status or dict(codec_dcp.decode_all_vb_seqnos(answer.value))

    of = codec_dcp.encode_all_vb_seqnos_request
    assert await seqnos(client, b"") == highs
    assert await seqnos(client, of(0)) == highs
    assert await seqnos(client, of(1)) == highs
    assert await seqnos(client, of(2)) == {}
    carts = await seqnos(client, of(1, CARTS))
    assert carts.keys() == highs.keys()
    assert all(carts[vbid] <= highs[vbid] for vbid in highs)
    assert await seqnos(client, of(1, 77)) == Status.UNKNOWN_COLLECTION
    assert await seqnos(client, bytes(3)) == Status.EINVAL
    assert await seqnos(client, bytes(9)) == Status.EINVAL
    assert await seqnos(plain, of(1, 0)) == Status.EINVAL
    defaults = await seqnos(plain, of(1))
    assert defaults == await seqnos(client, of(1, 0))
    for vbid in range(VBUCKETS):
        answer = await client.say(ev.GetFailoverLog(vbid))
        expected = [(each.vbuuid, each.seqno) for each in server.vbucket(vbid).failover_log]
        assert list(codec_dcp.decode_failover_log(answer.value)) == expected
    assert (await client.say(ev.GetFailoverLog(VBUCKETS))).status == Status.NOT_MY_VBUCKET


async def test_the_newer_of_two_connections_with_one_name_stays(server: Server) -> None:
    old = await server.client(name="same")
    new = await server.client(name="same")
    assert await old.receive() is None
    assert await new.alive()
