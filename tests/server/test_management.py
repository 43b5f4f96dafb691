"""HTTP on key-value ports: the requests of Go's clients as they send them, at the ports of mirror and sandbox."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import h11
import pytest

from mirror.sandbox import SandboxCluster
from mirror.serve.access.auth import FileUsers, entry_of
from mirror.server.management import HEAD_BYTES_MAX, NO_MANAGEMENT
from tests.serve.dcp_rig import DcpEndpoint
from tests.serve.kv_rig import PASSWORD, USER, WAIT_S, Endpoint, NoStrangers, Store, with_users

LOGIN = "Authorization: Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
WRONG = "Authorization: Basic " + base64.b64encode(b"demo:wrong").decode()
BY_GO = "User-Agent: gocbcore/v10.9.3\r\nAccept-Encoding: gzip"
BY_GO_DCP = "User-Agent: fasthttp"
"""What gocbcore 10.9.3 (`httpcomponent.go`) and go-dcp's HTTP client (`couchbase/http_client.go`) send."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Streamed:
    """An open answer, read as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.headers: dict[str, str] = {}
        self._body = b""
        self._parser = h11.Connection(h11.CLIENT)
        self._parser.send(h11.Request(method="GET", target="/", headers=[("Host", "h")]))
        self._parser.send(h11.EndOfMessage())
        self.status = 0
        self.complete = False

    def _take(self, data: bytes) -> None:
        self._parser.receive_data(data)
        while not self.complete and (event := self._parser.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {name.decode(): value.decode() for name, value in event.headers}
            elif isinstance(event, h11.Data):
                self._body += event.data
            else:
                self.complete = True

    async def next_map(self) -> dict[str, Any]:
        """The next map of a stream: its maps end with four line feeds."""
        async with asyncio.timeout(WAIT_S):
            while b"\n\n\n\n" not in self._body:
                data = await self.reader.read(1 << 18)
                assert data, "the server hung up"
                self._take(data)
        text, _, self._body = self._body.partition(b"\n\n\n\n")
        found: dict[str, Any] = json.loads(text)
        return found

    async def whole(self) -> Answer:
        async with asyncio.timeout(WAIT_S):
            while not self.complete:
                self._take(await self.reader.read(1 << 18))
        return Answer(self.status, self.headers, self._body)


class Port:
    """A key-value port under test."""

    def __init__(self, port: int, bucket: str, change_map: Callable[[], None]) -> None:
        self.port, self.bucket, self.change_map = port, bucket, change_map
        self._writers: list[asyncio.StreamWriter] = []

    async def send(self, sent: bytes) -> Streamed:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        writer.write(sent)
        return Streamed(reader, writer)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def ask(self, path: str, *headers: str, method: str = "GET", version: str = "1.1") -> Answer:
        return await (await self.open(path, *headers, method=method, version=version)).whole()

    async def open(self, path: str, *headers: str, method: str = "GET", version: str = "1.1") -> Streamed:
        lines = "\r\n".join((f"{method} {path} HTTP/{version}", "Host: localhost", *headers, "", ""))
        return await self.send(lines.encode())


@pytest.fixture(params=["kv", "dcp", "sandbox"])
async def port(request: pytest.FixtureRequest, tmp_path: Any) -> AsyncIterator[Port]:
    if request.param == "sandbox":
        async with SandboxCluster(nodes=2, vbuckets=4) as cluster:
            number = cluster.nodes[0].port
            assert number is not None
            found = Port(number, cluster.bucket.name, lambda: cluster.move(0, 1 - cluster.bucket.map.owners[0]))
            yield found
            await found.close()
        return
    store = Store(tmp_path)
    store.logs()
    kind: Any = Endpoint if request.param == "kv" else DcpEndpoint
    async with kind.serving(store.path, readers=NoStrangers()) as endpoint:
        found = Port(endpoint.port, "orders", lambda: None)
        yield found
        await found.close()
    store.close()


ONLY_A_CLUSTER = pytest.mark.parametrize("port", ["sandbox"], indirect=True)
"""The map of a mirror changes only with its start."""


@ONLY_A_CLUSTER
async def test_gocbcore_gets_the_map_and_each_new_one(port: Port) -> None:
    streamed = await port.open(f"/pools/default/bs/{port.bucket}", BY_GO, LOGIN)
    first = await streamed.next_map()
    assert streamed.headers["transfer-encoding"] == "chunked"
    assert first["name"] == port.bucket
    assert first["vBucketServerMap"]["vBucketMap"]
    for _ in range(3):
        port.change_map()
        following = await streamed.next_map()
        assert (following["revEpoch"], following["rev"]) > (first["revEpoch"], first["rev"])
        first = following


async def test_go_dcp_learns_the_version_and_the_kind_of_bucket(port: Port) -> None:
    version = (await port.ask("/pools", BY_GO_DCP, LOGIN)).json["implementationVersion"]
    major, minor, patch = version.split("-")[0].split(".")  # `nodeVersionFromString` of go-dcp
    assert (int(major), int(minor), int(patch)) >= (7, 2, 0)
    bucket = (await port.ask(f"/pools/default/buckets/{port.bucket}", BY_GO_DCP, LOGIN)).json
    assert (bucket["bucketType"], bucket["storageBackend"]) == ("membase", "couchstore")


async def test_a_ping_of_the_go_sdk_is_answered(port: Port) -> None:
    assert (await port.ask("/whoami", BY_GO, LOGIN)).json == {"id": USER, "domain": "local"}


async def test_each_path_is_refused_to_a_wrong_user_and_without_a_login(port: Port) -> None:
    for path in ("/pools", "/whoami", f"/pools/default/buckets/{port.bucket}", f"/pools/default/bs/{port.bucket}"):
        for headers in ((), (WRONG,), ("Authorization: Basic ?",), ("Authorization: Bearer abc",)):
            answer = await port.ask(path, BY_GO, *headers)
            assert answer.status == 401, (path, headers)
            assert answer.headers["www-authenticate"].startswith("Basic")


async def test_another_bucket_is_not_found(port: Port) -> None:
    for name in ("elsewhere", port.bucket.upper(), "%FF"):
        for path in ("bs", "buckets"):
            assert (await port.ask(f"/pools/default/{path}/{name}", BY_GO, LOGIN)).status == 404


async def test_the_paths_accept_only_get(port: Port) -> None:
    for path in ("/pools", "/whoami", f"/pools/default/buckets/{port.bucket}", f"/pools/default/bs/{port.bucket}"):
        for method in ("HEAD", "POST", "PUT", "DELETE"):
            streamed = await port.open(path, BY_GO, LOGIN, method=method)
            assert (await streamed.reader.readline()).startswith(b"HTTP/1.1 405 "), (path, method)
            assert b"Allow: GET" in await streamed.reader.read()


async def test_requests_for_management_fail_at_once(port: Port) -> None:
    for path in ("/pools/default/buckets", "/pools/default/buckets/", f"/pools/default/buckets/{port.bucket}/scopes"):
        answer = await port.ask(path, BY_GO, LOGIN)
        assert (answer.status, answer.body.decode()) == (501, NO_MANAGEMENT + "\n")


@ONLY_A_CLUSTER
async def test_a_client_of_http_1_0_gets_maps_without_chunks(port: Port) -> None:
    streamed = await port.open(f"/pools/default/bs/{port.bucket}", LOGIN, version="1.0")
    first = await streamed.next_map()
    assert "transfer-encoding" not in streamed.headers
    port.change_map()
    assert (await streamed.next_map())["rev"] > first["rev"]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET\r\n\r\n", 400),
        (b"hello, are you there?\r\n\r\n", 400),
        (b"GET /pools HTTP/1.1\r\nX: " + b"a" * HEAD_BYTES_MAX, 431),
        (b"CONNECT pools:80 HTTP/1.1\r\nHost: h\r\n\r\n", 501),
        (b"POST /pools HTTP/1.1\r\nHost: h\r\nContent-Length: 999999\r\n\r\n" + b"a" * 9999, 405),
    ],
)
async def test_a_malformed_request_gets_one_answer_and_is_disconnected(port: Port, sent: bytes, status: int) -> None:
    streamed = await port.send(sent)
    assert (await asyncio.wait_for(streamed.reader.read(), WAIT_S)).startswith(b"HTTP/1.1 %d " % status)


async def test_bytes_that_are_neither_a_frame_nor_http_end_the_connection(port: Port) -> None:
    streamed = await port.send(b"\x40" + bytes(23))
    assert await asyncio.wait_for(streamed.reader.read(), WAIT_S) == b""


async def test_a_request_that_comes_in_single_bytes_is_answered(port: Port) -> None:
    streamed = await port.send(b"")
    for byte in f"GET /whoami HTTP/1.1\r\nHost: h\r\n{LOGIN}\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n".encode():
        streamed.writer.write(bytes((byte,)))
        await asyncio.sleep(0)
    assert (await streamed.whole()).status == 200


async def test_a_removed_user_gets_no_further_maps(tmp_path: Any) -> None:
    file = with_users(tmp_path / "users.json", {USER: {**entry_of(PASSWORD), "read": ["sales.*"]}})
    store = Store(tmp_path)
    store.logs()
    async with Endpoint.serving(store.path, readers=FileUsers(file)) as endpoint:
        port = Port(endpoint.port, "orders", lambda: None)
        streamed = await port.open("/pools/default/bs/orders", LOGIN)
        await streamed.next_map()
        with_users(file, {"other": "password"})
        async with asyncio.timeout(WAIT_S):
            assert await streamed.reader.read() == b""
        await port.close()
    store.close()


async def test_an_ephemeral_bucket_is_described_as_such() -> None:
    async with SandboxCluster(nodes=1, vbuckets=4) as cluster:
        cluster.bucket.map.ephemeral = True
        number = cluster.nodes[0].port
        assert number is not None
        port = Port(number, cluster.bucket.name, lambda: None)
        bucket = (await port.ask(f"/pools/default/buckets/{port.bucket}", LOGIN)).json
        await port.close()
    assert (bucket["bucketType"], bucket["storageBackend"]) == ("ephemeral", "undefined")
