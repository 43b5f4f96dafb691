"""Reads documents by key, or by wire key (collection id and key).

An answer about one vbucket shows one commit, even if a second transaction reads the row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
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
from storage.format.tokens import AsOf, CollectionName, check_as_of, collection_of, has_expired
from storage.history import chain
from storage.model import Document, Kind, Manifest
from storage.read.groups import Groups
from storage.read.vbucket_reader import VbucketReader, Visible, end_of_references

_unpack_dup = keys.DUP.unpack
decode_row = records.decode_row
SEAL_BYTES = seal.SIZE


Admit = Callable[[Manifest], None]
"""Gets the manifest, which may lack the requested collection. May raise, before a document is read."""


class _Options(NamedTuple):
    collection: CollectionName | None = None
    as_of: AsOf = None
    now: float | None = None
    raw: bool = False
    lenient: bool = False
    deletions: bool = False
    bytes_max: int | None = None
    admit: Admit | None = None


class ReadRun:
    """Point reads that share one transaction in each environment, from the first read in it to the end of the run. So a
    read outside of the run may see a newer commit.
    """

    def __init__(self) -> None:
        self._open: list[tuple[Environment, Any]] = []
        """All transactions of the run. An ExitStack would take a third of a small read's time."""
        self._begun: dict[Environment, tuple[Any, int]] = {}
        self._views: dict[Environment, Any] = {}
        """Transactions whose `get` returns buffers of LMDB's map. They may see a later commit; rows never change."""

    def __enter__(self) -> ReadRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._begun.clear()
        self._views.clear()
        while self._open:
            environment, txn = self._open.pop()
            environment.end(txn)

    def _begin(self, environment: Environment, **options: bool) -> Any:
        txn = environment.begin(**options)
        self._open.append((environment, txn))
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
            views = self._views.get(reader.environment)
            if views is None:
                views = self._views[reader.environment] = self._begin(reader.environment, buffers=True)
            found = _row(reader, txn, views, txn.cursor(reader.keys), wire_key, above, up_to, bytes_max)
        except (struct.error, IndexError, lmdb.Error) as error:
            raise reader.damaged(error) from error
        return None if found is _OTHER else found


_OTHER: Any = object()
"""`_row` returns this if only the slower look-up can answer."""


def _row(
    reader: VbucketReader,
    txn: Any,
    rows: Any,
    cursor: Any,
    wire_key: bytes,
    above: bytes,
    up_to: bytes,
    bytes_max: int | None = None,
) -> bytes | None:
    """Return a document's row if the newest version of its key is a visible mutation; None if the key is absent; else
    `_OTHER`. This is the fast path of `PointReads._look`: it gives the same answers and errors in half the time.

    `rows` is `txn`; or, with `bytes_max`, a transaction that returns buffers, so that a larger row (`_OTHER`) is not
    copied. Such a transaction may see a later commit, but rows never change.
    """
    if not cursor.set_key(wire_key):
        reader.check_absent(txn, cursor, wire_key)
        return None
    cursor.last_dup()  # as in `VbucketReader.newest`
    dup = cursor.value()
    if (has_older := cursor.prev_dup()) and cursor.value() >= dup:
        raise reader.mismatch(wire_key)
    if not above < dup <= up_to or dup[KIND] != MUTATION:
        return _OTHER  # type: ignore[no-any-return]
    row_key = dup[ROW_KEY]
    stored: bytes = rows.get(row_key, b"", reader.rows)
    if bytes_max is not None:
        if not 0 < len(stored) <= bytes_max:
            return _OTHER  # type: ignore[no-any-return]
        stored = bytes(stored)
    if reader.verify_reads and crc32c(stored) != RESIDUE:
        raise seal.damaged(stored, row_key, reader.vbid, reader.environment.path)
    if stored[55 : 55 + stored[3]] != wire_key or (has_older and stored[24:32] != dup[SEQNO]):
        raise reader.mismatch(wire_key)
    return stored


def bytes_above(reader: VbucketReader, reference: bytes, bytes_max: int) -> AnswerTooLarge | None:
    """Return the error for a document whose row and, as the row claims, decompressed value together have more than
    `bytes_max` bytes; else None. Does not read the value.
    """
    txn = reader.environment.begin(buffers=True)
    try:
        view = txn.get(reference[ROW_KEY], None, reader.rows)
        byte_count = 0 if view is None else records.bytes_to_read(view)
    finally:
        view = None
        reader.environment.end(txn)
    if byte_count <= bytes_max:
        return None
    error = AnswerTooLarge(f"the document has more than {bytes_max} bytes", vbid=reader.vbid)
    error.byte_count = byte_count
    return error


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
        bytes_max: int | None = None,
    ) -> Document | None:
        """Return a document, or None if it is absent, deleted or expired.

        `collection` is a name (`scope.collection`) or an id, by default `_default._default`. `as_of` is a seqno of the
        key's vbucket or a `Time`. `now` (seconds since 1970) decides expiry, by default the moment of
        `VbucketReader.as_of`. `raw` leaves the value compressed and with its xattrs. Raises AnswerTooLarge, without
        reading the value, if the stored and the decompressed document together have more than `bytes_max` bytes.

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
            if as_of is None and collection is None and bytes_max is None:
                visible = reader.visible
                if visible[0] != txn.id():
                    visible = reader.look(txn)
                if above := visible[2]:
                    stored = _row(reader, txn, txn, txn.cursor(reader.keys), b"\0" + key, above, visible[3])
                    if stored is None:
                        return None
                    if stored is not _OTHER:
                        document = decode_row(vbid, visible[1], stored, raw, False, SEAL_BYTES)
                        if has_expired(document.expiry, now):
                            return None
                        return document
            options = _Options(collection, as_of, now, raw, bytes_max=bytes_max)
            return self._look(reader, Transaction(reader.environment, txn), key, options)
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
        """Return the documents that exist, by key. Arguments and errors are those of `get`; also SeveralVbuckets, for
        a seqno and keys of several vbuckets.

        Documents of one group of vbuckets are read in one transaction. A value that cannot be decompressed, or would be
        larger than 32 MiB, is returned as stored: `datatype` then still has its bit 2 (Snappy) or 4 (xattrs). Raises
        AnswerTooLarge as soon as the values together have more than `bytes_max` bytes.
        """
        # The iterator may do anything, even fork: read it to its end first.
        requested = [key.encode() if isinstance(key, str) else key for key in document_keys]
        if isinstance(as_of, int):
            check_as_of(as_of, {keys.vbid_of(key, self._vbucket_count) for key in requested})
        options = _Options(collection, as_of, now, raw, lenient=True)
        is_plain = as_of is None and collection is None
        vbucket_count, reader_of = self._vbucket_count, self.reader
        found: dict[bytes, Document] = {}
        byte_count = 0
        # By vbucket: reader, transaction, a cursor over the keys, and served state.
        found_in: dict[int, tuple[VbucketReader, Any, Any, Visible]] = {}
        with ReadRun() as run:
            for key in requested:
                vbid = ((crc32(key) >> 16) & 0x7FFF) % vbucket_count
                known = found_in.get(vbid)
                reader = reader_of(vbid) if known is None else known[0]
                document: Document | None
                try:
                    if known is None:
                        txn, visible = run.begun(reader)
                        known = found_in[vbid] = reader, txn, txn.cursor(reader.keys), visible
                    _, txn, cursor, visible = known
                    _, branch, above, up_to, _, _, _ = visible
                    fast = is_plain and above
                    stored = _row(reader, txn, txn, cursor, b"\0" + key, above, up_to) if fast else _OTHER
                    if stored is None:
                        continue
                    if stored is not _OTHER:
                        document = decode_row(vbid, branch, stored, raw, True, SEAL_BYTES)
                        if has_expired(document.expiry, now):
                            continue
                    elif (document := self._look(reader, Transaction(reader.environment, txn), key, options)) is None:
                        continue
                except (struct.error, IndexError, lmdb.Error) as error:
                    raise reader.damaged(error) from error
                found[key] = document
                if bytes_max is not None:
                    byte_count += len(document.value)
                    if byte_count > bytes_max:
                        what = f"the requested documents are more than {bytes_max} bytes"
                        raise AnswerTooLarge(what, hint="ask for fewer at once")
        return found

    def _look(self, reader: VbucketReader, txn: Transaction, key: bytes, options: _Options) -> Document | None:
        """Look up a document in a transaction, with every option of a point read."""
        links: chain.Chain | None = None
        now = options.now
        if options.as_of is None:
            _, branch, _, _, seqno, is_plain, manifest = reader.served_in(txn.raw)
            if not is_plain:
                reader.readable(txn)
        else:
            served, now_ms = reader.as_of(txn, options.as_of)
            (branch, seqno, _), links = served.position, served.links
            manifest = reader.manifest(txn, served.pub.manifest_key)
            now = now_ms / 1000 if now is None else now
        if options.admit is not None:
            options.admit(manifest)
        collection = collection_of(manifest, options.collection, self._path)
        wire_key = keys.encode_collection_id(collection.collection_id) + key
        dup = _newest(reader, txn, wire_key, branch, seqno, links)
        if dup is None or records.seqno_of(dup) <= collection.begin_seqno:
            return None
        if dup[KIND] == MUTATION:
            if options.bytes_max is not None and (too_large := bytes_above(reader, dup, options.bytes_max)):
                raise too_large
        elif not options.deletions:
            return None
        document = reader.document(txn, wire_key, dup, options.raw, options.lenient)
        if not document.deleted and has_expired(document.expiry, now):
            return document._replace(kind=Kind.EXPIRATION) if options.deletions else None
        return document

    def exists(self, key: bytes | str, collection: CollectionName | None = None) -> bool:
        """Return True if `get` would return a document."""
        return self.get(key, collection, raw=True) is not None

    def key_at(self, vbid: int, seqno: int) -> bytes | None:
        """Return the wire key of a document's row at a seqno of the served history, or None if no such row is there."""
        reader = self.reader(vbid)
        with reader.views(lambda txn: reader.readable(txn).links) as (views, links):
            branch = next((each.branch for each in links if each.base_seqno < seqno <= each.cut), 0)
            head = bytes(views.raw.get(keys.ROW.pack(branch, seqno), b"", reader.rows)[:HEAD_BYTES_MAX])
            return records.key_of(head) if head and not records.is_system_event(head) else None

    def find(
        self,
        wire_key: bytes,
        *,
        deletions: bool = False,
        now: float | None = None,
        bytes_max: int | None = None,
        admit: Admit | None = None,
    ) -> Document | None:
        """Return one document (raw) by its wire key. With `deletions` a tombstone counts as a document, and an expired
        document as a tombstone, which still has its value. Raises the errors of `get`, and those of `admit`, which is
        called first.
        """
        collection_id, key = wire_key[0], wire_key[1:]
        if collection_id >= 0x80:
            collection_id, key = keys.split_key(wire_key)
        reader = self.reader(((crc32(key) >> 16) & 0x7FFF) % self._vbucket_count)
        options = _Options(collection_id, None, now, raw=True, deletions=deletions, bytes_max=bytes_max, admit=admit)
        txn = reader.begin_read()
        try:
            return self._look(reader, Transaction(reader.environment, txn), key, options)
        except (struct.error, IndexError, lmdb.Error) as error:
            raise reader.damaged(error) from error
        finally:
            reader.environment.end(txn)


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
