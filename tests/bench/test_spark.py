"""The benchmark compares like with like, and says what it promises to say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import cli
from cli.bench import app, bar_lines
from mirror.bench import spark as spark_bench
from storage.admin.check import check
from tests.spark.mirrors import order


def test_a_ratio_is_of_one_round_and_a_bar_is_held_against_the_median() -> None:
    names = {name for bar in spark_bench.BARS for name in (bar.job, bar.baseline)}
    found = [dict.fromkeys(names, 1.0) | {"documents": seconds, "typed": 0.5} for seconds in (2.0, 4.0, 3.0)]
    by_job = {(each.bar.job, each.bar.baseline): each for each in spark_bench.ratios(found)}
    documents = by_job["documents", "parquet"]
    assert documents[1:] == (3.0, 2.0, 4.0)
    assert documents.met is True
    assert by_job["typed", "from_json"].met is True
    assert by_job["to_parquet", "arrow_export"].met is None
    found[0]["typed"] = found[1]["typed"] = 0.7
    ratios = spark_bench.ratios(found)
    assert [each.bar.job for each in ratios if each.met is False] == ["typed"]
    lines = bar_lines(ratios)
    assert lines[0] == "documents, next to Spark reading Parquet: 3.00 of its time (at most 3 required; 2.00 to 4.00)"
    assert lines[1].startswith("MISSED typed documents, next to from_json on the same rows: 0.70 of its time")


def test_a_mirror_for_the_benchmark_is_a_sound_one(tmp_path: Path) -> None:
    documents = [(b"k%d" % number, order(number)) for number in range(300)]
    assert spark_bench.store(str(tmp_path / "m"), documents, 16) == sum(len(key) + len(body) for key, body in documents)
    found = check(str(tmp_path / "m"))
    assert found.problems == []


def test_both_ways_of_reading_orders_give_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    body = b'{"number":%d,"customer":{"name":"Ada"},"items":[{"sku":"a","count":2}],"total":%d.5,"note":"x"}'
    spark_bench.store(str(tmp_path / "few"), [(b"k%d" % each, body % (each, each)) for each in range(100)], 8)
    jobs = spark_bench.Jobs(spark, tmp_path, str(tmp_path / "few"), str(tmp_path / "few"))
    found = jobs._typed().collect()
    assert len(found) == 100
    assert sorted(found) == sorted(jobs._by_spark(jobs._documents(str(tmp_path / "few"), "key,value")).collect())


@pytest.mark.ci
def test_it_prints_seconds_and_bars(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_bench, "WARMING_ROUNDS", 0)
    arguments = ["spark", "--documents", "1000", "--rounds", "1", "--folder", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    shape = json.loads(done.stdout)
    assert (shape["bench"], shape["documents"], len(shape["rounds"])) == ("spark", 1000, 1)
    assert shape["document_bytes"] > 250_000
    assert min(shape["rounds"][0].values()) > 0
    assert [each["at_most"] for each in shape["bars"]] == [3.0, 0.6, 1.3, None, None, None]
    assert all(each["ratio_min"] == each["ratio_max"] > 0 for each in shape["bars"])
    assert list(tmp_path.iterdir()) == []
    promised = Path(cli.__file__).with_name("JSON.md").read_text().partition("\n- `spark`:")[2].partition("\n## ")[0]
    fields = [name for name in shape if name not in ("bench", "rounds")]
    assert [name for name in [*fields, *shape["rounds"][0], *shape["bars"][0]] if f"`{name}`" not in promised] == []
    assert spark.range(3).count() == 3  # a session that was there goes on
