"""SIGKILL of driver and mirror in the middle of batches, and failovers that lose what was reported already.

Whatever dies, and whenever: each event is in `changes` once, what the source lost is taken back, and `documents` is the
source. Each kill is proved to have hit a running batch by Spark's own checkpoint.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.bucket import vbucket_of
from mirror.sandbox.thread import SandboxThread
from mirror.spark.pipeline.sync import How, sync
from tests.cli.conftest import COMMAND
from tests.crash.load import Load
from tests.crash.service import Service, until
from tests.spark.mirrors import SmallMirror, scanned
from tests.spark.sessions import ObjectStore
from tests.spark.standalone import spark_environment
from tests.spark.stream_rig import LIMIT_S, Stream, follow, newest, verdict

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
        pytest.param(2_000, 2, 150, marks=pytest.mark.ci),
        pytest.param(300_000, 20, 400, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_the_tables_are_exact_after_a_kill_of_any_process_during_a_batch(
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
    stream = Stream(
        lake, "--data", str(data), "--trigger", "0.2", "--max-age", "0", "--max-rows", str(max(500, changes // 20))
    )
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


class Killed:
    """A streaming program that is killed again and again, over a mirror that is written and rolled back meanwhile."""

    def __init__(self, command: list[str], checkpoint: Path, log: Path) -> None:
        self._command = command
        self._checkpoint = checkpoint
        self._log = log

    def kill_in_batch(self) -> None:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                self._command, env=spark_environment(), stdout=log, stderr=log, start_new_session=True
            )
        until("a batch to run", lambda: process.poll() is not None or self._running(), limit_s=LIMIT_S, poll_s=0.002)
        assert process.poll() is None, self._log.read_text()[-3000:]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert self._running(), "the checkpoint has the batch in which it was killed"

    def _running(self) -> bool:
        begun, done = (newest(self._checkpoint / name) for name in ("offsets", "commits"))
        return begun > done


def through_kills(small: SmallMirror, killed: Killed, finish: Callable[[], object]) -> None:
    """All is read, then rolled back; then killed over the retractions of what was read.

    `finish` runs the same stream to its end in this process.
    """
    rng = Random(20261123)
    first: dict[int, int] = {}
    for turn in range(2):
        for part in range(3):
            small.put({f"k{rng.randrange(300)}": b'{"turn":%d,"part":%d}' % (turn, part) for _ in range(200)})
            first = first or dict(small.seqnos)
        small.put({f"k{number}": None for number in rng.sample(range(300), 20)})
        if turn == 0:
            finish()
            for vbid in range(4):
                small.roll_back(vbid, first[vbid])
    killed.kill_in_batch()
    finish()


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_tables_in_an_object_store_are_exact_after_kills_of_the_driver(
    spark: SparkSession, s3: ObjectStore, tmp_path: Path
) -> None:
    small = SmallMirror(tmp_path / "data")
    where, checkpoint = "s3://lake/killed", tmp_path / "checkpoint"
    command = [*COMMAND, "sync", "--data", str(small.path), "--to", where, "--checkpoint", str(checkpoint)]
    killed = Killed([*command, "--available-now", "--max-age", "0", "--max-rows", "300"], checkpoint, tmp_path / "log")
    source = {"path": str(small.path), "maxRowsPerBatch": "300"}
    through_kills(small, killed, lambda: sync(spark, source, where, How(checkpoint, available_now=True)))
    found = DeltaTable(f"{where}/documents").to_pyarrow_table(columns=["key", "seqno", "value"]).to_pylist()
    assert {row["key"]: (row["seqno"], row["value"]) for row in found} == scanned(small.path)
    assert len(found) == len(scanned(small.path))
    rows = DeltaTable(f"{where}/changes").to_pyarrow_table(columns=["vbid", "key", "at_branch", "at_seqno", "kind"])
    events = [tuple(row.values()) for row in rows.to_pylist()]
    assert len(events) == len(set(events))
    assert "retraction" in {kind for *_, kind in events}
    small.close()


OWN_STREAM = """
from pyspark_mirror import session
changes = session().readStream.format("mirror").options(table="changes", maxRowsPerBatch="300").load({data!r})
writer = changes.writeStream.option("checkpointLocation", {folder!r} + "/checkpoint").format("parquet")
writer.trigger(availableNow=True).start({folder!r} + "/out").awaitTermination()
"""


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_custom_stream_has_each_event_once_after_kills(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's own sink of files, and the upsert that the documents give: strictly by (at_branch, at_seqno)."""
    small = SmallMirror(tmp_path / "data")
    stream = OWN_STREAM.format(data=str(small.path), folder=str(tmp_path))
    killed = Killed([sys.executable, "-c", stream], tmp_path / "checkpoint", tmp_path / "log")
    through_kills(small, killed, lambda: exec(stream, {}))
    rows = spark.read.parquet(str(tmp_path / "out")).select("key", "at_branch", "at_seqno", "kind", "seqno", "value")
    found = [tuple(row) for row in rows.collect()]
    assert len(found) == len({row[:3] for row in found})
    assert {"retraction", "restoration"} <= {kind for _, _, _, kind, _, _ in found}
    last = {
        key: (kind, seqno, bytes(value or b"")) for key, *_, kind, seqno, value in sorted(found, key=lambda r: r[:3])
    }
    current = {key: (seqno, value) for key, (kind, seqno, value) in last.items() if kind in ("mutation", "restoration")}
    assert current == scanned(small.path)
    small.close()
