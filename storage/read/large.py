"""Reads a large document in pieces, because one copy of 20 MiB would take 5 ms or more.

Knows rows of mutations; never the users of the pieces. Rows do not change, so each piece can be read in a transaction
of its own. Invariant: all pieces together are the value as it is stored. The checksum is compared only after the last
piece, so no piece may be used before all are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from google_crc32c import extend

from storage.errors import RUN_CHECK, CorruptedError, ViewInvalidated
from storage.format import records, seal
from storage.model import Branch, Document
from storage.read.vbucket_reader import VbucketReader

PIECE_BYTES = 256 * 1024
HEAD_BYTES_MAX = 24 + 31 + 255
"""Maximum length of a mutation's header, extras and key."""
SNAPPY_RATIO_MAX = 32
"""No value decompresses to more than this many times its length: three bytes become at most 64, a ratio of 21."""
_META_LENGTH = slice(52, 54)
"""Place of the length of extended metadata in a row. Old servers put this metadata behind the value."""


@dataclass(frozen=True, slots=True)
class LargeDocument:
    """A document whose value is still to be read."""

    document: Document
    """The document without its value; `datatype` describes the stored value."""
    stored_bytes: int
    value_bytes: int
    """Length of the decompressed value with its xattrs, according to the value's own header."""
    _reader: VbucketReader
    _row_key: bytes
    _head: bytes
    _value_at: int

    @property
    def head(self) -> bytes:
        """The DCP message without value and extended metadata; its length fields are adapted."""
        return _without_value(self._head, self._value_at)

    def pieces(self) -> Iterator[bytes]:
        """Yield the pieces of the stored value. Raises ViewInvalidated if the purger removes or moves the row, and,
        with `verify_reads`, CorruptedError after the last piece if the row's checksum is wrong.
        """
        reader = self._reader
        value_end = self._value_at + self.stored_bytes
        checksum = at = 0
        size = value_end
        while at < size:
            txn = reader.environment.begin(buffers=True)
            try:
                stored = txn.get(self._row_key, db=reader.rows)
                piece = b"" if stored is None else bytes(stored[at : at + PIECE_BYTES])
                size = 0 if stored is None else len(stored)
                del stored
            finally:
                reader.environment.end(txn)
            if not piece:
                raise ViewInvalidated("the document was purged meanwhile", vbid=reader.vbid, hint="read it again")
            checksum = extend(checksum, piece)
            first, last = max(self._value_at - at, 0), value_end - at
            at += len(piece)
            if first < min(last, len(piece)):
                yield piece if not first and last >= len(piece) else piece[first:last]
        if reader.verify_reads and checksum != seal.RESIDUE:
            raise seal.damaged(self._head, self._row_key, reader.vbid, reader.environment.path)


def about(found: Document | LargeDocument) -> Document:
    """Return the document, without its value if the value is large."""
    return found.document if isinstance(found, LargeDocument) else found


def large_row(reader: VbucketReader, row_key: bytes, stored: memoryview, bytes_max: int) -> LargeDocument | None:
    """Return the document of a mutation's row if the value, stored or decompressed, is longer than `bytes_max`; else
    None. Reads only the row's first bytes. Raises CorruptedError.
    """
    size = len(stored)
    if size <= bytes_max // SNAPPY_RATIO_MAX:
        return None
    head = bytes(stored[:HEAD_BYTES_MAX])
    if size <= bytes_max and not head[5] & records.DATATYPE_SNAPPY:
        return None
    value_at, value_end = _value_of(head, size, reader)
    stored_bytes = value_end - value_at
    value_bytes = stored_bytes
    if head[5] & records.DATATYPE_SNAPPY:
        with contextlib.suppress(CorruptedError):  # a read of the value raises this error
            value_bytes = records.decompressed_bytes(bytes(stored[value_at : value_at + 5]))
    if max(stored_bytes, value_bytes) <= bytes_max:
        return None
    branch = Branch(int.from_bytes(row_key[:4], "big"))
    document = records.decode_row(reader.vbid, branch, _without_value(head, value_at), raw=True)
    return LargeDocument(document, stored_bytes, value_bytes, reader, row_key, head, value_at)


def _value_of(head: bytes, size: int, reader: VbucketReader) -> tuple[int, int]:
    body_length = int.from_bytes(head[8:12], "big")
    value_at = 24 + head[4] + int.from_bytes(head[2:4], "big")
    value_end = size - seal.SIZE - int.from_bytes(head[_META_LENGTH], "big")
    if head[1] != records.MUTATION or 24 + body_length != size - seal.SIZE or not 55 <= value_at <= value_end:
        raise CorruptedError("a row's lengths do not add up", vbid=reader.vbid, hint=RUN_CHECK)
    return value_at, value_end


def _without_value(head: bytes, value_at: int) -> bytes:
    frame = bytearray(head[:value_at])
    frame[8:12] = (value_at - 24).to_bytes(4, "big")
    frame[_META_LENGTH] = b"\0\0"
    return bytes(frame)
