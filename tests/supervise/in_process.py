"""A supervisor whose workers are tasks of the test's own process: the real pipe and the real child's side, no spawn."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.messages import ProcessCommand, ProcessReport, StartMessage, StartWorker, encode
from mirror.supervise.processes import table as processes
from mirror.supervise.processes.channel import Channel
from mirror.supervise.processes.child import Child
from mirror.supervise.processes.life import ChildProcess, Make, Send
from mirror.supervise.processes.plan import Heartbeat
from mirror.supervise.supervisor import Supervisor
from tests.supervise import service
from tests.supervise.scripted import look_up, settings_for

Report = dict[str, Any]


class Work:
    """A worker's work: each report is the next answer of `reports`."""

    def __init__(self, groups: Sequence[int], reports: Callable[[Sequence[int]], Report]) -> None:
        self._groups = groups
        self._reports = reports
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._stopped.set()

    def status(self) -> ProcessReport:
        return cast(ProcessReport, self._reports(self._groups))

    async def request(self, command: ProcessCommand) -> dict[str, Any]:
        return {"heard": encode(command)}


class TaskProcess:
    numbers = itertools.count(1)

    def __init__(self, end: socket.socket, make: Make) -> None:
        self.pid = os.getpid()
        self._task = asyncio.create_task(self._live(end, make))
        self._killed_by: int | None = None

    @staticmethod
    async def _live(end: socket.socket, make: Make) -> int:
        channel = await Channel.open(end)
        try:
            return await ChildProcess(channel, make).live()
        finally:
            await channel.close()

    def send_signal(self, number: int) -> None:
        self._killed_by = number
        self._task.cancel()

    async def wait(self) -> int:
        await asyncio.wait([self._task])
        return -signal.Signals(self._killed_by) if self._killed_by is not None else self._task.result()


def use(
    monkeypatch: pytest.MonkeyPatch, reports: Callable[[Sequence[int]], Report], sends: list[Send] | None = None
) -> list[TaskProcess]:
    """Have supervisors start tasks instead of processes; returns them as they start. `sends` takes what each worker
    sends messages with.
    """
    started: list[TaskProcess] = []

    async def make(start: StartMessage, send: Send) -> Work:
        if sends is not None:
            sends.append(send)
        return Work(start.groups if isinstance(start, StartWorker) else (), reports)

    async def spawn(slot: int, groups: tuple[int, ...], heartbeat: Heartbeat, *_: object) -> Child:
        ours, theirs = socket.socketpair()
        process: Any = TaskProcess(theirs, make)
        started.append(process)
        return Child(slot, groups, process, await Channel.open(ours), heartbeat)

    monkeypatch.setattr(processes, "spawn", spawn)
    return started


@asynccontextmanager
async def serving(data: Path, settings: Settings | None = None, **more: Any) -> AsyncIterator[Supervisor]:
    """A service of eight vbuckets until the block ends."""
    arguments: dict[str, Any] = {"clock": SystemClock(), "look_up": look_up} | more
    made = Supervisor(settings or settings_for(data, workers=1), arguments.pop("look_up"), **arguments)
    async with service.serving(made):
        yield made


def vbucket(vbid: int, published: int = 5, high: int | None = 5, **more: Any) -> Report:
    return {
        "vbid": vbid, "state": "streaming", "node": "db1:11210" if high is not None else None,
        "published_seqno": published, "staged_seqno": published, "source_high_seqno": high, "vbuuid": 0xABC,
        "lag_seqnos": None if high is None else high - published,
        "documents": published, "rollback_count": 0,
    } | more  # fmt: skip


def vbids_of(groups: Sequence[int]) -> list[int]:
    """Of the eight vbuckets in four groups those of some groups."""
    return [vbid for vbid in range(8) if vbid % 4 in groups]
