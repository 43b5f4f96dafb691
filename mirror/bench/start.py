"""`bench start`: how long the service takes from its start until the source has a stream open for every vbucket.

Knows a source process of several nodes, the service in a process of its own, and how to watch both; nothing of what is
streamed. The clock starts when the service's process is made (an interpreter's start and all imports are in it), and
stops when the source accepted the last stream. Memory is what each worker holds privately (RssAnon) right then.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from mirror.bench.ingest import SANDBOX_PASSWORD, receive
from mirror.clock import SystemClock
from mirror.config_reader import validated
from mirror.sandbox import SandboxCluster
from mirror.supervise.processes import logs
from mirror.supervise.processes.figures import private_bytes
from mirror.supervise.source import look_up_with
from mirror.supervise.supervisor import Supervisor

LOOK_INTERVAL_S = 0.01
"""How often the source looks whether all streams are open: it has to answer the requests meanwhile."""


@dataclass(frozen=True, slots=True)
class StartFigures:
    """One start."""

    made: bool
    """The data directory was made by this start; else it was there."""
    seconds: float
    worker_private_bytes: list[int]


def starts(vbuckets: int, nodes: int, workers: int, again: int, folder: str) -> Iterator[StartFigures]:
    """Start on an empty directory below `folder`, then `again` times on what is there. RuntimeError when one fails."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    source = context.Process(target=_serve, args=(there, vbuckets, nodes), daemon=True)
    source.start()
    try:
        connection_string: str = receive(here, source)
        for number in range(again + 1):
            here.send("begin")
            receive(here, source)
            began = time.monotonic()
            service = context.Process(target=_mirror, args=(connection_string, f"{folder}/data", workers))
            service.start()
            try:
                opened: float = receive(here, source, alive=service)
                yield StartFigures(number == 0, opened - began, _memory(service.pid))
            finally:
                service.terminate()
                service.join(60)
                if service.is_alive():
                    service.kill()
    finally:
        here.close()
        source.join(10)
        if source.is_alive():
            source.kill()


def _memory(pid: int | None) -> list[int]:
    """Private memory of the service's workers."""
    children = psutil.Process(pid).children()
    of_workers = [
        child.pid for child in children if any("mirror.supervise.processes.worker" in word for word in child.cmdline())
    ]
    return sorted(private_bytes(each) or 0 for each in of_workers)


def _serve(pipe: Connection, vbuckets: int, nodes: int) -> None:
    """The source process: a document in each vbucket; on request it says when all streams are open."""

    async def serve() -> None:
        async with SandboxCluster(vbuckets=vbuckets, nodes=nodes) as cluster:
            for vbid in range(vbuckets):
                cluster.set(f"document-{vbid}", {"vbid": vbid}, vbid=vbid)
            pipe.send(cluster.connection_string)
            loop = asyncio.get_running_loop()
            requested = asyncio.Event()
            loop.add_reader(pipe.fileno(), requested.set)
            while True:
                await requested.wait()
                requested.clear()
                if not pipe.poll():
                    continue  # it was read already
                try:
                    pipe.recv()
                except EOFError:
                    return
                before = [len(cluster.sent(vbid).stream_requests) for vbid in range(vbuckets)]
                pipe.send("begun")
                while any(len(cluster.sent(vbid).stream_requests) <= before[vbid] for vbid in range(vbuckets)):
                    if pipe.poll():  # closed: nothing else is sent meanwhile
                        return
                    await asyncio.sleep(LOOK_INTERVAL_S)
                pipe.send(time.monotonic())

    asyncio.run(serve())


def _mirror(connection_string: str, data: str, workers: int) -> None:
    """The service process."""
    logs.set_up("error", json=False, process="bench")
    os.environ["DCP_MIRROR_PASSWORD"] = SANDBOX_PASSWORD
    values: dict[str, Any] = {"source": connection_string, "data": Path(data), "workers": workers, "groups": 8}
    settings = validated(values | {"log_level": "error"})
    clock = SystemClock()
    asyncio.run(Supervisor(settings, look_up_with(clock), clock=clock).run())
