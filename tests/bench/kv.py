"""GETs over the KV port from one plain client, next to memcached and Redis if they are installed.

All servers hold the same documents and get the same random keys, one request at a time, then `PIPELINE` under way on
one connection. The client is Python and often the slower half: compare the servers with each other.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.serve.access.auth import SourceUser
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.bucket.map import ServedMap, own_node
from mirror.serve.kv.server import KvServer
from mirror.server.listener import Address, listening_socket, reserve
from mirror.wire.constants import Opcode
from mirror.wire.frame import HEADER
from tests.bench import stores
from tests.bench.children import child, until
from tests.bench.lag import quantile
from tests.ports import free_port

PIPELINE = 64


class Memcached:
    """The memcached binary protocol, which the mirror speaks too."""

    @staticmethod
    def get(key: bytes, vbid: int = 0) -> bytes:
        return HEADER.pack(0x80, Opcode.GET, len(key), 0, 0, vbid, len(key), 0, 0) + key

    @staticmethod
    def set(key: bytes, value: bytes) -> bytes:
        body = bytes(8) + key + value
        return HEADER.pack(0x80, Opcode.SET, len(key), 8, 0, 0, len(body), 0, 0) + body

    @staticmethod
    def answer_size(data: bytearray, pos: int) -> int:
        """Size of the answer at `pos`; 0 while it is not whole."""
        if len(data) - pos < HEADER.size:
            return 0
        size = HEADER.size + int.from_bytes(data[pos + 8 : pos + 12])
        return size if len(data) - pos >= size else 0


class Redis:
    @staticmethod
    def get(key: bytes) -> bytes:
        return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)

    @staticmethod
    def set(key: bytes, value: bytes) -> bytes:
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


def measure(
    folder: Path, *, documents: int = 100_000, reads: int = 20_000, vbuckets: int = 64, rounds: int = 3
) -> Iterator[dict[str, float | str]]:
    path = stores.mirror(str(folder / "mirror"), documents, vbuckets)
    sample = stores.sample_keys(reads, documents)
    with ExitStack() as stack:
        servers: dict[str, tuple[int, Protocol]] = {
            "mirror": (stack.enter_context(child(serve, path, KvServer)).receive(), Memcached)
        }
        for name in ("memcached", "redis-server"):
            if shutil.which(name):
                servers[name] = stack.enter_context(_peer(name, documents))
        for _ in range(rounds):
            for name, (port, protocol) in servers.items():
                yield {"server": name, **_measure(port, protocol, sample)}


def _measure(port: int, protocol: Protocol, sample: Sequence[bytes]) -> dict[str, float]:
    requests = [protocol.get(key) for key in sample]
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _exchange(line, protocol, requests[:PIPELINE])
        times_us = []
        for request in requests:
            start = time.perf_counter()
            _exchange(line, protocol, (request,))
            times_us.append((time.perf_counter() - start) * 1e6)
        start = time.perf_counter()
        for first in range(0, len(requests), PIPELINE):
            _exchange(line, protocol, requests[first : first + PIPELINE])
        pipelined_s = time.perf_counter() - start
    times_us.sort()
    return {
        "reads_per_s": len(requests) / sum(times_us) * 1e6,
        "p50_us": quantile(times_us, 0.5),
        "p99_us": quantile(times_us, 0.99),
        "pipelined_per_s": len(requests) / pipelined_s,
    }


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


def serve(pipe: Connection, path: str, make: type[KvServer]) -> None:
    """Serve the mirror at `path` over KV or DCP in a process of its own; the first message is the port."""

    async def run() -> None:
        bucket = ServedBucket(path, SystemClock())
        held = reserve(Address(), "kv")
        users = SourceUser("demo", lambda: "demo")
        served_map = ServedMap(bucket.identity, [own_node([held.address])], 1)
        server = make(bucket, users, served_map, SystemClock(), Settings())
        await server.start([(held.address, listening_socket(held.address))])
        pipe.send(held.address.port)
        loop = asyncio.get_running_loop()
        closed = asyncio.Event()
        loop.add_reader(pipe.fileno(), closed.set)
        await closed.wait()

    asyncio.run(run())


@contextmanager
def _peer(name: str, documents: int) -> Iterator[tuple[int, Protocol]]:
    """Start memcached or redis-server with these documents; its port and protocol."""
    protocol: Protocol = Redis if name == "redis-server" else Memcached
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="dcp-mirror-bench-") as folder:
        arguments = {
            "memcached": ["-l", "127.0.0.1", "-p", str(port), "-U", "0", "-m", "4096", "-u", "nobody"],
            "redis-server": ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
        }[name]
        process = subprocess.Popen([name, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: process.poll() is not None or answers(port, b""))
            requests = [protocol.set(key, value) for key, value in stores.documents(range(documents))]
            with socket.create_connection(("127.0.0.1", port)) as line:
                for first in range(0, len(requests), PIPELINE):
                    _exchange(line, protocol, requests[first : first + PIPELINE])
            yield port, protocol
        finally:
            process.kill()
            process.wait()


def answers(port: int, request: bytes) -> bool:
    """True if the port listens and, unless the request is empty, answers it with success."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        line.sendall(request)
        return not request or line.recv(HEADER.size)[6:8] == b"\0\0"
    return False
