"""Worker processes of a running service: what is killed is replaced, and a crash loop is slowed down."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from mirror.supervise.processes.table import exit_words
from tests.supervise.conftest import eventually
from tests.supervise.scripted import settings_for, worker_command
from tests.supervise.service import pids, running, service_of, serving


async def test_a_crash_loop_is_slowed_down_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(service_of(tmp_path)) as service:
        await eventually(running(service))
        monkeypatch.setenv("SCRIPT", "crash")
        victim, other = pids(service)
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: service.reports.document()["workers"][0]["last_exit"] == "SIGKILL")
        await eventually(lambda: service.reports.document()["workers"][0]["restarts"] >= 2)
        assert service.reports.document()["workers"][0]["last_exit"] == "SIGSEGV"
        assert pids(service)[1] == other
        monkeypatch.setenv("SCRIPT", "")
        await eventually(running(service))


async def test_the_last_error_of_a_dead_worker_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", "bug")
    async with serving(service_of(tmp_path)) as service:
        await eventually(lambda: any(worker["last_exit"] for worker in service.reports.document()["workers"]))
        ended = {each["last_exit"]: each["last_error"] or "" for each in service.reports.document()["workers"]}
        assert ended["exit 1"].startswith("internal error: ZeroDivisionError: a bug")


async def test_a_worker_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", "stubborn")
    service = service_of(tmp_path, settings=settings_for(tmp_path, stop_timeout_s=0.5))
    async with serving(service):
        await eventually(running(service))
        children = pids(service)
    assert not any(psutil.pid_exists(pid) for pid in children)
    assert {worker["last_exit"] for worker in service.reports.document()["workers"]} == {"SIGKILL"}


async def test_a_worker_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    tries = []

    def command(descriptor: int) -> list[str]:
        tries.append(descriptor)
        return list(worker_command(descriptor)) if len(tries) > 2 else ["/nonexistent/python"]

    async with serving(service_of(tmp_path, command=command)) as service:
        await eventually(running(service))
        assert len(tries) == 4


def test_the_exit_status_is_shown_in_words() -> None:
    assert [exit_words(status) for status in (3, -9, -200)] == ["exit 3", "SIGKILL", "signal 200"]
