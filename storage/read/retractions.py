"""Finds a rollback's retractions (the newest lost version of each key) and restorations (the older version that is
visible again).

Memory holds positions of documents (`Undone`), never documents. If the lost history dropped or flushed a collection,
all documents of the collection are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from storage.env.transaction import Transaction
from storage.errors import ViewInvalidated
from storage.format import keys, records
from storage.format.records import MUTATION
from storage.history import branches, chain
from storage.model import Boundary, Document, Seqno
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
        boundary = branches.rollback_boundary(txn, reader.state(txn), to_seqno)
    found = undone(reader, served, served.links, boundary.seqno)
    return boundary, ((each.kind, document_of(reader, each, raw)) for each in found)


def undone(
    reader: VbucketReader,
    served: Served,
    lost: chain.Chain,
    common_seqno: int,
    bytes_max: int | None = None,
) -> Iterator[Undone]:
    """Yield a retraction for each key that `lost` changed above `common_seqno`, and restorations. Holds at most
    `bytes_max` bytes of positions at once. Raises ViewInvalidated.
    """
    rows_max = scan.CHUNK_ROWS if bytes_max is None else max(1, min(scan.CHUNK_ROWS, bytes_max // UNDONE_BYTES))
    return _RetractionWalk(reader, served, lost, common_seqno, rows_max).run()


def document_of(reader: VbucketReader, undone: Undone, raw: bool) -> Document:
    """Read an undone version. Raises ViewInvalidated if the purger has removed the version meanwhile."""
    with reader.environment.read() as txn:
        if txn.raw.get(undone.reference[records.ROW_KEY], db=reader.rows) is None:
            cursor = txn.raw.cursor(reader.keys)
            if not cursor.set_key_dup(undone.wire_key, undone.reference):
                raise rows_gone(reader.vbid)
        return reader.document(txn, undone.wire_key, undone.reference, raw, lenient=True)


@dataclass(slots=True)
class _RetractionWalk:
    """One walk over lost rows; the first fields are the arguments of `undone`."""

    reader: VbucketReader
    served: Served
    lost: chain.Chain
    common_seqno: int
    rows_max: int
    restored_links: chain.Chain = ()
    back: dict[int, Seqno] = field(default_factory=dict)
    """The begin_seqno, by id, of each collection that `lost` dropped, flushed or never had: all of the collection's
    documents are restored.
    """

    def run(self) -> Iterator[Undone]:
        self.restored_links = chain.recut(self.served.links, self.common_seqno)
        with self.reader.environment.read() as txn:
            before, after = (self.reader.manifest_on(txn, each) for each in (self.lost, self.restored_links))
        self.back = {
            collection_id: entry.begin_seqno
            for collection_id, entry in after.collections.items()
            if (known := before.collections.get(collection_id)) is None or known.begin_seqno > entry.begin_seqno
        }
        position = int(self.common_seqno)
        while position < self.lost[0].cut:
            with self.reader.environment.read() as txn:
                validity.check(self.reader, txn, self.served)
                undone, position = self._next(txn, position)
            yield from undone
        for collection_id, begin_seqno in self.back.items():
            prefix = keys.encode_collection_id(collection_id)
            left = scan.WireRange(prefix, prefix, None, begin_seqno, len(prefix))
            while left.start:
                with self.reader.environment.read() as txn:
                    found, following = scan.references(
                        self.reader,
                        txn,
                        self.served,
                        left,
                        deletions=False,
                        rows_max=self.rows_max,
                        links=self.restored_links,
                    )
                left = left._replace(start=following)
                yield from (Undone("restoration", wire_key, dup) for wire_key, dup in found)

    def _next(self, txn: Transaction, position: int) -> tuple[list[Undone], int]:
        vbid = self.reader.vbid
        piece = chain.piece(txn, vbid, self.lost, position, self.rows_max, scan.CHUNK_BYTES)
        if chain.has_gap(txn, vbid, self.lost, position):
            raise rows_gone(vbid)
        return self._retracted(txn, records.key_rows(piece.rows)), piece.to_seqno

    def _retracted(self, txn: Transaction, key_rows: list[tuple[bytes, bytes]]) -> list[Undone]:
        found = []
        cursor = txn.raw.cursor(self.reader.keys)
        manifest = self.reader.manifest_on(txn, self.restored_links)
        for wire_key, dup in key_rows:
            if chain.newest_version(cursor, wire_key, self.lost) != dup:
                continue  # the key's newest lost version comes later
            found.append(Undone("retraction", wire_key, dup))
            again = chain.newest_version(cursor, wire_key, self.restored_links)
            if again is None or records.kind_of(again) != MUTATION:
                continue
            collection_id = keys.split_key(wire_key)[0]
            if collection_id not in self.back and manifest.has(collection_id, records.seqno_of(again)):
                found.append(Undone("restoration", wire_key, again))
        return found
