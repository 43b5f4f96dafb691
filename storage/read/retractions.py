"""Finds a rollback's retractions (the newest lost version of each key) and restorations (the older version that is
visible again).

Knows the vbucket's row and key trees (LMDB's named databases), the lost chain and the served chain. Invariants:
- memory holds positions of documents (`Undone`), never documents;
- each key is retracted once, by its newest lost version;
- if the lost history dropped or flushed a collection, all documents of the collection are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.errors import NoSuchBoundary, ViewInvalidated
from storage.format import keys, records, seal
from storage.format.records import MUTATION
from storage.history import branches, chain
from storage.model import Boundary, Branch, Document, Kind, Seqno
from storage.read import scan, validity
from storage.read.vbucket_reader import Served, VbucketReader

UNDONE_BYTES = 1024
"""Bytes of memory for the positions of a retraction and its restoration; a key has at most 250 bytes."""


class Undone(NamedTuple):
    """The position of a version that a rollback took back (`retraction`) or made visible again (`restoration`)."""

    kind: str
    wire_key: bytes
    reference: bytes


def rows_gone(vbid: int) -> ViewInvalidated:
    return ViewInvalidated("the rows of a rollback are gone from history", vbid=vbid, hint="read it from the beginning")


def retracted_by(reader: VbucketReader, to_seqno: int, raw: bool) -> tuple[Boundary, Iterator[tuple[str, Document]]]:
    with reader.environment.read() as txn:
        served = reader.served(txn)
        boundary = chain.newest_boundary(txn, reader.vbid, served.links, to_seqno)
    if boundary is None or boundary.seqno < served.pub.floor_seqno:
        raise NoSuchBoundary(
            f"nothing is kept at or below seqno {to_seqno}; history begins at seqno {served.pub.floor_seqno}",
            vbid=reader.vbid,
            hint="give a later seqno; `dcp-mirror state` shows the kept boundaries",
        )
    found = undone(reader, served, served.links, boundary.seqno)
    return boundary, ((each.kind, document_of(reader, each, raw)) for each in found)


def undone(
    reader: VbucketReader,
    served: Served,
    lost: chain.Chain,
    common_seqno: int,
    replacing: chain.Chain = (),
    bytes_max: int | None = None,
) -> Iterator[Undone]:
    """Yield a retraction for each key that `lost` changed above `common_seqno`, and restorations. Holds at most
    `bytes_max` bytes of positions at once. Raises ViewInvalidated.

    `replacing` is the chain that a deferred rollback made visible. A key is left out if `replacing` has a version of
    the key above `common_seqno` in a collection that `replacing` keeps, or if `lost` has dropped or flushed the key's
    collection.
    """
    rows_max = scan.CHUNK_ROWS if bytes_max is None else max(1, min(scan.CHUNK_ROWS, bytes_max // UNDONE_BYTES))
    return _RetractionWalk(reader, served, lost, common_seqno, replacing, rows_max).run()


def document_of(reader: VbucketReader, undone: Undone, raw: bool) -> Document:
    """Read an undone version. Raises ViewInvalidated if the purger has removed the version meanwhile."""
    with reader.environment.read() as txn:
        if txn.raw.get(undone.reference[records.ROW_KEY], db=reader.rows) is None:
            cursor = txn.raw.cursor(reader.keys)
            if not cursor.set_key_dup(undone.wire_key, undone.reference):
                raise rows_gone(reader.vbid)
        return reader.document(txn, undone.wire_key, undone.reference, raw, lenient=True)


def restored_collections(reader: VbucketReader, lost: chain.Chain, links: chain.Chain) -> dict[int, Seqno]:
    """Return the begin_seqno, by id, of each collection of `links` that `lost` has dropped, flushed or never had."""
    with reader.environment.read() as txn:
        before, after = (reader.manifest_on(txn, each) for each in (lost, links))
    return {
        collection_id: entry.begin_seqno
        for collection_id, entry in after.collections.items()
        if (known := before.collections.get(collection_id)) is None or known.begin_seqno > entry.begin_seqno
    }


@dataclass(slots=True)
class _RetractionWalk:
    """One walk over lost rows; the first fields are the arguments of `undone`."""

    reader: VbucketReader
    served: Served
    lost: chain.Chain
    common_seqno: int
    replacing: chain.Chain
    rows_max: int
    restored_links: chain.Chain = ()
    back: dict[int, Seqno] = field(default_factory=dict)
    """Result of `restored_collections`: all documents of these collections are restored."""

    def run(self) -> Iterator[Undone]:
        self.restored_links = chain.recut(self.served.links, self.common_seqno)
        self.back = restored_collections(self.reader, self.lost, self.replacing or self.restored_links)
        position = int(self.common_seqno)
        while position < self.lost[0].cut:
            with self.reader.environment.read() as txn:
                validity.check(self.reader, txn, self.served)
                undone, position = self._next(txn, position)
            yield from undone
        restored = replace(self.served, links=self.restored_links)
        for collection_id, begin_seqno in self.back.items():
            prefix = keys.encode_collection_id(collection_id)
            left = scan.WireRange(prefix, prefix, None, begin_seqno, len(prefix))
            while left.start:
                with self.reader.environment.read() as txn:
                    found, following = scan.references(
                        self.reader, txn, restored, left, deletions=False, rows_max=self.rows_max
                    )
                left = left._replace(start=following)
                yield from (Undone("restoration", wire_key, dup) for wire_key, dup in found)

    def _next(self, txn: Transaction, position: int) -> tuple[list[Undone], int]:
        vbid = self.reader.vbid
        piece = chain.piece(txn, vbid, self.lost, position, self.rows_max, scan.CHUNK_BYTES)
        for link in self.lost:
            if branches.get_branch(txn, vbid, link.branch).kept_seqno < link.cut > position:
                raise rows_gone(vbid)
        return self._retracted(txn, records.key_rows(piece.rows)), piece.to_seqno

    def _retracted(self, txn: Transaction, key_rows: list[tuple[bytes, bytes]]) -> list[Undone]:
        found = []
        cursor = txn.raw.cursor(self.reader.keys)
        held = self.reader.manifest_on(txn, self.lost)
        manifest = self.reader.manifest_on(txn, self.replacing or self.restored_links)
        for wire_key, dup in key_rows:
            if chain.newest_version(cursor, wire_key, self.lost) != dup:
                continue  # the key's newest lost version comes later
            collection_id = keys.split_key(wire_key)[0]
            if self.replacing:
                if not held.has(collection_id, records.seqno_of(dup)):
                    continue
                newest = chain.newest_version(cursor, wire_key, self.replacing)
                seqno = 0 if newest is None else records.seqno_of(newest)
                if seqno > self.restored_links[0].cut and manifest.has(collection_id, seqno):
                    continue
            found.append(Undone("retraction", wire_key, dup))
            again = chain.newest_version(cursor, wire_key, self.restored_links)
            if again is None or records.kind_of(again) != MUTATION or collection_id in self.back:
                continue
            if manifest.has(collection_id, records.seqno_of(again)):
                found.append(Undone("restoration", wire_key, again))
        return found


class NewToReader:
    """A filter that passes the events that are new to a reader whose position is on a lost history. Call it with events
    in rising seqno order.

    Documents of a collection that the new history has dropped or flushed do not pass. A reader that already had the
    drop or flush does not get that event again, so it would keep the documents.
    """

    def __init__(self, reader: VbucketReader, lost: chain.Chain, replacing: chain.Chain, raw: bool) -> None:
        """`lost`: the chain of the reader's position; `replacing`: the chain that a deferred rollback made visible."""
        self._reader = reader
        self._lost = lost
        self._replacing = replacing
        self._compared_to = min(lost[0].cut, replacing[0].cut)
        """Seqno of the last event that is compared with the lost history. Later events all pass."""
        self._raw = raw
        self._back = restored_collections(reader, lost, replacing)
        """Collections that the lost history dropped, flushed or never had: the reader has no documents of them."""
        with reader.environment.read() as txn:
            self._manifest = reader.manifest_on(txn, replacing)
        self._overridden: set[tuple[int, bytes]] = set()
        """Keys of events that passed. Later events of these keys pass, too, because the reader's version was replaced.
        """

    def __call__(self, document: Document) -> bool:
        if document.seqno > self._compared_to:
            return True
        if document.kind is Kind.SYSTEM_EVENT:
            begins_back = document.seqno in self._back.values()
            return begins_back or (not self._was_given(document) and self._lasts(document.seqno))
        if document.collection_id in self._back:
            return True
        if not self._manifest.has(document.collection_id, document.seqno):
            return False
        key = (document.collection_id, document.key)
        if key not in self._overridden and self._was_given(document) and self._keeps_newest(document):
            return False
        self._overridden.add(key)
        return True

    def _lasts(self, seqno: int) -> bool:
        """Return True if the scopes and collections that begin at this seqno are all in the newest manifest."""
        with self._reader.environment.read() as txn:
            before, after = (
                self._reader.manifest_on(txn, chain.recut(self._replacing, at)) for at in (seqno - 1, seqno)
            )
        begun = {number for number, entry in after.collections.items() if entry.begin_seqno == seqno}
        kept = {number for number, entry in self._manifest.collections.items() if entry.begin_seqno == seqno}
        return begun == kept and after.scopes.keys() - before.scopes.keys() <= self._manifest.scopes.keys()

    def _was_given(self, document: Document) -> bool:
        known = self._document_at(self._lost, document.seqno)
        return known is not None and known._replace(branch=document.branch) == document

    def _keeps_newest(self, document: Document) -> bool:
        """Return True if the new history has the reader's version of the key: the newest lost version."""
        wire_key = keys.encode_collection_id(document.collection_id) + document.key
        with self._reader.environment.read() as txn:
            newest = chain.newest_version(txn.raw.cursor(self._reader.keys), wire_key, self._lost)
        assert newest is not None, "it was given"
        seqno = records.seqno_of(newest)
        if seqno == document.seqno:
            return True
        ours, theirs = (self._document_at(each, seqno) for each in (self._lost, self._replacing))
        return ours is not None and theirs is not None and ours == theirs._replace(branch=ours.branch)

    def _document_at(self, links: chain.Chain, seqno: int) -> Document | None:
        """Return the row that a chain sees at a seqno."""
        if seqno > links[0].cut:
            return None
        reader = self._reader
        link = next(link for link in reversed(links) if seqno <= link.cut)
        row_key = keys.ROW.pack(link.branch, seqno)
        with reader.environment.read() as txn:
            stored = txn.raw.get(row_key, db=reader.rows)
        if stored is None:
            return None
        reader.verify(row_key, stored)
        return records.decode_row(reader.vbid, Branch(link.branch), stored, self._raw, True, seal.SIZE)
