"""First fill of a mirror over a socket, by the consumer that workers run, next to the same rows put into bare LMDB.

The source sends one disk snapshot for each vbucket, the messages of all streams in turn as kv_engine sends them
(`turn`), or one stream after the other (`stream`). The clock starts with the first stream request and stops when the
last vbucket is published and synced.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.feed.cluster.discovery import discover
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import parse
from mirror.feed.follow.consumer import Consumer
from mirror.log import set_up_logs
from mirror.sandbox import SandboxCluster
from mirror.supervise.processes.child import private_bytes
from mirror.supervise.processes.worker import settle_collector
from storage.env import directory
from storage.model import Identity
from storage.write.writer import GroupWriter, WriterOptions
from tests.bench import limits, stores
from tests.bench.children import Child, child, wait_closed
from tests.bench.limits import Timing
from tests.feed.harness import source_high_seqnos, streams_from

SAMPLE_INTERVAL_S = 0.02
GROUPS = 8


def measure(
    folder: Path,
    *,
    documents: int = 500_000,
    vbuckets: int = 64,
    value_bytes: int = 256,
    sync: str = "safe",
    order: str = "turn",
    workers: int = 1,
    rounds: int = 3,
) -> Iterator[dict[str, float | str]]:
    rows = stores.rows_of(stores.documents(range(documents), value_bytes), vbuckets)
    with child(_serve, documents, vbuckets, value_bytes, order) as source:
        connection_string: str = source.receive()
        for number in range(rounds):
            limit = limits.write(folder / f"limit-{number}", rows)
            filled, peak_bytes = _fill(connection_string, str(folder / f"mirror-{number}"), sync, workers)
            yield {
                "documents_per_s": filled.per_s,
                "limit_per_s": limit.per_s,
                "ratio": filled.per_s / limit.per_s,
                "cpu_us": filled.cpu_s / documents * 1e6,
                "limit_cpu_us": limit.cpu_s / documents * 1e6,
                "peak_private_mib": peak_bytes / 2**20,
            }


def _serve(pipe: Connection, documents: int, vbuckets: int, value_bytes: int, order: str) -> None:
    async def serve() -> None:
        async with SandboxCluster(vbuckets=vbuckets) as cluster:
            cluster.bucket.load(stores.documents(range(documents), value_bytes))
            cluster.bucket.tuning.in_turn = order == "turn"
            pipe.send(cluster.connection_string)
            await asyncio.to_thread(wait_closed, pipe)

    asyncio.run(serve())


def _fill(connection_string: str, path: str, sync: str, workers: int) -> tuple[Timing, int]:
    """Fill a mirror once; also the most private memory (RssAnon) that all workers had together, in bytes."""
    with ExitStack() as stack:
        consumers: list[Child] = []
        for number in range(workers):  # the first one creates the directory
            groups = range(number, GROUPS, workers)
            consumers.append(stack.enter_context(child(_consume, connection_string, path, sync, groups)))
            consumers[-1].receive()
        for each in consumers:
            each.send("begin")
        peak_bytes = 0
        while not all(each.pipe.poll() for each in consumers):  # true also for one that died
            time.sleep(SAMPLE_INTERVAL_S)
            peak_bytes = max(peak_bytes, sum(private_bytes(each.process.pid or 0) or 0 for each in consumers))
        counts, starts, ends, cpu_s = zip(*(each.receive() for each in consumers), strict=True)
        return Timing(sum(counts), max(ends) - min(starts), sum(cpu_s)), peak_bytes


def _consume(pipe: Connection, connection_string: str, path: str, sync: str, groups: Sequence[int]) -> None:
    def caught_up(consumer: Consumer) -> bool:
        highs = source_high_seqnos(consumer)
        return len(highs) == len(consumer.vbuckets) and streams_from(consumer, highs)

    async def consume() -> None:
        async with consuming(connection_string, path, sync, groups) as (consumer, writers):
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            start, cpu_start = time.monotonic(), time.process_time()
            running = asyncio.create_task(consumer.run())
            while not caught_up(consumer):  # noqa: ASYNC110 - looks on from outside, as status does
                await asyncio.sleep(SAMPLE_INTERVAL_S)
            for writer in writers:
                writer.environment.env.sync(True)
            end, cpu_s = time.monotonic(), time.process_time() - cpu_start
            count = sum(source_high_seqnos(consumer).values())  # not known any more once the sessions are closed
            await consumer.stop()
            await running
        pipe.send((count, start, end, cpu_s))

    asyncio.run(consume())


@asynccontextmanager
async def consuming(
    connection_string: str, path: str, sync: str, groups: Sequence[int] = range(GROUPS)
) -> AsyncIterator[tuple[Consumer, list[GroupWriter]]]:
    """A consumer like a worker's over these groups of a directory, which is created if there is none, and its
    writers.
    """
    set_up_logs("warning", json=False, process="bench")
    clock = SystemClock()
    os.environ["DCP_MIRROR_PASSWORD"] = "demo"
    settings = Settings(source=connection_string, groups=GROUPS)
    source = parse(connection_string)
    cluster_map = await discover(Access.of(source, settings), clock)
    identity = Identity(
        cluster_map.cluster_uuid or "", "bench", cluster_map.bucket_uuid or "", cluster_map.vbucket_count, GROUPS
    )
    if not directory.exists(path):
        directory.create(path, identity)
    writers = [
        GroupWriter(
            directory.group_path(path, group),
            WriterOptions(
                group=group,
                identity=identity,
                sync=sync,
                clock_ms=clock.wall_ms,
                monotonic_ms=lambda: int(clock.monotonic() * 1000),
            ),
        )
        for group in groups
    ]
    consumer = Consumer(
        settings, source=source, writers=writers, identity=identity, clock=clock, cluster_map=cluster_map
    )
    settle_collector()
    yield consumer, writers
    for writer in writers:
        writer.close()
