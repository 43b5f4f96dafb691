"""Documents in bulk: every document of a vbucket at one boundary as rows that nobody has taken apart, for readers that
make columns of them.

Knows the key and row trees and who is visible; must never know what becomes of the rows. Invariants: the same documents
as `View.scan` of the boundary finds, whatever is written, purged or rolled back meanwhile, or ViewInvalidated; a chunk
is read in one transaction and holds `rows_max` rows or `CHUNK_BYTES` at most (and a run of `GET_ROWS` rows), so neither
the purger nor memory is held up by a long read.

Two ways: rows in their own order, taking those whose places the key tree named before, is twice as fast as looking each
row up; but it needs the places remembered, and it walks over older versions and over what nobody asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from storage import keys
from storage.errors import CorruptedError
from storage.view import CHUNK_BYTES, Pin, View

ROWS_MAX = 2_000
"""Rows of a chunk: more cost the processor's caches more than they save."""
GET_ROWS = 128
"""Rows fetched between two looks at how many bytes they are."""
REMEMBERED_MAX = 500_000
"""Documents of a vbucket whose places are remembered while its rows are walked: some 50 MB."""
ROWS_PER_DOCUMENT = 3
"""Walking rows and leaving out the older versions is faster than looking each row up, up to about so many."""
_FOREVER = b"\xff"


class KeyRange(NamedTuple):
    """Document keys from `start` on, with `prefix`, below `end` (None: no end)."""

    start: bytes = b""
    prefix: bytes = b""
    end: bytes | None = None


EVERY_KEY = KeyRange()


class Chunk(NamedTuple):
    """Documents of one collection: their keys as they stand on the wire, and their rows, in the same order."""

    collection_id: int
    keys: list[bytes]
    frames: list[bytes]


def documents(
    view: View,
    pin: Pin,
    collection_ids: Collection[int] | None = None,
    wanted: KeyRange = EVERY_KEY,
    *,
    rows_max: int = ROWS_MAX,
) -> Iterator[Chunk]:
    """Every document that `pin` sees, expired ones too, in whatever order is the fastest.

    Raises ViewInvalidated once the purger has been at what `pin` sees. A rollback does not end it.
    """
    read = _Read(view, pin, collection_ids, wanted, rows_max)
    if wanted == EVERY_KEY and (newest := read.newest()) is not None:
        return read.in_order_of_rows(newest)
    return read.in_order_of_keys()


class _Read:
    """One vbucket of one pin, being read."""

    def __init__(
        self, view: View, pin: Pin, collection_ids: Collection[int] | None, wanted: KeyRange, rows_max: int
    ) -> None:
        self._view = view
        self._vbid = pin.vbid
        self._opened = view._open(pin.vbid)
        self._environment = self._opened.environment
        self._standing = view.standing(pin)
        with self._environment.read() as txn:
            manifest = view._manifest(self._environment, txn, pin.vbid, self._standing.manifest_key)
        asked = manifest.collections if collection_ids is None else manifest.collections.keys() & set(collection_ids)
        self._collections = sorted(
            (keys.encode_collection_id(each), each, manifest.collections[each].begin_seqno.to_bytes(8, "big"))
            for each in asked
        )
        self._wanted = wanted
        self._rows_max = rows_max
        self._limits = {
            keys.PREFIX.pack(each.branch): keys.ROW.pack(each.branch, each.cut) + _FOREVER
            for each in self._standing.links
        }

    def newest(self) -> set[bytes] | None:
        """The row keys of all documents; None where it is faster to look each row up: they are too many to remember,
        or most rows are older versions.
        """
        found: set[bytes] = set()
        for prefix, _, begin_seqno in self._collections:
            position = prefix
            while position:
                with self._transaction() as txn:
                    versions, position = self._versions(txn, position, prefix, None)
                found.update([dup[:12] for dup in versions.values() if dup[12] == 0x57 and dup[4:12] > begin_seqno])
                if len(found) > REMEMBERED_MAX:
                    return None
        with self._transaction() as txn:
            row_count = txn.stat(self._opened.rows)["entries"]
        return found if row_count <= ROWS_PER_DOCUMENT * len(found) + self._rows_max else None

    def in_order_of_rows(self, newest: set[bytes]) -> Iterator[Chunk]:
        """Walk the rows, and take those."""
        for link in reversed(self._standing.links):
            position, end = keys.ROW.pack(link.branch, link.base_seqno), keys.ROW.pack(link.branch, link.cut)
            while position < end:
                frames: list[bytes] = []
                byte_count = 0
                with self._transaction() as txn:
                    cursor = txn.cursor(self._opened.rows)
                    entries = iter(cursor.iternext()) if cursor.set_range(position + _FOREVER) else iter(())
                    for _ in range(0, self._rows_max, GET_ROWS):
                        run = list(islice(entries, GET_ROWS))
                        taken = [frame for key, frame in run if key in newest]
                        frames += taken
                        byte_count += sum(map(len, taken))
                        position = run[-1][0][:12] if len(run) == GET_ROWS else end
                        if position >= end or byte_count > CHUNK_BYTES:
                            break
                yield from self._chunks(frames)

    def _chunks(self, frames: list[bytes]) -> Iterator[Chunk]:
        """Rows by their collections."""
        try:
            wire_keys = [frame[55 : 55 + (frame[2] << 8 | frame[3])] for frame in frames]
        except IndexError:
            raise CorruptedError("a row is cut short", path=self._environment.path, vbid=self._vbid) from None
        if len(self._collections) == 1:
            if frames:
                yield Chunk(self._collections[0][1], wire_keys, frames)
            return
        for prefix, collection_id, _ in self._collections:
            mine = [at for at, key in enumerate(wire_keys) if key.startswith(prefix)]
            if mine:
                yield Chunk(collection_id, [wire_keys[at] for at in mine], [frames[at] for at in mine])

    def in_order_of_keys(self) -> Iterator[Chunk]:
        """Walk the keys that are wanted, and look their rows up."""
        for collection_prefix, collection_id, begin_seqno in self._collections:
            prefix = collection_prefix + self._wanted.prefix
            end = None if self._wanted.end is None else collection_prefix + self._wanted.end
            position = collection_prefix + max(self._wanted.prefix, self._wanted.start)
            while position:
                with self._transaction() as txn:
                    versions, following = self._versions(txn, position, prefix, end)
                    found = [key for key, dup in versions.items() if dup[12] == 0x57 and dup[4:12] > begin_seqno]
                    frames: list[bytes] = []
                    byte_count = 0
                    rows = txn.cursor(self._opened.rows)
                    while len(frames) < len(found):
                        run = found[len(frames) : len(frames) + GET_ROWS]
                        got = rows.getmulti([versions[key][:12] for key in run])
                        if len(got) != len(run):
                            raise CorruptedError(
                                "a key points to a row that is missing", path=self._environment.path, vbid=self._vbid
                            )
                        frames += [frame for _, frame in got]
                        byte_count += sum(map(len, frames[-len(run) :]))
                        if byte_count > CHUNK_BYTES and len(frames) < len(found):
                            following = found[len(frames)]
                            break
                position = following
                if frames:
                    yield Chunk(collection_id, found[: len(frames)], frames)

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        """A read of what is certainly there still."""
        with self._environment.read() as txn:
            self._view._revalidate(self._environment, txn, self._vbid, self._standing)
            yield txn

    def _versions(
        self, txn: Any, position: bytes, prefix: bytes, end: bytes | None
    ) -> tuple[dict[bytes, bytes], bytes]:
        """The newest visible version of some keys from `position` on, and where to go on (empty: the end)."""
        cursor = txn.cursor(self._opened.keys)
        if not cursor.set_range(position):
            return {}, b""
        entries = cursor.iternext()
        pairs: list[tuple[bytes, bytes]] = list(islice(entries, self._rows_max))
        following = b""
        if len(pairs) == self._rows_max:  # the last key with all of its versions
            last = pairs[-1][0]
            for pair in entries:
                if pair[0] != last:
                    following = pair[0]
                    break
                pairs.append(pair)
        if not (pairs[-1][0].startswith(prefix) and (end is None or pairs[-1][0] < end)):
            pairs = [each for each in pairs if each[0].startswith(prefix) and (end is None or each[0] < end)]
            following = b""
        # The versions of a key rise along the chain, so the last visible one is the newest.
        limits = self._limits
        return {key: dup for key, dup in pairs if dup <= limits.get(dup[:4], b"")}, following


def collection_names(view: View, pin: Pin) -> dict[int, str]:
    """`scope.collection` of each collection that `pin` sees, by id."""
    opened = view._open(pin.vbid)
    with opened.environment.read() as txn:
        standing = view._standing(opened, txn, pin.vbid, pin.branch, pin.seqno)
        manifest = view._manifest(opened.environment, txn, pin.vbid, standing.manifest_key)
    return {
        each.collection_id: f"{manifest.scopes.get(each.scope_id, '?')}.{each.name}"
        for each in manifest.collections.values()
    }
