"""A service of real processes whose work is a script, and its control socket, for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from mirror.client import socket_address
from mirror.clock import SystemClock
from mirror.supervise.supervisor import Supervisor
from tests.processes import ProcessGroup
from tests.supervise.scripted import look_up, settings_for, worker_command

SCRIPTED = Path(__file__).with_name("scripted.py")


def service_of(data: Path, **values: Any) -> Supervisor:
    arguments: dict[str, Any] = {"clock": SystemClock(), "command": worker_command} | values
    lookup = arguments.pop("look_up", look_up)
    settings = arguments.pop("settings", None) or settings_for(data)
    return Supervisor(settings, lookup, **arguments)


def phases(service: Supervisor) -> list[str]:
    return [worker["phase"] for worker in service.reports.document()["workers"]]


def pids(service: Supervisor) -> list[int]:
    return [worker["pid"] for worker in service.reports.document()["workers"]]


def running(service: Supervisor, count: int = 2) -> Callable[[], bool]:
    return lambda: phases(service).count("running") == count


@asynccontextmanager
async def serving(service: Supervisor) -> AsyncIterator[Supervisor]:
    """The service until the block ends, then a clean stop of all it started."""
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        service.stop()
        await task


async def ask(data: Path, request: dict[str, Any]) -> dict[str, Any]:
    with socket_address(data) as address:
        reader, writer = await asyncio.open_unix_connection(address, limit=2**24)
    writer.write(json.dumps(request).encode() + b"\n")
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    await writer.wait_closed()
    return answer


def children_of(process: ProcessGroup) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def ask_now(data: Path) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = asyncio.run(ask(data, {"op": "status"}))["status"]
    except (OSError, ValueError):
        return {"workers": []}
    return answer
