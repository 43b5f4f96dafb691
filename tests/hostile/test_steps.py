"""No step of a listener's event loop takes more than 10 ms, whatever a port is asked at the limits of a bucket; with
documents of 20 MiB no step takes more than 100 ms.

At 1,024 vbuckets, 1,000 collections, 10,000 users and 100,000 versions of one key. A step is measured by the processor
time of the loop's thread, relative to the core's present speed, and the best of a few repetitions counts: neither other
processes nor other threads matter.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import cramjam
import pytest

from mirror.config_reader import validated
from mirror.serve.access.auth import FileUsers, entry_of, new_salt_key
from mirror.wire import codec_dcp, codec_kv, xattr
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.constants import Datatype, DcpOpenFlag, Feature, Opcode, StreamRequestFlag
from mirror.wire.frame import Frame
from storage.format import records
from storage.format.keys import vbid_of
from storage.model import SEQNO_MAX, Collection, Seqno, SnapshotRange
from tests.hostile.site import LARGE_BYTES, PASSWORD, USER, Http, Kv
from tests.hostile.steps import LARGE_STEP_MAX_S, STEP_MAX_S, slowness, timed
from tests.oracle import kv_client
from tests.serve.dcp_rig import serving_dcp
from tests.serve.http_site import service_report, serving_http
from tests.serve.kv_rig import ALL_FEATURES, DEFAULT, Store, serving

pytestmark = pytest.mark.xdist_group("listener_steps")  # the store is made once

T = TypeVar("T")

REPETITIONS = 12
VBUCKETS, COLLECTIONS, USERS, VERSIONS, DOCUMENTS = 1024, 1000, 10_000, 100_000, 2000
FEATURES = tuple(each for each in ALL_FEATURES if each != 0x0F)
POLY = "poly"
"""A user with a pattern for each of 50 collections."""
HOT, FULL_VBID = b"hot", 7
HOT_VBID = vbid_of(HOT, VBUCKETS)
LARGE_VBID, LARGE_COUNT = 9, 3
LARGE_KEYS = [key for key in (b"l%d" % number for number in range(10_000)) if vbid_of(key, VBUCKETS) == LARGE_VBID][:3]
"""Documents of 20 MiB: plain, compressed, and with extended attributes."""
USUAL = "".join(f"&vbid={vbid}" for vbid in range(VBUCKETS) if vbid not in (HOT_VBID, LARGE_VBID))
BODY = b'{"keys": [%b]}'


class Ports:
    """The three servers over one store, in one thread, and a client of each."""

    def __init__(self, folder: Path) -> None:
        self._data, self.users_file = folder / "data", folder / "users.json"
        self._users = FileUsers(self.users_file)
        self._settings = validated({"data": self._data, "users_file": self.users_file, "sql": True})
        self._report = service_report(self._data)
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = AsyncExitStack()
        self.ports: dict[str, int] = {}

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def start(self) -> None:
        enter, path, users = self._stack.enter_async_context, str(self._data), self._users
        self.ports["kv"] = (await enter(serving(path, readers=users))).port
        self.ports["dcp"] = (await enter(serving_dcp(path, readers=users))).port
        _, address = await enter(serving_http(self._settings, stored=lambda _: self._report))
        self.ports["http"] = address.port

    @contextmanager
    def running(self) -> Iterator[Ports]:
        self.thread.start()
        try:
            self.call(self.start())
            self.kv, self.poly, self.dcp = self.kv_client("kv"), self.kv_client("kv", POLY), self.kv_client("dcp")
            yield self
        finally:
            for client in (self.kv, self.poly, self.dcp):
                client.close()
            self.call(self._stack.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self.thread.join(10)
            self._loop.close()

    def kv_client(self, kind: str, user: str = USER, features: Iterable[int] = FEATURES) -> Kv:
        client = Kv(self.ports[kind], login=False)
        client.ask(kv_client.hello(b"steps", features))
        assert client.ask(kv_client.sasl_auth(b"PLAIN", f"\0{user}\0{PASSWORD}".encode())).status == 0
        assert client.ask(kv_client.select_bucket(b"orders")).status == 0
        return client

    def http(self, user: str = USER) -> Http:
        client = Http(self.ports["http"], login=False)
        client.head += f"Authorization: Basic {base64.b64encode(f'{user}:{PASSWORD}'.encode()).decode()}\r\n"
        return client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limits")
    store = Store(folder, vbuckets=VBUCKETS)
    store.logs()
    scopes = {8 + number: f"s{number:02d}" for number in range(20)}
    collections = (Collection(8 + n, 8 + n % 20, f"c{n:04d}", Seqno(1)) for n in range(COLLECTIONS))
    store.collections(1, scopes, DEFAULT, *collections)
    writer = store.writer

    def fill(vbid: int, keys: list[bytes], first: int) -> None:
        rows = []
        for seqno, key in enumerate(keys, first):
            frame = records.encode_mutation(key, b'{"number": %d}' % seqno, seqno, datatype=1)
            rows.append((writer.vbuckets[vbid].prefix + seqno.to_bytes(8), frame))
        last = first + len(rows) - 1
        writer.vbuckets[vbid].stage(rows, 0, SnapshotRange(Seqno(first), Seqno(last)))
        writer.vbuckets[vbid].publish(last, first)
        writer.commit()

    for first in range(2, VERSIONS + 2, 1000):
        fill(HOT_VBID, [HOT] * 1000, first)
    keys = (b"k%d" % number for number in range(10_000_000))
    fill(FULL_VBID, [next(key for key in keys if vbid_of(key, VBUCKETS) == FULL_VBID) for _ in range(DOCUMENTS)], 2)
    plain = b'{"a":[%b]}' % b",".join([b'"%b"' % (b"x" * 1000)] * (LARGE_BYTES // 1000))
    values = (plain, bytes(cramjam.snappy.compress_raw(plain)), xattr.join({b"note": b'{"a": 1}'}, plain))
    datatypes = (Datatype.JSON, Datatype.JSON | Datatype.SNAPPY, Datatype.JSON | Datatype.XATTR)
    for seqno, (key, value, datatype) in enumerate(zip(LARGE_KEYS, values, datatypes, strict=True), 2):
        assert store.put(key, value, seqno, datatype=int(datatype)) == LARGE_VBID
    store.close()
    entry = entry_of(PASSWORD)
    users = {f"user{number:05d}": entry | {"read": ["s00.c0000"]} for number in range(USERS)}
    users[USER] = entry
    users[POLY] = entry | {"read": [f"s{n % 20:02d}.c{n:04d}" for n in range(50)]}
    (folder / "users.json").write_text(json.dumps({"users": users, "salt_key": new_salt_key()}))
    return folder


@pytest.fixture(scope="module")
def ports(folder: Path) -> Iterator[Ports]:
    try:
        with Ports(folder).running() as made:
            gc.collect()
            gc.freeze()  # as a listener's process does; and what the tests hold is no work of a listener's
            yield made
    finally:
        gc.unfreeze()


def many(client: Kv, *frames: Frame) -> None:
    client.send(*frames)
    for _ in frames:
        client.receive()


def stat(client: Kv, group: bytes) -> None:
    client.send(fr.request(Opcode.STAT, key=group))
    while client.receive().key:
        pass


def seqnos(client: Kv, collection_id: int | None = None) -> None:
    extras = codec_dcp.encode_all_vb_seqnos_request(1, collection_id)
    many(client, *[fr.request(Opcode.GET_ALL_VB_SEQNOS, extras=extras)] * 2)


def between(key: bytes | None = None, **more: Any) -> dict[str, Any]:
    start, end = (base64.b64encode(each).decode() for each in ((key, key) if key else (b"\0", b"\xff")))
    return {"range": {"start": start, "end": end}} | more


def scan(client: Kv, vbid: int, body: dict[str, Any]) -> None:
    value = json.dumps(body).encode()
    made = client.ask(fr.request(Opcode.RANGE_SCAN_CREATE, vbucket=vbid, value=value, datatype=1))
    assert made.status == 0, made
    extras = kv_client.encode_scan_continue(codec_kv.ScanLimits(made.value))
    client.ask(fr.request(Opcode.RANGE_SCAN_CONTINUE, vbucket=vbid, extras=extras))
    client.ask(fr.request(Opcode.RANGE_SCAN_CANCEL, vbucket=vbid, extras=made.value))


def gets(client: Kv, prefix: bytes) -> None:
    keys = [b"q%d" % number for number in range(1000)]
    many(client, *[fr.request(Opcode.GET, key=prefix + key, vbucket=vbid_of(key, VBUCKETS)) for key in keys])


def challenges(ports: Ports) -> None:
    for _ in range(8):
        client = Kv(ports.ports["kv"], login=False)
        client.ask(kv_client.sasl_auth(b"SCRAM-SHA512", b"n,,n=unknown,r=abcdefgh"))
        client.close()


def dcp_streams(ports: Ports) -> None:
    """Streams of all vbuckets but that of the large documents, up to now, and what the connection says of them."""
    client = ports.kv_client("dcp")
    flags = int(DcpOpenFlag.PRODUCER)
    assert client.ask(codec_dcp.to_frame(ev.DcpOpen(b"steps", flags))).status == 0
    vbids = [vbid for vbid in range(VBUCKETS) if vbid != LARGE_VBID]
    for vbid in vbids:
        client.send(codec_dcp.to_frame(ev.StreamRequest(vbid, 0, 0, SEQNO_MAX, 0, 0, 0, opaque=vbid)))
    answered = 0
    while answered < len(vbids):
        answered += client.receive().opcode == Opcode.DCP_STREAM_REQ
    client.close()


def large_dcp_stream(features: Iterable[int], flags: DcpOpenFlag) -> Callable[[Ports], None]:

    def read(ports: Ports) -> None:
        client = ports.kv_client("dcp", features=features)
        assert client.ask(codec_dcp.to_frame(ev.DcpOpen(b"large", int(DcpOpenFlag.PRODUCER | flags)))).status == 0
        assert client.ask(codec_dcp.to_frame(ev.DcpControl(b"enable_noop", b"true"))).status == 0
        flag = int(StreamRequestFlag.TO_LATEST)
        client.send(codec_dcp.to_frame(ev.StreamRequest(LARGE_VBID, flag, 1, SEQNO_MAX, 77, 1, 1)))
        counted = dict.fromkeys((Opcode.DCP_MUTATION, Opcode.DCP_STREAM_END), 0)
        while not counted[Opcode.DCP_STREAM_END]:
            opcode = Opcode(client.receive().opcode)
            counted[opcode] = counted.get(opcode, 0) + 1
        client.close()
        assert counted[Opcode.DCP_MUTATION] == LARGE_COUNT

    return read


def web(act: Callable[[Http], object], user: str = USER) -> Callable[[Ports], object]:
    def ask(ports: Ports) -> object:
        client = ports.http(user)
        found = act(client)
        client.close()
        return found

    return ask


def get(path: str, user: str = USER) -> Callable[[Ports], object]:
    def ask(client: Http) -> None:
        status, _ = client.get(path)
        assert status in (200, 400), status

    return web(ask, user)


def head(path: str) -> Callable[[Ports], object]:
    def ask(client: Http) -> None:
        client.send(path, method="HEAD")
        assert client.more().startswith(b"HTTP/1.1 200")

    return web(ask)


def changes(query: str, user: str = USER) -> Callable[[Ports], object]:
    def ask(client: Http) -> bytes:
        data = client.changes(query)
        assert b"event: end" in data
        return data

    return web(ask, user)


def changes_after(ports: Ports) -> None:
    seen = changes("&since=now")(ports)
    assert isinstance(seen, bytes)
    position = seen.rpartition(b"id: ")[2].split(b"\n")[0].decode()
    head(f"/v1/changes?since={position}")(ports)
    changes(f"&since={position}")(ports)


def multi_get(value: bytes, count: int) -> Callable[[Ports], object]:
    return web(lambda client: client.post("/v1/collections/_default/multi-get", BODY % b",".join([value] * count)))


def query(sql: str, status: int = 200) -> Callable[[Ports], object]:
    def ask(client: Http) -> None:
        assert client.post("/v1/query", json.dumps({"sql": sql}).encode())[0] == status

    return web(ask)


def queries_of_clients_that_hang_up(ports: Ports) -> None:
    """Of which some wait for a place, and none for an answer."""
    body = json.dumps({"sql": "SELECT count(*) FROM range(1000000000000) t(a) WHERE a % 7 = 3"}).encode()
    clients = [ports.http() for _ in range(8)]
    for client in clients:
        head = f"POST /v1/query HTTP/1.1\r\n{client.head}Content-Length: {len(body)}\r\n\r\n"
        client.line.sendall(head.encode() + body)
    for client in clients:
        client.close()
    query("SELECT 1")(ports)


def pipelined(client: Http) -> None:
    """A client that logs in and then pipelines as many requests as one parse takes."""
    client.get("/livez")
    client.line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 600)
    data = b""
    while data.count(b"alive") < 600:
        data += client.more()


def chunked(client: Http) -> None:
    head = f"POST /v1/collections/_default/multi-get HTTP/1.1\r\n{client.head}Transfer-Encoding: chunked\r\n\r\n"
    client.ask(head.encode() + b"1\r\n \r\n" * 100_000 + b"2\r\n{}\r\n0\r\n\r\n")


def features(ports: Ports) -> None:
    client = Kv(ports.ports["kv"], login=False)
    many(client, *[kv_client.hello(b"", range(32_000))] * 8)
    client.close()


REQUESTS: dict[str, Callable[[Ports], object]] = {
    "GET of all vbuckets": lambda p: gets(p.kv, b"\0"),
    "GET of a collection in all vbuckets": lambda p: gets(p.poly, b"\x08"),
    "GET of a key with many versions": lambda p: many(
        p.kv, *[fr.request(Opcode.GET, key=b"\0" + HOT, vbucket=HOT_VBID)] * 500
    ),
    "GET_COLLECTION_ID": lambda p: many(p.kv, *[kv_client.get_collection_id(b"s00.c0980")] * 128),
    "GET_COLLECTION_ID with 50 patterns": lambda p: many(p.poly, *[kv_client.get_collection_id(b"s00.c0000")] * 128),
    "GET_SCOPE_ID": lambda p: many(p.poly, *[kv_client.get_scope_id(b"s00")] * 128),
    "GET_COLLECTIONS_MANIFEST": lambda p: many(p.poly, *[kv_client.get_collections_manifest()] * 8),
    "GET_ALL_VB_SEQNOS": lambda p: seqnos(p.kv),
    "GET_ALL_VB_SEQNOS of a collection": lambda p: seqnos(p.kv, 8),
    "GET_ALL_VB_SEQNOS of a collection, for DCP": lambda p: seqnos(p.dcp, 0),
    "STAT failovers": lambda p: stat(p.kv, b"failovers"),
    "STAT vbucket-seqno": lambda p: stat(p.kv, b"vbucket-seqno"),
    "GET_CLUSTER_CONFIG": lambda p: many(p.kv, *[fr.request(Opcode.GET_CLUSTER_CONFIG)] * 50),
    "a scan of a key with many versions": lambda p: scan(p.kv, HOT_VBID, between(HOT)),
    "a scan of documents": lambda p: scan(p.kv, FULL_VBID, between()),
    "a scan of keys": lambda p: scan(p.kv, FULL_VBID, between(key_only=True)),
    "a sample": lambda p: scan(p.kv, FULL_VBID, {"sampling": {"samples": 10}}),
    "a sample of many versions": lambda p: scan(p.kv, HOT_VBID, {"sampling": {"samples": 10}}),
    "SCRAM challenges": challenges,
    "DCP streams": dcp_streams,
    "/metrics": get("/metrics"),
    "/v1/status": get("/v1/status"),
    "/v1/vbuckets": get("/v1/vbuckets"),
    "/v1/vbuckets/{vbid}": get(f"/v1/vbuckets/{HOT_VBID}"),
    "/v1/collections": get("/v1/collections"),
    "/v1/collections with 50 patterns": get("/v1/collections", POLY),
    "/openapi.json": get("/openapi.json"),
    "a document with many versions": get(f"/v1/collections/_default/documents/{HOT.decode()}"),
    "a document as of a seqno": get(f"/v1/collections/_default/documents/{HOT.decode()}?as_of=5000"),
    "a page of documents": get(f"/v1/collections/_default/documents?limit=1000&vbid={FULL_VBID}"),
    "a page of many versions": get(f"/v1/collections/_default/documents?limit=1000&vbid={HOT_VBID}"),
    "2,000 parameters": get("/v1/collections/_default/documents?" + "&".join(["prefix=a"] * 2000)),
    "HEAD of changes": head("/v1/changes"),
    "HEAD of changes from now on": head("/v1/changes?since=now"),
    "changes of all vbuckets": changes(USUAL),
    "changes of a collection": changes(USUAL + "&collection=s00.c0000", POLY),
    "changes after a position": changes_after,
    "a multi-get of objects": multi_get(b"{}", 349_500),
    "a multi-get of empty strings": multi_get(b'""', 349_500),
    "a multi-get of a string of escapes": multi_get(b'"' + b'\\"' * 520_000 + b'"', 1),
    "a multi-get of 1,000 keys": multi_get(b'"%0240d"' % 7, 1000),
    "a query of all vbuckets": query("SELECT count(*) FROM documents"),
    "a query of many rows": query("SELECT * FROM range(1000000)"),
    "a query of 60 KiB": query(f"SELECT {'1, ' * 20_000}1"),
    "a query that is refused": query("SELECT * FROM read_csv('/etc/passwd')", 400),
    "queries of clients that hang up": queries_of_clients_that_hang_up,
    "pipelined requests": web(pipelined),
    "a body of chunks of one byte": web(chunked),
    "HELLO with 32,000 features": features,
    "DCP of large documents": large_dcp_stream(FEATURES, DcpOpenFlag.INCLUDE_XATTRS),
    "DCP of large documents, plain": large_dcp_stream([Feature.COLLECTIONS, Feature.SELECT_BUCKET], DcpOpenFlag(0)),
    "DCP of large documents, without values": large_dcp_stream(FEATURES, DcpOpenFlag.NO_VALUE),
    "changes with large documents": changes(f"&vbid={LARGE_VBID}"),
    "a page of large documents": get(f"/v1/collections/_default/documents?limit=1000&vbid={LARGE_VBID}"),
    "a multi-get of large documents": multi_get(b",".join(b'"%b"' % key for key in LARGE_KEYS[:2]), 1),
    "a large document": get(f"/v1/collections/_default/documents/{LARGE_KEYS[1].decode()}"),
}


SHORT = (
    "GET of all vbuckets", "GET_ALL_VB_SEQNOS of a collection", "STAT failovers",
    "a scan of a key with many versions", "a sample of many versions", "SCRAM challenges",
    "DCP streams", "/v1/status", "/v1/collections", "a page of documents", "changes after a position",
    "a multi-get of objects", "pipelined requests", "a body of chunks of one byte", "DCP of large documents",
    "a multi-get of large documents",
)  # fmt: skip
"""One request for each mechanism that bounds a step. The others are of the long tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.ci if each in SHORT else pytest.mark.long) for each in REQUESTS]
)
def test_every_step_of_an_event_loop_is_short(name: str, ports: Ports) -> None:
    found = []
    for _ in range(REPETITIONS):
        with timed(ports.thread) as steps:
            REQUESTS[name](ports)
            slow = slowness()
        seconds, step = steps.worst()
        found.append((seconds / slow, step))
        if found[-1][0] <= (LARGE_STEP_MAX_S if "large document" in name else STEP_MAX_S):
            return
    seconds, step = min(found)
    pytest.fail(f"{name}: a step of {seconds * 1000:.1f} ms: {step}")


def test_the_timer_names_a_long_step() -> None:
    async def outer() -> None:
        await asyncio.sleep(0)
        sum(range(500_000))

    with timed(threading.current_thread()) as steps:
        asyncio.run(outer())
    seconds, name = steps.worst()
    assert seconds > 0.001
    assert "outer" in name
