"""A service that was killed, from its next start to its first read and until it has caught up.

The source is a mirror's DCP endpoint over a copy of the same documents; while the service is down it gets some more.
The clock starts when the service's process is made: an interpreter's start and all imports count. The limit of the
first read is a new interpreter that opens the same LMDB environments and reads one document.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mirror import client
from mirror.clock import SystemClock
from mirror.config_reader import validated
from mirror.health import FOLLOWING
from mirror.log import set_up_logs
from mirror.messages import GetStatus
from mirror.serve.dcp.dcp_session import DcpServer
from mirror.supervise.setup import look_up_with
from mirror.supervise.supervisor import Supervisor
from storage.format.keys import vbid_of
from tests.bench import kv, limits, stores
from tests.bench.children import Child, child, until
from tests.ports import free_port

GROUPS = 8


def measure(
    folder: Path,
    *,
    documents: int = 1_000_000,
    vbuckets: int = 1024,
    missed: int = 1000,
    workers: int = 2,
    rounds: int = 3,
) -> Iterator[dict[str, float | str]]:
    source, data = str(folder / "source"), str(folder / "data")
    rows = stores.rows_of(stores.documents(range(documents)), vbuckets)
    highs = {vbid: len(each) for vbid, each in rows.items()}
    stores.store(source, rows, GROUPS)
    shutil.copytree(source, data)
    key = stores.key_of(0)
    probe = kv.Memcached.get(key, vbid_of(key, vbuckets))
    with child(kv.serve, source, DcpServer) as dcp:
        address = f"couchbase://demo@127.0.0.1:{dcp.receive()}/bench"
        for number in range(rounds + 1):
            began = time.monotonic()
            with child(_read_one, data, key) as bare:
                bare.receive()
                limit_s = time.monotonic() - began
            port = free_port()
            began = time.monotonic()
            with ExitStack() as stack:
                service = stack.enter_context(child(_run, address, port, data, workers, daemon=False))
                stack.callback(_kill, service)
                until(lambda: _is_alive(service) and kv.answers(port, probe))  # noqa: B023 - called at once
                first_read_s = time.monotonic() - began
                until(lambda: _is_alive(service) and _caught_up(data, highs))  # noqa: B023 - the same
                caught_up_s = time.monotonic() - began
            if number:  # the first start finds a mirror that was never served
                yield {
                    "first_read_s": first_read_s,
                    "limit_read_s": limit_s,
                    "ratio": limit_s / first_read_s,
                    "caught_up_s": caught_up_s,
                }
            first = documents + number * missed
            more = stores.rows_of(stores.documents(range(first, first + missed)), vbuckets, highs)
            stores.append(source, more)
            highs = {vbid: high + len(more[vbid]) for vbid, high in highs.items()}


def _run(pipe: Connection, source: str, port: int, data: str, workers: int) -> None:
    set_up_logs("error", json=False, process="bench")
    os.environ["DCP_MIRROR_PASSWORD"] = "demo"
    values: dict[str, Any] = {"source": source, "data": Path(data), "workers": workers, "groups": GROUPS}
    settings = validated(values | {"kv": f"127.0.0.1:{port}", "log_level": "error"})
    clock = SystemClock()
    asyncio.run(Supervisor(settings, look_up_with(clock), clock=clock).run())


def _is_alive(service: Child) -> bool:
    if not service.process.is_alive():
        raise RuntimeError("the service ended")
    return True


def _kill(service: Child) -> None:
    if service.process.is_alive() and service.process.pid is not None:
        os.kill(service.process.pid, signal.SIGKILL)
        service.process.join()


def _caught_up(data: str, highs: dict[int, int]) -> bool:
    """True if the service says so, and these vbuckets are published as far as this."""
    answer = client.ask(Path(data), GetStatus())
    if answer is None or answer["status"]["state"] != FOLLOWING:
        return False
    rows = {row["vbid"]: row["published_seqno"] for row in answer["status"]["vbuckets"]}
    return all(rows[vbid] >= seqno for vbid, seqno in highs.items())


def _read_one(pipe: Connection, data: str, key: bytes) -> None:
    pipe.send(limits.get_one(data, key) is not None)
