"""Scans one vbucket by collection and key, in chunks of documents.

Knows the key tree (a named database of LMDB) and the visible rows. Invariants:
- a scan reads one boundary from beginning to end;
- a scan holds no transaction between chunks, so it does not make the file grow;
- a scan raises ViewInvalidated once a rollback, a resync or the purger has passed the scan's boundary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.format import keys
from storage.format.records import KIND, MUTATION
from storage.format.tokens import AsOf, CollectionName, Pin, collection_id_of
from storage.model import SEQNO_MAX, Document, Manifest
from storage.read import validity
from storage.read.point_reads import bytes_above
from storage.read.vbucket_reader import KINDS, Served, VbucketReader

CHUNK_ROWS = 2_000
CHUNK_BYTES = 8 * 1024 * 1024
"""Maximum bytes of values in a chunk; a single document may be larger."""


class KeySelection(NamedTuple):
    """Selects documents of a vbucket with `start` <= key < `end` whose key begins with `prefix`."""

    prefix: bytes = b""
    start: bytes = b""
    end: bytes | None = None
    deletions: bool = False
    """True: select tombstones and expired documents, too."""
    raw: bool = False

    def within(self, manifest: Manifest, collection_id: int) -> WireRange | None:
        """Return the selection's wire keys in one collection; None if the manifest lacks the collection."""
        if (entry := manifest.collections.get(collection_id)) is None:
            return None
        collection = keys.encode_collection_id(collection_id)
        end = None if self.end is None else collection + self.end
        start = collection + max(self.prefix, self.start)
        return WireRange(start, collection + self.prefix, end, entry.begin_seqno, len(collection))


class WireRange(NamedTuple):
    """Wire keys (collection id and key) from `start` to below `end` that begin with `prefix`, for rows above
    `begin_seqno`. `skip` is the length of the collection id in a wire key.
    """

    start: bytes
    prefix: bytes
    end: bytes | None
    begin_seqno: int
    skip: int


def documents(
    reader: VbucketReader,
    selection: KeySelection,
    collection: CollectionName | None,
    as_of: AsOf,
    now: float | None,
    path: str,
) -> Iterator[Document]:
    """Yield the documents of a vbucket at one boundary; `collection`, `as_of` and `now` as for `View.scan`."""
    with reader.environment.read() as txn:
        served, boundary = reader.as_of(txn, as_of)
        manifest = reader.manifest(txn, served.pub.manifest_key)
    if now is None:
        now = boundary.time_ms / 1000 if boundary is not None else time.time()
    ids = list(manifest.collections) if collection is None else [collection_id_of(manifest, collection, path)]
    for collection_id in sorted(ids, key=keys.encode_collection_id):
        left = selection.within(manifest, collection_id)
        while left is not None and left.start:
            found, following = chunk(reader, served, left, selection, now=now)
            left = left._replace(start=following)
            yield from found


def page(
    reader: VbucketReader,
    at: Pin,
    collection: CollectionName | None,
    selection: KeySelection,
    *,
    limit: int | None = None,
    bytes_max: int | None = None,
    document_bytes_max: int | None = None,
    path: str = "",
) -> tuple[list[Document], bytes]:
    """Return a page of the documents that `at` sees, and the key to continue from (see `BoundaryRead.page`)."""
    served, wire_range = _pinned(reader, at, collection, selection, path)
    if wire_range is None:
        return [], b""
    found, following = chunk(
        reader,
        served,
        wire_range,
        selection,
        now=at.now_ms / 1000,
        rows_max=limit,
        bytes_max=bytes_max,
        document_bytes_max=document_bytes_max,
    )
    return found, following[wire_range.skip :]


def count_keys(reader: VbucketReader, at: Pin, collection_id: int, *, start: bytes, keys_max: int) -> tuple[int, bytes]:
    """Count the documents, also expired ones, that the pin `at` sees among the next `keys_max` keys. Return also the
    key to continue from (empty: the end). Raises ViewInvalidated.
    """
    served, wire_range = _pinned(reader, at, collection_id, KeySelection(start=start))
    if wire_range is None:
        return 0, b""
    with reader.environment.read() as txn:
        found, following = references(reader, txn, served, wire_range, deletions=False, rows_max=keys_max)
    return len(found), following[wire_range.skip :]


def _pinned(
    reader: VbucketReader, at: Pin, collection: CollectionName | None, selection: KeySelection, path: str = ""
) -> tuple[Served, WireRange | None]:
    with reader.environment.read() as txn:
        served = validity.served_at(reader, txn, at, survives_rollback=False)
        manifest = reader.manifest(txn, served.pub.manifest_key)
    return served, selection.within(manifest, collection_id_of(manifest, collection, path))


def chunk(
    reader: VbucketReader,
    served: Served,
    wire_range: WireRange,
    selection: KeySelection,
    *,
    now: float,
    rows_max: int | None = None,
    bytes_max: int | None = None,
    document_bytes_max: int | None = None,
) -> tuple[list[Document], bytes]:
    """Return a range's next documents and the wire key to continue from (empty: the end). Raises ViewInvalidated, and
    AnswerTooLarge (as `PointReads.get` does) if the first document has more than `document_bytes_max` bytes.
    """
    bytes_max = CHUNK_BYTES if bytes_max is None else bytes_max
    found: list[Document] = []
    byte_count = 0
    with reader.environment.read() as txn:
        newest, following = references(
            reader, txn, served, wire_range, deletions=selection.deletions, rows_max=rows_max or CHUNK_ROWS
        )
        for wire_key, dup in newest:
            if document_bytes_max is not None and dup[KIND] == MUTATION:
                too_large = bytes_above(reader, dup, document_bytes_max)
                if too_large is not None and found:
                    return found, wire_key
                if too_large is not None:
                    raise too_large
            document = reader.document(txn, wire_key, dup, selection.raw, lenient=True)
            if not selection.deletions and document.expiry and document.expiry <= now:
                continue
            byte_count += len(document.value)
            if found and byte_count > bytes_max:
                return found, wire_key
            found.append(document)
    return found, following


def references(
    reader: VbucketReader, txn: Transaction, served: Served, wire_range: WireRange, *, deletions: bool, rows_max: int
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the newest visible versions (wire key, reference) of the next `rows_max` keys, and the key to continue
    from (empty: the end). Raises ViewInvalidated.
    """
    validity.check(reader, txn, served)
    links = served.links
    branch, cut = links[0].branch, links[0].cut
    start, prefix, end, begin_seqno, _ = wire_range
    prefix_length = len(prefix)
    found: list[tuple[bytes, bytes]] = []
    cursor = txn.raw.cursor(reader.keys)
    if not cursor.set_range(start):
        return [], b""
    dup: bytes | None
    previous = b""
    for seen, wire_key in enumerate(cursor.iternext_nodup()):
        if wire_key <= previous or wire_key < start:
            raise reader.mismatch(wire_key)
        previous = wire_key
        if wire_key[:prefix_length] != prefix or (end is not None and wire_key >= end):
            reader.check_named(txn.raw, wire_key, cursor.value())
            break
        if seen >= rows_max:
            return found, wire_key
        dup = cursor.value()
        if cursor.count() > 1:  # go to the last version at once: a key may have many versions
            dup = reader.newest(cursor, wire_key)
        dup_branch, seqno, kind = keys.DUP.unpack(dup)
        if dup_branch != branch or seqno > cut:
            dup = reader.newest_visible(txn.raw, cursor, wire_key, dup, links)
            cursor.set_key(wire_key)
            if dup is not None:
                _, seqno, kind = keys.DUP.unpack(dup)
        if kind != MUTATION and kind not in KINDS:
            raise reader.mismatch(wire_key)
        if dup is not None and seqno > begin_seqno and (kind == MUTATION or deletions):
            found.append((wire_key, dup))
    return found, b""


def count(reader: VbucketReader) -> int:
    with reader.environment.read() as txn:
        served = reader.readable(txn)
        manifest = reader.manifest(txn, served.pub.manifest_key)
        begin = {cid: entry.begin_seqno for cid, entry in manifest.collections.items()}
        cuts = {link.branch: link.cut for link in served.links}
        total = is_there = 0
        current = b""
        for wire_key, dup in txn.raw.cursor(reader.keys).iternext():
            if wire_key != current:
                total += is_there
                is_there, current = 0, wire_key
                collection_id = wire_key[0] if wire_key[0] < 0x80 else keys.split_key(wire_key)[0]
                begin_seqno = begin.get(collection_id, SEQNO_MAX)
            branch, seqno, kind = keys.DUP.unpack(dup)
            if seqno <= cuts.get(branch, -1):
                is_there = 1 if kind == MUTATION and seqno > begin_seqno else 0
        return total + is_there
