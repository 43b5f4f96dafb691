"""The limits that speed is measured against: bare LMDB doing the least that the same result needs.

`write_limit` writes rows that are already decoded into the same trees with the same sync setting; `get_limit` reads key
and row with a transaction each. No promise of the store is kept here: no states, no boundaries, no visibility.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import lmdb

from storage.env import directory
from storage.format import keys, records, seal
from storage.history.index import SLICE_ROWS, sort_key_rows

Row = tuple[bytes, bytes]
COMMIT_BYTES = 8 << 20
"""Of rows, in one transaction."""


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


def rounds(count: int, *works: Callable[[], Timing]) -> Iterator[list[Timing]]:
    """Each work once a round, in turn, so that a drifting machine touches all alike."""
    for _ in range(count):
        yield [work() for work in works]
