"""The writer's own words, without Spark: what tasks report, what is committed, what is taken away."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mirror.errors import MirrorError
from mirror.spark.pipeline.sink import PartsSink, PartsWritten, Writer
from mirror.spark.runner import error_of
from mirror.spark.tables.parts import Part
from tests.spark.events import event, table_of

PREFIX = "part-0123456789abcdef-b7"


def writer(folder: Path, result_file: Path) -> Writer:
    options = {"folder": str(folder), "prefix": PREFIX, "result_file": str(result_file)}
    made = PartsSink(options).writer(None, overwrite=False)
    assert isinstance(made, Writer)
    return made


def test_the_parts_that_tasks_wrote_are_reported_to_the_driver(tmp_path: Path) -> None:
    sink = writer(tmp_path, tmp_path / "result.json")
    batches = table_of([event("mutation", "a", (1, 1)), event("deletion", "b", (1, 2))]).to_batches()
    written = sink.write(iter(batches))
    nothing = sink.write(iter([]))
    sink.commit([written, None, nothing])
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["problem"] is None
    (part,) = (Part(*each) for each in found["parts"])
    assert part.name.startswith(PREFIX)
    assert pq.read_table(tmp_path / part.name).column("key").to_pylist() == ["a", "b"]


def test_times_arrive_in_the_session_zone_and_are_written_in_utc(tmp_path: Path) -> None:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    table = table_of([event("mutation", "a", (1, 1), event_time=at)])
    schema = table.schema.set(len(table.schema) - 1, pa.field("event_time", pa.timestamp("us", "Asia/Tokyo")))
    written = writer(tmp_path, tmp_path / "result.json").write(iter(table.cast(schema).to_batches()))
    assert pq.read_table(tmp_path / written.parts[0].name).column("event_time").to_pylist() == [at]


def test_a_failed_write_of_a_task_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sink = writer(tmp_path / "file" / "below", tmp_path / "result.json")
    written = sink.write(iter(table_of([event("mutation", "a", (1, 1))]).to_batches()))
    sink.commit([written])
    problem = json.loads((tmp_path / "result.json").read_text())["problem"]
    found = error_of(RuntimeError(problem))
    assert isinstance(found, MirrorError)
    assert "cannot be written on" in found.what


def test_parts_of_a_job_that_failed_are_removed(tmp_path: Path) -> None:
    sink = writer(tmp_path, tmp_path / "result.json")
    written = sink.write(iter(table_of([event("mutation", "a", (1, 1))]).to_batches()))
    (tmp_path / "another.parquet").touch()
    sink.abort([written, None, PartsWritten([])])
    assert [path.name for path in tmp_path.iterdir()] == ["another.parquet"]
