"""From a write at the source until readers of the mirror see it, at several rates, next to a bare loop.

Source and consumer, which is one worker's, note times of one clock: the source when it has written, the consumer when
the commit that made a seqno visible has returned. The bare loop receives messages of the same size over a socket and
puts those that are there into LMDB in one transaction.
"""

from __future__ import annotations

import asyncio
import socket
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mirror.sandbox import SandboxCluster
from mirror.supervise.processes.worker import settle_collector
from storage.write.writer import CommitResult, GroupWriter
from tests.bench.children import child
from tests.bench.ingest import consuming
from tests.bench.limits import BareStore
from tests.feed.harness import source_high_seqnos, streams_from

VALUE = b'{"note":"' + b"x" * 256 + b'"}'
MESSAGE_BYTES = 340
"""About the size of a DCP message with such a value."""
TICK_S = 0.0005

Write = tuple[int, int, float]
"""vbucket, seqno, and when it was written or became visible."""


def measure(
    folder: Path,
    *,
    rates: str = "500,5000",
    vbuckets: int = 64,
    seconds: float = 5.0,
    sync: str = "safe",
    rounds: int = 1,
) -> Iterator[dict[str, float | str]]:
    with (
        child(_write, vbuckets) as source,
        child(_follow, source.receive(), str(folder / "mirror"), sync, vbuckets) as consumer,
    ):
        consumer.receive()
        for number in range(rounds):
            for rate in map(int, rates.split(",")):
                limit_ms = _bare(rate, seconds, folder / f"limit-{number}-{rate}", sync)
                source.send((rate, seconds))
                written: list[Write] = source.receive()
                consumer.send({vbid: seqno for vbid, seqno, _ in written})
                found_ms = _lags_ms(written, consumer.receive())
                yield {
                    "rate": f"{rate}/s",
                    "p50_ms": quantile(found_ms, 0.5),
                    "p99_ms": quantile(found_ms, 0.99),
                    "limit_p50_ms": quantile(limit_ms, 0.5),
                    "limit_p99_ms": quantile(limit_ms, 0.99),
                }


def quantile(rising: Sequence[float], share: float) -> float:
    return rising[min(len(rising) - 1, int(len(rising) * share))]


def _lags_ms(written: list[Write], visible: list[Write]) -> list[float]:
    """From each write to the first time at which its vbucket was visible up to it, sorted."""
    seen: dict[int, tuple[list[int], list[float]]] = {}
    for vbid, seqno, at in visible:
        seqnos, times = seen.setdefault(vbid, ([], []))
        seqnos.append(seqno)
        times.append(at)
    return sorted((seen[vbid][1][bisect_left(seen[vbid][0], seqno)] - at) * 1000 for vbid, seqno, at in written)


def _due(start: float, rate: int, count: int) -> int:
    return min(count, int((time.monotonic() - start) * rate) + 1)


def _write(pipe: Connection, vbuckets: int) -> None:
    async def serve() -> None:
        async with SandboxCluster(vbuckets=vbuckets) as cluster:
            pipe.send(cluster.connection_string)
            settle_collector()
            while order := await asyncio.to_thread(_received, pipe):
                rate, seconds = order
                count = int(rate * seconds)
                written: list[Write] = []
                start = time.monotonic()
                while len(written) < count:
                    for _ in range(len(written), _due(start, rate, count)):
                        vbid = len(written) % vbuckets
                        item = cluster.set(b"document::%010d" % len(written), VALUE, vbid=vbid)
                        written.append((vbid, item.seqno, time.monotonic()))
                    await asyncio.sleep(TICK_S)
                pipe.send(written)

    asyncio.run(serve())


def _note_visible(writer: GroupWriter, visible: list[Write]) -> None:
    """Have each commit add what became visible, and when."""
    commit = writer.commit

    def note(**options: bool) -> CommitResult:
        result = commit(**options)
        now = time.monotonic()
        visible.extend((vbid, int(seqno), now) for vbid, seqno in result.published)
        return result

    writer.commit = note  # type: ignore[method-assign]


def _follow(pipe: Connection, connection_string: str, path: str, sync: str, vbuckets: int) -> None:
    async def follow() -> None:
        async with consuming(connection_string, path, sync) as (consumer, writers):
            visible: list[Write] = []
            for writer in writers:
                _note_visible(writer, visible)
            running = asyncio.create_task(consumer.run())
            while len(source_high_seqnos(consumer)) < vbuckets:  # noqa: ASYNC110 - looks on from outside
                await asyncio.sleep(0.02)
            settle_collector()  # as a worker does, else a full collection is a pause of 10 to 40 ms
            pipe.send("ready")
            while newest := await asyncio.to_thread(_received, pipe):
                while not streams_from(consumer, newest):  # noqa: ASYNC110 - the same
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


def _bare(rate: int, seconds: float, path: Path, sync: str) -> list[float]:
    ours, theirs = socket.socketpair()
    count = int(rate * seconds)
    with ours, theirs, child(_store, theirs, path, count, sync) as storing:
        storing.receive()
        written: list[float] = []
        start = time.monotonic()
        message = bytes(MESSAGE_BYTES)
        while len(written) < count:
            for _ in range(len(written), _due(start, rate, count)):
                written.append(time.monotonic())  # before it is sent: the other process may be done at once
                ours.sendall(message)
            time.sleep(TICK_S)
        visible: list[float] = storing.receive()
        return sorted((seen - at) * 1000 for at, seen in zip(written, visible, strict=True))


def _store(pipe: Connection, link: socket.socket, path: Path, count: int, sync: str) -> None:
    store = BareStore(path, sync)
    visible: list[float] = []
    pipe.send("ready")
    rest = 0
    while len(visible) < count and (data := link.recv(1 << 20)):
        arrived, rest = divmod(rest + len(data), MESSAGE_BYTES)
        if arrived:
            store.commit([bytes(MESSAGE_BYTES)] * arrived)
            visible += [time.monotonic()] * arrived
    store.close()
    pipe.send(visible)
