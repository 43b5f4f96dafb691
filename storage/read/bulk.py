"""Reads every document of a vbucket at one boundary, as undecoded rows.

A read yields all documents of the boundary, also expired ones, or raises ViewInvalidated, whatever writes, purges and
rollbacks happen meanwhile.

A read of all keys walks the rows from the newest to the oldest and takes the first row of each key. This is several
times faster than a look-up of each row. But the walk must remember keys, and visits older versions and rows of
unrequested collections. Once this costs more than look-ups, the read continues in key order. A read verifies every row
that it visits, but notices a missing row only in key order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from itertools import islice, takewhile
from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.errors import CorruptedError
from storage.format import keys, seal
from storage.format.records import MUTATION, ROW_KEY, SEQNO, SYSTEM_EVENT
from storage.format.tokens import Pin
from storage.history.chain import check_place, not_in_order
from storage.read import validity
from storage.read.scan import CHUNK_BYTES, WireRange, references
from storage.read.vbucket_reader import VbucketReader

ROWS_MAX = 2_000
"""Approximate number of rows in a chunk. Larger chunks are slower, because of the processor's caches."""
GET_ROWS = 128
"""Number of rows fetched between two checks of the chunk's size."""
REMEMBERED_MAX = 500_000
"""Keys (some 60 MB) that a walk over rows may remember. If there are more, the read continues in key order."""
ROWS_PER_DOCUMENT = 3
"""With at most about this many rows per document, a walk over rows is faster than a look-up of each document."""
_FOREVER = b"\xff"
_MUTATIONS = b"\x80\x57\x00", b"\x80\x57\x01"
"""Bounds of the rows of mutations (first <= row < second). A row begins with magic, opcode and the upper byte of the
key's length, which is 0 because no key has 256 bytes.
"""
_TOMBSTONES = {b"\x58\x12", b"\x58\x15", b"\x59\x14"}
"""Opcodes of tombstones, each with the length of the message's extras."""
_MAGIC = 0x80
"""First byte of a row. A boundary, which may be as long as a row, begins with a seqno instead."""
_HIGH_SEQNO = b"\x80"
"""From this seqno on (2^63), a boundary may begin like a row, so only its key distinguishes it."""
_KEYS = [slice(55, 55 + length) for length in range(256)]


class KeyRange(NamedTuple):
    """Document keys from `start` on, with `prefix`, below `end` (None: no end)."""

    start: bytes = b""
    prefix: bytes = b""
    end: bytes | None = None


EVERY_KEY = KeyRange()


class Chunk(NamedTuple):
    collection_id: int
    stored: list[bytes]
    """DCP messages, each with its checksum (`seal.SIZE` bytes). The checksums were compared if the view verifies reads.
    """
    byte_count: int

    @property
    def frames(self) -> list[bytes]:
        """Copies of the messages without checksums. To spare the copies, cut the checksums of `stored` yourself."""
        return [each[seal.FRAME] for each in self.stored]


def documents(
    reader: VbucketReader,
    pin: Pin,
    collection_ids: Collection[int] | None = None,
    key_range: KeyRange = EVERY_KEY,
    *,
    rows_max: int = ROWS_MAX,
    after_seqno: int = 0,
) -> Iterator[Chunk]:
    """Yield every document that `pin` (a served position) sees, also expired ones, in the fastest order.

    Documents at or below `after_seqno` may be left out. Raises ViewInvalidated once the purger has removed a row that
    `pin` sees. A rollback does not end the read.
    """
    read = _Read(reader, pin, collection_ids, key_range, rows_max)
    return read.in_order_of_rows(after_seqno) if key_range == EVERY_KEY else read.in_order_of_keys(frozenset())


class _Read:
    def __init__(
        self,
        reader: VbucketReader,
        pin: Pin,
        collection_ids: Collection[int] | None,
        key_range: KeyRange,
        rows_max: int,
    ) -> None:
        self._vbid = pin.vbid
        self._reader = reader
        self._environment = reader.environment
        with self._environment.read() as txn:
            self._served = validity.served_at(reader, txn, pin)
            manifest = reader.manifest(txn, self._served.pub.manifest_key)
        selected = manifest.collections if collection_ids is None else manifest.collections.keys() & set(collection_ids)
        self._collections = sorted(
            (keys.encode_collection_id(each), each, manifest.collections[each].begin_seqno.to_bytes(8, "big"))
            for each in selected
        )
        self._key_range = key_range
        self._rows_max = rows_max

    def in_order_of_rows(self, after_seqno: int) -> Iterator[Chunk]:
        """Walk the rows, newest first. Continue in key order once there are too many keys to remember, or too many rows
        are older versions or unrequested.
        """
        seen: set[bytes] = set()
        row_count = 0
        for link in self._served.links:
            first = keys.ROW.pack(link.branch, max(link.base_seqno, after_seqno)) + _FOREVER
            position = keys.ROW.pack(link.branch, link.cut) + _FOREVER
            while position and position >= first:
                taken: list[list[bytes]] = [[] for _ in self._collections]
                byte_counts = [0 for _ in self._collections]
                with self._environment.read() as txn:
                    validity.check(self._reader, txn, self._served)
                    for _ in range(0, self._rows_max, GET_ROWS):
                        frames, position = self._run(txn, position, first)
                        row_count += len(frames)
                        for number, mine in enumerate(self._newest(frames, seen)):
                            taken[number] += mine
                            byte_counts[number] += sum(map(len, mine))
                        if not position or sum(byte_counts) > CHUNK_BYTES:
                            break
                for (_, collection_id, _), rows, byte_count in zip(self._collections, taken, byte_counts, strict=True):
                    if rows:
                        yield Chunk(collection_id, rows, byte_count)
                if len(seen) > REMEMBERED_MAX or row_count > ROWS_PER_DOCUMENT * len(seen) + self._rows_max:
                    yield from self.in_order_of_keys(seen)
                    return

    def _run(self, txn: Transaction, position: bytes, first: bytes) -> tuple[list[bytes], bytes]:
        """Return entries below `position` and above `first`, oldest first, and the next position (empty: the end)."""
        cursor = txn.raw.cursor(self._reader.rows)
        if there := cursor.set_range(position):
            if (at := cursor.key()) != position:
                check_place(txn, self._vbid, at, cursor.value())
            there = cursor.prev()
        else:
            there = cursor.last()
        if not there:
            return [], b""
        newest: bytes = cursor.key()
        if newest[SEQNO] < _HIGH_SEQNO:
            frames = list(islice(cursor.iterprev(keys=False), GET_ROWS))
        else:
            frames = [each for key, each in islice(cursor.iterprev(), GET_ROWS) if len(key) == keys.ROW_KEY_SIZE]
        following: bytes = cursor.key()
        is_row = len(following) == keys.ROW_KEY_SIZE
        if following >= position or (is_row and frames[-1][24:32] != following[SEQNO]):
            raise not_in_order(txn, self._vbid)
        if following <= first:
            following = b""
            frames.clear()  # these rows are read again: do not hold large ones twice
            if newest > first:
                cursor.set_range(first)
                rows = list(takewhile(lambda entry: entry[0] <= newest, cursor.iternext()))
                if not rows or rows[-1][0] != newest:
                    raise not_in_order(txn, self._vbid)
                frames = [frame for key, frame in rows if len(key) == keys.ROW_KEY_SIZE]
        else:
            frames.reverse()
        return frames, following

    def _newest(self, frames: list[bytes], seen: set[bytes]) -> Iterator[Collection[bytes]]:
        """Yield each collection's documents with keys that `seen` lacks, and add the collection's keys to `seen`.
        `frames` is oldest first, so a later version replaces an earlier one. Raises CorruptedError.
        """
        all_mutations = bool(frames) and _MUTATIONS[0] <= min(frames) and max(frames) < _MUTATIONS[1]
        rows = frames if all_mutations else self._without_boundaries(frames)
        self._check(rows)
        try:
            if all_mutations:
                newest = {frame[_KEYS[frame[3]]]: frame for frame in rows}
            else:
                rows = [frame for frame in rows if frame[1] != SYSTEM_EVENT or frame[4] != 13]
                newest = {frame[24 + frame[4] : 24 + frame[4] + (frame[2] << 8 | frame[3])]: frame for frame in rows}
        except IndexError:
            raise self._damaged("a row is cut short") from None
        if b"" in newest:
            raise self._damaged("a row is cut short")
        if len(newest) < len(rows) and (seqnos := [frame[24:32] for frame in rows]) != sorted(seqnos):
            raise self._damaged("rows do not rise in seqno")
        oldest_seqno = rows[0][24:32] if rows else b""
        for prefix, _, begin_seqno in self._collections:
            if newest and min(newest).startswith(prefix) and max(newest).startswith(prefix):
                mine = newest  # every key between the smallest and the largest has the prefix, too
            else:
                mine = {key: frame for key, frame in newest.items() if key.startswith(prefix)}
            if not seen.isdisjoint(mine):
                mine = {key: frame for key, frame in mine.items() if key not in seen}
            seen.update(mine)
            gone = [] if all_mutations else [frame for frame in mine.values() if frame[1] != MUTATION]
            if not _TOMBSTONES.issuperset([frame[1:5:3] for frame in gone]):
                raise self._damaged("a row is of no known kind")
            if not gone and oldest_seqno > begin_seqno:
                yield mine.values()
            else:
                yield [each for each in mine.values() if each[1] == MUTATION and each[24:32] > begin_seqno]

    def _without_boundaries(self, frames: list[bytes]) -> list[bytes]:
        """Return `frames` without the boundaries. The keys of the entries were not fetched, so a boundary is recognized
        by its length and its first byte. A tombstone of this length with a damaged first byte is an error.
        """
        rows = [frame for frame in frames if len(frame) != keys.BOUNDARY.size or frame[0] == _MAGIC]
        if len(rows) < len(frames):
            for frame in frames:
                if len(frame) == keys.BOUNDARY.size and frame[0] != _MAGIC and frame[1:5:3] in _TOMBSTONES:
                    raise seal.damaged(frame, b"", self._vbid, self._environment.path)
        return rows

    def _check(self, rows: list[bytes]) -> None:
        if self._reader.verify_reads:
            seal.check_all(rows, self._vbid, self._environment.path)

    def _damaged(self, message: str) -> CorruptedError:
        return CorruptedError(message, path=self._environment.path, vbid=self._vbid)

    def in_order_of_keys(self, done: Set[bytes]) -> Iterator[Chunk]:
        """Walk the requested keys, and look up the rows of the keys that are not in `done`."""
        for collection_prefix, collection_id, begin_seqno in self._collections:
            prefix = collection_prefix + self._key_range.prefix
            end = None if self._key_range.end is None else collection_prefix + self._key_range.end
            start = collection_prefix + max(self._key_range.prefix, self._key_range.start)
            left = WireRange(start, prefix, end, int.from_bytes(begin_seqno), len(collection_prefix))
            while left.start:
                with self._environment.read() as txn:
                    found, following = references(
                        self._reader, txn, self._served, left, deletions=False, rows_max=self._rows_max
                    )
                    if done:
                        found = [pair for pair in found if pair[0] not in done]
                    frames: list[bytes] = []
                    byte_count = 0
                    rows = txn.raw.cursor(self._reader.rows)
                    while len(frames) < len(found):
                        run = found[len(frames) : len(frames) + GET_ROWS]
                        got = rows.getmulti([dup[ROW_KEY] for _, dup in run])
                        if len(got) != len(run):
                            raise self._damaged("a key points to a row that is missing")
                        stored = [frame for _, frame in got]
                        self._check(stored)
                        if [frame[_KEYS[frame[3]]] for frame in stored] != [key for key, _ in run]:
                            raise self._damaged("a key points to another document's row")
                        frames += stored
                        byte_count += sum(map(len, stored))
                        if byte_count > CHUNK_BYTES and len(frames) < len(found):
                            following = found[len(frames)][0]
                            break
                left = left._replace(start=following)
                if frames:
                    yield Chunk(collection_id, frames, byte_count)
