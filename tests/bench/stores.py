"""Documents of a bench, and mirrors of them, stored by the writer that workers have.

Invariant: the same arguments make the same documents, so that both sides of a ratio have them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from storage.env import directory
from storage.format import keys, records
from storage.model import FailoverLog, Identity, Seqno, SnapshotRange
from storage.write.writer import GroupWriter, WriterOptions
from tests.bench.limits import Row

COMMIT_BYTES = 8 << 20
RUN_ROWS = 500


def key_of(number: int) -> bytes:
    """The number-th of 2**32 keys of 20 bytes, in random order."""
    return b"document::%010d" % (number * 2654435761 % 2**32)


def documents(numbers: range, value_bytes: int = 256) -> Iterator[tuple[bytes, bytes]]:
    """JSON with a text that does not compress."""
    filler = random.Random(numbers.start).randbytes(value_bytes).hex().encode()
    for number in numbers:
        head = b'{"id":%d,"total":%d.%02d,"note":"' % (number, number % 10_000, number % 100)
        yield key_of(number), head + filler[: max(0, value_bytes - len(head) - 2)] + b'"}'


def sample_keys(count: int, of: int) -> list[bytes]:
    rng = random.Random(count)
    return [key_of(rng.randrange(of)) for _ in range(count)]


def rows_of(
    found: Iterable[tuple[bytes, bytes]], vbuckets: int, highs: Mapping[int, int] | None = None
) -> dict[int, list[Row]]:
    """Rows of the documents by vbucket, with the seqnos that follow `highs`."""
    rows: dict[int, list[Row]] = {vbid: [] for vbid in range(vbuckets)}
    for key, value in found:
        vbid = keys.vbid_of(key, vbuckets)
        seqno = (highs or {}).get(vbid, 0) + len(rows[vbid]) + 1
        frame = records.encode_mutation(key, value, seqno, cas=1_700_000_000_000_000_000 + (seqno << 16), datatype=1)
        rows[vbid].append((keys.ROW.pack(1, seqno), frame))
    return rows


def store(path: str, rows: Mapping[int, list[Row]], groups: int = 1) -> None:
    """Make a mirror of these rows, a snapshot for each vbucket."""
    identity = Identity("bench", "bench", "bench", len(rows), groups)
    directory.create(path, identity)
    for group in range(groups):
        with _writing(path, identity, group) as writer:
            for vbid in identity.group_vbids(group):
                writer.vbuckets[vbid].save(failover_log=FailoverLog.of([(7, 0)]))
                _store_snapshot(writer, vbid, rows[vbid])


def append(path: str, rows: Mapping[int, list[Row]]) -> None:
    """Store a snapshot more for each vbucket that has rows."""
    identity = directory.load(path)
    for group in range(identity.group_count):
        with _writing(path, identity, group) as writer:
            for vbid in identity.group_vbids(group):
                if rows[vbid]:
                    _store_snapshot(writer, vbid, rows[vbid])


def mirror(path: str, count: int, vbuckets: int = 64) -> str:
    """Make a mirror of `documents(range(count))` and return its path."""
    store(path, rows_of(documents(range(count)), vbuckets))
    return path


@contextmanager
def _writing(path: str, identity: Identity, group: int) -> Iterator[GroupWriter]:
    writer = GroupWriter(
        directory.group_path(path, group),
        WriterOptions(group=group, identity=identity, clock_ms=lambda: int(time.time() * 1000)),
    )
    yield writer
    writer.commit()
    while writer.step() or any(writer.vbuckets[vbid].complete_seqno is not None for vbid in writer.environment.vbids):
        writer.commit()
    writer.close()


def _store_snapshot(writer: GroupWriter, vbid: int, rows: list[Row]) -> None:
    before = int(writer.vbuckets[vbid].base.published_seqno)
    end = before + len(rows)
    for first in range(0, len(rows), RUN_ROWS):
        run = rows[first : first + RUN_ROWS]
        writer.vbuckets[vbid].stage(
            run, sum(len(frame) for _, frame in run), SnapshotRange(Seqno(before + 1), Seqno(end))
        )
        if writer.pending_bytes >= COMMIT_BYTES:
            writer.commit(flush_open=True)
    writer.vbuckets[vbid].publish(end, before + 1 if rows else 0)
