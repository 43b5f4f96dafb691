"""SQL over a mirror, next to DuckDB over the same documents as NDJSON on disk, both on the same cores.

Jobs of a round run in turn, after one that does not count. `ratio` is a job's time to that of the job it is next to,
`anonymous_mib` the peak of this process's own memory; DuckDB's limit is `memory_mib`. `cold` queries open a session of
their own. A point query runs after its table was opened.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

import duckdb

from mirror import open_view
from mirror.sandbox.workload import Orders, order_key
from mirror.sql import Session
from tests.bench import stores
from tests.bench.limits import Stopwatch

GROUPS = 8
QUERIES = {
    "count": "SELECT count(*) FROM {}",
    "metadata": "SELECT sum(_seqno) FROM {}",
    "group by": "SELECT state, sum(total) FROM {} GROUP BY 1",
    "nested": "SELECT customer.city, sum(total) FROM {} GROUP BY 1",
    "top ten": "SELECT number, total FROM {} ORDER BY total DESC LIMIT 10",
    "percentile": "SELECT quantile_cont(total, 0.99) FROM {}",
}


def measure(
    folder: Path,
    *,
    documents: int = 1_000_000,
    value_bytes: int = 300,
    vbuckets: int = 64,
    cores: int = 2,
    memory_mib: int = 256,
    rounds: int = 5,
) -> Iterator[dict[str, float | str]]:
    template = Orders(Random(1), value_bytes)
    orders = [(order_key(number), template.order(number)) for number in range(documents)]
    path, lines = str(folder / "mirror"), folder / "orders.ndjson"
    stores.store(path, stores.rows_of(orders, vbuckets), GROUPS)
    lines.write_bytes(b"\n".join(order for _, order in orders))
    key = orders[len(orders) // 2][0]
    del orders
    with (
        _on(cores),
        open_view(path) as view,
        Session(view, threads=cores, memory_bytes=memory_mib << 20) as session,
        duckdb.connect(config={"threads": cores}) as bare,
    ):

        def ask(query: str) -> None:
            session.run(query.format("documents")).reader.read_all()

        def ask_cold(query: str) -> None:
            with Session(view, threads=cores, memory_bytes=memory_mib << 20) as another:
                another.run(query.format("documents")).reader.read_all()

        def ask_file(query: str) -> None:
            bare.execute(query.replace("_seqno", "number").format(f"read_ndjson('{lines}')")).fetchall()

        by_key = f"SELECT state, total FROM documents WHERE _key = '{key.decode()}'"
        jobs: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (name, partial(ask, query), partial(ask_file, query)) for name, query in QUERIES.items()
        ]
        jobs.append(("group, cold", partial(ask_cold, QUERIES["group by"]), partial(ask_file, QUERIES["group by"])))
        jobs.append(("by key", partial(ask, by_key), partial(view.get, key)))
        for number in range(-1, rounds):
            for name, job, other in jobs:
                with _anonymous_peak() as peak:
                    watch = Stopwatch()
                    job()
                    timing = watch.timing(documents)
                watch = Stopwatch()
                other()
                limit = watch.timing(documents)
                if number >= 0:
                    yield {
                        "query": name.rjust(11),
                        "documents_per_s": timing.per_s,
                        "ms": timing.elapsed_s * 1e3,
                        "limit_ms": limit.elapsed_s * 1e3,
                        "ratio": timing.elapsed_s / limit.elapsed_s,
                        "anonymous_mib": max(peak),
                    }


@contextmanager
def _on(cores: int) -> Iterator[None]:
    kept = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(kept)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, kept)


@contextmanager
def _anonymous_peak() -> Iterator[list[float]]:
    """Note how many MiB of its own this process has, every 20 ms."""
    seen: list[float] = []
    ended = threading.Event()

    def note() -> None:
        while True:
            (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in each)
            seen.append(int(line.split()[1]) / 1024)
            if ended.wait(0.02):
                return

    noting = threading.Thread(target=note)
    noting.start()
    try:
        yield seen
    finally:
        ended.set()
        noting.join()
