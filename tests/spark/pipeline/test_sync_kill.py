"""SIGKILL of `sync`, of its processes and of the mirror, in the middle of batches and merges, with failovers between.

test_standalone.py does the same on a cluster of Spark.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from mirror.spark.pipeline.sync import How, sync
from mirror.spark.places import folder_at
from mirror.spark.runner import LocalRunner
from mirror.spark.tables.documents import BATCH_MARK, batch_of
from tests.cli.conftest import COMMAND, environment
from tests.crash.service import until
from tests.spark.mirrors import SmallMirror, scanned
from tests.spark.sessions import ObjectStore
from tests.spark.standalone import spark_environment
from tests.spark.stream_rig import LIMIT_S, VBUCKETS, LocalDriver, through_kills

VICTIMS = ("worker", "workers", "mirror", "driver", "driver and workers")

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS)) as thread:
        yield thread


@pytest.mark.parametrize(
    ("victims", "changes", "rate"),
    [
        pytest.param(["worker", "mirror", "driver and workers"], 2_000, 200, id="3"),
        pytest.param(
            Random(7).choices(VICTIMS, k=40), 100_000, 400, id="40", marks=[pytest.mark.long, pytest.mark.timeout(7200)]
        ),
    ],
)
def test_the_tables_are_exact_whichever_process_was_killed_at_work(
    source: SandboxThread, tmp_path: Path, victims: list[str], changes: int, rate: int, record_property: Any
) -> None:
    record_property("kills", through_kills(source, tmp_path, LocalDriver, victims, changes, rate))


def write_and_roll_back(small: SmallMirror) -> Iterator[None]:
    """Write; then roll back and write again over what was read."""
    rng = Random(20261123)
    first: dict[int, int] = {}
    for turn in range(2):
        for part in range(3):
            small.put({f"k{rng.randrange(300)}": b'{"turn":%d,"part":%d}' % (turn, part) for _ in range(200)})
            first = first or dict(small.seqnos)
        small.put({f"k{number}": None for number in rng.sample(range(300), 20)})
        if turn == 0:
            yield
            for vbid in range(4):
                small.roll_back(vbid, first[vbid])
    yield


def test_tables_in_an_object_store_are_exact_after_kills_of_the_driver(s3: ObjectStore, tmp_path: Path) -> None:
    small = SmallMirror(tmp_path / "data")
    changes = folder_at("s3://lake/killed/changes")
    command = [*COMMAND, "sync", "--data", str(small.path), "--to", "s3://lake/killed", "--available-now"]

    def files_of_no_commit() -> bool:
        done = DeltaTable(changes.url).transaction_version(BATCH_MARK) if changes.names() else None
        return any((batch_of(name) or 0) > (-1 if done is None else done) for name in changes.names() if "-b" in name)

    for _ in write_and_roll_back(small):
        process = subprocess.Popen(
            [*command, "--max-age", "0", "--max-rows", "100"], env=environment(**s3.env), process_group=0
        )
        kill_when(files_of_no_commit, process)
        sync(
            {"path": str(small.path), "maxRowsPerBatch": "100"},
            "s3://lake/killed",
            LocalRunner(1),
            How(available_now=True),
        )
    found = DeltaTable("s3://lake/killed/documents").to_pyarrow_table(columns=["key", "seqno", "value"]).to_pylist()
    assert {row["key"]: (row["seqno"], row["value"]) for row in found} == scanned(small.path)
    assert len(found) == len(scanned(small.path))
    rows = DeltaTable(changes.url).to_pyarrow_table(columns=["vbid", "key", "at_branch", "at_seqno", "kind"])
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


def test_a_custom_stream_has_each_event_once_after_kills(spark: SparkSession, tmp_path: Path) -> None:
    """Spark's own sink of files, and the upsert that the documents give: strictly by (at_branch, at_seqno)."""
    small = SmallMirror(tmp_path / "data")
    stream = OWN_STREAM.format(data=str(small.path), folder=str(tmp_path))
    written = write_and_roll_back(small)
    next(written)
    exec(stream, {})
    next(written)
    kill_in_batch([sys.executable, "-c", stream], tmp_path / "checkpoint")
    exec(stream, {})
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


def kill_in_batch(command: list[str], checkpoint: Path) -> None:
    """Spark's checkpoint proves that a batch ran: its begin is on disk, its end is not."""

    def running() -> bool:
        begun, done = (newest(checkpoint / name) for name in ("offsets", "commits"))
        return begun > done

    kill_when(running, subprocess.Popen(command, env=spark_environment(), start_new_session=True))


def kill_when(at_work: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group at work. They are stopped while it is decided: looking may outlast a batch."""
    while True:
        until("a batch", lambda: process.poll() is not None or at_work(), limit_s=LIMIT_S, poll_s=0.002)
        assert process.poll() is None, "it ended by itself, and was never seen at work"
        os.killpg(process.pid, signal.SIGSTOP)
        hit = at_work()
        os.killpg(process.pid, signal.SIGKILL if hit else signal.SIGCONT)
        if hit:
            process.wait()
            assert at_work(), "what it was killed in is not finished"
            return


def newest(folder: Path) -> int:
    """The highest number among the files; Spark writes them under another name first."""
    return max((int(path.name) for path in folder.glob("[0-9]*")), default=-1)
