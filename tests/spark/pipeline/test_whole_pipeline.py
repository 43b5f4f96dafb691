"""All pipelines one after the other, on documents with xattrs, compressed and not: a backfill, a mirror that goes on
from it, typed tables of each collection, a failover that loses what they had, a reader of them, a comparison.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from mirror.config import Settings
from mirror.config_reader import load
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.bucket import vbucket_of
from mirror.sandbox.thread import SandboxThread
from mirror.spark.pipeline.backfill import backfill
from mirror.spark.pipeline.compare import compare
from mirror.spark.pipeline.runner import LocalRunner
from mirror.spark.pipeline.sync import How, Synced, sync
from mirror.spark.tables.documents import Layout, Layouts
from mirror.spark.tables.lake import Costs
from mirror.typed.ddl import fields_of
from tests.crash.service import Service
from tests.spark.stream_rig import follow

VBUCKETS = 16
DOCUMENTS = 120
TABLES = ("_default._default", "s.c")

State = dict[tuple[str, str], tuple[int | None, str | None]]


def write(cluster: SandboxCluster, key: str, number: int, collection: str) -> None:
    """A document with or without xattrs, compressed or not, by its number."""
    body = json.dumps({"n": number, "name": "name " * 20 + str(number)}).encode()
    xattrs: dict[str, object] = {"_sync": {"rev": number}, "user": "x" * 100} if number % 3 else {}
    cluster.bucket.set(key, body, collection=collection, xattrs=xattrs, compressed=number % 2 == 0)


def fill(cluster: SandboxCluster) -> None:
    cluster.bucket.create_scope("s")
    cluster.bucket.create_collection("s", "c")
    for number in range(DOCUMENTS):
        write(cluster, f"k{number}", number, TABLES[number % 4 == 0])
    for number in range(0, DOCUMENTS, 10):
        cluster.bucket.delete(f"k{number}", collection=TABLES[number % 4 == 0])


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS)) as thread:
        thread.call(fill, thread.cluster)
        yield thread


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "demo")
    return load().settings


def rows_of(lake: Path, collection: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = DeltaTable(str(lake / "collections" / collection)).to_pyarrow_table().to_pylist()
    return rows


def state_of(lake: Path) -> State:
    found: State = {}
    for collection in TABLES:
        rows = rows_of(lake, collection)
        state: State = {(collection, row["_key"]): (row["n"], row["name"]) for row in rows}
        assert len(state) == len(rows), "a document stands twice"
        for row in rows:
            assert row["_datatype"] == 1, "compression and xattrs are gone"
            assert json.loads(row["_value"])["n"] == row["n"]
        found |= state
    return found


class Reader(threading.Thread):
    """Reads the newest version of a table, again and again, and keeps what went wrong."""

    def __init__(self, lake: Path) -> None:
        super().__init__(daemon=True)
        self._lake = lake
        self._ended = threading.Event()
        self.problems: list[str] = []
        self.counts: Counter[int] = Counter()

    def run(self) -> None:
        while True:
            last = self._ended.is_set()
            try:
                for collection in TABLES:
                    rows = rows_of(self._lake, collection)
                    if len({row["_key"] for row in rows}) != len(rows):
                        self.problems.append("a document stands twice")
                    self.counts[len(rows)] += 1
            except Exception as error:
                self.problems.append(repr(error))
            if last:
                return

    def end(self) -> None:
        self._ended.set()
        self.join()


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_tables_are_the_source_from_its_backfill_through_a_failover_while_they_are_read(
    spark: SparkSession, source: SandboxThread, settings: Settings, tmp_path: Path
) -> None:
    data, lake = tmp_path / "data", tmp_path / "lake"
    layouts = Layouts(per_collection=True, others=Layout(fields_of("n int, name string")))
    how = How(available_now=True, layouts=layouts, costs=Costs(rewrite_rate=0), tidy_batches=1)

    def synced() -> Synced:
        follow(source, data)
        done = sync(spark, {"path": str(data)}, lake, how)
        assert done.misfits == 0
        return done

    def expected() -> State:
        state: State = {}
        for number, collection in written.items():
            state[collection, f"k{number}"] = (number, "name " * 20 + str(number))
        return state

    written = {number: TABLES[number % 4 == 0] for number in range(DOCUMENTS) if number % 10}
    done = backfill(data, replace(settings, source=source.connection_string, groups=2), LocalRunner(1))
    assert done.vbuckets == VBUCKETS
    with Service(source.connection_string, data, "--workers", "1") as service:
        service.start()
        synced()
        assert state_of(lake) == expected()

        reader = Reader(lake)
        reader.start()
        lost = [number for number in range(1000, 1012) if number % 4]
        for number in lost:
            source.call(write, source.cluster, f"k{number}", number, TABLES[0])
        assert synced().inserted == len(lost)
        assert len(state_of(lake)) == len(expected()) + len(lost)
        vbids = Counter(vbucket_of(f"k{number}".encode(), VBUCKETS) for number in lost)
        for vbid, count in vbids.items():
            source.call(source.cluster.failover, vbid, lose=count)
        for number in (2000, 2001):
            written[number] = TABLES[1]
            source.call(write, source.cluster, f"k{number}", number, TABLES[1])
        again = synced()
        reader.end()
        assert (again.inserted, again.deleted) == (2, len(lost))
        assert state_of(lake) == expected()
        assert reader.problems == []
        assert sum(reader.counts.values()) >= 2

        compared = compare(data, source.connection_string, settings, LocalRunner(1))
        assert {each.state for each in compared.vbuckets} == {"equal"}
        assert sum(each.documents for each in compared.vbuckets) == len(expected())
    events = DeltaTable(str(lake / "changes")).to_pyarrow_table(columns=["key", "kind", "at_branch", "at_seqno"])
    reported = Counter(tuple(row.values()) for row in events.to_pylist())
    assert max(reported.values()) == 1
    assert {key for key, kind, *_ in reported if kind == "retraction"} == {f"k{number}" for number in lost}
