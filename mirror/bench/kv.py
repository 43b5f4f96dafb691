"""`bench kv`: the KV endpoint, and peers that are installed, read by one plain client over loopback in one run.

Knows a server process, memcached and Redis as child processes, and a client that sends GETs and waits; what the mirror
does with them, the endpoint knows. All peers hold the same keys and values of the same size and get the same random
keys: one request at a time (each one's time is taken), then with many under way on one connection. The client is
Python, and often the slower half: compare the figures with each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from mirror.bench.ingest import SANDBOX_PASSWORD
from mirror.clock import SystemClock
from mirror.serve.auth import SourceUser
from mirror.serve.kv_bucket import KvBucket
from mirror.serve.kv_map import ServedMap, own_node
from mirror.serve.kv_server import KvServer
from mirror.serve.listener import Address, listening_socket, reserve
from mirror.wire.constants import Opcode
from mirror.wire.frame import HEADER

PIPELINE = 64
PATIENCE_S = 30.0
_ANSWER = HEADER.size


@dataclass(frozen=True, slots=True)
class KvFigures:
    """One server, one round."""

    requests_per_s: float
    """One at a time."""
    p50_us: float
    p99_us: float
    pipelined_per_s: float
    """With `PIPELINE` under way."""


class Memcached:
    """The memcached binary protocol, which the mirror speaks too."""

    @staticmethod
    def get(key: bytes, vbid: int = 0) -> bytes:
        """A request."""
        return HEADER.pack(0x80, Opcode.GET, len(key), 0, 0, vbid, len(key), 0, 0) + key

    @staticmethod
    def set(key: bytes, value: bytes) -> bytes:
        """A request."""
        body = bytes(8) + key + value
        return HEADER.pack(0x80, Opcode.SET, len(key), 8, 0, 0, len(body), 0, 0) + body

    @staticmethod
    def answer_size(data: bytearray, pos: int) -> int:
        """Size of the answer at `pos`; 0 while it is not whole."""
        if len(data) - pos < _ANSWER:
            return 0
        size = _ANSWER + int.from_bytes(data[pos + 8 : pos + 12])
        return size if len(data) - pos >= size else 0


class Redis:
    """The protocol of Redis, as far as GET and SET go."""

    @staticmethod
    def get(key: bytes) -> bytes:
        """A request."""
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)

    @staticmethod
    def set(key: bytes, value: bytes) -> bytes:
        """A request."""
        return b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(value), value)

    @staticmethod
    def answer_size(data: bytearray, pos: int) -> int:
        """Size of the answer at `pos`; 0 while it is not whole."""
        end = data.find(b"\r\n", pos)
        if end < 0:
            return 0
        size = end + 2 - pos
        if data[pos] == 0x24 and (length := int(data[pos + 1 : end])) >= 0:
            size += length + 2
        return size if len(data) - pos >= size else 0


Protocol = type[Memcached] | type[Redis]


def measure(port: int, protocol: Protocol, sample: Sequence[bytes]) -> KvFigures:
    """Read the keys one at a time, then many at once."""
    requests = [protocol.get(key) for key in sample]
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _exchange(line, protocol, requests[:PIPELINE])
        times = []
        began = time.perf_counter()
        for request in requests:
            start = time.perf_counter()
            _exchange(line, protocol, (request,))
            times.append(time.perf_counter() - start)
        serial_s = time.perf_counter() - began
        began = time.perf_counter()
        for first in range(0, len(requests), PIPELINE):
            _exchange(line, protocol, requests[first : first + PIPELINE])
        pipelined_s = time.perf_counter() - began
    times.sort()
    return KvFigures(
        len(requests) / serial_s,
        times[len(times) // 2] * 1e6,
        times[len(times) * 99 // 100] * 1e6,
        len(requests) / pipelined_s,
    )


def _exchange(line: socket.socket, protocol: Protocol, requests: Sequence[bytes]) -> None:
    """Send requests, and wait for as many answers."""
    line.sendall(requests[0] if len(requests) == 1 else b"".join(requests))
    data = bytearray()
    pos, left = 0, len(requests)
    while left:
        piece = line.recv(1 << 18)
        if not piece:
            raise RuntimeError("the server hung up")
        data += piece
        while left and (size := protocol.answer_size(data, pos)):
            pos += size
            left -= 1


def _serve(path: str, make: type[KvServer], out: Connection) -> None:
    """A server process."""

    async def serve() -> None:
        bucket = KvBucket(path, SystemClock(), stale_allowed=True)
        held = reserve(Address(), "kv")
        users = SourceUser("demo", lambda: SANDBOX_PASSWORD)
        server = make(
            bucket, users, ServedMap(bucket.identity, [own_node([held.address])], 1), SystemClock(),
        )  # fmt: skip
        await server.start([(held.address, listening_socket(held.address))])
        out.send(held.address.port)
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def mirror_server(path: str, make: type[KvServer] = KvServer) -> Iterator[int]:
    """The endpoint over the mirror at `path`, KV or DCP, in a process of its own; its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(path, make, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE_S):
            raise RuntimeError("the server process did not start")
        yield ours.recv()
    except EOFError:
        raise RuntimeError("the server process ended before it listened") from None
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


@contextmanager
def peer_server(name: str, documents: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[int, Protocol]]:
    """memcached or redis-server with these documents; its port and protocol."""
    protocol: Protocol = Redis if name == "redis-server" else Memcached
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="dcp-mirror-bench-") as folder:
        arguments = {
            "memcached": ["-l", "127.0.0.1", "-p", str(port), "-U", "0", "-m", "4096", "-u", "nobody"],
            "redis-server": ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
        }[name]
        process = subprocess.Popen([name, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for(port, name, process)
            requests = [protocol.set(key, value) for key, value in documents]
            with socket.create_connection(("127.0.0.1", port)) as line:
                for first in range(0, len(requests), PIPELINE):
                    _exchange(line, protocol, requests[first : first + PIPELINE])
            yield port, protocol
        finally:
            process.kill()
            process.wait()


def _wait_for(port: int, name: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.02)
    raise RuntimeError(f"{name} did not start")


def peers() -> list[str]:
    """The peers that are installed."""
    return [name for name in ("memcached", "redis-server") if shutil.which(name)]
