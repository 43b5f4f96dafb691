"""A mirror under steady load for a long time, with kills, failovers and dead readers: nothing grows, and it ends equal.

    pytest -m long -n0 tests/crash/test_soak.py                            an hour
    DCP_MIRROR_SOAK_S=60 pytest -m long -n0 tests/crash/test_soak.py       a minute, with everything as much closer

In an hour: a kill each minute (a worker, then the supervisor), a failover every two, a killed reader every five.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psutil
import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from storage.env import directory
from storage.env.environment import SHARED
from storage.format import keys
from tests.crash.judge import is_level, judge
from tests.crash.load import Load
from tests.crash.service import Service, until

SECONDS = int(os.environ.get("DCP_MIRROR_SOAK_S", 3600))
SCALE = SECONDS / 3600
KILL_EVERY_S, FAIL_OVER_EVERY_S, READER_EVERY_S = 60 * SCALE, 120 * SCALE, 300 * SCALE
WARM_UP = 0.2
"""Of the time, before the figures count: history fills its window first."""
GROWTH_MAX = 1.5
NODES, VBUCKETS, GROUPS, WORKERS = 2, 16, 2, 2
RATE, KEYS = 200, 2000
READER = """
import sys, time
from storage.read.view import open_view
view = open_view(sys.argv[1], partial=True)
environment = view.groups.environment(0)
with environment.read() as txn:
    print("reading", flush=True)
    time.sleep(3600)
"""


class Figures(NamedTuple):
    """Figures that must not grow."""

    memory_bytes: int
    file_bytes: int
    descriptors: int
    branches: int
    manifests: int

    def within(self, before: Figures) -> list[str]:
        """Which have grown, beyond what noise explains."""
        slack = Figures(32 << 20, 8 << 20, 20, 40, 40)
        return [
            f"{name}: {old} -> {new}"
            for name, old, new, more in zip(self._fields, before, self, slack, strict=True)
            if new > old * GROWTH_MAX + more
        ]


def figures(service: Service) -> Figures:
    processes = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
    identity = directory.load(str(service.data))
    branches = manifests = file_bytes = 0
    for group in range(GROUPS):
        path = directory.group_path(str(service.data), group)
        file_bytes += os.path.getsize(f"{path}/data.mdb")
        environment = SHARED.acquire(path, identity.group_vbids(group))
        try:
            environment.open_all()
            with environment.read() as txn:
                branches += txn.stat(keys.DB_BRANCH)["entries"]
                manifests += txn.stat(keys.DB_MANIFEST)["entries"]
        finally:
            SHARED.release(environment)
    memory = sum(process.memory_info().rss for process in processes)
    return Figures(memory, file_bytes, sum(process.num_fds() for process in processes), branches, manifests)


def kill_a_reader(data: Path) -> None:
    """Kill a reader with an open transaction, which it then never closes."""
    reader = subprocess.Popen([sys.executable, "-c", READER, str(data)], stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"reading\n"
    reader.kill()
    reader.wait()
    reader.stdout.close()


def fail_over(cluster: SandboxCluster, rng: Random) -> None:
    """With or without the loss of a tail."""
    vbid = rng.randrange(VBUCKETS)
    cluster.failover(vbid, lose=min(rng.choice((0, 1, 5, 20)), cluster.vbucket(vbid).high_seqno))


@pytest.mark.long
@pytest.mark.timeout(SECONDS * 2 + 600)
def test_a_long_run_under_load_keeps_its_size_and_ends_equal(tmp_path: Path, seed: int, record_property: Any) -> None:
    rng = Random(seed)
    cluster = SandboxCluster(nodes=NODES, vbuckets=VBUCKETS, seed=seed, checkpoint_items_max=200, checkpoints_kept=3)
    load = Load(cluster, seed, rate=RATE, keys=KEYS, collections=False)
    flags = ["--groups", str(GROUPS), "--workers", str(WORKERS)]
    flags += ["--set", f"history_s={max(1, int(300 * SCALE))}"]
    done = dict.fromkeys(("kills", "failovers", "readers"), 0)
    samples: list[Figures] = []
    with SandboxThread(cluster) as source, Service(source.connection_string, tmp_path / "data", *flags) as service:
        source.call(load.write, 2000)
        writing = source.call(lambda: asyncio.get_running_loop().create_task(load.run()))
        service.start()
        service.wait_workers(WORKERS)
        began = time.monotonic()
        while (elapsed_s := time.monotonic() - began) < SECONDS:
            if elapsed_s >= SECONDS * (WARM_UP + (1 - WARM_UP) / 2 * len(samples)):
                service.wait_workers(WORKERS)
                samples.append(figures(service))
            if elapsed_s >= KILL_EVERY_S * (done["kills"] + 1):
                if done["kills"] % 2:
                    service.kill_supervisor()
                    service.start()
                else:
                    service.kill(service.wait_workers(WORKERS)[rng.randrange(WORKERS)]["pid"])
                done["kills"] += 1
            if elapsed_s >= FAIL_OVER_EVERY_S * (done["failovers"] + 1):
                source.call(fail_over, cluster, rng)
                done["failovers"] += 1
            if elapsed_s >= READER_EVERY_S * (done["readers"] + 1):
                kill_a_reader(service.data)
                done["readers"] += 1
            time.sleep(min(0.2, KILL_EVERY_S / 10))
        service.wait_workers(WORKERS)
        samples.append(figures(service))
        load.rate = 0
        until("all of the source", lambda: is_level(cluster, service.data), poll_s=0.1)
        assert not writing.done(), writing
        source.call(writing.cancel)
        assert service.terminate() == 0
        judge(cluster, service.data, live=False)
        assert not service.tracebacks()
    start, middle, end = samples[0], samples[len(samples) // 2], samples[-1]
    record_property(
        "kills", f"{SECONDS} s, {load.written} writes, {done}; figures at start {start}, middle {middle}, end {end}"
    )
    assert not end.within(start), f"grown since the start: {end.within(start)}, middle {middle}"
