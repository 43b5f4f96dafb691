"""`bench growth`: what a document costs in a mirror of one size and in one many times larger, next to bare LMDB.

Knows two stores that get the same documents, wave by wave: a mirror's, by the writer that workers have (nothing is
received: how a message reaches it costs the same at every size), and a bare one. Keys are random, so each wave touches
all of every vbucket's tree of keys; both stores are one LMDB environment. The wave that is measured is as large as the
smallest size, so what is done in it is the same at every size; it ends with all of it published and synced. Reads are
of random keys of all, in the mirror's own files, which the system has in its memory as far as that goes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from mirror.bench import get, limits, stores
from storage.format import keys, records

FILL_WAVES = 4
"""What is not measured comes in larger waves: as many of the measured ones at once."""


@dataclass(frozen=True, slots=True)
class GrowthFigures:
    """The wave that ended at a size, and reads then."""

    documents: int
    stored: limits.Timing
    limit: limits.Timing
    got: limits.Timing
    limit_got: limits.Timing


def key_of(number: int) -> bytes:
    """The number-th of 2**32 keys, in random order."""
    return b"document::%010d" % (number * 2654435761 % 2**32)


def growth(sizes: Sequence[int], vbuckets: int, value_bytes: int, reads: int, folder: str) -> Iterator[GrowthFigures]:
    """Measure at each of `sizes`, which rise and are multiples of the first, with two stores below `folder`."""
    path = os.path.join(folder, "mirror")
    stores.store_each(path, vbuckets, 1, lambda _: [])
    bare = limits.BareTrees(os.path.join(folder, "bare"), vbuckets)
    seqnos = [0] * vbuckets
    try:
        end = 0
        for size in sizes:
            while end < size:
                step = min(FILL_WAVES * sizes[0], size - sizes[0] - end) or sizes[0]
                rows = _wave(range(end, end + step), value_bytes, seqnos)
                limit, stored = bare.add(rows), stores.add_rows(path, rows)
                end += step
            rng = Random(size)
            sample = [key_of(rng.randrange(size)) for _ in range(reads)]
            limits.get_limit(path, sample, vbuckets)  # both sides find the files in the system's memory
            limit_got = limits.get_limit(path, sample, vbuckets)
            yield GrowthFigures(size, stored, limit, get.get_view(path, sample), limit_got)
    finally:
        bare.close()


def _wave(numbers: range, value_bytes: int, seqnos: list[int]) -> dict[int, list[limits.Row]]:
    """Documents as rows of their vbuckets, with the seqnos that come after `seqnos`, which rise."""
    payload = Random(numbers.start).randbytes(2 * value_bytes)
    rows: dict[int, list[limits.Row]] = {vbid: [] for vbid in range(len(seqnos))}
    for number in numbers:
        key = key_of(number)
        vbid = keys.vbid_of(key, len(seqnos))
        seqno = seqnos[vbid] = seqnos[vbid] + 1
        value = payload[number % value_bytes :][:value_bytes]
        rows[vbid].append((keys.ROW.pack(1, seqno), records.encode_mutation(key, value, seqno, cas=seqno << 16)))
    return rows
