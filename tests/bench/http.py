"""Documents over HTTP from one process, next to an application that answers the same bytes from memory on the same
server.

Both get the same requests over the same connections, each of which is kept busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.serve.http.documents import JSON, entity_tag, headers_of
from mirror.serve.http.protocol import Gate, HttpConnection
from mirror.serve.http.server import HttpServer
from mirror.server.admission import Acceptor, Admission
from mirror.server.listener import Address, listening_socket, reserve
from mirror.server.turns import Turns
from storage.model import Branch, Document, Seqno
from tests.bench import stores
from tests.bench.children import child, wait_closed
from tests.bench.lag import quantile

BODY = b"x" * 256
_DOCUMENT = Document(63, 0, b"", Seqno(1000), 1, 1000 << 16, 0, 0, 1, BODY, branch=Branch(1))
HEADERS = [
    *headers_of(_DOCUMENT, entity_tag(_DOCUMENT, "body"), _DOCUMENT.datatype),
    (b"content-length", b"%d" % len(BODY)),
    (b"content-type", JSON),
]


def measure(
    folder: Path, *, documents: int = 100_000, requests: int = 20_000, connections: int = 16, rounds: int = 3
) -> Iterator[dict[str, float | str]]:
    path = stores.mirror(str(folder / "mirror"), documents)
    sent = [request_of(key) for key in stores.sample_keys(requests, documents)]
    with child(_serve, None) as bare, child(_serve, path) as served:
        ports = bare.receive(), served.receive()
        for _ in range(rounds):
            (limit_s, _), (elapsed_s, latencies_s) = [asyncio.run(_ask(port, sent, connections)) for port in ports]
            yield {
                "requests_per_s": requests / elapsed_s,
                "limit_per_s": requests / limit_s,
                "ratio": limit_s / elapsed_s,
                "p50_ms": quantile(latencies_s, 0.5) * 1000,
                "p99_ms": quantile(latencies_s, 0.99) * 1000,
            }


def request_of(key: bytes) -> bytes:
    path = f"/v1/collections/_default/documents/{quote_from_bytes(key, safe='')}"
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def _same_bytes(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})


def _no_status(_: Path) -> dict[str, Any]:
    return {"vbuckets": [], "vbucket_count": 0, "vbuckets_held": 0,
            "totals": {"documents_per_s": None, "bytes_per_s": None,
            "lag_seqnos": None, "lag_s": None}}  # fmt: skip


def _serve(pipe: Connection, data: str | None) -> None:
    """Serve the mirror at `data`, or (None) the least application; the first message is the port."""

    async def serve() -> None:
        held = reserve(Address(), "http")
        opened = listening_socket(held.address)
        if data is not None:
            server = HttpServer(Settings(data=Path(data)), [(held.address, opened)], _no_status, SystemClock())
            await server.start()
            task = asyncio.create_task(server.run())
            pipe.send(held.address.port)
            await asyncio.to_thread(wait_closed, pipe)
            await server.stop()
            await task
        else:
            make = partial(HttpConnection, Gate(_same_bytes), True)
            bare = Acceptor(Admission(Settings(), Turns()), opened, make)
            pipe.send(held.address.port)
            await asyncio.to_thread(wait_closed, pipe)
            bare.close()
        held.release()

    asyncio.run(serve())


class _Client(asyncio.Protocol):
    """A connection that sends a request, reads its answer, and sends the next."""

    def __init__(self, requests: Iterator[bytes], latencies_s: list[float]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests = requests
        self._latencies_s = latencies_s
        self._buffer = b""
        self._bytes_needed = 0
        self._sent_at = 0.0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "TCP"
        self._transport = transport
        self._next()

    def _next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            self._finish(None)
        else:
            self._sent_at = time.perf_counter()
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._bytes_needed:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._buffer[:end].lower()
            if not head.startswith(b"http/1.1 200"):
                self._finish(RuntimeError(f"the server answered {head.splitlines()[0].decode(errors='replace')}"))
                return
            at = head.index(b"content-length: ") + 16
            self._bytes_needed = end + 4 + int(head[at : (head + b"\r").index(b"\r", at)])
        if len(self._buffer) >= self._bytes_needed:
            self._latencies_s.append(time.perf_counter() - self._sent_at)
            self._buffer, self._bytes_needed = b"", 0
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc or ConnectionError("the server hung up"))

    def _finish(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)


async def _ask(port: int, requests: Sequence[bytes], connections: int) -> tuple[float, list[float]]:
    """Seconds for all requests, and those of each, rising. Raises RuntimeError for any answer but 200."""
    waiting = iter(requests)
    latencies_s: list[float] = []
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(lambda: _Client(waiting, latencies_s), "127.0.0.1", port)
        for _ in range(connections)
    ]
    try:
        await asyncio.gather(*(client.done for _, client in opened))
    finally:
        for transport, _ in opened:
            transport.abort()
        await asyncio.sleep(0)
    return time.perf_counter() - started, sorted(latencies_s)
