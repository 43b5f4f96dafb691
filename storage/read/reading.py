"""One read of any size: the boundaries that it sees, and every rule that holds for it.

Commands, SQL, Spark, HTTP (pages of results) and `verify` read through a `BoundaryRead`. It chooses the boundary of a
vbucket once, at the vbucket's first read, and refuses a vbucket that is not filled yet or that a resync withholds
(`VbucketReader.readable`). After `hold`, a lease keeps the boundaries until `close`; the caller hands in the lease. If
a boundary is gone all the same, every read raises the same error (`lost`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock
from typing import NamedTuple, Self

from storage.env.environment import AFTER_FORK
from storage.errors import Closed, Unavailable, ViewInvalidated
from storage.format import keys
from storage.format.tokens import AsOf, CollectionName, Pin, check_as_of, positions_of, unknown_collection
from storage.model import Document, Manifest
from storage.read import bulk, scan, validity
from storage.read.bulk import EVERY_KEY, KeyRange
from storage.read.groups import Groups
from storage.read.scan import KeySelection, WireRange
from storage.read.vbucket_reader import Served, VbucketReader

AGAIN = "start the read again; if this comes again, keep more history (history_s)"

Lease = Callable[[Mapping[int, tuple[int, int]]], AbstractContextManager[object]]
"""Takes a lease on positions, (branch, seqno) by vbid, for the time of the context. Raises Unavailable if refused."""


def lost(reason: str, path: str, vbid: int | None = None) -> ViewInvalidated:
    return ViewInvalidated(f"the history that is read is no longer kept: {reason}", path=path, vbid=vbid, hint=AGAIN)


def pin_of(reader: VbucketReader, as_of: AsOf = None, now_ms: int | None = None) -> Pin:
    """Return a vbucket's position, now or at a boundary. Raises NoSuchBoundary, Unavailable."""
    with reader.environment.read() as txn:
        served, moment_ms = reader.as_of(txn, as_of)
    return Pin(reader.vbid, *served.position, moment_ms if now_ms is None else now_ms)


def check_readable(groups: Groups, vbids: Collection[int]) -> None:
    """Raise Unavailable unless each vbucket can be read."""
    refused = [error for vbid in vbids if (error := groups.reader(vbid).refusal()) is not None]
    if refused:
        count = sum(each.message == refused[0].message for each in refused)
        if count > 1:
            message = f"{count} of {len(vbids)} vbuckets: {refused[0].message}"
            raise Unavailable(message, path=groups.path, hint=refused[0].hint)
        raise refused[0]


class Rows(NamedTuple):
    """Stored rows of one collection in one vbucket (`bulk.Chunk`)."""

    pin: Pin
    collection: str
    prefix_length: int
    """Length of the collection id in a row's key."""
    stored: list[bytes]
    byte_count: int


class BoundaryRead:
    """Documents of some vbuckets, each at one boundary, made by `View.reading`. Threads may share it."""

    def __init__(
        self, groups: Groups, vbids: Iterable[int], as_of: AsOf, now_ms: int | None, pins: Iterable[Pin], lease: Lease
    ) -> None:
        self.vbids = list(vbids)
        check_as_of(as_of, self.vbids)
        self._groups = groups
        self._as_of = as_of
        self._now_ms = time.time_ns() // 1_000_000 if now_ms is None and as_of is None else now_ms
        self._pins = {pin.vbid: pin for pin in pins}
        self._lease = lease
        self._held = ExitStack()
        self._is_held = False
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._groups.inherited:
            with self._lock:
                self._held.close()

    def _exclusively(self) -> Lock:
        """Return the lock. Raises Closed in a forked child, where a thread that is not there may hold the lock."""
        if self._groups.inherited:
            raise Closed("opened before a fork", path=self._groups.path, hint=AFTER_FORK)
        return self._lock

    def vbid_of(self, key: bytes) -> int:
        return keys.vbid_of(key, self._groups.vbucket_count)

    def pin(self, vbid: int) -> Pin:
        """Return the boundary of a vbucket. Raises Unavailable, NoSuchBoundary."""
        with self._exclusively():
            return self._pin(vbid)

    def _pin(self, vbid: int) -> Pin:
        if vbid not in self._pins:
            self._pins[vbid] = pin_of(self._groups.reader(vbid), self._as_of, self._now_ms)
        return self._pins[vbid]

    def hold(self) -> list[Pin]:
        """Choose the boundaries of all vbuckets, take a lease on them, and return them. Raises the errors of `pin`, and
        what the lease raises.
        """
        with self._exclusively():
            check_readable(self._groups, [vbid for vbid in self.vbids if vbid not in self._pins])
            pins = [self._pin(vbid) for vbid in self.vbids]
            if not self._is_held:
                try:
                    self._held.enter_context(self._lease(positions_of(pins)))
                except Unavailable:
                    self._check_kept(pins)
                    raise
                self._is_held = True
        return pins

    def _check_kept(self, pins: Iterable[Pin]) -> None:
        """Raise ViewInvalidated if a boundary is not kept."""
        for pin in pins:
            reader = self._groups.reader(pin.vbid)
            with self._translated(), reader.environment.read() as txn:
                validity.served_at(reader, txn, pin)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ViewInvalidated as error:
            raise lost(error.message, self._groups.path, error.vbid) from error

    def manifest(self, vbid: int) -> Manifest:
        pin, reader = self.pin(vbid), self._groups.reader(vbid)
        with self._translated(), reader.environment.read() as txn:
            return reader.manifest(txn, validity.served_at(reader, txn, pin).pub.manifest_key)

    def collections(self, vbids: Iterable[int] | None = None) -> set[str]:
        """Return the names of the collections that any of some vbuckets (None: all) has."""
        requested = self.vbids if vbids is None else vbids
        return {name for vbid in requested for name in self.manifest(vbid).names().values()}

    def collection_id(self, name: CollectionName) -> int:
        """Return the id of a collection that any vbucket has: they learn of a collection at different times. Raises
        UnknownCollection.
        """
        known: set[str] = set()
        for vbid in self.vbids:
            manifest = self.manifest(vbid)
            if (found := manifest.collection(name)) is not None:
                return found.collection_id
            known |= manifest.ids.keys()
        raise unknown_collection(name, known, self._groups.path)

    def rows(
        self,
        vbid: int,
        collections: Iterable[CollectionName] | None = None,
        key_range: KeyRange = EVERY_KEY,
        *,
        rows_max: int = bulk.ROWS_MAX,
        after_seqno: int = 0,
    ) -> Iterator[Rows]:
        """Yield the rows of every document of a vbucket, also of expired ones, in the fastest order (`bulk.documents`).

        `collections` names those to read, or has their ids; None: all. Documents at or below `after_seqno` may be left
        out. A rollback does not end the read.
        """
        manifest = self.manifest(vbid)
        names = manifest.names()
        found = () if collections is None else map(manifest.collection, collections)
        chosen = [*names] if collections is None else [each.collection_id for each in found if each is not None]
        if not chosen:
            return
        pin = self.pin(vbid)
        with self._translated():
            reader = self._groups.reader(vbid)
            for chunk in bulk.documents(reader, pin, chosen, key_range, rows_max=rows_max, after_seqno=after_seqno):
                length = len(keys.encode_collection_id(chunk.collection_id))
                yield Rows(pin, names[chunk.collection_id], length, chunk.stored, chunk.byte_count)

    def page(
        self,
        vbid: int,
        collection: CollectionName,
        selection: KeySelection,
        *,
        limit: int | None = None,
        bytes_max: int | None = None,
        document_bytes_max: int | None = None,
    ) -> tuple[list[Document], bytes]:
        """Return the documents among the next `limit` keys, without expired ones, and the key to continue from (empty:
        the end). A vbucket that lacks the collection has none of its documents.

        A page of results that is not the last may have fewer documents, even none. Its values have at most `bytes_max`
        bytes together; a larger document is a page by itself. A rollback below the boundary ends the read. Raises
        AnswerTooLarge, as `get` does, if the page's first document has more than `document_bytes_max` bytes.
        """
        with self._translated():
            reader, served, left = self._range(vbid, collection, selection)
            if left is None:
                return [], b""
            found, following = scan.chunk(
                reader,
                served,
                left,
                selection,
                now=self.pin(vbid).now_ms / 1000,
                rows_max=limit,
                bytes_max=bytes_max,
                document_bytes_max=document_bytes_max,
            )
        return found, following[left.skip :]

    def count_keys(self, vbid: int, collection_id: int, start: bytes, keys_max: int) -> tuple[int, bytes]:
        """Count the documents, also expired ones, among the next `keys_max` keys. Return also the key to continue from
        (empty: the end).
        """
        with self._translated():
            reader, served, left = self._range(vbid, collection_id, KeySelection(start=start))
            if left is None:
                return 0, b""
            with reader.environment.read() as txn:
                found, following = scan.references(reader, txn, served, left, deletions=False, rows_max=keys_max)
        return len(found), following[left.skip :]

    def _range(
        self, vbid: int, collection: CollectionName, selection: KeySelection
    ) -> tuple[VbucketReader, Served, WireRange | None]:
        pin, reader = self.pin(vbid), self._groups.reader(vbid)
        with reader.environment.read() as txn:
            served = validity.served_at(reader, txn, pin, survives_rollback=False)
            manifest = reader.manifest(txn, served.pub.manifest_key)
        entry = manifest.collection(collection)
        return reader, served, None if entry is None else selection.within(entry)
