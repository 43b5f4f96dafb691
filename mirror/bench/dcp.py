"""`bench dcp`: a mirror's DCP port, read by clients that store nothing, against the same bytes from memory.

Knows the endpoint's process, a bare sender and the clients of `drain`. Both send each client the same number of bytes
over loopback; the bare sender knows nothing of DCP, and nobody acknowledges anything to it. All clients are in one
thread of this process, which is the same for both sides.
"""

from __future__ import annotations

import multiprocessing
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection

from mirror.bench.drain import PATIENCE_S, READ_BYTES, Server, Volume, discard, measured
from mirror.bench.ingest import receive
from mirror.bench.kv import mirror_server
from mirror.bench.limits import Timing
from mirror.serve.dcp_server import DcpServer

PIECE_BYTES = 1 << 20
"""What the bare sender gives a socket at once."""


@dataclass(frozen=True, slots=True)
class DcpFigures:
    """One round with so many clients. `documents` is of all their documents."""

    clients: int
    streamed: Timing
    limit: Timing


def dcp_rounds(path: str, bucket: str, clients: Sequence[int], rounds: int) -> Iterator[DcpFigures]:
    """Measure each number of clients each round. Raises RuntimeError when a process fails."""
    with mirror_server(path, DcpServer) as port:
        server = Server("127.0.0.1", port, bucket)
        volume = measured(server)
        for _ in range(rounds):
            for number in clients:
                yield DcpFigures(number, discard(server, volume, number), _limit(volume, number))


def _limit(volume: Volume, clients: int) -> Timing:
    """The same number of bytes to each client, from memory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    sender = context.Process(target=_send, args=(there, volume.size_bytes, clients), daemon=True)
    sender.start()
    try:
        port: int = receive(here, sender)
        return _take(port, volume, clients)
    finally:
        sender.kill()
        sender.join()


def _take(port: int, volume: Volume, clients: int) -> Timing:
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        left = {}
        for _ in range(clients):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            selector.register(line, selectors.EVENT_READ, line)
            left[line] = volume.size_bytes
        buffer = bytearray(READ_BYTES)
        start, cpu_start = time.perf_counter(), time.process_time()
        for line in left:
            line.sendall(b"\0")
        while left:
            for key, _ in selector.select():
                line = key.data
                count = line.recv_into(buffer)
                if not count:
                    raise RuntimeError("the bare sender hung up")
                left[line] -= count
                if not left[line]:
                    selector.unregister(line)
                    del left[line]
        return Timing(clients * volume.documents, time.perf_counter() - start, time.process_time() - cpu_start)


def _send(pipe: Connection, size_bytes: int, clients: int) -> None:
    """The bare sender's process: each client gets its bytes once it has sent one."""
    piece = memoryview(bytes(PIECE_BYTES))
    with socket.create_server(("127.0.0.1", 0), backlog=clients) as listening, selectors.DefaultSelector() as selector:
        pipe.send(listening.getsockname()[1])
        left = {}
        for _ in range(clients):
            line = listening.accept()[0]
            left[line] = size_bytes
        for line in left:
            line.recv(1)
            line.setblocking(False)
            selector.register(line, selectors.EVENT_WRITE, line)
        while left:
            for key, _ in selector.select():
                line = key.data
                left[line] -= line.send(piece[: left[line]])
                if not left[line]:
                    selector.unregister(line)
                    del left[line]
