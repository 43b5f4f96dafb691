"""Reads by key in this process, one by one and 100 at a time, next to bare LMDB reads of key and row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from storage.read.view import open_view
from tests.bench import limits, stores
from tests.bench.limits import Stopwatch

BATCH = 100


def measure(
    folder: Path, *, documents: int = 200_000, reads: int = 200_000, vbuckets: int = 64, rounds: int = 5
) -> Iterator[dict[str, float | str]]:
    path = stores.mirror(str(folder / "mirror"), documents, vbuckets)
    sample = stores.sample_keys(reads, documents)
    for _ in range(rounds):
        limit = limits.get(path, sample, vbuckets)
        with open_view(path) as view:
            view.get_many(sample[:BATCH])
            watch = Stopwatch()
            for key in sample:
                view.get(key)
            single = watch.timing(reads)
            watch = Stopwatch()
            for first in range(0, reads, BATCH):
                view.get_many(sample[first : first + BATCH])
            many = watch.timing(reads)
        yield {
            "reads_per_s": single.per_s,
            "limit_per_s": limit.per_s,
            "ratio": single.per_s / limit.per_s,
            "cpu_us": single.cpu_s / reads * 1e6,
            "many_per_s": many.per_s,
            "many_ratio": many.per_s / single.per_s,
        }
