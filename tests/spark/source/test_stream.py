"""Changes in Spark: a query with a checkpoint that is stopped and started again, over rollbacks; what can be shown
without Spark is in `test_changes.py` and `test_remote.py`.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows

from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.spark.source.changes_stream import ChangesStream
from mirror.spark.source.options import parse
from tests.spark.mirrors import SmallMirror, order, orders, scanned
from tests.spark.source.test_source import message_of

Row = dict[str, Any]


class Table:
    """A table by foreachBatch: upserts by (at_branch, at_seqno), and the size of each batch."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.sizes: list[int] = []
        self.kinds: set[str] = set()

    def __call__(self, batch: DataFrame, number: int) -> None:
        found = [row.asDict() for row in batch.collect()]
        self.sizes.append(len(found))
        for row in found:
            self.kinds.add(row["kind"])
            held = self.rows.get(row["key"])
            if held is None or (row["at_branch"], row["at_seqno"]) > (held["at_branch"], held["at_seqno"]):
                self.rows[row["key"]] = row

    @property
    def state(self) -> dict[str, tuple[int, bytes]]:
        return {
            key: (row["seqno"], bytes(row["value"]))
            for key, row in self.rows.items()
            if row["kind"] in ("mutation", "restoration")
        }


def run(spark: SparkSession, table: Table, checkpoint: Path, **options: str) -> None:
    stream = spark.readStream.format("mirror").options(table="changes", **options).load()
    writer = stream.writeStream.foreachBatch(table).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()


def test_a_query_follows_a_mirror_through_rollbacks_and_restarts(
    spark: SparkSession, small: SmallMirror, tmp_path: Path
) -> None:
    table, checkpoint, path = Table(), tmp_path / "checkpoint", str(small.path)
    small.put(orders(0, 120))
    first = dict(small.seqnos)
    small.put({f"order::{number:06d}": order(number + 1) for number in range(40)})
    run(spark, table, checkpoint, path=path, maxRowsPerBatch="100")
    assert sum(table.sizes) == 160
    assert max(table.sizes) <= 100
    for vbid in (1, 2, 3):
        small.roll_back(vbid, first[vbid])
    small.put({f"order::{number:06d}": None for number in range(100, 110)})
    run(spark, table, checkpoint, path=path)
    assert table.state == scanned(small.path)
    assert table.kinds == {"mutation", "deletion", "retraction", "restoration"}


@pytest.mark.ci
def test_a_query_over_a_connection_resumes_at_its_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    table, checkpoint = Table(), tmp_path / "checkpoint"
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=8)) as source:
        source.call(lambda: [source.cluster.set(f"k{number}", {"n": number}) for number in range(200)])
        run(spark, table, checkpoint, connection=source.connection_string)
        source.call(lambda: [source.cluster.set(f"k{number}", {"n": 0}) for number in range(50)])
        source.call(source.cluster.delete, "k70")
        run(spark, table, checkpoint, connection=source.connection_string)
    assert sum(table.sizes) == 251
    assert {key: value for key, (_, value) in table.state.items()} == {
        f"k{number}": b'{"n":%d}' % (0 if number < 50 else number) for number in range(200) if number != 70
    }


def test_a_batch_query_of_changes_has_all_of_them(spark: SparkSession, small: SmallMirror) -> None:
    frame = spark.read.format("mirror").options(path=str(small.path), table="changes", columns="kind,key")
    small.put(orders(0, 30))
    small.put({"order::000003": None})
    assert sorted(row.kind for row in frame.load().collect()) == ["deletion"] + ["mutation"] * 30


@pytest.mark.ci
def test_an_impossible_stream_is_refused_in_one_line(spark: SparkSession, small: SmallMirror, tmp_path: Path) -> None:
    path, table = str(small.path), Table()
    small.put(orders(0, 50))
    documents = spark.readStream.format("mirror").load(path).writeStream.foreachBatch(table)
    query = documents.option("checkpointLocation", str(tmp_path / "documents")).start()
    assert "documents cannot be streamed (set option table=changes)" in message_of(query.awaitTermination)
    checkpoint = tmp_path / "checkpoint"
    run(spark, table, checkpoint, path=path)
    run(spark, table, checkpoint, path=path)
    assert len(table.sizes) == 1, "nothing new is no batch"
    said = message_of(lambda: run(spark, table, checkpoint, path=path, collection="_default"))
    assert "was made with all collections and vbuckets, not collection=_default._default" in said
    small.put({f"order::{number:06d}": None for number in range(50)})
    small.put(orders(60, 60))
    small.purge(boundaries=1)
    said = message_of(lambda: run(spark, table, checkpoint, path=path))
    assert "cannot be followed" in said
    assert "onLostHistory=resync" in said
    run(spark, table, checkpoint, path=path, onLostHistory="resync")
    assert "resync" in table.kinds


def test_a_query_from_latest_begins_at_the_moment_of_its_start(small: SmallMirror) -> None:
    """Spark asks for the initial offset again for each plan; each answer was later than the end, or skipped events."""
    given = parse({"path": str(small.path), "table": "changes", "startingFrom": "latest"})
    small.put(orders(0, 50))
    stream = ChangesStream(given)
    stream.prepareForTriggerAvailableNow()
    small.put(orders(20, 60))
    first = stream.initialOffset()
    small.put(orders(0, 30))
    assert stream.initialOffset() == first
    assert stream.latestOffset(first, ReadMaxRows(1000)) == first
    assert stream.partitions(first, first) == []
    assert stream.latestOffset(first, ReadMaxRows(1000)) == first  # the end was fixed before the start
    stream.stop()
    running = ChangesStream(given)
    first = running.initialOffset()
    assert running.latestOffset(first, ReadMaxRows(1000)) == first
    small.put(orders(0, 10))
    end = running.latestOffset(first, ReadMaxRows(1000))
    again = ChangesStream(given)  # after a crash in the first batch, whose end is in the checkpoint
    small.put(orders(0, 10))
    assert again.partitions(again.initialOffset(), first) == []
    rows = [row for task in running.partitions(first, end) for each in running.read(task) for row in each.to_pylist()]
    assert sorted(row["key"] for row in rows) == sorted(orders(0, 10))
    for each in (running, again):
        each.stop()


@pytest.mark.ci
def test_a_query_from_latest_to_available_now_ends_while_the_mirror_is_written(
    spark: SparkSession, small: SmallMirror, tmp_path: Path
) -> None:
    small.put(orders(0, 50))
    ended, table = threading.Event(), Table()

    def write() -> None:
        while not ended.wait(0.01):
            small.put(orders(0, 8))

    writing = threading.Thread(target=write)
    writing.start()
    try:
        run(spark, table, tmp_path / "checkpoint", path=str(small.path), startingFrom="latest")
    finally:
        ended.set()
        writing.join()
    small.put(orders(60, 5))
    run(spark, table, tmp_path / "checkpoint", path=str(small.path), startingFrom="latest")
    assert {f"order::{number:06d}" for number in range(60, 65)} <= table.rows.keys()
    assert "order::000020" not in table.rows
