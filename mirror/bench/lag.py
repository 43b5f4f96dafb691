"""`bench lag`: from a write at the source until readers of the mirror see it, at several rates.

Knows a source process that writes at a rate, and a consumer process, which is one worker's. Both note times of one
clock: the source when it has written, the consumer when the commit that made a seqno visible has returned. The limit is
a bare loop in the consumer's place: it receives messages of the same size over a socket and puts those that are there
into LMDB in one transaction.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mirror.bench.ingest import consuming, receive
from mirror.bench.limits import BareStore
from mirror.feed.follow.consumer import Consumer
from mirror.feed.follow.group_commits import Group
from mirror.sandbox import SandboxCluster

VALUE_BYTES = 256
MESSAGE_BYTES = 340
"""About what a message of DCP with such a value has."""
TICK_S = 0.0005
"""Between two looks of a writer at what is due."""
VBUCKETS = 64

Write = tuple[int, int, float]
"""vbucket, seqno, and when it was written or became visible."""


@dataclass(frozen=True, slots=True)
class LagFigures:
    """Milliseconds from write to visible at one rate, sorted; and those of the bare loop."""

    rate: int
    lags_ms: list[float]
    limit_ms: list[float]


def quantile(sorted_values: list[float], share: float) -> float:
    """The value below which `share` of all are."""
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * share))]


def lags(rates: list[int], seconds: float, folder: str, sync: str) -> Iterator[LagFigures]:
    """Measure each rate for some seconds. Raises RuntimeError when a process fails."""
    context = multiprocessing.get_context("spawn")
    to_source, source_end = context.Pipe()
    source = context.Process(target=_write, args=(source_end,), daemon=True)
    source.start()
    to_consumer, consumer_end = context.Pipe()
    consumer = None
    try:
        connection_string: str = receive(to_source, source)
        path = os.path.join(folder, "mirror")
        consumer = context.Process(target=_follow, args=(consumer_end, connection_string, path, sync), daemon=True)
        consumer.start()
        receive(to_consumer, consumer)
        for number, rate in enumerate(rates):
            limit = _bare(context, rate, seconds, os.path.join(folder, f"limit-{number}"), sync)
            to_source.send((rate, seconds))
            written: list[Write] = receive(to_source, source, alive=consumer)
            newest = {vbid: seqno for vbid, seqno, _ in written}
            to_consumer.send(newest)
            yield LagFigures(rate, lags_ms(written, receive(to_consumer, consumer, alive=source)), limit)
    finally:
        for pipe, process in ((to_consumer, consumer), (to_source, source)):
            pipe.close()
            if process is not None:
                process.join(10)
                if process.is_alive():
                    process.kill()


def lags_ms(written: list[Write], visible: list[Write]) -> list[float]:
    """From each write to the first time at which its vbucket was visible up to it, sorted."""
    seen: dict[int, tuple[list[int], list[float]]] = {}
    for vbid, seqno, at in visible:
        seqnos, times = seen.setdefault(vbid, ([], []))
        seqnos.append(seqno)
        times.append(at)
    return sorted((seen[vbid][1][bisect_left(seen[vbid][0], seqno)] - at) * 1000 for vbid, seqno, at in written)


def _write(pipe: Connection) -> None:
    """The source process: write at the requested rates, and say what was written when."""

    async def serve() -> None:
        async with SandboxCluster(vbuckets=VBUCKETS) as cluster:
            pipe.send(cluster.connection_string)
            loop = asyncio.get_running_loop()
            orders: asyncio.Queue[tuple[int, float] | None] = asyncio.Queue()

            def hear() -> None:
                try:
                    orders.put_nowait(pipe.recv())
                except (EOFError, OSError):
                    loop.remove_reader(pipe.fileno())
                    orders.put_nowait(None)

            loop.add_reader(pipe.fileno(), hear)
            value = b'{"note":"' + b"x" * VALUE_BYTES + b'"}'
            while (order := await orders.get()) is not None:
                rate, seconds = order
                count = int(rate * seconds)
                written: list[Write] = []
                start = time.monotonic()
                while len(written) < count:
                    due = min(count, int((time.monotonic() - start) * rate) + 1)
                    for _ in range(len(written), due):
                        item = cluster.set(b"document::%010d" % len(written), value, vbid=len(written) % VBUCKETS)
                        written.append((len(written) % VBUCKETS, item.seqno, time.monotonic()))
                    await asyncio.sleep(TICK_S)
                pipe.send(written)

    asyncio.run(serve())


def _note_visible(consumer: Consumer, visible: list[Write]) -> None:
    """Have each commit of the consumer add what became visible, and when."""
    seen = {vbid: int(vbucket.writer.served(vbid).published_seqno) for vbid, vbucket in consumer.vbuckets.items()}

    def note(group: Group) -> None:
        now = time.monotonic()
        for vbid in group.vbuckets:
            published = int(group.writer.served(vbid).published_seqno)
            if published != seen[vbid]:
                seen[vbid] = published
                visible.append((vbid, published, now))

    consumer.commits.on_committed = note


def _follow(pipe: Connection, connection_string: str, path: str, sync: str) -> None:
    """The consumer process: follow, and say when everything became visible, once what was requested is."""

    async def follow() -> None:
        async with consuming(connection_string, path, sync) as (consumer, _):
            visible: list[Write] = []
            _note_visible(consumer, visible)
            running = asyncio.create_task(consumer.run())
            while len(consumer.source_high_seqnos()) < VBUCKETS:  # noqa: ASYNC110 - looks on from outside
                await asyncio.sleep(0.02)
            pipe.send(None)
            while newest := await asyncio.to_thread(_received, pipe):
                while not consumer.caught_up(newest):  # noqa: ASYNC110 - the same
                    await asyncio.sleep(0.02)
                pipe.send(visible)
                visible.clear()
            await consumer.stop()
            await running

    asyncio.run(follow())


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _bare(context: Any, rate: int, seconds: float, path: str, sync: str) -> list[float]:
    """The same with a bare loop: sorted milliseconds."""
    ours, theirs = socket.socketpair()
    here, there = context.Pipe()
    count = int(rate * seconds)
    process = context.Process(target=_store, args=(there, theirs, path, count, sync), daemon=True)
    process.start()
    theirs.close()
    try:
        receive(here, process)
        written: list[float] = []
        start = time.monotonic()
        message = bytes(MESSAGE_BYTES)
        while len(written) < count:
            due = min(count, int((time.monotonic() - start) * rate) + 1)
            for _ in range(len(written), due):
                written.append(time.monotonic())  # before it is sent: the other process may be done at once
                ours.sendall(message)
            time.sleep(TICK_S)
        visible: list[float] = receive(here, process)
        return sorted((seen - at) * 1000 for at, seen in zip(written, visible, strict=True))
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def _store(pipe: Connection, link: socket.socket, path: str, count: int, sync: str) -> None:
    """The bare loop: commit whatever messages are there, and note when that was done."""
    store = BareStore(path, sync)
    visible: list[float] = []
    pipe.send(None)
    rest = 0
    while len(visible) < count and (data := link.recv(1 << 20)):
        arrived, rest = divmod(rest + len(data), MESSAGE_BYTES)
        if arrived:
            store.commit([bytes(MESSAGE_BYTES)] * arrived)
            visible += [time.monotonic()] * arrived
    store.close()
    pipe.send(visible)
