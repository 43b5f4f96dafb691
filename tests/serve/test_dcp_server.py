"""The DCP endpoint: TLS and users; garbage ends only its own connection, and slow clients hold no memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mirror.serve.access.auth import FileUsers, entry_of
from mirror.serve.dcp.dcp_session import NOTED_S, PERSISTENCE_UNKNOWN, SourceContact
from mirror.serve.dcp.dcp_stream import PIECE_BYTES
from mirror.server import connection as served_connection
from mirror.server.connection import Connection
from mirror.server.outgoing import HIGH_WATER_BYTES
from mirror.supervise.processes.server import DcpServing, KvServing
from mirror.wire import codec_kv
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status
from storage.model import Collection, Seqno
from tests.manual_clock import ManualClock
from tests.oracle import kv_client
from tests.serve.dcp_rig import DcpClient, DcpEndpoint, serving_dcp, system_event, until
from tests.serve.kv_rig import DEFAULT, Store, serving, with_users

VBUCKETS = 1
LARGE = 40_000
STREAM = fr.request(Opcode.DCP_STREAM_REQ, extras=bytes(16) + b"\xff" * 8 + bytes(24), opaque=3)


async def test_a_client_that_waits_for_persistence_is_named_once_in_the_log_and_in_status(store: Store) -> None:
    """Kafka's connector and go-dcp got no documents, and the mirror said nothing."""
    store.put(b"a", b"value", 1)
    store.log(0, (7, 0))
    with capture_logs() as lines:
        async with serving_dcp(store.path) as endpoint:
            for _ in range(3):
                client = await endpoint.client()
                for _ in range(3):
                    assert (await client.ask(codec_kv.observe_seqno(0, 7))).status == Status.NOT_SUPPORTED
            assert endpoint.server.producers.warnings == [PERSISTENCE_UNKNOWN]
    assert [each["event"] for each in lines].count("persistence-unknown") == 1
    async with serving_dcp(store.path, publishes_persisted=True) as endpoint:
        client = await endpoint.client()
        assert (await client.ask(codec_kv.observe_seqno(0, 7))).status == 0
        assert endpoint.server.producers.warnings == []


async def test_a_stream_ends_when_the_users_file_withdraws_its_right(store: Store, users_file: Path) -> None:
    ann, bob = entry_of("pw"), entry_of("pw")

    def allow(*patterns: str) -> None:
        with_users(users_file, {"ann": ann | {"read": patterns}, "bob": bob})

    allow("*")
    carts = Collection(9, 8, "carts", Seqno(1))
    system_event(store, 1, ev.CollectionCreated(1, 8, 9, "carts"), DEFAULT, carts)
    async with serving_dcp(store.path, readers=FileUsers(users_file)) as endpoint:
        stranger = await endpoint.connect()
        assert (await stranger.say(ev.DcpOpen(b"x", 1))).status == Status.EACCESS
        clients = []
        for name, value in (("ann", b""), ("ann", b'{"collections":["9"]}'), ("bob", b"")):
            client = await endpoint.client(name=f"{name}{len(value)}", login=(name, "pw"))
            assert (await client.stream(0, value=value)).status == 0
            await client.until_end(1)
            clients.append(client)
        allow("shop.carts", "_default.other")
        assert await clients[0].event() == ev.StreamEnd(0, 8, opaque=0x77)
        assert (await clients[0].stream(0)).status == Status.EACCESS
        store.put(b"c", b"cart", 2, cid=9)
        await clients[1].until_end(2)
        await clients[2].until_end(2)
        with_users(users_file, {"bob": bob})
        assert await clients[1].event() == ev.StreamEnd(0, 8, opaque=0x77)
        assert (await clients[1].stream(0)).status == Status.EACCESS
        assert await clients[2].login("bob", "wrong") != 0
        assert await clients[2].event() == ev.StreamEnd(0, 8, opaque=0x77), "a failed second login ends the first"
        assert (await clients[2].stream(0)).status == Status.EACCESS


async def test_a_connection_name_belongs_to_its_user(store: Store, tmp_path: Path) -> None:
    """A user of one collection once cut off another's connection by taking its name."""
    users_file = with_users(tmp_path / "users.json", {"ann": "pw", "bob": "pw"})
    async with serving_dcp(store.path, readers=FileUsers(users_file)) as endpoint:
        clients = [await endpoint.client(login=(user, "pw")) for user in ("ann", "bob", "ann")]
        assert await clients[0].receive() is None
        for client in clients[1:]:
            assert await client.alive()
        for client in clients[1:]:
            await client.close()
        await until(lambda: not endpoint.server.producers.named)


async def test_a_stop_closes_every_connection(store: Store) -> None:
    async with serving_dcp(store.path) as endpoint:
        client = await endpoint.client()
        assert (await client.stream(0)).status == 0
        await endpoint.server.stop(0.2)
        assert await client.receive() is None
        assert endpoint.server.producers.counters.streams_closed == 1


async def test_garbage_ends_only_its_own_connection(store: Store, dcp: DcpEndpoint) -> None:
    store.put(b"a", b"1", 1)
    good = await dcp.client(name="good")
    assert (await good.stream(0)).status == 0
    await good.until_end(1)
    rng = random.Random(7)
    for opened in (False, True):
        for number in range(15):
            bad = await (dcp.client(name=f"bad{number}") if opened else dcp.connect())
            bad.writer.write(rng.randbytes(rng.choice([1, 23, 24, 500])) + b"\xff" * 30)
            bad.writer.write_eof()  # what looks like the start of a long request would be waited for
            with contextlib.suppress(ConnectionError):
                await bad.reader.read()  # to its end; what begins like HTTP is answered in HTTP
            await bad.close()
    store.put(b"a", b"2", 2)
    await good.until_end(2)


async def test_truncated_and_malformed_requests_are_refused(dcp: DcpEndpoint) -> None:
    client = await dcp.client()
    for opcode in (Opcode.DCP_CLOSE_STREAM, Opcode.DCP_BUFFER_ACK, Opcode.DCP_OPEN):
        answer = await client.ask(fr.request(opcode, extras=bytes(3), key=b"odd", value=b"x"))
        assert answer.status == Status.EINVAL, opcode
    assert (await client.ask(fr.request(Opcode.DCP_MUTATION, extras=bytes(31), key=b"k"))).status != 0
    assert (await client.ask(fr.request(Opcode.DCP_CONTROL, key=b"no_such", value=b"1"))).status == Status.EINVAL
    await client.send(fr.response(fr.request(Opcode.DCP_SNAPSHOT_MARKER)))
    assert await client.alive()
    await client.send(fr.response(fr.request(Opcode.GET)))
    assert await client.receive() is None


async def stalled(store: Store, dcp: DcpEndpoint, documents: int) -> tuple[DcpClient, Connection]:
    """A client that takes nothing of a stream, once its connection is paused."""
    for seqno in range(1, documents + 1):
        store.put(b"k%d" % seqno, b"x" * LARGE, seqno)
    client = await dcp.client()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(STREAM)
    (connection,) = dcp.server.connections
    await until(lambda: connection.outgoing.paused_s is not None)
    return client, connection


async def test_a_client_that_reads_nothing_is_held_at_the_high_water_mark(store: Store, dcp: DcpEndpoint) -> None:
    client, connection = await stalled(store, dcp, 600)
    assert connection.outgoing.unsent_bytes <= HIGH_WATER_BYTES + PIECE_BYTES + 2 * LARGE
    sent = dcp.server.producers.counters.stream_bytes
    await client.send(kv_client.noop())
    await asyncio.sleep(0.1)
    assert dcp.server.producers.counters.stream_bytes == sent
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    await client.until_end(600)


async def test_answers_to_a_client_that_reads_nothing_are_bounded_too(
    store: Store, dcp: DcpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_connection, "ANSWERS_BYTES_MAX", 10_000)
    client, connection = await stalled(store, dcp, 300)
    held = connection.outgoing.unsent_bytes
    for _ in range(40):
        await client.send(*[fr.request(Opcode.GET_CLUSTER_CONFIG, opaque=9)] * 20)
        await asyncio.sleep(0.005)
    assert connection.outgoing.unsent_bytes < held + 10_000 + 200_000
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    answers = 0
    seqno = 0
    while answers < 800 or seqno < 300:
        frame = await client.receive()
        assert frame is not None
        if frame.opcode == Opcode.GET_CLUSTER_CONFIG:
            answers += 1
        elif frame.opcode == Opcode.DCP_MUTATION:
            seqno = int.from_bytes(frame.extras[:8])


async def test_a_client_that_reads_nothing_for_too_long_is_disconnected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.server.endpoint.SEND_TIMEOUT_S", 0.5)
    for seqno in range(1, 301):
        store.put(b"k%d" % seqno, b"x" * LARGE, seqno)
    async with serving_dcp(store.path) as dcp:
        client = await dcp.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(STREAM)
        await until(lambda: dcp.server.status()["dcp_dropped"] > 0)
        await until(lambda: not dcp.server.connections)
        assert dcp.server.status()["dcp_dropped"] == 1
        client.writer.transport.abort()


async def test_a_client_is_idle_without_a_stream_and_not_without_noops(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.server.endpoint.IDLE_TIMEOUT_S", 1000)
    async with serving_dcp(store.path) as dcp:
        listener = await dcp.client(name="listener", noop=False, flags=1)
        assert (await listener.stream(0)).status == 0
        idler = await dcp.client(name="idler")
        dcp.server.now_s += 1001
        dcp.server.sweep()
        assert await idler.receive() is None
        store.put(b"a", b"1", 1)
        await listener.until_end(1)


async def test_an_error_of_this_program_ends_the_connection_and_is_logged(
    store: Store, dcp: DcpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await dcp.client()

    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("mirror.serve.dcp.dcp_stream.DcpStream.take", broken)
    assert (await client.stream(0)).status == 0
    assert await client.receive() is None


def test_a_vbucket_without_a_recent_report_is_not_in_contact() -> None:
    clock = ManualClock()
    contact = SourceContact([0, 1], clock)
    assert contact.lost_ms() == {0: 0, 1: 0}
    contact.note({1: 700})
    clock.advance(1)
    assert contact.lost_ms() == {1: 1700}
    contact.note({})
    assert contact.lost_ms() == {}
    clock.advance(NOTED_S + 1)
    assert contact.lost_ms() == {0: 6000, 1: 6000}


async def test_range_scans_are_neither_answered_nor_offered(dcp: DcpEndpoint) -> None:
    client = await dcp.client()
    scan = fr.request(Opcode.RANGE_SCAN_CREATE, value=b"{}", datatype=1)
    assert (await client.ask(scan)).status == Status.UNKNOWN_COMMAND
    assert set(KvServing.capabilities) - set(DcpServing.capabilities) == {"rangeScan"}


EVERY_KEY = sorted({shape % bytes([byte]) for byte in range(256) for shape in (b"%b-at", b"at-%b-at", b"at-%b", b"%b")})


async def test_every_key_can_be_requested_and_streamed(store: Store) -> None:
    for seqno, key in enumerate(EVERY_KEY, 1):
        store.put(key, b"value of " + key, seqno)
    async with serving(store.path) as kv, serving_dcp(store.path) as dcp:
        plain, sdk = await kv.connect(), await kv.sdk()
        for client, prefix in ((plain, b""), (sdk, b"\0")):
            for key in EVERY_KEY:
                found = await client.get(prefix + key)
                assert (found.status, found.value) == (0, b"value of " + key)
        reader = await dcp.client()
        assert (await reader.stream(0)).status == 0
        streamed = [each.key for each in await reader.until_end(len(EVERY_KEY)) if isinstance(each, ev.Mutation)]
        assert streamed == [b"\0" + key for key in EVERY_KEY]  # the default collection
