"""The limits that speed is measured against: bare LMDB doing the least that the same result needs.

`write_limit` writes rows that are already decoded into the same trees with the same sync setting; `get_limit` reads key
and row with a transaction each. No promise of the store is kept here: no states, no boundaries, no visibility.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import lmdb

from storage import directory, keys, records, seal
from storage.index import SLICE_ROWS, sort_key_rows
from storage.model import FailoverLog, Identity, Seqno, SnapshotRange
from storage.purge import Window
from storage.view import open_view
from storage.writer import GroupWriter

Row = tuple[bytes, bytes]
COMMIT_BYTES = 8 << 20
"""Of rows, in one transaction."""


class RollbackFigures(NamedTuple):
    """A rollback, and the removal of what it left behind while other vbuckets were written and read."""

    retracted_rows: int
    rollback_ms: float
    steps: int
    step_ms_p50: float
    step_ms_p99: float
    step_ms_max: float
    removed_rows_per_s: float
    """Of all the time until the last row was gone, what else was done in it included."""
    removed_rows_per_s_alone: float
    """Of the steps' own time."""
    documents_per_s: float
    commit_ms_p99: float
    reads_per_s: float


class Timing(NamedTuple):
    """What was done and how long it took."""

    documents: int
    seconds: float
    cpu_s: float = 0.0
    """Processor time, where it was measured."""

    @property
    def per_second(self) -> float:
        """Rate."""
        return self.documents / self.seconds if self.seconds else 0.0

    @property
    def cpu_us(self) -> float:
        """Processor time of a document."""
        return self.cpu_s / self.documents * 1e6


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


def write_limit(path: str, rows: dict[int, list[Row]], *, deferred: bool, batch_rows: int = SLICE_ROWS) -> Timing:
    """The same rows by `putmulti` into the same trees, metasync off, `batch_rows` a transaction.

    `deferred`: row trees first, then all key rows of a vbucket sorted and appended, as for one large snapshot each;
    otherwise both trees with every batch, its key rows sorted. Key rows are decoded and checksums
    computed before the time begins.
    """
    key_rows = {vbid: records.key_rows(each) for vbid, each in rows.items()}
    rows = {vbid: seal.sealed_rows([key for key, _ in each], each) for vbid, each in rows.items()}
    env, row_trees, key_trees = _bare_trees(path, rows)
    count = sum(map(len, rows.values()))
    start, cpu_start = time.perf_counter(), time.process_time()
    for vbid, each in rows.items():
        for first in range(0, len(each), batch_rows):
            with env.begin(write=True) as txn:
                txn.cursor(row_trees[vbid]).putmulti(each[first : first + batch_rows], append=True)
                if not deferred:
                    batch = key_rows[vbid][first : first + batch_rows]
                    sort_key_rows(batch)
                    txn.cursor(key_trees[vbid]).putmulti(batch, dupdata=False)
        if deferred:
            batch = key_rows[vbid]
            sort_key_rows(batch)
            for first in range(0, len(batch), batch_rows):
                with env.begin(write=True) as txn:
                    txn.cursor(key_trees[vbid]).putmulti(batch[first : first + batch_rows], dupdata=False)
    env.sync(True)
    timing = Timing(count, time.perf_counter() - start, time.process_time() - cpu_start)
    env.close()
    return timing


def _bare_trees(path: str, vbids: Iterable[int]) -> tuple[Any, dict[int, Any], dict[int, Any]]:
    """A bare environment at `path` with the trees of rows and of keys of these vbuckets."""
    vbids = list(vbids)
    os.makedirs(path, exist_ok=True)
    env = lmdb.open(path, map_size=64 << 30, max_dbs=2 * len(vbids) + 2, metasync=False, readahead=False, meminit=False)
    with env.begin(write=True) as txn:
        row_trees = {vbid: env.open_db(keys.rows_db(vbid), txn=txn) for vbid in vbids}
        key_trees = {vbid: env.open_db(keys.keys_db(vbid), txn=txn, dupsort=True, dupfixed=True) for vbid in vbids}
    return env, row_trees, key_trees


class BareTrees:
    """The trees of a mirror in one bare environment that grows: each call adds rows to every vbucket."""

    def __init__(self, path: str, vbuckets: int) -> None:
        """A new one at `path`."""
        self._env, self._row_trees, self._key_trees = _bare_trees(path, range(vbuckets))

    def add(self, rows: dict[int, list[Row]]) -> Timing:
        """Put these rows and their keys, sorted, with a transaction whenever `COMMIT_BYTES` are written. As in
        `write_limit`, key rows are decoded and checksums computed before the time begins.
        """
        key_rows = {vbid: records.key_rows(each) for vbid, each in rows.items()}
        sealed = {vbid: seal.sealed_rows([key for key, _ in each], each) for vbid, each in rows.items()}
        start, cpu_start = time.perf_counter(), time.process_time()
        left = list(rows)
        while left:
            size_bytes = 0
            with self._env.begin(write=True) as txn:
                while left and size_bytes < COMMIT_BYTES:
                    vbid = left.pop(0)
                    txn.cursor(self._row_trees[vbid]).putmulti(sealed[vbid], append=True)
                    sort_key_rows(key_rows[vbid])
                    txn.cursor(self._key_trees[vbid]).putmulti(key_rows[vbid], dupdata=False)
                    size_bytes += sum(len(row) for _, row in sealed[vbid])
        self._env.sync(True)
        count = sum(map(len, rows.values()))
        return Timing(count, time.perf_counter() - start, time.process_time() - cpu_start)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


class BareStore:
    """A bare LMDB environment that takes messages one after the other: the limit of how soon something is stored."""

    def __init__(self, path: str, sync: str) -> None:
        """A new one at `path`; `sync` is what a commit forces to the disk, as for the mirror's store."""
        os.makedirs(path)
        self._env = lmdb.open(path, map_size=1 << 30, metasync=sync == "full", sync=sync != "unsafe", meminit=False)
        self._count = 0

    def commit(self, messages: Sequence[bytes]) -> None:
        """Store them in one transaction."""
        with self._env.begin(write=True) as txn:
            for message in messages:
                self._count += 1
                txn.put(self._count.to_bytes(8, "big"), message, append=True)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


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
        with _writing(path, identity, group) as writer:
            for vbid in directory.group_vbids(identity, group):
                writer.save_failover_log(vbid, FailoverLog.of([(7, 0)]))
                rows = rows_of(vbid)
                step = snapshot_rows or len(rows) or 1
                for snapshot in range(0, len(rows), step):
                    _store_snapshot(writer, vbid, rows[snapshot : snapshot + step], snapshot, run_rows)


def append_rows(path: str, count: int, *, seed: int) -> dict[int, int]:
    """Write `count` documents more into the first group of a store that nobody writes; the seqnos by vbucket."""
    identity = directory.load(path)
    vbids = directory.group_vbids(identity, 0)
    highs = {}
    with _writing(path, identity, 0) as writer:
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
                _store_snapshot(writer, vbid, rows, first, len(rows))
                highs[vbid] = first + len(rows)
    return highs


def add_rows(path: str, rows: dict[int, list[Row]], run_rows: int = 500) -> Timing:
    """Write a snapshot more into each of these vbuckets of a store that nobody else writes, until all is published and
    synced. The time begins with the first row: the groups are open.
    """
    identity = directory.load(path)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(_writing(path, identity, group)) for group in range(identity.group_count)]
        start, cpu_start = time.perf_counter(), time.process_time()
        for writer in writers:
            for vbid in writer.environment.vbids:
                if rows.get(vbid):
                    _store_snapshot(writer, vbid, rows[vbid], int(writer.served(vbid).published_seqno), run_rows)
            _commit_all(writer)
            writer.environment.env.sync(True)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    return Timing(sum(map(len, rows.values())), seconds, cpu_s)


@contextlib.contextmanager
def _writing(path: str, identity: Identity, group: int) -> Iterator[GroupWriter]:
    """A group's writer; at the end everything is committed and it is closed."""
    writer = GroupWriter.open(
        directory.group_path(path, group),
        group=group,
        vbids=list(directory.group_vbids(identity, group)),
        identity=identity,
        clock_ms=lambda: int(time.time() * 1000),
    )
    yield writer
    _commit_all(writer)
    writer.close()


def _commit_all(writer: GroupWriter) -> None:
    writer.commit()
    while writer.step() or any(writer.publishing(vbid) for vbid in writer.environment.vbids):
        writer.commit()


def _store_snapshot(writer: GroupWriter, vbid: int, rows: list[Row], before: int, run_rows: int) -> None:
    """One snapshot whose rows have the seqnos after `before`."""
    end = before + len(rows)
    for first in range(0, len(rows), run_rows):
        run = rows[first : first + run_rows]
        writer.stage(vbid, run, sum(len(frame) for _, frame in run), SnapshotRange(Seqno(before + 1), Seqno(end)))
        if writer.pending_bytes >= COMMIT_BYTES:
            writer.commit(flush_open=True)
    writer.publish(vbid, end, before + 1)


def rollback_round(path: str, retracted: int, *, value_bytes: int = 256, seed: int = 1) -> RollbackFigures:
    """Retract `retracted` rows of one vbucket of four, then remove them; meanwhile another is written, a third is read.

    Half of the retracted rows are new documents, half are new versions of those that stay. What goes on at the side is
    what a worker does between two steps: a commit of 100 documents, 20 reads.
    """
    identity = Identity("bench", "bench", "bench", 4, 1)
    directory.create(path, identity)
    ahead_ms = 0

    def clock_ms() -> int:
        return time.time_ns() // 1_000_000 + ahead_ms

    writer = GroupWriter.open(
        directory.group_path(path, 0),
        group=0,
        vbids=range(4),
        identity=identity,
        clock_ms=clock_ms,
        window=Window(time_ms=3_600_000),
    )
    rng = random.Random(seed)
    payload = rng.randbytes(2 * value_bytes)
    kept = max(1, retracted // 2)
    positions = [0, 0, 0, 0]

    def stage(vbid: int, numbers: Sequence[int], end: int) -> None:
        prefix, first = writer.row_prefix(vbid), positions[vbid]
        batch = []
        for seqno, number in enumerate(numbers, first + 1):
            cut = seqno % value_bytes
            frame = records.encode_mutation(b"document::%010d" % number, payload[cut : cut + value_bytes], seqno)
            batch.append((prefix + seqno.to_bytes(8, "big"), frame))
        positions[vbid] += len(numbers)
        writer.stage(vbid, batch, sum(len(frame) for _, frame in batch), SnapshotRange(Seqno(first + 1), Seqno(end)))

    def snapshot(vbid: int, numbers: Sequence[int]) -> None:
        end = positions[vbid] + len(numbers)
        for first in range(0, len(numbers), SLICE_ROWS):
            stage(vbid, numbers[first : first + SLICE_ROWS], end)
            writer.commit(flush_open=True)
        writer.publish(vbid, end, 0)
        writer.commit()
        while writer.publishing(vbid):
            writer.step()
            writer.commit()

    snapshot(0, rng.sample(range(kept), kept))
    of_2 = [each for each in range(min(4 * kept, 400_000)) if keys.vbid_of(b"document::%010d" % each, 4) == 2]
    snapshot(2, of_2)
    while writer.step():
        pass
    snapshot(0, rng.sample(range(2 * kept), retracted - retracted // 2) + rng.sample(range(2 * kept), retracted // 2))
    names = [b"document::%010d" % rng.choice(of_2) for _ in range(1_000)]
    steps: list[float] = []
    commits: list[float] = []
    reads = written = 0
    with open_view(path) as view:
        start = time.perf_counter()
        found = writer.rollback(0, kept)
        rollback_ms = (time.perf_counter() - start) * 1e3
        assert found.boundary_seqno == kept, found
        ahead_ms = 7_200_000  # the window passes
        gone = writer.figures()["purged_rows"] + retracted
        start = time.perf_counter()
        while writer.figures()["purged_rows"] < gone:
            began = time.perf_counter()
            writer.step()
            steps.append(time.perf_counter() - began)
            if not len(steps) % 5:
                began = time.perf_counter()
                stage(1, range(written, written + 100), positions[1] + 100)
                writer.publish(1, positions[1], 0)
                writer.commit()
                commits.append(time.perf_counter() - began)
                written += 100
            for name in names[reads % 1_000 :][:20]:
                assert view.get(name) is not None
                reads += 1
        seconds = time.perf_counter() - start
    writer.close()
    steps.sort()
    commits.sort()
    return RollbackFigures(
        retracted_rows=retracted,
        rollback_ms=rollback_ms,
        steps=len(steps),
        step_ms_p50=1e3 * steps[len(steps) // 2],
        step_ms_p99=1e3 * steps[int(len(steps) * 0.99)],
        step_ms_max=1e3 * steps[-1],
        removed_rows_per_s=retracted / seconds,
        removed_rows_per_s_alone=retracted / sum(steps),
        documents_per_s=written / seconds,
        commit_ms_p99=1e3 * commits[int(len(commits) * 0.99)] if commits else 0.0,
        reads_per_s=reads / seconds,
    )


def get_limit(path: str, sample: Sequence[bytes], vbucket_count: int) -> Timing:
    """Bare reads of a mirror with one group: a transaction, the key tree's oldest reference, the row, nothing more."""
    folder = directory.group_path(path, 0)
    env = lmdb.open(folder, map_size=64 << 30, max_dbs=2 * vbucket_count + 16, readonly=True, readahead=False,
                    max_spare_txns=8, max_readers=1024)  # fmt: skip
    trees = [
        (env.open_db(keys.keys_db(vbid), dupsort=True, dupfixed=True, create=False),
         env.open_db(keys.rows_db(vbid), create=False))
        for vbid in range(vbucket_count)
    ]  # fmt: skip
    lookups = [(b"\0" + key, *trees[keys.vbid_of(key, vbucket_count)]) for key in sample]
    start, cpu_start = time.perf_counter(), time.process_time()
    for wire_key, key_tree, row_tree in lookups:
        txn = env.begin()
        txn.get(txn.get(wire_key, b"", key_tree)[:12], b"", row_tree)
        txn.abort()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    env.close()
    return Timing(len(sample), seconds, cpu_s)


def bare_get(path: str, vbid: int, key: bytes) -> bytes | None:
    """One document of a mirror by bare reads: all environments are opened, and two trees of one of them."""
    identity = directory.load(path)
    opened = [
        lmdb.open(directory.group_path(path, group), map_size=64 << 30, max_dbs=4, readonly=True, readahead=False)
        for group in range(identity.group_count)
    ]
    env = opened[vbid % identity.group_count]
    key_tree = env.open_db(keys.keys_db(vbid), dupsort=True, dupfixed=True, create=False)
    row_tree = env.open_db(keys.rows_db(vbid), create=False)
    with env.begin() as txn:
        reference = txn.get(b"\0" + key, None, key_tree)
        row = None if reference is None else txn.get(reference[:12], None, row_tree)
    for each in opened:
        each.close()
    return row


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


def rounds(count: int, *works: Callable[[], Timing]) -> Iterator[list[Timing]]:
    """Each work once a round, in turn, so that a drifting machine touches all alike."""
    for _ in range(count):
        yield [work() for work in works]
