"""`bench rollback`: a rollback, and the removal of what it leaves behind while other vbuckets are written and read.

Knows one group with four vbuckets: rows of the first are retracted, the second is written meanwhile, the third is read.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from mirror.bench import stores
from storage.env import directory
from storage.format import keys, records
from storage.history.index import SLICE_ROWS
from storage.history.purge import Window
from storage.model import Identity, Seqno, SnapshotRange
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter

WINDOW_MS = 3_600_000
RETRACTED, WRITTEN, READ = 0, 1, 2
"""Vbuckets."""
NAMES = 1_000
"""Keys that are read in turn."""


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


class _Store:
    """The mirror: its writer, how far each vbucket is, and its clock."""

    def __init__(self, path: str, value_bytes: int, rng: random.Random) -> None:
        identity = Identity("bench", "bench", "bench", 4, 1)
        directory.create(path, identity)
        self.ahead_ms = 0
        self.writer = GroupWriter.open(
            directory.group_path(path, 0),
            group=0,
            vbids=range(4),
            identity=identity,
            clock_ms=lambda: time.time_ns() // 1_000_000 + self.ahead_ms,
            window=Window(time_ms=WINDOW_MS),
        )
        self.positions = [0, 0, 0, 0]
        self._value_bytes = value_bytes
        self._payload = rng.randbytes(2 * value_bytes)

    def stage(self, vbid: int, numbers: Sequence[int], end: int) -> None:
        """Offer documents of these numbers as a part of a snapshot up to `end`."""
        prefix, first = self.writer.row_prefix(vbid), self.positions[vbid]
        batch = []
        for seqno, number in enumerate(numbers, first + 1):
            cut = seqno % self._value_bytes
            frame = records.encode_mutation(_key(number), self._payload[cut : cut + self._value_bytes], seqno)
            batch.append((prefix + seqno.to_bytes(8, "big"), frame))
        self.positions[vbid] += len(numbers)
        snapshot = SnapshotRange(Seqno(first + 1), Seqno(end))
        self.writer.stage(vbid, batch, sum(len(frame) for _, frame in batch), snapshot)

    def snapshot(self, vbid: int, numbers: Sequence[int]) -> None:
        """Write a snapshot of documents of these numbers, and publish it."""
        end = self.positions[vbid] + len(numbers)
        for first in range(0, len(numbers), SLICE_ROWS):
            self.stage(vbid, numbers[first : first + SLICE_ROWS], end)
            self.writer.commit(flush_open=True)
        self.writer.publish(vbid, end, 0)
        stores.commit_all(self.writer)

    def write(self, numbers: Sequence[int]) -> float:
        """Commit a snapshot of the vbucket that is written; the seconds it took."""
        began = time.perf_counter()
        self.stage(WRITTEN, numbers, self.positions[WRITTEN] + len(numbers))
        self.writer.publish(WRITTEN, self.positions[WRITTEN], 0)
        self.writer.commit()
        return time.perf_counter() - began


def _key(number: int) -> bytes:
    return b"document::%010d" % number


def rollback_round(path: str, retracted: int, *, value_bytes: int = 256, seed: int = 1) -> RollbackFigures:
    """Retract `retracted` rows of one vbucket of four, then remove them; meanwhile another is written, a third is read.

    Half of the retracted rows are new documents, half are new versions of those that stay. What goes on at the side is
    what a worker does between two steps: a commit of 100 documents, 20 reads.
    """
    rng = random.Random(seed)
    store = _Store(path, value_bytes, rng)
    kept = max(1, retracted // 2)
    store.snapshot(RETRACTED, rng.sample(range(kept), kept))
    read = [each for each in range(min(4 * kept, 400_000)) if keys.vbid_of(_key(each), 4) == READ]
    store.snapshot(READ, read)
    new = rng.sample(range(2 * kept), retracted - retracted // 2)
    store.snapshot(RETRACTED, new + rng.sample(range(2 * kept), retracted // 2))
    names = [_key(rng.choice(read)) for _ in range(NAMES)]
    with open_view(path) as view:
        start = time.perf_counter()
        found = store.writer.rollback(RETRACTED, kept)
        rollback_ms = (time.perf_counter() - start) * 1e3
        assert found.boundary_seqno == kept, found
        store.ahead_ms = 2 * WINDOW_MS
        figures = _remove(store, view, names, retracted, rollback_ms)
    store.writer.close()
    return figures


def _remove(store: _Store, view: View, names: list[bytes], retracted: int, rollback_ms: float) -> RollbackFigures:
    """Step until the retracted rows are gone, with writes and reads in between."""
    steps: list[float] = []
    commits: list[float] = []
    reads = written = 0
    gone = store.writer.figures()["purged_rows"] + retracted
    start = time.perf_counter()
    while store.writer.figures()["purged_rows"] < gone:
        began = time.perf_counter()
        store.writer.step()
        steps.append(time.perf_counter() - began)
        if not len(steps) % 5:
            commits.append(store.write(range(written, written + 100)))
            written += 100
        for name in names[reads % NAMES :][:20]:
            assert view.get(name) is not None
            reads += 1
    seconds = time.perf_counter() - start
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
