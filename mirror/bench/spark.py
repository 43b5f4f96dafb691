"""`bench spark`: a mirror read by Spark, next to Spark reading the same documents as Parquet, by from_json and
by plain Arrow.

Knows Spark jobs and how to take their time; never where documents come from. Everything reads the same documents: two
mirrors of them, one with `FEW` vbuckets and one with `MANY`, and Parquet files that Spark wrote with its own defaults
from the first. Invariants: the jobs of a round run in turn within seconds, so that a drifting machine touches all
alike, after rounds that are not counted (Java compiles, workers start, files come into memory); a job without a sink
makes every column of every row and throws it away; each ratio is of one round.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql.functions import col, from_json

from mirror.bench import limits, stores
from mirror.spark.export import export
from mirror.spark.runner import LocalRunner
from storage.format import keys, records

FEW, MANY, GROUPS = 64, 1024, 8
CAS = 1_700_000_000_000_000_000
"""As of late 2023."""

FIELDS = (
    "number bigint, customer struct<name: string, city: string>, state string, "
    "items array<struct<sku: string, count: int>>, total double"
)
"""What is read of an order."""

WARMING_ROUNDS = 2


class Bar(NamedTuple):
    """A ratio of two jobs' times: what it is to be at most, where something is promised."""

    name: str
    job: str
    baseline: str
    at_most: float | None = None


BARS = (
    Bar("documents, next to Spark reading Parquet", "documents", "parquet", 3.0),
    Bar("typed documents, next to from_json on the same rows", "typed", "from_json", 0.6),
    Bar("1,024 vbuckets, next to 64", "documents_1024", "documents", 1.3),
    Bar("typed documents, next to Parquet and from_json", "typed", "parquet_from_json"),
    Bar("documents to Parquet, next to Parquet to Parquet", "to_parquet", "parquet_to_parquet"),
    Bar("documents to Parquet, next to the export without Spark", "to_parquet", "arrow_export"),
)


class Ratio(NamedTuple):
    """A bar, and what was found in all rounds."""

    bar: Bar
    median: float
    least: float
    most: float

    @property
    def met(self) -> bool | None:
        """None where nothing is promised."""
        return None if self.bar.at_most is None else self.median <= self.bar.at_most


def store(path: str, documents: Iterable[tuple[bytes, bytes]], vbuckets: int) -> int:
    """A mirror of these documents, as a first backfill leaves it. Returns the bytes of keys and values."""
    rows: dict[int, list[limits.Row]] = {vbid: [] for vbid in range(vbuckets)}
    size = 0
    for key, body in documents:
        each = rows[keys.vbid_of(key, vbuckets)]
        seqno = len(each) + 1
        frame = records.encode_mutation(key, body, seqno, cas=CAS + (seqno << 16), datatype=1)
        each.append((keys.ROW.pack(1, seqno), frame))
        size += len(key) + len(body)
    stores.store_rows(path, rows, snapshot_rows=max(map(len, rows.values())) or 1, groups=GROUPS)
    return size


class Jobs:
    """What is measured, by name."""

    def __init__(self, spark: Any, folder: Path, few: str, many: str) -> None:
        """Nothing is written or read yet."""
        self._spark = spark
        self._few, self._many = few, many
        self._parquet = str(folder / "parquet")
        self._out = folder / "out"
        self.by_name: Mapping[str, Callable[[], None]] = {
            "documents": lambda: self._to_nothing(self._documents(few)),
            "parquet": lambda: self._to_nothing(self._read_parquet()),
            "documents_1024": lambda: self._to_nothing(self._documents(many)),
            "typed": lambda: self._to_nothing(self._typed()),
            "from_json": lambda: self._to_nothing(self._by_spark(self._documents(few, "key,value"))),
            "parquet_from_json": lambda: self._to_nothing(self._by_spark(self._read_parquet())),
            "to_parquet": lambda: self._to_parquet(self._documents(few)),
            "parquet_to_parquet": lambda: self._to_parquet(self._read_parquet()),
            "arrow_export": self._export,
        }

    def prepare(self) -> None:
        """Write the Parquet files that the mirror is measured against."""
        self._documents(self._few).write.parquet(self._parquet)

    def seconds(self, name: str) -> float:
        """Run a job."""
        shutil.rmtree(self._out, ignore_errors=True)
        start = time.perf_counter()
        self.by_name[name]()
        return time.perf_counter() - start

    def _documents(self, path: str, columns: str | None = None) -> Any:
        reader = self._spark.read.format("mirror")
        return (reader if columns is None else reader.option("columns", columns)).load(path)

    def _typed(self) -> Any:
        return self._spark.read.format("mirror").schema(f"_key string, {FIELDS}").load(self._few)

    def _read_parquet(self) -> Any:
        return self._spark.read.parquet(self._parquet)

    @staticmethod
    def _by_spark(frame: Any) -> Any:
        parsed = from_json(col("value").cast("string"), FIELDS).alias("body")
        return frame.select(col("key").alias("_key"), parsed).select("_key", "body.*")

    @staticmethod
    def _to_nothing(frame: Any) -> None:
        frame.write.format("noop").mode("overwrite").save()

    def _to_parquet(self, frame: Any) -> None:
        frame.write.parquet(str(self._out))

    def _export(self) -> None:
        export(Path(self._few), self._out, LocalRunner())


def rounds(jobs: Jobs, count: int) -> Iterator[dict[str, float]]:
    """Seconds of each job by name, for each round that counts."""
    jobs.prepare()
    for number in range(-WARMING_ROUNDS, count):
        found = {name: jobs.seconds(name) for name in jobs.by_name}
        if number >= 0:
            yield found


def ratios(found: Sequence[Mapping[str, float]]) -> list[Ratio]:
    """What the rounds say of the bars."""
    answers = []
    for bar in BARS:
        each = [seconds[bar.job] / seconds[bar.baseline] for seconds in found]
        answers.append(Ratio(bar, statistics.median(each), min(each), max(each)))
    return answers
