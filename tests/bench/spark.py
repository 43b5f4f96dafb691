"""A mirror read by Spark, next to Spark reading the same documents as Parquet, by from_json and by plain Arrow.

Two mirrors have the documents, of `FEW` and of `MANY` vbuckets, and Parquet files that Spark wrote with its own
defaults. The jobs of a round run in turn, after rounds that do not count (Java compiles, workers start, files come into
memory). A job without a sink makes every column of every row and discards it. `ratio` is a job's time to that of the
job it is next to.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from pyspark.sql.functions import col, from_json

from cli.tasks import spark_session
from mirror.sandbox.workload import Orders, order_key
from mirror.spark.pipeline.export import export
from mirror.spark.runner import LocalRunner
from tests.bench import stores

FEW, MANY, GROUPS = 64, 1024, 8
FIELDS = (
    "number bigint, customer struct<name: string, city: string>, state string, "
    "items array<struct<sku: string, count: int>>, total double"
)
NEXT_TO = {
    "documents": "parquet",
    "documents_1024": "documents",
    "typed": "from_json",
    "to_parquet": "parquet_to_parquet",
    "arrow_export": "to_parquet",
}


def measure(
    folder: Path, *, documents: int = 100_000, value_bytes: int = 300, warming: int = 2, rounds: int = 5
) -> Iterator[dict[str, float | str]]:
    template = Orders(Random(1), value_bytes)
    orders = [(order_key(number), template.order(number)) for number in range(documents)]
    few, many = str(folder / "few"), str(folder / "many")
    stores.store(few, stores.rows_of(orders, FEW), GROUPS)
    stores.store(many, stores.rows_of(orders, MANY), GROUPS)
    with spark_session("bench") as session:
        found = jobs(session, folder, few, many)
        for number in range(-warming, rounds):
            seconds = {}
            for name, job in found.items():
                shutil.rmtree(folder / "out", ignore_errors=True)
                start = time.perf_counter()
                job()
                seconds[name] = time.perf_counter() - start
            for name, next_to in NEXT_TO.items():
                if number >= 0:
                    yield {
                        "job": name.rjust(14),
                        "next to": next_to.rjust(18),
                        "documents_per_s": documents / seconds[name],
                        "ratio": seconds[name] / seconds[next_to],
                    }


def jobs(spark: Any, folder: Path, few: str, many: str) -> Mapping[str, Callable[[], object]]:
    parquet, out = str(folder / "parquet"), folder / "out"

    def read(path: str, **options: str) -> Any:
        return spark.read.format("mirror").options(**options).load(path)

    def by_spark(frame: Any) -> Any:
        parsed = from_json(col("value").cast("string"), FIELDS).alias("body")
        return frame.select(col("key").alias("_key"), parsed).select("_key", "body.*")

    def discard(frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    read(few).write.parquet(parquet)
    return {
        "parquet": lambda: discard(spark.read.parquet(parquet)),
        "documents": lambda: discard(read(few)),
        "documents_1024": lambda: discard(read(many)),
        "typed": lambda: discard(spark.read.format("mirror").schema(f"_key string, {FIELDS}").load(few)),
        "from_json": lambda: discard(by_spark(read(few, columns="key,value"))),
        "to_parquet": lambda: read(few).write.parquet(str(out)),
        "parquet_to_parquet": lambda: spark.read.parquet(parquet).write.parquet(str(out)),
        "arrow_export": lambda: export(Path(few), out, LocalRunner()),
    }
