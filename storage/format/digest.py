"""Fingerprints of document versions, to compare two copies of a bucket without moving values.

Knows documents as they are stored (`raw`) and how to sort more fingerprints than memory holds; must never know where
the other copy is. A fingerprint has the key with its collection id, seqno, rev_seqno, cas, whether it is a tombstone,
and a digest of all else that a reader can see: value and xattrs, decompressed, flags, expiry, and the datatype without
its Snappy bit. It has neither the delete time of a tombstone, which a source knows only of what it reads from disk, nor
whether it was deleted or expired. Invariant: two copies of one version have equal fingerprints.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import IO, NamedTuple

import msgpack

from storage.format import keys
from storage.format.records import DATATYPE_SNAPPY, decompress
from storage.model import Document, Kind

DIGEST_BYTES = 16
RUN_ROWS = 50_000
"""Fingerprints sorted in memory at once: about 15 MB."""
_CHUNK_ROWS = 2_000
_HEAD = struct.Struct(">IIB")
_PREFIXES = [keys.encode_collection_id(collection_id) for collection_id in range(0x80)]
_MUTATION = Kind.MUTATION
_VERSION = struct.Struct(">IQQQ?")


class Fingerprint(NamedTuple):
    """One version of one key. Sorts by key, then by seqno."""

    key: bytes
    """With its collection id, as on the wire."""
    seqno: int
    rev_seqno: int
    cas: int
    deleted: bool
    digest: bytes


def fingerprint(document: Document) -> Fingerprint:
    """Return the fingerprint of a document that was read `raw`. Raises CorruptedError if its value is damaged."""
    _, collection_id, key, seqno, rev_seqno, cas, flags, expiry, datatype, value, kind, _ = document
    deleted = kind is not _MUTATION
    if datatype & DATATYPE_SNAPPY:
        value, datatype = decompress(value) if value else value, datatype & ~DATATYPE_SNAPPY
    head = _HEAD.pack(0, 0, datatype) if deleted else _HEAD.pack(flags, expiry, datatype)
    digest = hashlib.blake2b(head + value, digest_size=DIGEST_BYTES).digest()
    prefix = _PREFIXES[collection_id] if collection_id < 0x80 else keys.encode_collection_id(collection_id)
    return Fingerprint(prefix + key, int(seqno), rev_seqno, cas, deleted, digest)


class Digest:
    """Digest of many versions, added in rising order of their keys."""

    def __init__(self) -> None:
        self._hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.count = 0

    def add(self, each: Fingerprint) -> None:
        self.count += 1
        key, seqno, rev_seqno, cas, deleted, digest = each
        self._hasher.update(_VERSION.pack(len(key), seqno, rev_seqno, cas, deleted) + key + digest)

    def hex(self) -> str:
        return self._hasher.hexdigest()


class Runs:
    """Sorter of fingerprints. Runs of `run_rows` go to nameless files in `folder` (None: the system's)."""

    def __init__(self, folder: str | None = None, run_rows: int = RUN_ROWS) -> None:
        self._folder = folder
        self._run_rows = run_rows
        self._run: list[Fingerprint] = []
        self._spilled: list[IO[bytes]] = []

    def add(self, each: Fingerprint) -> None:
        """Raises OSError if the folder takes no more."""
        self._run.append(each)
        if len(self._run) >= self._run_rows:
            self._spill()

    def newest(self) -> Iterator[Fingerprint]:
        """Yield the fingerprint with the highest seqno of each key, in the order of keys. Add none meanwhile."""
        self._run.sort()
        for file in self._spilled:
            file.seek(0)
        runs: list[Iterable[Fingerprint]] = [self._run, *(_read_run(file) for file in self._spilled)]
        for _, versions in groupby(heapq.merge(*runs), key=itemgetter(0)):
            yield deque(versions, maxlen=1)[0]

    def close(self) -> None:
        for file in self._spilled:
            file.close()
        self._spilled, self._run = [], []

    def _spill(self) -> None:
        self._run.sort()
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - lives as long as the runs
        self._spilled.append(file)
        for start in range(0, len(self._run), _CHUNK_ROWS):
            file.write(msgpack.packb(self._run[start : start + _CHUNK_ROWS]))
        file.flush()
        self._run = []


def _read_run(file: IO[bytes]) -> Iterator[Fingerprint]:
    unpacker = msgpack.Unpacker(file, use_list=False, max_buffer_size=1 << 30)
    for chunk in unpacker:
        for fields in chunk:
            yield Fingerprint(*fields)
