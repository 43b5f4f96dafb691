"""Scans one vbucket by collection and key, in chunks of documents.

A scan holds no transaction between chunks, so it does not make the file grow. It raises ViewInvalidated once a
rollback, a resync or the purger has passed the scan's boundary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import islice
from operator import lt
from typing import Any, NamedTuple

from storage.env.transaction import Transaction
from storage.format import keys
from storage.format.records import BRANCH, EXPIRY, KIND, MUTATION, ROW_KEY, SEQNO
from storage.format.tokens import AsOf, CollectionName, has_expired
from storage.history import chain
from storage.model import Collection, Document
from storage.read import validity
from storage.read.point_reads import bytes_above
from storage.read.vbucket_reader import Served, VbucketReader, end_of_references

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

    def within(self, collection: Collection) -> WireRange:
        head = keys.encode_collection_id(collection.collection_id)
        end = None if self.end is None else head + self.end
        return WireRange(
            head + max(self.prefix, self.start), head + self.prefix, end, collection.begin_seqno, len(head)
        )


class WireRange(NamedTuple):
    """Wire keys (collection id and key) from `start` to below `end` that begin with `prefix`, for rows above
    `begin_seqno`. `skip` is the length of the collection id in a wire key.
    """

    start: bytes
    prefix: bytes
    end: bytes | None
    begin_seqno: int
    skip: int

    def has(self, wire_key: bytes) -> bool:
        """Return True if a wire key from `start` on is within the range."""
        return wire_key.startswith(self.prefix) and (self.end is None or wire_key < self.end)


def documents(
    reader: VbucketReader,
    selection: KeySelection,
    collection: CollectionName | None,
    as_of: AsOf,
    now: float | None,
) -> Iterator[Document]:
    """Yield the documents of a vbucket at one boundary; `collection`, `as_of` and `now` as for `View.scan`. A vbucket
    that lacks the collection has no documents of it.
    """
    with reader.environment.read() as txn:
        served, now_ms = reader.as_of(txn, as_of)
        manifest = reader.manifest(txn, served.pub.manifest_key)
    now = now_ms / 1000 if now is None else now
    chosen = [*manifest.collections.values()] if collection is None else [manifest.collection(collection)]
    ranges = [selection.within(each) for each in chosen if each is not None]
    for left in sorted(ranges):
        while left.start:
            found, following = chunk(reader, served, left, selection, now=now)
            left = left._replace(start=following)
            yield from found


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
            if not selection.deletions and has_expired(document.expiry, now):
                continue
            byte_count += len(document.value)
            if found and byte_count > bytes_max:
                return found, wire_key
            found.append(document)
    return found, following


def references(
    reader: VbucketReader,
    txn: Transaction,
    served: Served,
    wire_range: WireRange,
    *,
    deletions: bool,
    rows_max: int,
    links: chain.Chain | None = None,
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the newest visible versions (wire key, reference) of at most `rows_max` of the next keys, and the key to
    continue from (empty: the end). `links`: an older position on the chain of `served`. Raises ViewInvalidated.

    Skips the older versions of a key that has very many. If most keys have several versions, looks at more references
    than `rows_max`, but returns fewer keys rather than look at many more than `CHUNK_ROWS`.
    """
    validity.check(reader, txn, served)
    links = served.links if links is None else links
    pairs, following = _entries(reader, txn, wire_range, rows_max, links)
    newest = list(dict(_visible(reader, txn, pairs, links)).items())
    if len(newest) > rows_max:
        following = newest[rows_max][0]
        del newest[rows_max:]
    found = [pair for pair in newest if pair[1][KIND] == MUTATION]
    if len(found) < len(newest):
        for pair in newest:
            reader.check_kind(*pair)
        if deletions:
            found = newest
    if wire_range.begin_seqno:
        begin = wire_range.begin_seqno.to_bytes(8)
        found = [pair for pair in found if pair[1][SEQNO] > begin]
    return found, following


def _entries(
    reader: VbucketReader, txn: Transaction, wire_range: WireRange, rows_max: int, links: chain.Chain
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return all references of about `rows_max` keys from the range's start on, and the key to continue from."""
    cursor = txn.raw.cursor(reader.keys)
    if not cursor.set_range(wire_range.start):
        return [], b""
    entries = cursor.iternext()
    looks = rows_max + 1
    pairs: list[tuple[bytes, bytes]] = list(islice(entries, looks))
    while len(pairs) == looks <= CHUNK_ROWS and (missing := rows_max + 1 - len(dict(pairs))) > 0:
        more = max(missing, looks // 4)
        pairs += islice(entries, more)
        looks += more
    if pairs[0][0] < wire_range.start or not all(map(lt, pairs, islice(pairs, 1, None))):
        raise reader.mismatch(pairs[0][0])
    following = b""
    if len(pairs) == looks:
        following = pairs[-1][0]  # there may be more versions of this key
        if pairs[0][0] == following:  # skip the others: there may be many
            pairs, following = _of_one_key(reader, txn, cursor, following, links)
        else:
            del pairs[bisect_left(pairs, (following,)) :]
    if pairs and not wire_range.has(pairs[-1][0]):
        end = next(number for number, pair in enumerate(pairs) if not wire_range.has(pair[0]))
        reader.check_named(txn.raw, *pairs[end])
        return pairs[:end], b""
    return pairs, following if wire_range.has(following) else b""


def _visible(
    reader: VbucketReader, txn: Transaction, pairs: list[tuple[bytes, bytes]], links: chain.Chain
) -> list[tuple[bytes, bytes]]:
    """Return the references that a chain sees. The versions of a key rise, so the last one is the newest."""
    limits = {keys.PREFIX.pack(each.branch): end_of_references(each.branch, each.cut) for each in links}
    if len(limits) == 1:
        ((first, last),) = limits.items()
        visible = [pair for pair in pairs if first <= pair[1] <= last]
    else:
        visible = [pair for pair in pairs if pair[1] <= limits.get(pair[1][BRANCH], b"")]
    if len(visible) < len(pairs):
        for wire_key, dup in set(pairs).difference(visible):
            reader.check_named(txn.raw, wire_key, dup)
    return visible


def _of_one_key(
    reader: VbucketReader, txn: Transaction, cursor: Any, wire_key: bytes, links: chain.Chain
) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the newest visible version of a key with several versions, and the next key (empty: the end)."""
    cursor.set_key(wire_key)
    newest = reader.newest(cursor, wire_key)
    found: bytes | None = newest
    if not chain.sees(links, *keys.DUP.unpack(newest)[:2]):
        found = reader.newest_visible(txn.raw, cursor, wire_key, newest, links)
    cursor.set_key(wire_key)
    following = cursor.key() if cursor.next_nodup() else b""
    return [] if found is None else [(wire_key, found)], following


def count(reader: VbucketReader) -> int:
    total = 0
    with reader.environment.read() as txn:
        served = reader.readable(txn)
        manifest = reader.manifest(txn, served.pub.manifest_key)
    for left in map(KeySelection().within, manifest.collections.values()):
        while left.start:
            chosen = partial(references, reader, served=served, wire_range=left, deletions=False, rows_max=CHUNK_ROWS)
            with reader.views(chosen) as (views, (found, following)):
                for row_key in sorted([dup[ROW_KEY] for _, dup in found]):  # near each other in the file
                    row = views.raw.get(row_key, b"", reader.rows)
                    total += not has_expired(int.from_bytes(row[EXPIRY]))
            left = left._replace(start=following)
    return total
