"""`bench restart`: a service that was killed, from its next start to the first read and until it has caught up.

Knows two stores of the same documents: the source's, which a DCP endpoint serves, and the mirror's, a copy of it. While
the service is down the source gets some documents more. The clock starts when the service's process is made (an
interpreter's start and all imports are in it). The limit of the first read is a new interpreter that opens the same
LMDB environments and reads one document.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mirror import client
from mirror.bench.ingest import SANDBOX_PASSWORD, receive
from mirror.bench.kv import Memcached, mirror_server
from mirror.bench.limits import Row, bare_get
from mirror.bench.stores import append_rows, document_rows, store_each
from mirror.clock import SystemClock
from mirror.config_reader import validated
from mirror.health import FOLLOWING
from mirror.messages import GetStatus
from mirror.serve.dcp_server import DcpServer
from mirror.supervise.processes import logs
from mirror.supervise.source import look_up_with
from mirror.supervise.supervisor import Supervisor
from storage.format import keys, records

GROUPS = 8
VBID = 0
"""The vbucket that is read."""
LOOK_INTERVAL_S = 0.01
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class RestartFigures:
    """One start after a SIGKILL."""

    first_read_s: float
    caught_up_s: float
    limit_read_s: float


def restarts(
    documents: int, vbuckets: int, missed: int, workers: int, rounds: int, folder: str
) -> Iterator[RestartFigures]:
    """Start once, then kill and start `rounds` times. Raises RuntimeError when a process fails."""
    each = max(1, documents // vbuckets)
    source, data = os.path.join(folder, "source"), os.path.join(folder, "data")
    names = (b"read::%d" % number for number in itertools.count())
    probe_key = next(name for name in names if keys.vbid_of(name, vbuckets) == VBID)

    def rows_of(vbid: int) -> list[Row]:
        rows = document_rows(vbid, vbuckets, each, 256)
        if vbid == VBID:
            frame = records.encode_mutation(probe_key, bytes(256), len(rows) + 1)
            rows.append((keys.ROW.pack(1, len(rows) + 1), frame))
        return rows

    store_each(source, vbuckets, GROUPS, rows_of)
    shutil.copytree(source, data)
    context = multiprocessing.get_context("spawn")
    with mirror_server(source, DcpServer) as dcp_port:
        kv_port = _free_port()
        service = _start(context, dcp_port, kv_port, data, workers)
        try:
            _until(service, lambda: _caught_up(data, {}))
            for number in range(rounds):
                _kill(service)
                highs = append_rows(source, missed, seed=number + 2)
                limit = _limit(context, data, probe_key)
                began = time.monotonic()
                service = _start(context, dcp_port, kv_port, data, workers)
                _until(service, lambda: _reads(kv_port, probe_key))
                first_read_s = time.monotonic() - began
                _until(service, lambda: _caught_up(data, highs))  # noqa: B023 - called before the next round
                yield RestartFigures(first_read_s, time.monotonic() - began, limit)
        finally:
            _kill(service)


def _start(context: Any, dcp_port: int, kv_port: int, data: str, workers: int) -> Any:
    source = f"couchbase://demo@127.0.0.1:{dcp_port}/bench"
    service = context.Process(target=_serve, args=(source, f"127.0.0.1:{kv_port}", data, workers))
    service.start()
    return service


def _serve(source: str, kv: str, data: str, workers: int) -> None:
    """The service process."""
    logs.set_up("error", json=False, process="bench")
    os.environ["DCP_MIRROR_PASSWORD"] = SANDBOX_PASSWORD
    values: dict[str, Any] = {"source": source, "data": Path(data), "workers": workers, "groups": GROUPS, "kv": kv}
    clock = SystemClock()
    settings = validated(values | {"log_level": "error"})
    asyncio.run(Supervisor(settings, look_up_with(clock), clock=clock).run())


def _kill(service: Any) -> None:
    os.kill(service.pid, signal.SIGKILL)
    service.join()


def _until(service: Any, look: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        if not service.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the service did not come up")
        time.sleep(LOOK_INTERVAL_S)


def _caught_up(data: str, highs: dict[int, int]) -> bool:
    """The service says so, and these vbuckets are published as far as this."""
    answer = client.ask(Path(data), GetStatus())
    if answer is None or answer["status"]["state"] != FOLLOWING:
        return False
    rows = {row["vbid"]: row["published_seqno"] for row in answer["status"]["vbuckets"]}
    return all(rows[vbid] >= seqno for vbid, seqno in highs.items())


def _reads(port: int, key: bytes) -> bool:
    """The KV port answers a GET with the document."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        line.sendall(Memcached.get(key, VBID))
        answer = line.recv(24)
        return len(answer) == 24 and answer[6:8] == b"\0\0"
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _limit(context: Any, data: str, key: bytes) -> float:
    """Seconds until a new interpreter has read one document."""
    here, there = context.Pipe()
    began = time.monotonic()
    reader = context.Process(target=_read_one, args=(there, data, key), daemon=True)
    reader.start()
    try:
        receive(here, reader)
        return time.monotonic() - began
    finally:
        reader.join()


def _read_one(pipe: Connection, data: str, key: bytes) -> None:
    pipe.send(bare_get(data, VBID, key) is not None)
