"""Builds the key rows of a large staged snapshot just before the snapshot is published.

If a snapshot spans several transactions, its rows first go to the row tree `v<vbid>` alone. No reader sees these rows,
so they need no key rows yet. Once the snapshot is complete, `IndexJob` reads the rows back, sorts their key rows and
inserts these in slices of bounded size. Inserting each key row as its row arrives would be several times slower and
write ten times the bytes. Invariants:
- memory holds at most one run (sorted part) of about `RUN_ROWS` key rows, and a chunk of each run in a file;
- every write transaction holds at most `SLICE_ROWS` rows;
- the whole job can be repeated after a crash: existing key rows stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from operator import itemgetter
from typing import Any

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.errors import VERIFY, CorruptedError
from storage.format import keys
from storage.format.keys import BOUNDARY_SUFFIX, ROW_KEY_SIZE
from storage.format.records import SEQNO, SYSTEM_EVENT, row_key, seqno_of
from storage.format.runs import SortedRuns

RUN_ROWS = 200_000
"""Key rows sorted in memory at once: about 40 MB."""
SLICE_ROWS = 20_000
"""Rows read or written in one step of some 20 to 50 ms; between steps the worker answers noops and sends heartbeats."""

KeyRow = tuple[bytes, bytes]
BY_KEY = itemgetter(0)
"""Sorts key rows by document key. The sort is stable and the input rises in seqno, so the key rows of one document stay
in order of seqno.
"""


class IndexJob:
    """Builds the key rows of one branch's rows with from_seqno < seqno <= to_seqno, a slice at a time."""

    def __init__(self, environment: Environment, vbid: int, prefix: bytes, from_seqno: int, to_seqno: int) -> None:
        self.environment = environment
        self.vbid = vbid
        self.prefix = prefix
        self.to_seqno = to_seqno
        self.row_bytes = 0
        """Bytes of the rows read so far."""
        self._position = from_seqno
        self._read_all = False
        self._runs: SortedRuns[KeyRow] = SortedRuns(environment.path, RUN_ROWS, BY_KEY)
        self._sorted: Iterator[KeyRow] | None = None

    def read_slice(self) -> bool:
        if self._read_all:
            return False
        with self.environment.read() as txn:
            key_rows, count, last_seqno, row_bytes = key_rows_between(
                txn, self.vbid, self.prefix, self._position, self.to_seqno, SLICE_ROWS
            )
        self._read_all = count < SLICE_ROWS
        self.row_bytes += row_bytes
        self._position = last_seqno
        self._runs.extend(key_rows)
        return not self._read_all

    def next_slice(self) -> None:
        if self._sorted is None:
            self._sorted = self._runs.sorted()
        self._slice = list(islice(self._sorted, SLICE_ROWS))

    def write_slice(self, txn: Transaction) -> bool:
        """Insert the slice in `txn`, which the caller commits. If the commit fails, call this again: it inserts the
        same slice. Return False after the last slice.
        """
        put_key_rows(txn, self.vbid, self._slice)
        return len(self._slice) == SLICE_ROWS

    def close(self) -> None:
        self._runs.close()


def rows_between(
    txn: Transaction,
    vbid: int,
    prefix: bytes,
    after_seqno: int,
    to_seqno: int,
    limit: int,
    bytes_max: int | None = None,
) -> list[tuple[bytes, bytes]]:
    """Return the rows of a branch with after_seqno < seqno <= to_seqno, rising: no boundaries, and at most `limit`.

    With `bytes_max` return only as many rows as fit into these bytes, but at least one row.
    """
    left = bytes_max if bytes_max is not None else float("inf")
    cursor = txn.cursor(keys.rows_db(vbid))
    end = row_key(prefix, to_seqno)
    rows: list[tuple[bytes, bytes]] = []
    if after_seqno >= to_seqno or not cursor.set_range(row_key(prefix, after_seqno + 1)):
        return rows
    previous = b""
    for key, value in cursor.iternext():
        if key <= previous:
            raise not_in_order(txn, vbid)
        previous = key
        if key > end:
            check_end(txn, vbid, cursor, key, value)
            break
        if len(key) == ROW_KEY_SIZE:
            left -= len(value)
            if rows and left < 0:
                break
            rows.append((key, value))
            if len(rows) == limit or left <= 0:
                break
        elif key[ROW_KEY_SIZE:] != BOUNDARY_SUFFIX:
            raise not_in_order(txn, vbid)
    return rows


def check_end(txn: Transaction, vbid: int, cursor: Any, key: bytes, value: bytes) -> None:
    """Raise CorruptedError if a flipped bit in a row's key made a walk over rows end early."""
    check_place(txn, vbid, key, value)
    if cursor.next() and bytes(cursor.key()) <= key:
        raise not_in_order(txn, vbid)


def check_place(txn: Transaction, vbid: int, key: bytes, value: bytes) -> None:
    """Raise CorruptedError if a row's key has another seqno than the row."""
    if len(key) == ROW_KEY_SIZE and value[24:32] != key[SEQNO]:
        raise not_in_order(txn, vbid)


def not_in_order(txn: Transaction, vbid: int) -> CorruptedError:
    return CorruptedError("the rows are not in order", path=txn.path, vbid=vbid, hint=VERIFY)


def key_rows_between(
    txn: Transaction, vbid: int, prefix: bytes, after_seqno: int, to_seqno: int, limit: int
) -> tuple[list[KeyRow], int, int, int]:
    """Return the key rows of at most `limit` rows with after_seqno < seqno <= to_seqno. Return also the number of rows
    read (with system events, which have no key row), their last seqno and their bytes.

    Each row is decoded as it is read: to collect the rows first takes three times as long.
    """
    cursor = txn.cursor(keys.rows_db(vbid))
    end = row_key(prefix, to_seqno)
    found: list[KeyRow] = []
    add = found.append
    count = row_bytes = 0
    last = row_key(prefix, after_seqno)
    if after_seqno >= to_seqno or not cursor.set_range(row_key(prefix, after_seqno + 1)):
        return found, 0, after_seqno, 0
    for key, frame in cursor.iternext():
        if key > end or count == limit:
            break
        if len(key) == ROW_KEY_SIZE:
            count += 1
            row_bytes += len(frame)
            last = key
            if frame[1] != SYSTEM_EVENT:
                start = 24 + frame[4]  # `records.key_of` inline
                add((frame[start : start + (frame[2] << 8 | frame[3])], key + frame[1:2]))
        elif key[ROW_KEY_SIZE:] != BOUNDARY_SUFFIX:
            raise not_in_order(txn, vbid)
    return found, count, seqno_of(last), row_bytes


def put_key_rows(txn: Transaction, vbid: int, rows: list[KeyRow]) -> None:
    """Insert sorted key rows; existing ones stay as they are."""
    if rows:
        consumed, _ = txn.cursor(keys.keys_db(vbid)).putmulti(rows, dupdata=False)
        assert consumed == len(rows), (vbid, consumed, len(rows))
