"""A KV connection: framing, order, garbage, large requests, slow readers, and turns."""

from __future__ import annotations

import asyncio
import random
import struct

import pytest

from mirror.serve.kv.server import KvSession
from mirror.server.connection import Connection
from mirror.server.outgoing import HIGH_WATER_BYTES
from mirror.wire import codec_kv
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec
from mirror.wire.constants import Magic, Opcode, Status
from mirror.wire.frame import Frame
from tests.oracle import kv_client
from tests.serve.dcp_rig import until
from tests.serve.kv_rig import Client, Endpoint, Store, get, serving

FRAMES_PER_CONNECTION = 4


@pytest.fixture
def store(store: Store) -> Store:
    store.put(b"a", b"value", 1)
    return store


async def test_one_busy_client_works_in_each_turn_of_the_loop(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once had its turn in each: the others waited for as many turns as there were such clients."""
    now, iteration, worked = 0.0, 0, list[int]()

    def clock() -> float:
        return now

    def answer(self: Connection, frame: Frame) -> bytes:
        nonlocal now
        now += 1.0
        worked.append(iteration)
        return plain(self, frame)

    plain = Connection._answer
    monkeypatch.setattr("mirror.server.connection.perf_counter", clock)
    monkeypatch.setattr(Connection, "_answer", answer)
    clients = [await endpoint.connect() for _ in range(5)]
    for client in clients:
        assert (await client.ask(kv_client.noop())).status == 0, "it has used up a turn now"
    worked.clear()
    for client in clients:  # some that wait for each answer, some that do not
        await client.send(*(kv_client.noop(opaque=number) for number in range(6)))
    while len(worked) < 30:
        iteration += 1
        await asyncio.sleep(0)
    assert len(set(worked)) == 30, "no two in one turn of the loop"
    for client in clients:
        assert [frame.opaque for _ in range(6) if (frame := await client.receive())] == list(range(6))


async def test_answers_come_in_the_order_of_requests_in_any_pieces(endpoint: Endpoint) -> None:
    requests = [get(opaque=number) if number % 3 else kv_client.noop(opaque=number) for number in range(60)]
    data = b"".join(fr.encode(each) for each in requests)
    for size in (1, 7, 25, len(data)):
        client = await endpoint.connect()
        for start in range(0, len(data), size):
            client.writer.write(data[start : start + size])
            if size < 30:
                await asyncio.sleep(0)
        answers = [await client.receive() for _ in requests]
        assert [each.opaque for each in answers if each] == list(range(60))
        assert all(each and each.status == Status.SUCCESS for each in answers)


async def test_a_long_pipeline_is_answered_and_others_have_their_turn(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.server.connection.TURN_REQUESTS", 8)
    async with serving(store.path) as endpoint:
        busy, other = await endpoint.connect(), await endpoint.connect()
        busy.writer.write(b"".join(fr.encode(get(opaque=number)) for number in range(5000)))
        await other.ask(get())
        for number in range(5000):
            assert (await busy.answer()).opaque == number


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: mirror\r\n\r\n",
        b"get a\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
        bytes(24),
        fr.HEADER.pack(0x80, 0, 10, 0, 0, 0, 5, 0, 0),
        fr.HEADER.pack(0x80, 0, 1, 0, 0, 0, 0xFFFF_FFFF, 0, 0),
        fr.HEADER.pack(0x81, 0, 0, 0, 0, 0, 0, 0, 0),
        fr.HEADER.pack(0x18, 0, 0, 0, 0, 0, 0, 0, 0),
        fr.HEADER.pack(0x82, 1, 0, 0, 0, 0, 0, 0, 0),
        fr.HEADER.pack(0x81, 0, 0, 0, 0, 0, 200_000, 0, 0),
    ],
)
async def test_malformed_bytes_end_only_their_own_connection(endpoint: Endpoint, data: bytes) -> None:
    other, client = await endpoint.connect(), await endpoint.connect()
    client.writer.write(fr.encode(get()) + data)
    assert (await client.answer()).value == b"value"
    assert await client.receive() is None
    assert (await other.ask(get())).value == b"value"
    assert endpoint.server.counters.errors == 1


async def test_malformed_bytes_at_the_end_of_a_turn_are_noticed(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few of them for a header: nothing more comes that would wake the connection."""
    monkeypatch.setattr("mirror.server.connection.TURN_S", -1.0)
    client = await endpoint.connect()
    client.writer.write(fr.encode(get()) + fr.encode(get()) + b"get a\r\n")
    for _ in range(2):
        assert (await client.answer()).value == b"value"
    assert await client.receive() is None
    assert endpoint.server.counters.errors == 1


async def test_a_response_sent_to_the_server_is_ignored(endpoint: Endpoint) -> None:
    client = await endpoint.connect()
    await client.send(Frame(int(Magic.SERVER_RESPONSE), 1))
    assert await client.alive()


def samples() -> list[bytes]:
    """Good requests of every kind, to be damaged."""
    specs = kv_client.encode_lookup_specs([LookupSpec(int(Opcode.SUBDOC_GET), b"n.m[1]", 4), LookupSpec(0, b"")])
    frames = [
        kv_client.hello(b"agent", range(1, 40)),
        kv_client.sasl_list_mechs(),
        kv_client.sasl_auth(b"SCRAM-SHA512", b"n,,n=demo,r=abcdef"),
        kv_client.sasl_step(b"SCRAM-SHA512", b"c=biws,r=abcdef,p=AAAA"),
        kv_client.select_bucket(b"orders"),
        kv_client.get_error_map(),
        codec_kv.get_cluster_config((1, 1)),
        kv_client.get_collection_id(b"_default._default"),
        kv_client.get_scope_id(b"_default"),
        codec_kv.observe_seqno(0, 77),
        kv_client.get_meta(0, b"\0a"),
        fr.request(Opcode.STAT, key=b"vbucket-seqno 3"),
        fr.request(Opcode.RANGE_SCAN_CREATE, value=b'{"range":{"start":"","end":"/w=="}}', datatype=1),
        fr.request(Opcode.RANGE_SCAN_CREATE, value=b'{"sampling":{"samples":1},"key_only":true}', datatype=1),
        fr.request(Opcode.RANGE_SCAN_CONTINUE, extras=bytes(28)),
        fr.request(Opcode.RANGE_SCAN_CANCEL, extras=bytes(16)),
        fr.request(Opcode.SUBDOC_GET, key=b"\0a", extras=b"\0\x01\0", value=b"n"),
        fr.request(Opcode.SUBDOC_MULTI_LOOKUP, key=b"\0a", value=specs),
        fr.request(Opcode.GET, key=b"\0a", framing=b"\x22\0\x05"),
        *(
            fr.request(opcode, key=b"\0a", extras=bytes(4), value=b"{}")
            for opcode in KvSession.operations
            if opcode != Opcode.QUIT
        ),
    ]
    return [fr.encode(each) for each in frames]


def damaged(good: bytes, rng: random.Random) -> bytes:
    """Return a frame with one fault: a bit, a byte, a length, an opcode, a cut, or surplus bytes."""
    data = bytearray(good)
    kind = rng.randrange(6)
    if kind == 0:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 2:
        struct.pack_into(">I", data, 8, rng.choice((0, 1, 5, 1000, 70_000, 2**31, 2**32 - 1)))
    elif kind == 3:
        data[1] = rng.randrange(256)
    elif kind == 4:
        del data[rng.randrange(1, len(data)) :]
    else:
        data += rng.randbytes(rng.randint(1, 60))
    return bytes(data)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.long)])
async def test_damaged_frames_do_not_affect_other_clients(store: Store, count: int) -> None:
    rng = random.Random(20_261)
    good = samples()
    async with serving(store.path) as endpoint:
        witness = await endpoint.sdk()
        vbid = endpoint.bucket.view.vbid_of(b"a")
        sent = 0
        while sent < count:
            client = Client(*await asyncio.open_connection("127.0.0.1", endpoint.port))
            for _ in range(FRAMES_PER_CONNECTION):
                client.writer.write(damaged(rng.choice(good), rng))
                sent += 1
            client.writer.write_eof()
            while data := await client.reader.read(1 << 18):  # it answers or hangs up: it never stays silent
                head, begins_http, _ = data.partition(b"HTTP/1.1 400 ")  # to a first frame that begins as HTTP does
                client.buffer.feed(head)
                if begins_http:
                    await client.reader.read()
                while (answer := client.buffer.next_frame()) is not None:
                    assert answer.is_response
            assert len(client.buffer) == 0, "whole answers, or none"
            await client.close()
            if sent % 1000 == 0:
                assert (await witness.ask(fr.request(Opcode.GET, vbucket=vbid, key=b"\0a"))).value == b"value"
        assert endpoint.server.counters.errors > count // 100
        assert len(endpoint.server.connections) <= 2


async def test_a_request_that_is_too_large_is_refused_and_its_body_dropped(endpoint: Endpoint) -> None:
    """Answered before the body is there, and none of it is kept."""
    client = await endpoint.connect()
    size = 20_000_000
    head = fr.HEADER.pack(0x80, Opcode.SET, 1, 8, 0, 0, size, 7, 0)
    client.writer.write(head)
    answer = await client.answer()
    assert (answer.status, answer.opaque) == (Status.NOT_SUPPORTED, 7)
    piece = bytes(1_000_000)
    for _ in range(size // len(piece)):
        client.writer.write(piece)
        await client.writer.drain()
        held = sum(map(len, next(iter(endpoint.server.connections))._pieces))
        assert held == 0
    assert (await client.ask(get(opaque=8))).value == b"value"
    large = await client.ask(fr.request(Opcode.STAT, key=b"x" * 60_000, value=b"y" * 60_000))
    assert large.status == Status.E2BIG
    assert await client.alive()


async def test_requests_of_a_client_that_reads_nothing_are_not_read_on(store: Store) -> None:
    store.put(b"huge", b"x" * 1_000_000, 2)
    async with serving(store.path) as endpoint:
        slow, other = await endpoint.connect(), await endpoint.connect()
        slow.writer.write(b"".join(fr.encode(get(b"huge", opaque=number)) for number in range(200)))
        await slow.writer.drain()
        await other.ask(get())
        await until(lambda: any(each.outgoing.paused_s is not None for each in endpoint.server.connections))
        (connection,) = [each for each in endpoint.server.connections if each.outgoing.paused_s is not None]
        assert connection.outgoing.unsent_bytes < HIGH_WATER_BYTES + 2_000_000
        served = endpoint.server.counters.requests
        await other.ask(get())
        assert endpoint.server.counters.requests == served + 1
        for number in range(200):
            answer = await slow.answer()
            assert (answer.opaque, len(answer.value)) == (number, 1_000_000)
        assert connection.outgoing.paused_s is None
        assert (await slow.ask(get())).value == b"value"


async def test_a_quit_closes_the_connection_after_its_answer(endpoint: Endpoint) -> None:
    for opcode, answers in ((Opcode.QUIT, True), (Opcode.QUITQ, False)):
        client = await endpoint.connect()
        await client.send(get(), fr.request(opcode), get())
        assert (await client.answer()).value == b"value"
        assert (await client.receive() is not None) is answers
        assert await client.receive() is None


async def test_an_unknown_opcode_is_an_unknown_command(endpoint: Endpoint) -> None:
    client = await endpoint.sdk()
    for opcode in (0xEE, Opcode.DCP_OPEN, Opcode.GET_RANDOM_KEY):
        assert (await client.ask(fr.request(opcode))).status == Status.UNKNOWN_COMMAND
