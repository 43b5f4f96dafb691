"""`bench get`: reads by key through a view, to be compared with `mirror.bench.limits.get_limit`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mirror.bench.limits import Timing
from storage.read.view import open_view


def get_view(path: str, sample: Sequence[bytes]) -> Timing:
    """The same reads through `open_view`, each a whole `Document`."""
    with open_view(path) as view:
        for key in sample[:100]:
            view.get(key)
        start, cpu_start = time.perf_counter(), time.process_time()
        for key in sample:
            view.get(key)
        return Timing(len(sample), time.perf_counter() - start, time.process_time() - cpu_start)


def get_many_view(path: str, sample: Sequence[bytes], batch: int = 100) -> Timing:
    """The same reads by `get_many`, `batch` documents a call."""
    with open_view(path) as view:
        view.get_many(sample[:100])
        start = time.perf_counter()
        for first in range(0, len(sample), batch):
            view.get_many(sample[first : first + batch])
        return Timing(len(sample), time.perf_counter() - start)
