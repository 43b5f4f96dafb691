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

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.format import keys
from storage.format.records import SYSTEM_EVENT, seqno_of
from storage.format.runs import SortedRuns
from storage.history import chain

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
    """Builds the key rows of one link's rows, a slice at a time."""

    def __init__(self, environment: Environment, vbid: int, link: chain.ChainLink) -> None:
        self.environment = environment
        self.vbid = vbid
        self.to_seqno = link.cut
        self.row_bytes = 0
        """Bytes of the rows read so far."""
        self._left = link
        self._read_all = False
        self._runs: SortedRuns[KeyRow] = SortedRuns(environment.path, RUN_ROWS, BY_KEY)
        self._sorted: Iterator[KeyRow] | None = None

    def read_slice(self) -> bool:
        if self._read_all:
            return False
        with self.environment.read() as txn:
            key_rows, count, last_seqno, row_bytes = key_rows_of(txn, self.vbid, self._left, SLICE_ROWS)
        self._read_all = count < SLICE_ROWS
        self.row_bytes += row_bytes
        self._left = self._left._replace(base_seqno=last_seqno)
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


def key_rows_of(
    txn: Transaction, vbid: int, link: chain.ChainLink, rows_max: int
) -> tuple[list[KeyRow], int, int, int]:
    """Return the key rows of the first `rows_max` rows of a link. Return also the number of rows read (with system
    events, which have no key row), their last seqno and their bytes.

    Each row is decoded as it is read: to collect the rows first takes three times as long.
    """
    found: list[KeyRow] = []
    add = found.append
    count = row_bytes = 0
    last = keys.ROW.pack(link.branch, link.base_seqno)
    for last, frame in islice(chain.rows_after(txn, vbid, (link,)), rows_max):
        count += 1
        row_bytes += len(frame)
        if frame[1] != SYSTEM_EVENT:
            start = 24 + frame[4]  # `records.key_of` inline
            add((frame[start : start + (frame[2] << 8 | frame[3])], last + frame[1:2]))
    return found, count, seqno_of(last), row_bytes


def put_key_rows(txn: Transaction, vbid: int, rows: list[KeyRow]) -> None:
    """Insert sorted key rows; existing ones stay as they are."""
    if rows:
        consumed, _ = txn.cursor(keys.keys_db(vbid)).putmulti(rows, dupdata=False)
        assert consumed == len(rows), (vbid, consumed, len(rows))
