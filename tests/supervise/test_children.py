from __future__ import annotations

import asyncio
import errno
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from mirror.config import to_wire
from mirror.errors import SupervisionError
from mirror.messages import Answer, Ready, Resync, StartWorker
from mirror.supervise.processes.child import UNKNOWN, Child, ChildExited, ChildMessage, Gauge, private_bytes, spawn
from mirror.supervise.processes.plan import Heartbeat
from tests.supervise.scripted import settings_for, worker_command

M = TypeVar("M", Ready, Answer)
Events = asyncio.Queue[ChildMessage | ChildExited]


async def start(data: Path) -> tuple[Child, Events]:
    events: Events = asyncio.Queue()
    child = await spawn(0, (0, 1), Heartbeat(0), worker_command)
    child.watch(events.put_nowait)
    child.send(StartWorker(slot=0, groups=[0, 1], settings=to_wire(settings_for(data))))
    await until(events, Ready)
    return child, events


async def until(events: Events, kind: type[M]) -> M:
    while True:
        event = await events.get()
        assert isinstance(event, ChildMessage)
        if isinstance(event.message, kind):
            return event.message


async def until_gone(events: Events) -> ChildExited:
    while True:
        event = await events.get()
        if isinstance(event, ChildExited):
            return event


async def test_the_death_of_a_child_is_its_last_event(tmp_path: Path) -> None:
    child, events = await start(tmp_path)
    child.kill()
    assert (await until_gone(events)).status == -signal.SIGKILL
    assert events.empty()
    assert not psutil.pid_exists(child.pid)
    child.kill()


async def test_a_request_to_a_dead_child_fails_at_once(tmp_path: Path) -> None:
    child, events = await start(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    question = asyncio.create_task(child.request(Resync(1), timeout_s=3600))
    await asyncio.sleep(0)
    child.kill()
    await until_gone(events)
    with pytest.raises(SupervisionError, match="gone"):
        await question


async def test_a_request_that_is_not_answered_in_time_fails(tmp_path: Path) -> None:
    child, events = await start(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(SupervisionError, match=r"^worker 0 did not answer within"):
        await child.request(Resync(1), timeout_s=0.05)
    child.kill()
    await until_gone(events)


async def test_a_child_that_sends_garbage_is_killed() -> None:
    code = "import os, sys, time; os.write(int(sys.argv[1]), b'\\xff' * 8); time.sleep(3600)"
    events: Events = asyncio.Queue()
    child = await spawn(0, (0,), Heartbeat(0), lambda descriptor: [sys.executable, "-c", code, str(descriptor)])
    child.watch(events.put_nowait)
    assert (await until_gone(events)).status == -signal.SIGKILL
    assert "limit" in str(child.exit_report)


async def test_a_program_that_cannot_be_started_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        await spawn(0, (0,), Heartbeat(0), lambda descriptor: ["/nonexistent/python"])


async def test_a_server_is_called_by_its_name() -> None:
    child = await spawn(1000, (), Heartbeat(0), lambda _: [sys.executable, "-c", "import time; time.sleep(3600)"])
    with pytest.raises(SupervisionError, match=r"^kv 0 did not answer within"):
        await child.request(Resync(1), timeout_s=0.05)
    events: Events = asyncio.Queue()
    child.watch(events.put_nowait)
    child.kill()
    await until_gone(events)


def test_a_living_process_has_figures() -> None:
    figures: dict[str, Any] = {**Gauge(os.getpid()).read()}
    assert figures["cpu_percent"] >= 0
    assert figures["private_bytes"] is not None
    assert 1_000_000 < figures["private_bytes"] <= figures["resident_bytes"]
    assert figures["threads"] >= 1
    assert figures["open_files"] >= 3


def test_private_memory_does_not_count_mapped_files(tmp_path: Path) -> None:
    before = private_bytes(os.getpid())
    held = bytearray(os.urandom(32 * 1024 * 1024))
    after = private_bytes(os.getpid())
    assert before is not None
    assert after is not None
    assert after - before > 30 * 1024 * 1024
    with (tmp_path / "file").open("wb+") as file:
        file.write(held)
        file.flush()
        with mmap.mmap(file.fileno(), len(held), prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == held  # pages in
            mapped_too = private_bytes(os.getpid())
    assert mapped_too is not None
    assert mapped_too - after < 16 * 1024 * 1024


def test_a_process_that_has_ended_has_no_figures() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        gauge = Gauge(process.pid)
        process.wait()
    assert gauge.read() == UNKNOWN
    assert private_bytes(process.pid) is None
    assert Gauge(process.pid).read() == UNKNOWN


def test_figures_are_unknown_when_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status command failed when the limit of open files was reached."""
    gauge = Gauge(os.getpid())

    def refuse(_: object) -> float:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil.Process, "cpu_percent", refuse)
    assert gauge.read() == UNKNOWN
