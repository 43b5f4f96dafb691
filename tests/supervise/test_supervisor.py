"""A service as a whole: signals, and children that end with their supervisor."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mirror.errors import ExitCode
from tests.processes import ProcessGroup, end_group
from tests.supervise.conftest import eventually, eventually_now
from tests.supervise.scripted import settings_for
from tests.supervise.service import SCRIPTED, ask_now, children_of, phases, running, service_of


async def test_a_second_interrupt_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", "stubborn")
    service = service_of(tmp_path, settings=settings_for(tmp_path, stop_timeout_s=3600))
    task = asyncio.create_task(service.run())
    await eventually(running(service))
    os.kill(os.getpid(), signal.SIGINT)
    await eventually(lambda: phases(service) == ["stopping", "stopping"])
    os.kill(os.getpid(), signal.SIGINT)
    assert await task == ExitCode.DONE


def run(data: Path) -> bool:
    return [worker["phase"] for worker in ask_now(data)["workers"]] == ["running", "running"]


def started(data: Path) -> ProcessGroup:
    command = [sys.executable, str(SCRIPTED), "service", str(data)]
    return ProcessGroup(command, stderr=subprocess.DEVNULL, text=True, process_group=0)


def test_the_children_of_a_killed_supervisor_end(tmp_path: Path) -> None:
    """The kernel ends both a running child and a stopped one, which cannot notice anything."""
    with started(tmp_path) as service:
        children = eventually_now(lambda: len(children_of(service)) == 2 and children_of(service))
        assert children
        eventually_now(lambda: run(tmp_path))
        children[0].suspend()
        service.kill()
        service.wait()
        eventually_now(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    with started(tmp_path) as again:
        eventually_now(lambda: run(tmp_path))
        again.terminate()
        assert again.wait() == 0


def test_a_service_stops_when_its_terminal_closes(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, str(SCRIPTED), "service", str(tmp_path)])
    try:
        eventually_now(lambda: run(tmp_path))
    except BaseException:
        end_group(pid)
        raise
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ask_now(tmp_path)["workers"] == []
