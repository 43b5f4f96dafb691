"""Every bench runs, at a size that shows only that it works."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from storage.admin.check import check
from storage.read.view import open_view
from tests.bench import __main__ as runner

SMALL: dict[str, dict[str, int | float | str]] = {
    "ingest": {"documents": 2000, "vbuckets": 8, "workers": 2, "rounds": 1},
    "lag": {"rates": "100,400", "seconds": 0.2},
    "get": {"documents": 1000, "reads": 300, "vbuckets": 4, "rounds": 2},
    "kv": {"documents": 300, "reads": 200, "vbuckets": 4, "rounds": 1},
    "sql": {"documents": 1000, "vbuckets": 4, "rounds": 1},
    "restart": {"documents": 800, "vbuckets": 8, "missed": 21, "workers": 1, "rounds": 1},
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name in ("lag", "restart"))) for name in SMALL]
)
def test_each_bench_gives_figures_and_leaves_sound_mirrors(name: str, tmp_path: Path) -> None:
    rows = list(importlib.import_module(f"tests.bench.{name}").measure(tmp_path, **SMALL[name]))
    assert rows
    assert all(value > 0 for row in rows for value in row.values() if not isinstance(value, str))
    mirrors = [path.parent for path in tmp_path.glob("*/mirror.json")]
    assert mirrors
    for path in mirrors:
        assert check(str(path)).problems == []
        with open_view(str(path)) as view:
            count = sum(view.count(vbid) for vbid in range(view.identity.vbucket_count))
        assert count >= int(SMALL[name].get("documents", 80))


@pytest.mark.ci
def test_the_spark_bench_gives_figures(spark: SparkSession, tmp_path: Path) -> None:
    rows = list(importlib.import_module("tests.bench.spark").measure(tmp_path, documents=1000, warming=0, rounds=1))
    assert len(rows) == 5
    assert all(row["ratio"] > 0 for row in rows)
    assert spark.range(3).count() == 3  # a session that was there goes on


def test_rows_are_printed_as_a_table_with_medians(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[runner.Row] = [{"server": name, "per_s": number} for number in (1.5, 4000, 3) for name in ("a", "b")]
    table = [line.split() for line in runner.lines(rows)]
    assert table[:3] == [["server", "per_s"], ["a", "1.5"], ["b", "1.5"]]
    assert table[-3:] == [["medians:"], ["a", "3"], ["b", "3"]]
    runner.main(["get", "--documents", "100", "--reads", "100", "--vbuckets", "2", "--rounds", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 2
