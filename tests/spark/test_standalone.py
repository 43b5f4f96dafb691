"""The same pipelines on a cluster of Spark's own, while executors, drivers and the mirror are killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from deltalake import DeltaTable

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.read.view import open_view
from tests.bench import stores
from tests.crash.load import Load
from tests.crash.service import until
from tests.spark.standalone import LIMIT_S, Application, Standalone
from tests.spark.stream_rig import (
    PUBLISHED,
    VBUCKETS,
    Unfinished,
    documents_of,
    kill_at_work,
    through_kills,
    wire_key_text,
)

DOCUMENTS = 60_000

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("processes"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("standalone")) as running:
        yield running


@pytest.fixture(scope="module")
def application(cluster: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    with Application(cluster, tmp_path_factory.mktemp("application")) as made:
        yield made


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS)) as thread:
        yield thread


def test_an_export_outlives_an_executor(cluster: Standalone, application: Application, tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "out"
    stores.mirror(str(data), DOCUMENTS, VBUCKETS)

    def kill_in_export() -> None:
        until("the first file", lambda: list(target.glob("*.parquet")), limit_s=LIMIT_S, poll_s=0.005)
        cluster.kill_executor()

    words = ["export", "--data", data, "--to", target, "--format", "delta", "--json"]
    said = application.run(*words, meanwhile=kill_in_export)
    (done,) = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    assert done["documents"] == DOCUMENTS
    table = DeltaTable(str(target))
    assert table.version() == 0
    keys = table.to_pyarrow_table(columns=["key", "seqno"])
    with open_view(str(data)) as view:
        expected = {(each.key.decode(), each.seqno) for each in view.scan()}
    assert set(zip(keys["key"].to_pylist(), keys["seqno"].to_pylist(), strict=True)) == expected
    assert keys.num_rows == DOCUMENTS


def test_a_stream_over_a_connection_outlives_an_executor_in_a_merge(
    cluster: Standalone, application: Application, source: SandboxThread, tmp_path: Path
) -> None:
    source.call(Load(source.cluster, 5, rate=0, keys=1500).write, 4000)
    lake = tmp_path / "lake"

    def kill_in_merge() -> None:
        driver = OnCluster(cluster, application, tmp_path)
        kill_at_work(driver, Unfinished(lake, "documents"), 0, cluster.kill_executor, lambda: None)

    words = ["sync", "--to", lake, "--source", source.connection_string, "--max-rows", "1000", "--max-age", "0"]
    application.run(*words, "--available-now", meanwhile=kill_in_merge)
    rows = DeltaTable(str(lake / "changes")).to_pyarrow_table(columns=["kind", "vbid", "seqno"]).to_pylist()
    reported = [(row["vbid"], row["seqno"]) for row in rows if row["kind"] in PUBLISHED]
    assert len(reported) == len(set(reported)) > 1000
    table = DeltaTable(str(lake / "documents")).to_pyarrow_table(columns=["key", "seqno", "cas"]).to_pylist()
    held = sorted((row["key"], row["seqno"], row["cas"]) for row in table)
    current = source.call(documents_of, source.cluster).items()
    assert held == sorted((wire_key_text(key), seqno, cas) for key, (seqno, cas) in current)


class OnCluster:
    """`sync` in the application."""

    def __init__(self, cluster: Standalone, application: Application, _: Path, *arguments: object) -> None:
        self.workers = cluster.executors
        self.running, self.send, self.kill = application.running, application.send, application.kill
        self.start = partial(application.begin, "sync", *arguments)

    def worker_lost(self) -> None:
        """Do nothing: Spark starts another executor, and its task again."""


VICTIMS = ("worker", "workers", "mirror", "driver", "driver and workers")


@pytest.mark.parametrize(
    ("victims", "changes", "rate"),
    [
        pytest.param(["worker", "driver and workers", "worker"], 2_000, 150, id="3"),
        pytest.param(
            Random(42).choices(VICTIMS, k=15), 60_000, 400, id="15", marks=[pytest.mark.long, pytest.mark.timeout(7200)]
        ),
    ],
)
def test_the_tables_are_exact_whichever_executors_and_drivers_were_killed(
    cluster: Standalone,
    application: Application,
    source: SandboxThread,
    tmp_path: Path,
    victims: list[str],
    changes: int,
    rate: int,
    record_property: Any,
) -> None:
    """A process without Spark goes on at their position, and ends what they began."""
    driver_of = partial(OnCluster, cluster, application)
    record_property("kills", through_kills(source, tmp_path, driver_of, victims, changes, rate))
