"""Reads documents by key, or by wire key (collection id and key).

Knows a vbucket's key tree and row tree (LMDB's named databases) through the `VbucketReader`. Invariants:
- an answer about one vbucket shows one commit, even if a second transaction reads the row;
- a vbucket's remembered state is used only in transactions of the same commit.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable
from contextlib import ExitStack
from time import monotonic
from typing import Any, NamedTuple
from zlib import crc32

import lmdb
from google_crc32c import value as crc32c

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.errors import AnswerTooLarge
from storage.format import keys, records, seal
from storage.format.records import HEAD_BYTES_MAX, KIND, MUTATION, ROW_KEY, SEQNO
from storage.format.seal import RESIDUE
from storage.format.tokens import AsOf, CollectionName, collection_id_of
from storage.history import chain
from storage.model import Branch, Document, Manifest
from storage.read.groups import Groups
from storage.read.vbucket_reader import VbucketReader, Visible, end_of_references

_unpack_dup = keys.DUP.unpack
decode_row = records.decode_row
SEAL_BYTES = seal.SIZE


class Found(NamedTuple):
    """The result of `PointReads.find`."""

    document: Document | None
    collection_exists: bool
    """False if the key's collection is unknown, or was dropped."""
    manifest: Manifest


class _Options(NamedTuple):
    collection: CollectionName | None
    as_of: AsOf
    now: float | None
    raw: bool
    lenient: bool = False


class ReadRun:
    """Point reads that share one transaction in each environment, from the first read in it to the end of the run. So a
    read outside of the run may see a newer commit.
    """

    def __init__(self) -> None:
        self._ends = ExitStack()
        self._begun: dict[Environment, tuple[Any, int]] = {}
        self._views: dict[Environment, Any] = {}
        """Transactions whose `get` returns buffers of LMDB's map. They may see a later commit; rows never change."""

    def __enter__(self) -> ReadRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._begun.clear()
        self._views.clear()
        self._ends.close()

    def _begin(self, environment: Environment, **options: bool) -> Any:
        txn = environment.begin(**options)
        self._ends.callback(environment.end, txn)
        return txn

    def begun(self, reader: VbucketReader) -> tuple[Any, Visible]:
        """Return the run's lmdb.Transaction for a vbucket, and the vbucket's served state in this transaction."""
        known = self._begun.get(reader.environment)
        if known is None:
            txn = self._begin(reader.environment)
            known = self._begun[reader.environment] = txn, txn.id()
        visible = reader.visible
        return known[0], visible if visible[0] == known[1] else reader.look(known[0])

    def row(self, reader: VbucketReader, wire_key: bytes, bytes_max: int) -> bytes | None:
        """Return the stored row of a document, expired or not. `wire_key` must begin with a collection id of one byte.
        Return None if the row has more than `bytes_max` bytes, or if this quick look-up does not suffice: then call
        `View.find`.
        """
        try:
            txn, (_, branch, above, up_to, _, is_plain, manifest) = self.begun(reader)
            if wire_key[0]:
                collection = manifest.collections.get(wire_key[0])
                above = b"" if collection is None else end_of_references(branch, collection.begin_seqno)
            if not is_plain or not above:
                return None
            cursor = txn.cursor(reader.keys)
            if not cursor.set_key(wire_key):
                return None
            cursor.last_dup()  # as in `VbucketReader.newest`
            dup = cursor.value()
            if (has_older := cursor.prev_dup()) and cursor.value() >= dup:
                raise reader.mismatch(wire_key)
            if not above < dup <= up_to or dup[KIND] != MUTATION:
                return None
            row_key = dup[ROW_KEY]
            views = self._views.get(reader.environment)
            if views is None:
                views = self._views[reader.environment] = self._begin(reader.environment, buffers=True)
            view = views.get(row_key, None, reader.rows)
            if view is None or len(view) > bytes_max:
                return None
            stored = bytes(view)
        except (struct.error, IndexError, lmdb.Error) as error:
            raise reader.damaged(error) from error
        if reader.verify_reads and crc32c(stored) != RESIDUE:
            raise seal.damaged(stored, row_key, reader.vbid, reader.environment.path)
        if stored[55 : 55 + stored[3]] != wire_key or (has_older and stored[24:32] != dup[SEQNO]):
            raise reader.mismatch(wire_key)
        return stored


_OTHER: Any = object()
"""`_plain` returns this if the key's newest version is not visible; an older version may be visible."""


def _plain(
    reader: VbucketReader,
    txn: Any,
    cursor: Any,
    key: bytes,
    visible: Visible,
    now: float | None,
    raw: bool,
    lenient: bool,
) -> Document | None:
    """Return a document of the default collection, None if it does not exist, or `_OTHER`."""
    _, branch, above, up_to, _, _, _ = visible
    wire_key = b"\0" + key
    if not cursor.set_key(wire_key):
        reader.check_absent(txn, cursor, wire_key)
        return None
    cursor.last_dup()  # as in `VbucketReader.newest`
    dup = cursor.value()
    if (has_older := cursor.prev_dup()) and cursor.value() >= dup:
        raise reader.mismatch(wire_key)
    if not above < dup <= up_to:
        return _OTHER  # type: ignore[no-any-return]
    if dup[KIND] != MUTATION:
        reader.check_kind(wire_key, dup)
        return None
    row_key = dup[ROW_KEY]
    stored = txn.get(row_key, b"", reader.rows)
    if reader.verify_reads and crc32c(stored) != RESIDUE:
        raise seal.damaged(stored, row_key, reader.vbid, reader.environment.path)
    document = decode_row(reader.vbid, branch, stored, raw, lenient, SEAL_BYTES)
    if document.key != key or document.collection_id or (has_older and stored[24:32] != dup[SEQNO]):
        raise reader.mismatch(wire_key)
    if document.expiry and document.expiry <= (time.time() if now is None else now):
        return None
    return document


class PointReads:
    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.reader = groups.reader
        self._readers = groups.readers
        self._path = groups.path
        self._vbucket_count = groups.vbucket_count

    def get(
        self,
        key: bytes | str,
        collection: CollectionName | None = None,
        *,
        as_of: AsOf = None,
        now: float | None = None,
        raw: bool = False,
    ) -> Document | None:
        """Return a document, or None if it is absent, deleted or expired.

        `collection` is a name (`scope.collection`) or an id, by default `_default._default`. `as_of` is a seqno of the
        key's vbucket or a `Time`. `now` (seconds since 1970) decides expiry: by default the present time, with `as_of`
        the time of the boundary. `raw` leaves the value compressed and with its xattrs.

        Raises UnknownCollection, NoSuchBoundary (`as_of` is before the kept history), Unavailable (the vbucket is not
        filled yet, or is being resynced), NotHeld (another mirror holds the vbucket) and CorruptedError.
        """
        if isinstance(key, str):
            key = key.encode()
        # `Groups.reader` and `VbucketReader.begin_read`, inline:
        vbid = ((crc32(key) >> 16) & 0x7FFF) % self._vbucket_count
        reader = self._readers.get(vbid)
        if reader is None or monotonic() >= reader.environment.look_at:
            reader = self.reader(vbid)
        running = reader.running
        running.append(None)
        try:
            txn = None if reader.environment.remapping else reader.begin()
        except lmdb.Error:
            txn = None
        if txn is None:
            running.pop()
            txn = reader.environment.begin()
        try:
            if as_of is None and collection is None:
                visible = reader.visible
                if visible[0] != txn.id():
                    visible = reader.look(txn)
                if visible[2]:
                    found = _plain(reader, txn, txn.cursor(reader.keys), key, visible, now, raw, False)
                    if found is not _OTHER:
                        return found
            options = _Options(collection, as_of, now, raw)
            return self._get(reader, Transaction(reader.environment, txn), key, options)
        except (struct.error, IndexError, lmdb.Error) as error:
            raise reader.damaged(error) from error
        finally:
            txn.abort()
            running.pop()

    def get_many(
        self,
        document_keys: Iterable[bytes | str],
        collection: CollectionName | None = None,
        *,
        as_of: AsOf = None,
        now: float | None = None,
        raw: bool = False,
        bytes_max: int | None = None,
    ) -> dict[bytes, Document]:
        """Return the documents that exist, by key. Arguments and errors are those of `get`.

        Documents of one group of vbuckets are read in one transaction. A value that cannot be decompressed, or would be
        larger than 32 MiB, is returned as stored: `datatype` then still has its bit 2 (Snappy) or 4 (xattrs). Raises
        AnswerTooLarge as soon as the values together have more than `bytes_max` bytes.
        """
        document_keys = list(document_keys)  # the iterator may do anything, even fork
        options = _Options(collection, as_of, now, raw, lenient=True)
        is_plain = as_of is None and collection is None
        vbucket_count, reader_of = self._vbucket_count, self.reader
        found: dict[bytes, Document] = {}
        byte_count = 0
        found_in: dict[int, tuple[VbucketReader, Any, Any, Visible]] = {}
        """By vbucket: reader, transaction, a cursor over the keys, and served state."""
        with ReadRun() as run:
            for key in document_keys:
                if isinstance(key, str):
                    key = key.encode()
                vbid = ((crc32(key) >> 16) & 0x7FFF) % vbucket_count
                known = found_in.get(vbid)
                reader = reader_of(vbid) if known is None else known[0]
                document: Document | None
                try:
                    if known is None:
                        txn, visible = run.begun(reader)
                        known = found_in[vbid] = reader, txn, txn.cursor(reader.keys), visible
                    _, txn, cursor, visible = known
                    document = _OTHER
                    if is_plain and visible[2]:
                        document = _plain(reader, txn, cursor, key, visible, now, raw, True)
                    if document is _OTHER:
                        document = self._get(reader, Transaction(reader.environment, txn), key, options)
                    if document is None:
                        continue
                except (struct.error, IndexError, lmdb.Error) as error:
                    raise reader.damaged(error) from error
                found[key] = document
                if bytes_max is not None:
                    byte_count += len(document.value)
                    if byte_count > bytes_max:
                        raise AnswerTooLarge(
                            f"the requested documents are more than {bytes_max} bytes", hint="ask for fewer at once"
                        )
        return found

    def _get(self, reader: VbucketReader, txn: Transaction, key: bytes, options: _Options) -> Document | None:
        found = self._reference(reader, txn, key, options)
        if found is None:
            return None
        document = reader.document(txn, found[0], found[1], options.raw, options.lenient)
        return None if document.expiry and document.expiry <= found[2] else document

    def _reference(
        self, reader: VbucketReader, txn: Transaction, key: bytes, options: _Options
    ) -> tuple[bytes, bytes, float] | None:
        """Return a document's wire key, its reference and the time for its expiry; None if there is no document."""
        links: chain.Chain | None = None
        now = options.now
        if options.as_of is None:
            _, branch, _, _, seqno, is_plain, manifest = reader.served_in(txn.raw)
            if not is_plain:
                reader.readable(txn)
        else:
            served, boundary = reader.as_of(txn, options.as_of)
            branch, seqno, links = Branch(served.links[0].branch), served.pub.seqno, served.links
            manifest = reader.manifest(txn, served.pub.manifest_key)
            if now is None and boundary is not None:
                now = boundary.time_ms / 1000
        collection_id = collection_id_of(manifest, options.collection, self._path)
        wire_key = keys.encode_collection_id(collection_id) + key
        dup = _newest(reader, txn, wire_key, branch, seqno, links)
        if dup is None:
            return None
        _, dup_seqno, kind = _unpack_dup(dup)
        if kind != MUTATION or not manifest.has(collection_id, dup_seqno):
            return None
        return wire_key, dup, time.time() if now is None else now

    def get_within(
        self,
        bytes_max: int,
        key: bytes,
        collection: CollectionName | None = None,
        *,
        as_of: AsOf = None,
        raw: bool = False,
    ) -> Document | None:
        """Return what `get` returns. Raises AnswerTooLarge, without reading the value, if the stored and the
        decompressed document together have more than `bytes_max` bytes.
        """
        reader = self.reader(((crc32(key) >> 16) & 0x7FFF) % self._vbucket_count)
        options = _Options(collection, as_of, None, raw)
        with reader.environment.read() as txn:
            found = self._reference(reader, txn, key, options)
        if found is None:
            return None
        document = document_within(bytes_max, reader, found[0], found[1], raw)
        if document is None:  # the row was purged or moved to another branch meanwhile
            return self.get(key, collection, as_of=as_of, raw=raw)
        return None if document.expiry and document.expiry <= found[2] else document

    def exists(self, key: bytes | str, collection: CollectionName | None = None) -> bool:
        """Return True if `get` would return a document."""
        return self.get(key, collection, raw=True) is not None

    def key_at(self, vbid: int, seqno: int) -> bytes | None:
        """Return the wire key of a document's row at a seqno of the served history, or None if no such row is there."""
        reader = self.reader(vbid)
        while True:
            with reader.environment.read() as txn:
                commit, links = txn.raw.id(), reader.readable(txn).links
            branch = next((each.branch for each in links if each.base_seqno < seqno <= each.cut), None)
            if branch is None:
                return None
            with reader.environment.read(buffers=True) as views:
                if views.raw.id() == commit:  # else the row may have moved to another branch
                    head = bytes(views.raw.get(keys.ROW.pack(branch, seqno), b"", reader.rows)[:HEAD_BYTES_MAX])
                    return records.key_of(head) if head and not records.is_system_event(head) else None

    def find(
        self, wire_key: bytes, *, deletions: bool = False, now: float | None = None, bytes_max: int | None = None
    ) -> Found:
        """Look up one document (raw) by its wire key. With `deletions` a tombstone counts as a document. Raises the
        errors of `get`, and AnswerTooLarge as `get_within` does.
        """
        collection_id, key = wire_key[0], wire_key[1:]
        if collection_id >= 0x80:
            collection_id, key = keys.split_key(wire_key)
        reader = self.reader(((crc32(key) >> 16) & 0x7FFF) % self._vbucket_count)
        document: Document | None = None
        unread = None
        txn = Transaction(reader.environment, reader.begin_read())
        try:
            _, branch, _, _, seqno, is_plain, manifest = reader.served_in(txn.raw)
            if not is_plain:
                reader.readable(txn)
            collection = manifest.collections.get(collection_id)
            if collection is not None and (dup := _newest(reader, txn, wire_key, branch, seqno)) is not None:
                _, dup_seqno, kind = _unpack_dup(dup)
                if (kind == MUTATION or deletions) and dup_seqno > collection.begin_seqno:
                    if kind == MUTATION and bytes_max is not None:
                        unread = dup
                    else:
                        document = reader.document(txn, wire_key, dup, True)
        except (struct.error, IndexError, lmdb.Error) as error:
            raise reader.damaged(error) from error
        finally:
            reader.environment.end(txn.raw)
        if unread is not None and bytes_max is not None:
            document = document_within(bytes_max, reader, wire_key, unread, raw=True)
            if document is None:
                return self.find(wire_key, deletions=deletions, now=now)
        if document is not None and document.expiry and not document.deleted:
            now = time.time() if now is None else now
            if document.expiry <= now:
                document = None
        return Found(document, collection is not None, manifest)


def document_within(
    bytes_max: int, reader: VbucketReader, wire_key: bytes, reference: bytes, raw: bool
) -> Document | None:
    """Return the document of the row that a reference names, or None if the row was purged or moved. Reads in a new
    transaction. Raises AnswerTooLarge as `PointReads.get_within` does.
    """
    row_key = reference[ROW_KEY]
    txn = reader.environment.begin(buffers=True)
    try:
        view = txn.get(row_key, None, reader.rows)
        if view is None:
            return None
        if (byte_count := records.bytes_to_read(view)) > bytes_max:
            error = AnswerTooLarge(f"the document has more than {bytes_max} bytes", vbid=reader.vbid)
            error.byte_count = byte_count
            raise error
        stored = bytes(view)
    except (struct.error, IndexError, lmdb.Error) as error:
        raise reader.damaged(error) from error
    finally:
        view = None
        reader.environment.end(txn)
    if reader.verify_reads and crc32c(stored) != RESIDUE:
        raise seal.damaged(stored, row_key, reader.vbid, reader.environment.path)
    reader.check_row(stored, wire_key, reference)
    return records.decode_row(reader.vbid, Branch(records.branch_of(reference)), stored, raw, False, SEAL_BYTES)


def _newest(
    reader: VbucketReader, txn: Transaction, wire_key: bytes, branch: int, seqno: int, links: chain.Chain | None = None
) -> bytes | None:
    """Return a key's newest reference visible at (branch, seqno), or None. `links`: the chain of this position."""
    cursor = txn.raw.cursor(reader.keys)
    if not cursor.set_key(wire_key):
        reader.check_absent(txn.raw, cursor, wire_key)
        return None
    dup: bytes = cursor.value()
    if cursor.next_dup():
        dup = reader.newest(cursor, wire_key)
    reader.check_kind(wire_key, dup)
    dup_branch, dup_seqno, _ = _unpack_dup(dup)
    if dup_branch == branch and dup_seqno <= seqno:
        return dup
    if links is None:
        links = reader.chain_at(txn, branch, seqno)
    found = reader.newest_visible(txn.raw, cursor, wire_key, dup, links)
    if found is not None:
        reader.check_kind(wire_key, found)
    return found
