"""The stores that benchmarks measure: rows made up, and stored by the writer that workers have.

Knows writers, keys and rows; must never know what is measured. Invariant: the same arguments make the same rows.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping

from mirror.bench.limits import COMMIT_BYTES, Row, Timing
from storage.env import directory
from storage.format import keys, records
from storage.model import FailoverLog, Identity, Seqno, SnapshotRange
from storage.write.writer import GroupWriter


def document_rows(vbid: int, vbuckets: int, count: int, value_bytes: int, seed: int = 1) -> list[Row]:
    """`count` mutations of one vbucket (branch 1), seqnos from 1, keys of 20 bytes in random order."""
    rng = random.Random(seed * 65536 + vbid)
    payload = rng.randbytes(value_bytes)
    rows: list[Row] = []
    for number in rng.sample(range(count), count):
        key = b"document::%010d" % (number * vbuckets + vbid)
        seqno = len(rows) + 1
        cut = rng.randrange(value_bytes) if value_bytes else 0
        frame = records.encode_mutation(key, payload[cut:] + payload[:cut], seqno, cas=seqno << 16)
        rows.append((keys.ROW.pack(1, seqno), frame))
    return rows


def own_keys(vbucket_count: int, count: int) -> dict[int, list[Row]]:
    """`count` mutations spread over the vbuckets their keys hash to."""
    rows: dict[int, list[Row]] = {vbid: [] for vbid in range(vbucket_count)}
    for number in range(count):
        key = b"document::%010d" % number
        each = rows[keys.vbid_of(key, vbucket_count)]
        seqno = len(each) + 1
        each.append((keys.ROW.pack(1, seqno), records.encode_mutation(key, b"%0256d" % number, seqno)))
    return rows


def sample_keys(count: int, of: int, seed: int = 1) -> list[bytes]:
    """`count` random keys of `own_keys(..., of)`."""
    rng = random.Random(seed)
    return [b"document::%010d" % rng.randrange(of) for _ in range(count)]


def store_rows(
    path: str, rows: Mapping[int, list[Row]], *, snapshot_rows: int, run_rows: int = 500, groups: int = 1
) -> Timing:
    """The same rows through GroupWriter, offered in runs of `run_rows`, a snapshot ending every `snapshot_rows`."""
    start = time.perf_counter()
    store_each(path, max(rows) + 1, groups, lambda vbid: rows.get(vbid, []), snapshot_rows, run_rows)
    return Timing(sum(map(len, rows.values())), time.perf_counter() - start)


def store_each(
    path: str,
    vbuckets: int,
    groups: int,
    rows_of: Callable[[int], list[Row]],
    snapshot_rows: int | None = None,
    run_rows: int = 500,
) -> None:
    """The same of vbuckets whose rows are made one vbucket after the other; by default a snapshot each."""
    identity = Identity("bench", "bench", "bench", vbuckets, groups)
    directory.create(path, identity)
    for group in range(groups):
        with writing(path, identity, group) as writer:
            for vbid in directory.group_vbids(identity, group):
                writer.save_failover_log(vbid, FailoverLog.of([(7, 0)]))
                rows = rows_of(vbid)
                step = snapshot_rows or len(rows) or 1
                if not rows:
                    writer.publish(vbid, 0, 0)  # an empty vbucket is filled, too
                for snapshot in range(0, len(rows), step):
                    store_snapshot(writer, vbid, rows[snapshot : snapshot + step], snapshot, run_rows)


def append_rows(path: str, count: int, *, seed: int) -> dict[int, int]:
    """Write `count` documents more into the first group of a store that nobody writes; the seqnos by vbucket."""
    identity = directory.load(path)
    vbids = directory.group_vbids(identity, 0)
    highs = {}
    with writing(path, identity, 0) as writer:
        for number, vbid in enumerate(vbids):
            share = count // len(vbids) + (number < count % len(vbids))
            first = int(writer.served(vbid).published_seqno)
            rows = [
                (
                    keys.ROW.pack(1, seqno),
                    records.encode_mutation(b"more::%d::%010d" % (seed, seqno), bytes(256), seqno),
                )
                for seqno in range(first + 1, first + 1 + share)
            ]
            if rows:
                store_snapshot(writer, vbid, rows, first, len(rows))
                highs[vbid] = first + len(rows)
    return highs


def add_rows(path: str, rows: dict[int, list[Row]], run_rows: int = 500) -> Timing:
    """Write a snapshot more into each of these vbuckets of a store that nobody else writes, until all is published and
    synced. The time begins with the first row: the groups are open.
    """
    identity = directory.load(path)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(writing(path, identity, group)) for group in range(identity.group_count)]
        start, cpu_start = time.perf_counter(), time.process_time()
        for writer in writers:
            for vbid in writer.environment.vbids:
                if rows.get(vbid):
                    store_snapshot(writer, vbid, rows[vbid], int(writer.served(vbid).published_seqno), run_rows)
            commit_all(writer)
            writer.environment.env.sync(True)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    return Timing(sum(map(len, rows.values())), seconds, cpu_s)


@contextlib.contextmanager
def writing(path: str, identity: Identity, group: int) -> Iterator[GroupWriter]:
    """A group's writer; at the end everything is committed and it is closed."""
    writer = GroupWriter.open(
        directory.group_path(path, group),
        group=group,
        vbids=list(directory.group_vbids(identity, group)),
        identity=identity,
        clock_ms=lambda: int(time.time() * 1000),
    )
    yield writer
    commit_all(writer)
    writer.close()


def commit_all(writer: GroupWriter) -> None:
    """Commit until everything that is complete is published."""
    writer.commit()
    while writer.step() or any(writer.publishing(vbid) for vbid in writer.environment.vbids):
        writer.commit()


def store_snapshot(writer: GroupWriter, vbid: int, rows: list[Row], before: int, run_rows: int) -> None:
    """One snapshot whose rows have the seqnos after `before`."""
    end = before + len(rows)
    for first in range(0, len(rows), run_rows):
        run = rows[first : first + run_rows]
        writer.stage(vbid, run, sum(len(frame) for _, frame in run), SnapshotRange(Seqno(before + 1), Seqno(end)))
        if writer.pending_bytes >= COMMIT_BYTES:
            writer.commit(flush_open=True)
    writer.publish(vbid, end, before + 1)
