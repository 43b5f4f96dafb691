"""The limits that speed is measured against: bare LMDB doing the least that the same result needs.

No promise of the store is kept here: no states, no boundaries, no visibility.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb

from storage.env import directory
from storage.format import keys, records, seal
from storage.history.index import BY_KEY, SLICE_ROWS

Row = tuple[bytes, bytes]


class Timing(NamedTuple):
    done: int
    elapsed_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.done / self.elapsed_s


class Stopwatch:
    def __init__(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def timing(self, count: int) -> Timing:
        return Timing(count, time.perf_counter() - self._start, time.process_time() - self._cpu_start)


def write(path: Path, rows: Mapping[int, list[Row]]) -> Timing:
    """Put the same rows into the same trees, all rows of a vbucket first, then its keys, sorted, as one large snapshot
    does it. Keys are decoded and checksums computed before the time begins.
    """
    key_rows = {vbid: records.key_rows(each) for vbid, each in rows.items()}
    sealed = {vbid: seal.sealed_rows([key for key, _ in each], each) for vbid, each in rows.items()}
    path.mkdir()
    env = lmdb.open(
        str(path), map_size=64 << 30, max_dbs=2 * len(rows) + 2, metasync=False, readahead=False, meminit=False
    )
    with env.begin(write=True) as txn:
        row_trees = {vbid: env.open_db(keys.rows_db(vbid), txn=txn) for vbid in rows}
        key_trees = {vbid: env.open_db(keys.keys_db(vbid), txn=txn, dupsort=True, dupfixed=True) for vbid in rows}
    watch = Stopwatch()
    for vbid, each in sealed.items():
        for first in range(0, len(each), SLICE_ROWS):
            with env.begin(write=True) as txn:
                txn.cursor(row_trees[vbid]).putmulti(each[first : first + SLICE_ROWS], append=True)
        key_rows[vbid].sort(key=BY_KEY)
        for first in range(0, len(each), SLICE_ROWS):
            with env.begin(write=True) as txn:
                txn.cursor(key_trees[vbid]).putmulti(key_rows[vbid][first : first + SLICE_ROWS], dupdata=False)
    env.sync(True)
    timing = watch.timing(sum(map(len, rows.values())))
    env.close()
    return timing


class BareStore:
    """Takes messages one after the other: the limit of how soon something is stored."""

    def __init__(self, path: Path, sync: str) -> None:
        path.mkdir()
        self._env = lmdb.open(
            str(path), map_size=1 << 30, metasync=sync == "full", sync=sync != "unsafe", meminit=False
        )
        self._count = 0

    def commit(self, messages: Sequence[bytes]) -> None:
        with self._env.begin(write=True) as txn:
            for message in messages:
                self._count += 1
                txn.put(self._count.to_bytes(8, "big"), message, append=True)

    def close(self) -> None:
        self._env.close()


def get(path: str, sample: Sequence[bytes], vbuckets: int) -> Timing:
    """Read a mirror with one group: for each key a transaction, the oldest reference, the row."""
    env = lmdb.open(directory.group_path(path, 0), map_size=64 << 30, max_dbs=2 * vbuckets + 16, readonly=True,
                    readahead=False, max_spare_txns=8, max_readers=1024)  # fmt: skip
    trees = [
        (env.open_db(keys.keys_db(vbid), dupsort=True, dupfixed=True, create=False),
         env.open_db(keys.rows_db(vbid), create=False))
        for vbid in range(vbuckets)
    ]  # fmt: skip
    lookups = [(b"\0" + key, *trees[keys.vbid_of(key, vbuckets)]) for key in sample]
    watch = Stopwatch()
    for wire_key, key_tree, row_tree in lookups:
        txn = env.begin()
        txn.get(txn.get(wire_key, b"", key_tree)[:12], b"", row_tree)
        txn.abort()
    timing = watch.timing(len(sample))
    env.close()
    return timing


def get_one(path: str, key: bytes) -> bytes | None:
    """Open all environments of a mirror and read one document."""
    identity = directory.load(path)
    vbid = keys.vbid_of(key, identity.vbucket_count)
    opened = [
        lmdb.open(directory.group_path(path, group), map_size=64 << 30, max_dbs=4, readonly=True, readahead=False)
        for group in range(identity.group_count)
    ]
    env = opened[vbid % identity.group_count]
    key_tree = env.open_db(keys.keys_db(vbid), dupsort=True, dupfixed=True, create=False)
    row_tree = env.open_db(keys.rows_db(vbid), create=False)
    with env.begin() as txn:
        row: bytes | None = txn.get(txn.get(b"\0" + key, b"", key_tree)[:12], None, row_tree)
    for each in opened:
        each.close()
    return row
