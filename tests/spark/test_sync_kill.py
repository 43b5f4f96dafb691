"""SIGKILL of driver and mirror in the middle of batches, and failovers that lose what was reported already.

Whatever dies, and whenever: each event is in `changes` once, what the source lost is taken back, and `documents` is the
source. Each kill is proved to have hit a running batch by Spark's own checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mirror.sandbox.bucket import vbucket_of
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from tests.crash.load import Load
from tests.crash.service import Service, until
from tests.spark.stream_rig import LIMIT_S, Stream, follow, verdict

VBUCKETS = 16
KEYS = 800
ROLLBACKS = 3
TAIL = 6

pytestmark = pytest.mark.xdist_group("spark processes")


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS)) as thread:
        yield thread


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("changes", "kills", "rate"),
    [
        pytest.param(4_000, 2, 150, marks=pytest.mark.ci),
        pytest.param(300_000, 20, 400, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_the_tables_are_exact_whichever_process_was_killed_in_mid_batch(
    source: SandboxThread, tmp_path: Path, changes: int, kills: int, rate: int, record_property: Any
) -> None:
    seed = 20261121
    record_property("seed", seed)
    rng = Random(seed)
    rollbacks = min(kills, ROLLBACKS)
    load = Load(source.cluster, seed, rate=0, keys=KEYS)
    source.call(load.write, changes // 2)
    writing = asyncio.run_coroutine_threadsafe(load.run(), source._loop)
    tails = itertools.count()
    data, lake = tmp_path / "data", tmp_path / "lake"
    stream = Stream(lake, "--data", str(data), "--trigger", "0.2", "--max-rows", str(max(500, changes // 20)))
    with Service(source.connection_string, data, "--groups", "4", "--workers", "2") as service, stream:
        service.start()
        follow(source, data)
        stream.start()
        load.rate = rate
        for number in range(kills):
            if number % 2:
                stream.kill_in_batch("mirror", lambda: os.kill(service.pid, signal.SIGKILL), lambda: bury(service))
            else:
                whole = bool(rng.randrange(2))
                stream.kill_in_batch("driver", partial(stream.kill_driver, whole_group=whole), stream.start)
            if number < rollbacks:
                lose_a_tail(source, load, stream, data, f"tail{next(tails)}")
            left = changes // 2 * (number + 1) // kills - (load.written - changes // 2)
            source.call(load.write, max(0, left))
        load.rate = 0
        writing.cancel()
        follow(source, data)
        stream.terminate()
        stream.finish()
        found = verdict(source, data, lake)
    record_property("kills", f"{'; '.join(map(str, stream.kills))}; {found}")
    assert len(stream.kills) == kills
    assert load.written >= changes
    assert found["rollbacks"] >= rollbacks
    assert found["retractions"] >= rollbacks * TAIL
    assert service.tracebacks() == ""


def bury(service: Service) -> None:
    """Wait until its workers have followed it, then start it again."""
    service.kill_supervisor()
    service.start()


def lose_a_tail(source: SandboxThread, load: Load, stream: Stream, data: Path, name: str) -> None:
    """A failover that loses what the stream has reported already."""
    rate, load.rate = load.rate, 0
    follow(source, data)
    keys = [f"{name}-{number}" for number in range(TAIL)]
    for key in keys:
        source.call(source.cluster.set, key, b'{"tail": true}')
    vbids = sorted({vbucket_of(key.encode(), VBUCKETS) for key in keys})
    until("the tail to be reported", lambda: set(keys) <= stream.keys_reported(), limit_s=LIMIT_S, poll_s=0.2)
    for vbid in vbids:
        source.call(source.cluster.failover, vbid, lose=TAIL)
    load.rate = rate
