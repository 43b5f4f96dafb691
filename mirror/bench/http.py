"""How fast the HTTP side answers, compared with the best of its server library: one client, one run, one machine.

Knows how to start both servers in processes of their own, and a client that keeps some connections busy and reads no
more of an answer than it must; never what the API means. The limit is an ASGI application that answers the same headers
and as many bytes from memory on the same protocol. Invariant: both sides get the same requests over the same number of
connections, in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.serve.admission import Acceptor, Admission
from mirror.serve.http_documents import JSON, entity_tag, headers_of
from mirror.serve.http_protocol import BoundedProtocol, Gate, protocol_config
from mirror.serve.http_server import HttpServer, Listening
from mirror.serve.listener import Address, Limits, listening_socket, reserve
from storage.model import Branch, Document, Seqno, Vbid

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One measurement."""

    count: int
    elapsed_s: float
    latencies_s: Sequence[float]
    """Of every request, rising."""

    @property
    def per_second(self) -> float:
        """Requests a second."""
        return self.count / self.elapsed_s

    def quantile_ms(self, share: float) -> float:
        """The latency that `share` of the requests stayed below, milliseconds."""
        return self.latencies_s[min(self.count - 1, int(self.count * share))] * 1000


async def _same_bytes(scope: Any, receive: Any, send: Any) -> None:
    """The least application: what the mirror answers for a document, headers included."""
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": BODY})


BODY = b"x" * 256
_DOCUMENT = Document(Vbid(63), 0, b"", Seqno(1000), 1, 1000 << 16, 0, 0, 1, BODY, branch=Branch(1))
HEADERS = [
    *headers_of(_DOCUMENT, entity_tag(_DOCUMENT, "body"), _DOCUMENT.datatype),
    (b"content-length", b"%d" % len(BODY)),
    (b"content-type", JSON),
]


def _no_status(_: Path) -> dict[str, Any]:
    return {"vbuckets": [], "vbucket_count": 0, "vbuckets_held": 0,
            "totals": {"documents_per_s": None, "bytes_per_s": None,
            "lag_seqnos": None, "lag_s": None}}  # fmt: skip


async def _serve(data: str | None, pipe: Connection) -> None:
    held = reserve(Address(), "http")
    opened = listening_socket(held.address)
    if data is not None:
        server = HttpServer(Settings(data=Path(data)), [Listening(opened, local=True)], _no_status, SystemClock())
        await server.start()
        task = asyncio.create_task(server.run())
        pipe.send(held.address.port)
        await asyncio.to_thread(_wait_end, pipe)
        await server.stop()
        await task
    else:
        gate = Gate()
        config = protocol_config(_same_bytes)
        bare = Acceptor(Admission(Limits(login_timeout_s=3600)), opened, partial(BoundedProtocol, config, gate, {}))
        pipe.send(held.address.port)
        await asyncio.to_thread(_wait_end, pipe)
        bare.close()
    held.release()


def _wait_end(pipe: Connection) -> None:
    with contextlib.suppress(EOFError):
        pipe.recv()


def _process(data: str | None, pipe: Connection) -> None:
    asyncio.run(_serve(data, pipe))


@contextmanager
def serving(data: str | None) -> Iterator[int]:
    """The port of a server in a process of its own: of the mirror at `data`, or (None) of the least application."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_process, args=(data, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise RuntimeError("the server did not start")
        yield ours.recv()
    except EOFError:
        raise RuntimeError("the server ended before it began") from None
    finally:
        ours.close()
        process.join(STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()


class _HttpClient(asyncio.Protocol):
    """One connection: a request, its answer, the next request."""

    def __init__(self, requests: Iterator[bytes], latencies_s: list[float], done: asyncio.Future[None]) -> None:
        self._requests = requests
        self._latencies_s = latencies_s
        self._done = done
        self._buffer = b""
        self._bytes_needed = 0
        self._sent_at = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "TCP"
        self._transport = transport
        self._next()

    def _next(self) -> None:
        assert self._transport is not None, "connected"
        request = next(self._requests, None)
        if request is None:
            self._transport.close()
            if not self._done.done():
                self._done.set_result(None)
            return
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
                self._fail(RuntimeError(f"the server answered {head.splitlines()[0].decode(errors='replace')}"))
                return
            at = head.index(b"content-length: ") + 16
            self._bytes_needed = end + 4 + int(head[at : (head + b"\r").index(b"\r", at)])
        if len(self._buffer) >= self._bytes_needed:
            self._latencies_s.append(time.perf_counter() - self._sent_at)
            self._buffer, self._bytes_needed = b"", 0
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the server hung up"))

    def _fail(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)


async def _ask(port: int, requests: Sequence[bytes], connections: int) -> Answered:
    loop = asyncio.get_running_loop()
    waiting = iter(requests)
    latencies_s: list[float] = []
    done = []
    transports = []
    started = time.perf_counter()
    for _ in range(connections):
        end: asyncio.Future[None] = loop.create_future()
        done.append(end)
        transport, _ = await loop.create_connection(
            lambda end=end: _HttpClient(waiting, latencies_s, end),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        transports.append(transport)
    try:
        await asyncio.gather(*done)
    finally:
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0)
    return Answered(len(latencies_s), time.perf_counter() - started, sorted(latencies_s))


def request_of(key: bytes) -> bytes:
    """The request for a document."""
    path = f"/v1/collections/_default/documents/{quote_from_bytes(key, safe='')}"
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def measure(port: int, keys: Sequence[bytes], connections: int) -> Answered:
    """Ask for every key, over some connections that are kept busy. Raises RuntimeError for any other answer."""
    return asyncio.run(_ask(port, [request_of(key) for key in keys], connections))
