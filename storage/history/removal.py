"""Removes a range of rows that no view sees, with their key rows, in steps of bounded work.

Knows a vbucket's row tree and key tree; never why no view sees the range. Neighbouring rows are cheap to remove, but
their key rows lie anywhere in the key tree, each on another LMDB page. So the removal reads a run (some `RUN_ROWS`
rows), removes the run's key rows in key order, and then the rows. Invariants:
- a key row is removed before its row, so no key row refers to a missing row;
- memory holds one run;
- a step removes at most a small multiple of `limit` rows in its transaction;
- without a call of `settle` after a step, the next step does the same again;
- a removal need not be finished, because the purger finds the remaining rows again.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from enum import Enum, auto
from itertools import islice
from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.format import keys, records
from storage.format.records import SYSTEM_EVENT
from storage.history import chain

RUN_ROWS = 400_000
"""Rows whose key rows are removed in one pass over the key tree: some 40 MB."""
BATCH_ROWS = 4_000
SAMPLES_PER_BATCH = 16
DEAL_SLICES = 8
"""Slices (results of one read) that one step distributes to batches (parts of the run in key order)."""
READ_SHARE = 2
"""Rows of a step that reads, as a multiple of `limit`."""
ROW_SHARE = 4
"""Rows of a step that removes rows, as a multiple of `limit`: neighbouring rows are cheap."""


class Dead(NamedTuple):
    """Rows of a branch with after_seqno < seqno <= to_seqno. No view has seen them since `since_ms` of the
    `HistoryClock`; None: no view ever saw them.
    """

    branch: int
    after_seqno: int
    to_seqno: int
    since_ms: int | None
    left_by: int
    """The branch that left the rows: its record says since when they are dead, and stays as long as they do."""

    @property
    def first_key(self) -> bytes:
        """The smallest possible key in the range, right behind the boundary at `after_seqno`."""
        return keys.ROW.pack(self.branch, self.after_seqno) + keys.BOUNDARY_SUFFIX + b"\0"

    @property
    def last_key(self) -> bytes:
        return keys.ROW.pack(self.branch, self.to_seqno) + keys.BOUNDARY_SUFFIX


class Slice(NamedTuple):
    """The result of one read: sorted key rows (key and reference joined), number of rows and boundaries, and the seqno
    to continue from (None: the end).
    """

    references: list[bytes]
    size: int
    position: int | None


def marks_of(slices: list[list[bytes]], batch_rows: int) -> list[bytes]:
    """Return the marks: keys that cut sorted slices into batches of about `batch_rows`. Samples the slices."""
    stride = max(1, batch_rows // SAMPLES_PER_BATCH)
    sample = sorted(itertools.chain.from_iterable(each[::stride] for each in slices))
    return sample[SAMPLES_PER_BATCH::SAMPLES_PER_BATCH]


def deal(sorted_slice: list[bytes], marks: list[bytes], batches: list[list[list[bytes]]]) -> None:
    """Distribute a sorted slice to the batches between the marks."""
    cuts = [0, *(bisect_left(sorted_slice, mark) for mark in marks), len(sorted_slice)]
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        if start < end:
            batches[number].append(sorted_slice[start:end])


class RemovalPhase(Enum):
    READ = auto()
    KEYS = auto()
    ROWS = auto()


class Removal:
    def __init__(self, vbid: int, dead: Dead) -> None:
        self.dead = dead
        self.vbid = vbid
        self._rows = keys.rows_db(vbid)
        self._keys = keys.keys_db(vbid)
        self._begin_run(dead.after_seqno)

    def _begin_run(self, position: int) -> None:
        self._phase = RemovalPhase.READ
        self._position: int | None = position
        self._slices: list[list[bytes]] = []
        self._marks: list[bytes] = []
        self._batches: list[list[list[bytes]]] = []  # each batch: its sorted parts; the last batch is taken first
        self._left = 0  # rows and boundaries of the run that are still stored
        self._slice: Slice | None = None
        self._batch: list[bytes] = []
        self._count = 0

    def step(self, txn: Transaction, limit: int) -> int:
        """Do one step in `txn`, and return the number of removed rows."""
        if self._phase is RemovalPhase.READ:
            self._slice = self._read(txn, limit * READ_SHARE)
            return 0
        if self._phase is RemovalPhase.KEYS:
            self._remove_keys(txn, limit)
            return 0
        return self._remove_rows(txn, limit * ROW_SHARE)

    def settle(self) -> bool:
        """Note that the step was committed. Return False once the range is empty."""
        if self._phase is RemovalPhase.READ:
            return self._settle_read()
        if self._phase is RemovalPhase.KEYS:
            self._batch = self._batch[self._count :]
            if not self._batch and not self._batches:
                self._phase = RemovalPhase.ROWS
            return True
        self._left -= self._count
        if self._left > 0 and self._count:
            return True
        if self._position is None:
            return False
        self._begin_run(self._position)
        return True

    def _settle_read(self) -> bool:
        assert self._slice is not None, "nothing was read"
        self._slices.append(self._slice.references)
        self._left += self._slice.size
        self._position = self._slice.position
        if self._position is None or self._left >= RUN_ROWS:
            self._marks = marks_of(self._slices, BATCH_ROWS)
            self._batches = [[] for _ in range(len(self._marks) + 1)]
            self._phase = RemovalPhase.KEYS
        return self._left > 0 or self._position is not None

    def _read(self, txn: Transaction, limit: int) -> Slice:
        assert self._position is not None, "all was read"
        link = chain.ChainLink(self.dead.branch, self._position, self.dead.to_seqno)
        found: list[bytes] = []
        count = 0
        position = None
        seqno = self._position
        for key, frame in chain.rows_after(txn, self.vbid, (link,), boundaries=True):
            if count >= limit and records.seqno_of(key) != seqno:
                position = seqno
                break
            count += 1
            seqno = records.seqno_of(key)
            if len(key) == keys.ROW_KEY_SIZE and frame[1] != SYSTEM_EVENT:
                start = 24 + frame[4]  # `records.key_of` inline
                found.append(frame[start : start + (frame[2] << 8 | frame[3])] + key + frame[1:2])
        found.sort()
        return Slice(found, count, position)

    def _remove_keys(self, txn: Transaction, limit: int) -> None:
        self._count = 0
        if self._slices:  # merging all slices at once would take too long for a step
            for _ in range(min(DEAL_SLICES, len(self._slices))):
                deal(self._slices.pop(), self._marks, self._batches)
            return
        if not self._batch and self._batches:
            self._batch = sorted(itertools.chain.from_iterable(self._batches.pop()))
        delete, tree, size = txn.raw.delete, txn.environment.db(self._keys), keys.DUP_SIZE
        self._count = min(limit, len(self._batch))
        for reference in islice(self._batch, self._count):
            delete(reference[:-size], reference[-size:], tree)  # does nothing if the row has no key row

    def _remove_rows(self, txn: Transaction, limit: int) -> int:
        cursor = txn.cursor(self._rows)
        last_key = self.dead.last_key
        count = rows = 0
        there = cursor.set_range(self.dead.first_key)
        while there and count < min(limit, self._left):
            key = cursor.key()
            if key > last_key:
                break
            count += 1
            rows += len(key) == keys.ROW_KEY_SIZE
            there = cursor.delete()
        self._count = count
        return rows
