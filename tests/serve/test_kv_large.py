"""Large documents over KV: the same answers as for small ones, made in the worker thread, within the budget."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import cramjam
import pytest

from mirror.server.admission import IDLE_TIMEOUT_S
from mirror.server.connection import Connection
from mirror.server.endpoint import CROWDED_SEND_TIMEOUT_S
from mirror.server.turns import LARGE_BYTES
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.frame import Frame
from storage.format import records
from storage.model import Document
from tests.oracle import kv_client
from tests.serve.dcp_rig import until
from tests.serve.kv_rig import WAIT_S, Client, Endpoint, Store, get, serving

BODY = b'{"a":"' + random.Random(7).randbytes(LARGE_BYTES).hex().encode() + b'","z":[1,2]}'
XATTRS = b"\0\0\0\x09\0\0\0\x05_x\x001\0"
LIE = b"\xff\xff\xff\x7f"
XATTR_PATH = 4


def compressed(value: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(value))


@pytest.fixture
def store(store: Store) -> Store:
    store.put(b"small", b"{}", 1, datatype=1)
    return store


def lookup(key: bytes, *paths: tuple[int, bytes, int], opaque: int = 0) -> Frame:
    specs = [LookupSpec(int(opcode), path, flags) for opcode, path, flags in paths]
    value = kv_client.encode_lookup_specs(specs)
    return fr.request(Opcode.SUBDOC_MULTI_LOOKUP, key=key, value=value, opaque=opaque)


VALUES = {
    "json": (BODY, 1, BODY),
    "plain": (BODY, 0, BODY),
    "compressed": (compressed(BODY), 3, BODY),
    "well compressed": (compressed(bytes(9 * LARGE_BYTES)), 2, bytes(9 * LARGE_BYTES)),
    "xattrs": (XATTRS + BODY, 5, BODY),
    "both": (compressed(XATTRS + BODY), 7, BODY),
}
DAMAGED = {
    "xattrs": (LIE + BODY, 5),
    "compressed xattrs": (compressed(LIE + BODY), 7),
    "cut": (compressed(BODY)[:-9], 3),
}
JSON_VALUES = ("json", "compressed", "both")


GETTERS = (Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_REPLICA)


@pytest.mark.parametrize(("value", "datatype", "body"), VALUES.values(), ids=VALUES)
async def test_a_large_document_is_answered_as_a_small_one(
    endpoint: Endpoint, store: Store, value: bytes, datatype: int, body: bytes
) -> None:
    store.put(b"large", value, 2, datatype=datatype, flags=7, cas=99)
    for features in ((), (Feature.JSON,), (Feature.SNAPPY, Feature.JSON)):
        client = await endpoint.connect()
        if features:
            await client.hello(*features)
        for opcode in GETTERS:
            answer = await client.get(b"large", opcode=opcode)
            stored = Feature.SNAPPY in features and datatype & 6 == 2
            assert answer.value == (value if stored else body)
            assert answer.datatype == (datatype & 1 if features else 0) | (datatype & 2 if stored else 0)
            assert (answer.status, answer.cas, answer.extras) == (0, 99, (7).to_bytes(4, "big"))
            assert answer.key == (b"large" if opcode in (Opcode.GETK, Opcode.GETKQ) else b"")
    assert endpoint.server.worker.budget.out_bytes == 0


@pytest.mark.parametrize(("value", "datatype", "body"), [VALUES[each] for each in JSON_VALUES], ids=JSON_VALUES)
async def test_paths_and_metadata_of_a_large_document_are_those_of_a_small_one(
    endpoint: Endpoint, store: Store, value: bytes, datatype: int, body: bytes
) -> None:
    store.put(b"large", value, 2, datatype=datatype, flags=7, rev=5)
    client = await endpoint.connect()
    paths = [
        (Opcode.SUBDOC_GET, b"_x", XATTR_PATH),
        (Opcode.SUBDOC_GET, b"$document.value_bytes", XATTR_PATH),
        (Opcode.GET, b"", 0),
        (Opcode.SUBDOC_GET, b"z[-1]", 0),
        (Opcode.SUBDOC_EXISTS, b"b", 0),
        (Opcode.SUBDOC_GET_COUNT, b"z", 0),
        (Opcode.GET, b"", 0),
    ]
    answer = await client.ask(lookup(b"large", *paths))
    found = kv_client.decode_lookup_results(answer.value)
    has_x = bool(datatype & 4)
    assert answer.status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert [each.value for each in found] == [b"1" * has_x, b"%d" % len(body), body, b"2", b"", b"2", body]
    missing = int(Status.SUBDOC_PATH_ENOENT)
    assert [each.status for each in found] == [0 if has_x else missing, 0, 0, 0, missing, 0, 0]
    for path, expected in ((b"z", b"[1,2]"), (b"a", body[5 : body.index(b',"z"')])):
        one = fr.request(Opcode.SUBDOC_GET, key=b"large", extras=len(path).to_bytes(2, "big") + b"\0", value=path)
        assert (await client.ask(one)).value == expected
    meta = kv_client.decode_meta((await client.ask(kv_client.get_meta(0, b"large"))).extras)
    assert (meta.deleted, meta.flags, meta.rev_seqno) == (False, 7, 5)
    assert endpoint.server.worker.budget.out_bytes == 0


@pytest.mark.parametrize(("value", "datatype"), DAMAGED.values(), ids=DAMAGED)
async def test_a_malformed_large_document_is_an_error_of_its_request(
    endpoint: Endpoint, store: Store, value: bytes, datatype: int
) -> None:
    store.put(b"large", value, 2, datatype=datatype)
    client = await endpoint.connect()
    for request in (get(b"large"), lookup(b"large", (Opcode.SUBDOC_GET, b"z", 0))):
        assert (await client.ask(request)).status == Status.EINTERNAL
    assert (await client.get(b"small")).value == b"{}"
    assert endpoint.server.worker.budget.out_bytes == 0


async def test_a_damaged_row_is_a_temporary_failure_of_its_request(
    endpoint: Endpoint, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is of a small document."""
    store.put(b"large", BODY, 2)
    monkeypatch.setattr("storage.read.vbucket_reader.RESIDUE", 1)
    client = await endpoint.connect()
    assert (await client.get(b"large")).status == Status.ETMPFAIL
    assert endpoint.server.worker.budget.out_bytes == 0


@pytest.mark.parametrize("read", [get(b"large"), lookup(b"large", (Opcode.SUBDOC_GET, b"z", 0))], ids=["get", "lookup"])
async def test_other_clients_are_answered_while_a_large_document_is_read(
    endpoint: Endpoint, store: Store, monkeypatch: pytest.MonkeyPatch, read: Frame
) -> None:
    """A step of 20 MiB once made others wait 39 times as long as at rest."""
    store.put(b"large", BODY, 2, datatype=1)
    begun, go_on = threading.Event(), threading.Event()
    decode = records.decode_row

    def slow(*args: Any) -> Document:
        document = decode(*args)
        if document.key == b"large":
            begun.set()
            assert go_on.wait(WAIT_S)
        return document

    monkeypatch.setattr(records, "decode_row", slow)
    client, other = await endpoint.connect(), await endpoint.connect()
    await client.send(read, get(b"small", 1))
    await asyncio.to_thread(begun.wait, WAIT_S)
    assert (await other.get(b"small")).value == b"{}"
    go_on.set()
    assert [(await client.answer()).opaque for _ in range(2)] == [0, 1], "its own next request waits"


async def test_other_answers_come_behind_a_large_document(endpoint: Endpoint, store: Store) -> None:
    """Requests of a pipeline, and a message of the server."""
    body = bytes(40 * LARGE_BYTES)
    store.put(b"large", body, 2)
    client = await endpoint.connect(limit=1024)
    (connection,) = endpoint.server.connections
    await client.send(get(b"large", 1), lookup(b"large", (Opcode.GET, b"", 0), opaque=2), get(b"small", 3))
    await until(lambda: connection.outgoing.paused_s is not None)
    connection._flush([fr.encode(kv_client.noop(opaque=77))])
    opaques = []
    for _ in range(4):
        answer = await client.answer()
        opaques.append(answer.opaque)
        assert len(answer.value) == {1: len(body), 2: len(body) + 6, 3: 2, 77: 0}[answer.opaque]
    assert opaques == [1, 77, 2, 3]


async def test_a_client_that_quits_gets_all_of_its_answer(endpoint: Endpoint, store: Store) -> None:
    body = bytes(40 * LARGE_BYTES)
    store.put(b"large", body, 2)
    client = await endpoint.connect(limit=1024)
    await client.send(get(b"large", 1), fr.request(Opcode.QUIT, opaque=2))
    assert (await client.answer()).value == body
    assert (await client.answer()).opaque == 2
    assert await client.receive() is None


async def test_an_answer_that_repeats_a_large_document_is_refused(endpoint: Endpoint, store: Store) -> None:
    body = bytes(40 * LARGE_BYTES)
    store.put(b"large", body, 2)
    client = await endpoint.connect()
    whole = (Opcode.GET, b"", 0)
    assert len((await client.ask(lookup(b"large", *[whole] * 3))).value) > 3 * len(body)
    assert (await client.ask(lookup(b"large", *[whole] * 4))).status == Status.E2BIG


async def slow_reader(endpoint: Endpoint, key: bytes = b"large") -> tuple[Client, Connection]:
    """A client that asks for a document and takes nothing."""
    before = set(endpoint.server.connections)
    client = await endpoint.connect(limit=1024)
    await client.send(get(key), get(key), get(key))
    await until(lambda: any(each.outgoing.paused_s is not None for each in endpoint.server.connections - before))
    (connection,) = endpoint.server.connections - before
    return client, connection


async def test_memory_held_by_clients_that_read_nothing_is_bounded_and_reclaimed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are not written yet count as well. Where others wait for the memory, they have seconds only."""
    body = bytes(40 * LARGE_BYTES)
    store.put(b"large", body, 2)
    async with serving(store.path, reader_unsent_bytes_max=2 * len(body) + 1000) as endpoint:
        server = endpoint.server
        assert server._sweeper is not None
        server._sweeper.cancel()
        reads = []
        decode = records.decode_row

        def counted(*args: Any) -> Document:
            reads.append(args)
            return decode(*args)

        monkeypatch.setattr(records, "decode_row", counted)
        slow = [await slow_reader(endpoint) for _ in range(2)]
        assert 2 * len(body) < server.worker.budget.out_bytes < 2 * (len(body) + 500)
        assert all(connection.outgoing.unsent_bytes > 4 * LARGE_BYTES for _, connection in slow)
        other = await endpoint.connect()
        answer = asyncio.create_task(other.ask(get(b"large")))
        await until(lambda: server.worker.budget.waiting_count == 1)
        await server.worker.run(lambda: None)
        assert len(reads) == 2, "a value is not read before there is memory for it"
        assert (await (await endpoint.connect()).get(b"small")).value == b"{}", "small ones need none of it"
        begun_s = server.now_s
        server.now_s = begun_s + CROWDED_SEND_TIMEOUT_S - 1
        server.sweep()
        assert server.dropped_count == 0
        while not answer.done():  # what the kernel took in the meantime is progress, and begins the time again
            server.now_s += CROWDED_SEND_TIMEOUT_S + 1
            server.sweep()
            await asyncio.sleep(0.01)
        assert answer.result().value == body
        assert server.dropped_count
        for _, connection in slow:
            connection.abort()
        await until(lambda: server.worker.budget.out_bytes == 0)
        assert server.now_s < begun_s + IDLE_TIMEOUT_S


async def test_a_client_that_leaves_frees_its_memory_and_its_place(store: Store) -> None:
    body = bytes(40 * LARGE_BYTES)
    store.put(b"large", body, 2)
    async with serving(store.path, reader_unsent_bytes_max=len(body)) as endpoint:
        budget = endpoint.server.worker.budget
        client, connection = await slow_reader(endpoint)
        waiting = await endpoint.connect()
        await waiting.send(get(b"large"))
        await until(lambda: budget.waiting_count == 1)
        await waiting.close()
        await until(lambda: budget.waiting_count == 0)
        connection.abort()
        await until(lambda: budget.out_bytes == 0)
        assert client
