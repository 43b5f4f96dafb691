"""`bench ingest`: the whole way of a document, from the source's socket to a published row, against LMDB's limit,
and against a client that receives the same and stores nothing.

Knows a source process, a consumer process and how to watch them; what the limit is, `mirror.bench.limits` knows. The
source sends one disk snapshot per vbucket over loopback, as a first backfill is, with the messages of all vbuckets in
turn as kv_engine sends them, or one vbucket after the other; the consumer is the one that workers run. The clock
starts with the first stream request and stops when the last vbucket is published, with everything synced.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mirror.bench import limits
from mirror.bench.drain import Server, discard, measured
from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.feed.cluster.discovery import discover
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import parse
from mirror.feed.follow.consumer import Consumer
from mirror.sandbox import SandboxCluster, vbucket_of
from mirror.supervise.processes import logs
from mirror.supervise.processes.collector import settle_collector
from mirror.supervise.processes.figures import private_bytes
from storage.env import directory
from storage.format import keys, records
from storage.model import Identity
from storage.write.writer import GroupWriter

SAMPLE_INTERVAL_S = 0.02
"""How often the consumer's private memory is looked at, and whether it has caught up."""
SANDBOX_PASSWORD = "demo"
GROUPS = 8
ORDERS = ("turn", "stream")
"""How the source sends: a message of each stream in turn, or one stream after the other."""
PATIENCE_S = 900.0
"""Longest wait for a process of the benchmark."""


@dataclass(frozen=True, slots=True)
class IngestFigures:
    """One round and order: the time of all consumers against two limits, and the most private memory (RssAnon) that
    they had together, in bytes.
    """

    order: str
    documents: int
    ingest: limits.Timing
    limit: limits.Timing
    """Bare LMDB, which receives nothing."""
    discarded: limits.Timing
    """A client that stores nothing, of the same source."""
    peak_private_bytes: int

    @property
    def ratio(self) -> float:
        """Ingest rate as a share of the limit."""
        return self.ingest.per_second / self.limit.per_second

    @property
    def discard_ratio(self) -> float:
        """Ingest rate as a share of what can be received."""
        return self.ingest.per_second / self.discarded.per_second


def documents(count: int, value_bytes: int) -> Iterator[tuple[bytes, bytes]]:
    """Keys of 20 bytes in random order, and values that are JSON."""
    filler = os.urandom(value_bytes).hex().encode()
    for number in range(count):
        shuffled = (number * 2654435761) % 2**32
        head = b'{"id":%d,"total":%d.%02d,"note":"' % (number, shuffled % 10_000, shuffled % 100)
        yield b"document::%010d" % shuffled, head + filler[: max(0, value_bytes - len(head) - 2)] + b'"}'


def ingest_rounds(
    count: int,
    vbuckets: int,
    value_bytes: int,
    rounds: int,
    folder: str,
    sync: str,
    *,
    orders: Sequence[str] = ORDERS[:1],
    workers: int = 1,
) -> Iterator[IngestFigures]:
    """Measure each of `orders` each round, with a new mirror and a new limit below `folder`. Raises RuntimeError when a
    process fails. `workers` consumers share the groups; both limits have one process.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    source = context.Process(target=_serve_documents, args=(there, count, vbuckets, value_bytes), daemon=True)
    source.start()
    try:
        connection_string: str = receive(here, source)
        address = parse(connection_string).addresses[0]
        server = Server(address.host, address.port, "demo", "demo", SANDBOX_PASSWORD)
        volume = measured(server)
        rows = limit_rows(count, vbuckets, value_bytes)
        for number in range(rounds):
            path = os.path.join(folder, f"limit-{number}")
            limit = limits.write_limit(path, rows, deferred=True)
            for order in orders:
                here.send(order)
                receive(here, source)
                path = os.path.join(folder, f"m-{order}-{number}")
                ingest, peak = _consume_once(context, connection_string, path, sync, workers)
                yield IngestFigures(order, count, ingest, limit, discard(server, volume), peak)
    finally:
        here.close()
        source.join(10)
        if source.is_alive():
            source.kill()


def limit_rows(count: int, vbuckets: int, value_bytes: int) -> dict[int, list[limits.Row]]:
    """What the source holds, as the rows that LMDB takes."""
    rows: dict[int, list[limits.Row]] = {vbid: [] for vbid in range(vbuckets)}
    for key, value in documents(count, value_bytes):
        each = rows[vbucket_of(key, vbuckets)]
        seqno = len(each) + 1
        each.append((keys.ROW.pack(1, seqno), records.encode_mutation(key, value, seqno, datatype=1)))
    return rows


def receive(here: Connection, process: Any, *, alive: Any = None) -> Any:
    """What a process of the benchmark says. RuntimeError when it, or `alive`, ends before it does."""
    deadline = time.monotonic() + PATIENCE_S
    while not here.poll(0.1):
        if not process.is_alive() or (alive is not None and not alive.is_alive()) or time.monotonic() > deadline:
            raise RuntimeError("a process of the benchmark ended before it answered")
    return here.recv()


def _serve_documents(pipe: Connection, count: int, vbuckets: int, value_bytes: int) -> None:
    """The source process: load, say where, serve in the order that is named last until the pipe closes."""

    async def serve() -> None:
        async with SandboxCluster(vbuckets=vbuckets) as cluster:
            cluster.bucket.load(documents(count, value_bytes))
            pipe.send(cluster.connection_string)
            closed = asyncio.Event()

            def set_order() -> None:
                try:
                    cluster.nodes[0].in_turn = pipe.recv() == ORDERS[0]
                    pipe.send(None)
                except (EOFError, OSError):
                    closed.set()

            asyncio.get_running_loop().add_reader(pipe.fileno(), set_order)
            await closed.wait()

    asyncio.run(serve())


def _consume_once(
    context: Any, connection_string: str, path: str, sync: str, workers: int
) -> tuple[limits.Timing, int]:
    consumers: list[tuple[Connection, Any]] = []
    try:
        for number in range(workers):  # the first one creates the directory
            here, there = context.Pipe()
            groups = range(number, GROUPS, workers)
            arguments = (there, connection_string, path, sync, groups)
            consumers.append((here, context.Process(target=_consume, args=arguments, daemon=True)))
            consumers[-1][1].start()
            receive(*consumers[-1])
        for here, _ in consumers:
            here.send(None)
        peak = 0
        while not all(here.poll() or not consumer.is_alive() for here, consumer in consumers):
            time.sleep(SAMPLE_INTERVAL_S)
            peak = max(peak, sum(private_bytes(consumer.pid) or 0 for _, consumer in consumers))
        counts, starts, ends, cpu_s = zip(*(receive(here, consumer) for here, consumer in consumers), strict=True)
        return limits.Timing(sum(counts), max(ends) - min(starts), sum(cpu_s)), peak
    finally:
        for here, consumer in consumers:
            here.close()
            consumer.join(30)
            if consumer.is_alive():
                consumer.kill()


def _caught_up(consumer: Consumer) -> bool:
    """True once the source has sent all high seqnos and each is published."""
    highs = consumer.source_high_seqnos()
    return len(highs) == len(consumer.vbuckets) and consumer.caught_up(highs)


def _consume(pipe: Connection, connection_string: str, path: str, sync: str, groups: Sequence[int]) -> None:
    """A consumer process: one worker's work from an empty directory to caught up, begun when it is sent something."""

    async def consume() -> None:
        async with consuming(connection_string, path, sync, groups) as (consumer, writers):
            pipe.send(None)
            await asyncio.to_thread(pipe.recv)
            start, cpu_start = time.monotonic(), time.process_time()
            running = asyncio.create_task(consumer.run())
            while not _caught_up(consumer):  # noqa: ASYNC110 - looks on from outside, as status does
                await asyncio.sleep(SAMPLE_INTERVAL_S)
            for writer in writers:
                writer.environment.env.sync(True)
            end, cpu_s = time.monotonic(), time.process_time() - cpu_start
            count = sum(consumer.source_high_seqnos().values())  # not known any more once the sessions are closed
            await consumer.stop()
            await running
        pipe.send((count, start, end, cpu_s))

    asyncio.run(consume())


@contextlib.asynccontextmanager
async def consuming(
    connection_string: str, path: str, sync: str, groups: Sequence[int] = range(GROUPS)
) -> AsyncIterator[tuple[Consumer, list[GroupWriter]]]:
    """A consumer like a worker's over these groups of a directory, which is created where there is none, and its
    stores, which are closed at the end.
    """
    logs.set_up("warning", json=False, process="bench")
    clock = SystemClock()
    os.environ["DCP_MIRROR_PASSWORD"] = SANDBOX_PASSWORD
    settings = Settings(source=connection_string, groups=GROUPS)
    source = parse(connection_string)
    cluster_map = await discover(Access.of(source, settings), clock)
    identity = Identity(
        cluster_map.cluster_uuid or "", "bench", cluster_map.bucket_uuid or "", cluster_map.vbucket_count, GROUPS
    )
    if not directory.exists(path):
        directory.create(path, identity)
    writers = [
        GroupWriter.open(
            directory.group_path(path, group),
            group=group,
            vbids=directory.group_vbids(identity, group),
            identity=identity,
            sync=sync,
            clock_ms=clock.wall_ms,
            monotonic_ms=lambda: int(clock.monotonic() * 1000),
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
