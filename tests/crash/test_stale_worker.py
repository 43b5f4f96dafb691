"""Workers that are stopped: SIGSTOP, as a frozen virtual machine or a debugger does it, and waking up too late.

What must never happen: two processes that write one group. Against it stand the supervisor, which kills and reaps
before it starts another; the kernel, which kills a worker with its supervisor, stopped or not; the group's lock; and,
should all of them be outwitted, the fencing number that each write transaction looks at.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from tests.crash.judge import is_level, judge, wait_progress
from tests.crash.load import Load
from tests.crash.service import Service, gone, until

pytestmark = pytest.mark.ci
VBUCKETS = 8
FLAGS = ("--groups", "2", "--workers", "2")


@pytest.fixture
def source(seed: int) -> Iterator[SandboxThread]:
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=seed)
    load = Load(cluster, seed, rate=200, keys=400)
    with SandboxThread(cluster) as thread:
        thread.call(load.write, 500)
        writing = thread.call(lambda: asyncio.get_running_loop().create_task(load.run()))
        thread.load = load  # type: ignore[attr-defined]
        yield thread
        assert not writing.done(), writing
        thread.call(writing.cancel)


def test_a_worker_that_stands_still_is_replaced_and_never_wakes(source: SandboxThread, tmp_path: Path) -> None:
    patience = ("--set", "worker_heartbeat_timeout_s=2")
    with Service(source.connection_string, tmp_path / "data", *FLAGS, *patience) as service:
        service.start()
        stopped = service.wait_workers(2)[0]["pid"]
        wait_progress(service.data, range(VBUCKETS), "the mirror to follow")
        os.kill(stopped, signal.SIGSTOP)
        until(f"the stopped worker {stopped} to be killed", lambda: gone(stopped))
        workers = service.wait_workers(2)
        assert workers[0]["pid"] != stopped
        assert "heartbeat" in (workers[0]["last_error"] or ""), workers[0]
        wait_progress(service.data, range(VBUCKETS), "the replaced worker's vbuckets to go on")
        judge(source.cluster, service.data, live=True)
        assert service.terminate() == 0
    judge(source.cluster, service.data, live=False)


def test_a_stopped_worker_dies_with_its_supervisor(source: SandboxThread, tmp_path: Path) -> None:
    with Service(source.connection_string, tmp_path / "data", *FLAGS) as service:
        service.start()
        workers = service.wait_workers(2)
        wait_progress(service.data, range(VBUCKETS), "the mirror to follow")
        os.kill(workers[1]["pid"], signal.SIGSTOP)
        service.kill_supervisor()  # and fails if a worker outlives it
        judge(source.cluster, service.data, live=False)
        service.start()
        service.wait_workers(2)
        wait_progress(service.data, range(VBUCKETS), "the mirror to go on")
        assert service.terminate() == 0
    judge(source.cluster, service.data, live=False)


def test_a_worker_that_wakes_up_after_another_took_over_writes_nothing(source: SandboxThread, tmp_path: Path) -> None:
    """The locks were removed while a service slept, and another was started. The first wakes up with data in hand."""
    data = tmp_path / "data"
    never = ("--set", "worker_heartbeat_timeout_s=3600")
    sleeper = Service(source.connection_string, data, *FLAGS, *never, log=tmp_path / "sleeper.log")
    owner = Service(source.connection_string, data, *FLAGS, log=tmp_path / "owner.log")
    load: Load = source.load  # type: ignore[attr-defined]
    with sleeper, owner:
        sleeper.start()
        pids = [row["pid"] for row in sleeper.wait_workers(2).values()]
        wait_progress(data, range(VBUCKETS), "the mirror to follow")
        source.call(setattr, load, "rate", 0)  # so that no process is stopped inside of LMDB's own lock
        until("everything to be published", lambda: is_level(source.cluster, data), poll_s=0.1)
        until("the store to be synced", lambda: sleeper.status(), poll_s=0.1)
        for pid in (sleeper.pid, *pids):
            os.kill(pid, signal.SIGSTOP)
        try:
            for lock in (data / "service.lock", *data.glob("group-*/writer.lock")):
                lock.unlink()
            source.call(load.write, 400)  # lies in the sleeper's sockets when it wakes up
            source.call(setattr, load, "rate", 200)
            owner.start()
            until(
                "the owner's workers", lambda: owner.tail().count("process-ready") == 2
            )  # the sleeper's socket is mute
            wait_progress(data, range(VBUCKETS), "the new owner to follow")
        finally:
            for pid in (*pids, sleeper.pid):
                os.kill(pid, signal.SIGCONT)
        until(
            "the sleeper to find that it was overtaken",
            lambda: sleeper.log.read_text().count("another process took this group over") >= 2,
        )
        wait_progress(data, range(VBUCKETS), "the owner to go on next to the one that woke up")
        judge(source.cluster, data, live=True)
        sleeper.kill_supervisor()
        wait_progress(data, range(VBUCKETS), "the owner to go on alone")
        assert owner.terminate() == 0
    judge(source.cluster, data, live=False)
