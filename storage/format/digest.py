"""Fingerprints of document versions, to compare two copies of a bucket without moving values.

A fingerprint has: the key, prefixed by its collection id; seqno; rev_seqno; cas; a tombstone flag; and a digest of the
rest: value and xattrs (decompressed), flags, expiry, datatype without the Snappy bit. Two facts of a tombstone are left
out: its delete time, which sources send only for rows from disk, and its kind (deletion or expiration).
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from storage.format import keys
from storage.format.records import DATATYPE_SNAPPY, decompress
from storage.format.runs import SortedRuns
from storage.model import Document, Kind

DIGEST_BYTES = 16
RUN_ROWS = 50_000
"""Fingerprints sorted in memory at once: about 15 MB."""
_HEAD = struct.Struct(">IIB")
_PREFIXES = [keys.encode_collection_id(collection_id) for collection_id in range(0x80)]
_MUTATION = Kind.MUTATION
_VERSION = struct.Struct(">IQQQ?")


class Fingerprint(NamedTuple):
    """One version of one key. Fingerprints sort by key, then by seqno."""

    key: bytes
    """The key, prefixed by the collection id as on the wire."""
    seqno: int
    rev_seqno: int
    cas: int
    deleted: bool
    digest: bytes


def fingerprint(document: Document) -> Fingerprint:
    """Return the fingerprint of a document that was read `raw`. Raises CorruptedError if the value is damaged."""
    _, collection_id, key, seqno, rev_seqno, cas, flags, expiry, datatype, value, kind, _ = document
    deleted = kind is not _MUTATION
    if datatype & DATATYPE_SNAPPY:
        value, datatype = decompress(value) if value else value, datatype & ~DATATYPE_SNAPPY
    head = _HEAD.pack(0, 0, datatype) if deleted else _HEAD.pack(flags, expiry, datatype)
    digest = hashlib.blake2b(head + value, digest_size=DIGEST_BYTES).digest()
    prefix = _PREFIXES[collection_id] if collection_id < 0x80 else keys.encode_collection_id(collection_id)
    return Fingerprint(prefix + key, int(seqno), rev_seqno, cas, deleted, digest)


class Digest:
    """A digest of many fingerprints, which must be added in rising order of keys."""

    def __init__(self) -> None:
        self._hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.count = 0

    def add(self, each: Fingerprint) -> None:
        self.count += 1
        key, seqno, rev_seqno, cas, deleted, digest = each
        self._hasher.update(_VERSION.pack(len(key), seqno, rev_seqno, cas, deleted) + key + digest)

    def hex(self) -> str:
        return self._hasher.hexdigest()


class Runs(SortedRuns[Fingerprint]):
    def __init__(self, folder: str | None = None, run_rows: int = RUN_ROWS) -> None:
        super().__init__(folder, run_rows)

    def newest(self) -> Iterator[Fingerprint]:
        """Yield the newest fingerprint of each key, in key order. Add no fingerprints during the iteration."""
        for _, versions in groupby(self.sorted(), key=itemgetter(0)):
            yield Fingerprint(*deque(versions, maxlen=1)[0])
