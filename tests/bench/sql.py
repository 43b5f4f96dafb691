"""SQL over a mirror, next to DuckDB over the same documents as NDJSON on disk, both on one core.

Jobs of a round run in turn, after one that does not count. `ratio` is a job's processor time to that of the job it is
next to, `anonymous_mib` the peak of the process's own memory; DuckDB's limit is `memory_mib`. A point query runs after
its table was opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import duckdb

from mirror import open_view
from mirror.sandbox.workload import Orders, order_key
from mirror.sql import Session
from tests.bench import stores
from tests.bench.limits import Stopwatch

GROUPS = 8
NEXT_TO = {
    "count": "count of NDJSON",
    "metadata": "count of NDJSON",
    "group by": "group by of NDJSON",
    "nested, two": "nested, two of NDJSON",
    "by key": "view.get",
}


def measure(
    folder: Path,
    *,
    documents: int = 1_000_000,
    value_bytes: int = 300,
    vbuckets: int = 64,
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
        open_view(path) as view,
        Session(view, threads=1, memory_bytes=memory_mib << 20) as session,
        duckdb.connect(config={"threads": 1}) as bare,
    ):

        def ask(query: str) -> None:
            session.run(query).reader.read_all()

        def ask_file(query: str) -> None:
            bare.execute(query.format(f"read_ndjson('{lines}')")).fetchall()

        group = "SELECT state, count(*) FROM {} GROUP BY 1"
        nested = "SELECT customer.city, sum(total) FROM {} GROUP BY 1"
        jobs: dict[str, Callable[[], object]] = {
            "count of NDJSON": lambda: ask_file("SELECT count(*) FROM {}"),
            "group by of NDJSON": lambda: ask_file(group),
            "nested, two of NDJSON": lambda: ask_file(nested),
            "view.get": lambda: view.get(key),
            "count": lambda: ask("SELECT count(*) FROM documents"),
            "metadata": lambda: ask("SELECT sum(_seqno) FROM documents"),
            "group by": lambda: ask(group.format("documents")),
            "nested, two": lambda: ask(nested.format("documents")),
            "by key": lambda: ask(f"SELECT state, total FROM documents WHERE _key = '{key.decode()}'"),
        }
        for number in range(-1, rounds):
            found = {}
            for name, job in jobs.items():
                with _anonymous_peak() as peak:
                    watch = Stopwatch()
                    job()
                    found[name] = (watch.timing(documents), peak)
            for name, next_to in NEXT_TO.items():
                timing, peak = found[name]
                if number >= 0:
                    yield {
                        "query": name.rjust(11),
                        "next to": next_to.rjust(21),
                        "documents_per_cpu_s": documents / timing.cpu_s,
                        "cpu_ms": timing.cpu_s * 1e3,
                        "ratio": timing.cpu_s / found[next_to][0].cpu_s,
                        "anonymous_mib": max(peak),
                    }


@contextmanager
def _anonymous_peak() -> Iterator[list[float]]:
    """Note how many MiB this process has of its own, every 20 ms."""
    seen: list[float] = []
    ended = threading.Event()

    def note() -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            seen.append(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024)
            if ended.wait(0.02):
                return

    noting = threading.Thread(target=note)
    noting.start()
    try:
        yield seen
    finally:
        ended.set()
        noting.join()
