"""The same pipelines on a cluster of Spark's own, each with an executor killed in the middle of its work."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

import cli.main
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.read.view import open_view
from tests.bench import stores
from tests.crash.load import Load
from tests.crash.service import until
from tests.spark.standalone import HOME, LIMIT_S, Standalone, spark_environment
from tests.spark.stream_rig import PUBLISHED, Stream, documents_of, wire_key_text

VBUCKETS = 16
DOCUMENTS = 60_000

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("spark processes"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("standalone")) as running:
        yield running


@pytest.fixture(scope="module")
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS)) as thread:
        thread.call(Load(thread.cluster, 5, rate=0, keys=1500).write, 4000)
        yield thread


def submit(cluster: Standalone) -> list[object]:
    return [HOME / "bin" / "spark-submit", "--master", cluster.url, cli.main.__file__]


class Driver:
    def __init__(self, folder: Path, *command: object) -> None:
        self.out, self.err = folder / "driver.out", folder / "driver.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env=spark_environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def running(self) -> bool:
        return self.process.poll() is None

    def end(self) -> str:
        """Its stdout. Fails unless it ended well, and an executor was lost on the way."""
        try:
            code = self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
        said = self.err.read_text()
        assert code == 0, said[-4000:]
        assert "Lost executor" in said, "the kill came too late to hurt"
        return self.out.read_text()


def test_an_export_by_spark_submit_outlives_an_executor(cluster: Standalone, tmp_path: Path) -> None:
    data, target = tmp_path / "data", tmp_path / "out"
    stores.mirror(str(data), DOCUMENTS, VBUCKETS)
    driver = Driver(tmp_path, *submit(cluster), "export", "--data", data, "--to", target, "--format", "delta", "--json")
    until(
        "the first file", lambda: list(target.glob("*.parquet")) or not driver.running(), limit_s=LIMIT_S, poll_s=0.005
    )
    assert driver.running()
    cluster.kill_executor()
    done = json.loads(driver.end())
    assert done["documents"] == DOCUMENTS
    table = DeltaTable(str(target))
    assert table.version() == 0
    keys = table.to_pyarrow_table(columns=["key", "seqno"])
    with open_view(str(data)) as view:
        expected = {(each.key.decode(), each.seqno) for each in view.scan()}
    assert set(zip(keys["key"].to_pylist(), keys["seqno"].to_pylist(), strict=True)) == expected
    assert keys.num_rows == DOCUMENTS


@pytest.mark.parametrize("work", ["batch", "merge"])
def test_a_stream_over_a_connection_outlives_an_executor(
    cluster: Standalone, source: SandboxThread, tmp_path: Path, work: str
) -> None:
    """Killed while it writes events, and while it merges them: `documents` has files that no commit names yet."""
    lake = tmp_path / "lake"
    stream = Stream(lake, "--source", source.connection_string)
    where = ["--to", lake, "--source", source.connection_string, "--max-rows", "1000", "--max-age", "0"]
    driver = Driver(tmp_path, *submit(cluster), "sync", *where, "--available-now")

    def at_work() -> bool:
        begun, done = stream.batches()
        merging = work == "batch" or any((lake / "documents").glob(f"*-b{begun}-*.parquet"))
        return (begun > done >= 0 and merging) or not driver.running()

    until(f"a {work} after the first", at_work, limit_s=LIMIT_S, poll_s=0.005)
    assert driver.running()
    cluster.kill_executor()
    begun, done = stream.batches()
    assert begun == done + 1, "the kill hit no running batch"
    driver.end()
    rows = DeltaTable(str(lake / "changes")).to_pyarrow_table(columns=["kind", "vbid", "seqno"]).to_pylist()
    reported = [(row["vbid"], row["seqno"]) for row in rows if row["kind"] in PUBLISHED]
    assert len(reported) == len(set(reported)) > 1000
    table = DeltaTable(str(lake / "documents")).to_pyarrow_table(columns=["key", "seqno", "cas"]).to_pylist()
    held = sorted((row["key"], row["seqno"], row["cas"]) for row in table)
    current = source.call(documents_of, source.cluster).items()
    assert held == sorted((wire_key_text(key), seqno, cas) for key, (seqno, cas) in current)
