"""Values of the store: rows, states and small records as bytes (FORMAT.md, "Keyspaces").

A row is the DCP message from the wire (24-byte header, extras, prefixed key, value); the header's vbucket and opaque
have no meaning here. A `pub` record is a fixed struct. The other records are msgpack arrays that begin with the
record's version.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import astuple
from functools import wraps
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import cramjam
import msgpack

from storage.errors import RUN_CHECK, CorruptedError
from storage.format import keys
from storage.model import (
    SEQNO_MAX,
    Branch,
    Collection,
    Document,
    FailoverLog,
    Kind,
    ManifestChange,
    ManifestUid,
    Rollback,
    Seqno,
    SnapshotRange,
    VbucketState,
)

HEADER = struct.Struct(">BBHBBHIIQ")
"""magic, opcode, key length, extras length, datatype, vbucket, body length, opaque, cas."""
MAGIC = 0x80
DATATYPE_SNAPPY = 0x02
DATATYPE_XATTR = 0x04
HEAD_BYTES_MAX = 24 + 31 + 255
"""Maximum length of a row's header, extras and key."""
SNAPPY_RATIO_MAX = 32
"""No value decompresses to more than this many times its length: three bytes become at most 64, a ratio of 21."""
VALUE_LENGTH_MAX = 32 * 1024 * 1024
"""Largest decompressed value, bytes: a document of 20 MiB, its xattrs, and a reserve. A larger value is damage."""

_MUTATION = struct.Struct(">BBHBBHIIQQQIIIHB")
_MUTATION_BYTES = _MUTATION.size
_MUTATION_EXTRAS = 31
_READ_MUTATION = struct.Struct(">xBHBBxxI4xQQQII4xHxB").unpack_from
"""opcode, key length, extras length, datatype, body length, cas, seqno, rev_seqno, flags, expiry, nmeta, first byte of
the key.
"""
NUMBERS_AT = {"cas": 16, "seqno": 24, "rev_seqno": 32, "flags": 40, "expiry": 44}
"""Offsets of fields in a stored mutation, for code that reads many rows at once."""
EXPIRY = slice(44, 48)
_READ_ANSWER = struct.Struct(">2xHxBxxI4xQ16xII4xHx").unpack_from
"""key length, datatype, body length, cas, flags, expiry, nmeta."""
_new_tuple = tuple.__new__
_DELETION_V1 = struct.Struct(">QQH")
_DELETION_V2 = struct.Struct(">QQIB")
_EXPIRATION = struct.Struct(">QQI")
_SYSTEM_EVENT = struct.Struct(">QIB")
_MUTATION_KIND = Kind.MUTATION
_KINDS = {int(kind): kind for kind in Kind}

MUTATION, DELETION, SYSTEM_EVENT = int(Kind.MUTATION), int(Kind.DELETION), int(Kind.SYSTEM_EVENT)
"""Integers for loops over rows: comparing enum members would take a tenth of a row's time."""


ROW_KEY = slice(0, keys.ROW_KEY_SIZE)
"""The part of a reference, or of a boundary key, that is a row key. A reference is a value of the tree `k<vbid>`."""
KIND = keys.ROW_KEY_SIZE
"""Index of the row's kind in a reference."""
BRANCH, SEQNO = slice(0, 4), slice(4, keys.ROW_KEY_SIZE)
"""Branch and seqno in a row key or reference. As bytes they sort like the numbers."""
AFTER_BRANCH = slice(4, None)
"""The part of a row key or reference that a merge keeps when it moves the row to the parent branch."""


def row_key(prefix: bytes, seqno: int) -> bytes:
    """Return the key of the row at `seqno`; `prefix` is the branch, packed by `keys.PREFIX`."""
    return prefix + seqno.to_bytes(8, "big")


def branch_of(row_key: bytes) -> int:
    return int.from_bytes(row_key[:4], "big")


def seqno_of(row_key: bytes) -> int:
    return int.from_bytes(row_key[4:12], "big")


def kind_of(reference: bytes) -> int:
    return reference[KIND]


def is_system_event(frame: bytes) -> bool:
    return frame[1] == SYSTEM_EVENT


def key_of(frame: bytes) -> bytes:
    """Return the prefixed key of a stored message. Loops over many rows repeat this code inline."""
    start = 24 + frame[4]
    return frame[start : start + (frame[2] << 8 | frame[3])]


def key_rows(rows: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the key row (prefixed key, reference) of each (row key, message), in order. System events have none."""
    out = []
    for row_key, frame in rows:
        if frame[1] != SYSTEM_EVENT:
            start = 24 + frame[4]
            out.append((frame[start : start + (frame[2] << 8 | frame[3])], row_key + frame[1:2]))
    return out


def bytes_to_read(stored: bytes | memoryview) -> int:
    """Return the bytes of a row and, as it claims, of its decompressed value. Reads only the row's head."""
    size = len(stored)
    if size <= HEADER.size or not stored[5] & DATATYPE_SNAPPY:
        return size
    value_at = HEADER.size + stored[4] + (stored[2] << 8 | stored[3])
    try:
        return size + decompressed_bytes(bytes(stored[value_at : value_at + 5]))
    except CorruptedError:  # a read of the value raises this error
        return size


def _split_key(wire_key: bytes, vbid: int) -> tuple[int, bytes]:
    try:
        return keys.split_key(wire_key)
    except ValueError as error:
        raise CorruptedError(str(error), vbid=vbid, hint=RUN_CHECK) from error


def decode_row(
    vbid: int, branch: Branch, frame: bytes, raw: bool = False, lenient: bool = False, tail_bytes: int = 0
) -> Document:
    """Decode a stored row. `raw` keeps the value as stored: compressed and with xattrs. `lenient` keeps the value as
    stored if it cannot be decoded. `Document.datatype` shows the result. The last `tail_bytes` of `frame` are not part
    of the message.

    Raises CorruptedError if the bytes contradict the format.
    """
    end = len(frame) - tail_bytes
    if end > _MUTATION_BYTES:
        (
            opcode, key_length, extras_length, datatype, body_length, cas, seqno, rev_seqno, flags, expiry, nmeta,
            collection_id,
        ) = _READ_MUTATION(frame)  # fmt: skip
        if opcode != MUTATION or extras_length != _MUTATION_EXTRAS:
            return _decode_other(vbid, branch, frame[:end], raw, lenient)
        value_start, value_end = 55 + key_length, end - nmeta
        if 24 + body_length != end or value_start > value_end:
            raise CorruptedError("a row's lengths do not add up", vbid=vbid, hint=RUN_CHECK)
        value = frame[value_start:value_end]
        key = frame[56:value_start]
        if collection_id >= 0x80:
            collection_id, key = _split_key(frame[55:value_start], vbid)
        if datatype & 6 and not raw:
            value, datatype = body_or_all(value, datatype) if lenient else body_of(value, datatype)
        # Not Document(...): the Python-level __new__ of a named tuple takes as long as finding the row.
        return _new_tuple(
            Document,
            (vbid, collection_id, key, seqno, rev_seqno, cas, flags, expiry, datatype, value, _MUTATION_KIND, branch),
        )
    return _decode_other(vbid, branch, frame[:end], raw, lenient)


def answer_fields(frame: bytes, tail_bytes: int) -> tuple[int, int, int, int, bytes]:
    """Return datatype, cas, flags, expiry and value of a stored mutation, unchanged. Raises CorruptedError."""
    key_length, datatype, body_length, cas, flags, expiry, nmeta = _READ_ANSWER(frame)
    end = len(frame) - tail_bytes
    if 24 + body_length != end or 55 + key_length + nmeta > end:
        raise CorruptedError("a row's lengths do not add up", hint=RUN_CHECK)
    return datatype, cas, flags, expiry, frame[55 + key_length : end - nmeta]


def _decode_other(vbid: int, branch: Branch, frame: bytes, raw: bool, lenient: bool) -> Document:
    """Decode a tombstone or a system event. For a system event, `key` and `value` are the event's, `flags` is its
    number and `rev_seqno` its version; the collection id is 0.
    """
    try:
        _, opcode, key_length, extras_length, datatype, _, body_length, _, cas = HEADER.unpack_from(frame)
        kind = _KINDS.get(opcode)
        if kind is None or 24 + body_length != len(frame) or extras_length + key_length > body_length:
            raise CorruptedError(f"a row of opcode 0x{opcode:02x} cannot be read", vbid=vbid)
        nmeta = delete_time = flags = 0
        if kind is Kind.DELETION and extras_length == _DELETION_V1.size:
            seqno, rev_seqno, nmeta = _DELETION_V1.unpack_from(frame, 24)
        elif kind is Kind.DELETION and extras_length == _DELETION_V2.size:
            seqno, rev_seqno, delete_time, _ = _DELETION_V2.unpack_from(frame, 24)
        elif kind is Kind.EXPIRATION and extras_length == _EXPIRATION.size:
            seqno, rev_seqno, delete_time = _EXPIRATION.unpack_from(frame, 24)
        elif kind is Kind.SYSTEM_EVENT and extras_length == 13:
            seqno, flags, rev_seqno = _SYSTEM_EVENT.unpack_from(frame, 24)
        else:
            raise CorruptedError(f"a {kind.name.lower()} row has {extras_length} bytes of extras", vbid=vbid)
        key_start = 24 + extras_length
        wire_key = frame[key_start : key_start + key_length]
        value = frame[key_start + key_length : len(frame) - nmeta]
        collection_id, key = (0, wire_key) if kind is Kind.SYSTEM_EVENT else _split_key(wire_key, vbid)
    except (struct.error, IndexError, ValueError) as error:
        raise CorruptedError(f"a row cannot be read: {error}", vbid=vbid) from error
    if datatype & 6 and not raw:
        value, datatype = body_or_all(value, datatype) if lenient else body_of(value, datatype)
    return Document(
        vbid, collection_id, key, Seqno(seqno), rev_seqno, cas, flags, delete_time, datatype, value, kind, branch
    )


def body_of(value: bytes, datatype: int) -> tuple[bytes, int]:
    """Return the body, decompressed and without xattrs, and its datatype. Raises CorruptedError."""
    if not value:  # a stream without values: the datatype describes the omitted value
        return value, datatype & ~(DATATYPE_SNAPPY | DATATYPE_XATTR)
    if datatype & DATATYPE_SNAPPY:
        value = decompress(value)
        datatype &= ~DATATYPE_SNAPPY
    if datatype & DATATYPE_XATTR:
        if len(value) < 4 or (end := 4 + int.from_bytes(value[:4], "big")) > len(value):
            raise CorruptedError("the xattr section of a value is longer than the value")
        value = value[end:]
        datatype &= ~DATATYPE_XATTR
    return value, datatype


def body_or_all(value: bytes, datatype: int) -> tuple[bytes, int]:
    """Like `body_of`, but return `value` and `datatype` unchanged if the value cannot be decoded."""
    try:
        return body_of(value, datatype)
    except CorruptedError:
        return value, datatype


def value_problem(document: Document) -> str | None:
    """For a document read without `raw`: return why the value could not be decoded, or None if it was."""
    if document.datatype & (DATATYPE_SNAPPY | DATATYPE_XATTR):
        try:
            body_of(document.value, document.datatype)
        except CorruptedError as error:
            return error.message
    return None


def decompressed_bytes(value: bytes) -> int:
    """Return the decompressed length that a Snappy value (raw format) claims. Raises CorruptedError if the value is
    empty, or claims more than `VALUE_LENGTH_MAX`.
    """
    claimed = shift = 0
    for byte in value[:5]:
        claimed |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if not value or claimed > VALUE_LENGTH_MAX:
        raise CorruptedError(f"a compressed value claims {claimed} bytes; at most {VALUE_LENGTH_MAX} are possible")
    return claimed


def decompress(value: bytes) -> bytes:
    """Decompress Snappy (raw format). Raises CorruptedError, also above the limit of `decompressed_bytes`."""
    decompressed_bytes(value)
    try:
        return bytes(cramjam.snappy.decompress_raw(value))
    except Exception as error:
        raise CorruptedError(f"a compressed value cannot be decompressed: {error}") from error


def encode_mutation(
    key: bytes,
    value: bytes,
    seqno: int,
    *,
    collection_id: int = 0,
    rev_seqno: int = 1,
    cas: int = 1,
    flags: int = 0,
    expiry: int = 0,
    datatype: int = 0,
) -> bytes:
    """Return the message of a mutation, for benchmarks and tools that write rows without a source."""
    wire_key = keys.encode_collection_id(collection_id) + key
    body_length = _MUTATION_EXTRAS + len(wire_key) + len(value)
    head = _MUTATION.pack(
        MAGIC, MUTATION, len(wire_key), _MUTATION_EXTRAS, datatype, 0, body_length, 0, cas, seqno, rev_seqno, flags,
        expiry, 0, 0, 0,
    )  # fmt: skip
    return head + wire_key + value


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _reads(what: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Turn errors of a decoding function into a CorruptedError that names the record."""

    def wrap(read: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(read)
        def reading(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return read(*args, **kwargs)
            except (TypeError, ValueError, LookupError) as error:
                raise CorruptedError(f"the {what} record is damaged: {error}", hint=RUN_CHECK) from error

        return reading

    return wrap


def _pack(*fields: Any) -> bytes:
    return bytes(msgpack.packb((1, *fields)))


def _unpack(data: bytes | None, what: str, count: int) -> list[Any]:
    if data is None:
        raise CorruptedError(f"the {what} record is missing", hint=RUN_CHECK)
    try:
        fields = msgpack.unpackb(data)
    except Exception as error:
        raise CorruptedError(f"the {what} record cannot be read: {error}") from error
    if not isinstance(fields, list) or len(fields) - 1 != count or fields[0] != 1:
        raise CorruptedError(f"the {what} record has an unknown shape")
    return fields[1:]


HistoryIds = tuple[tuple[int, int], ...]
"""(history id, seqno) pairs of a branch, in order of seqno. An id belongs to the positions above its seqno, up to the
seqno of the next pair. The first id also belongs to the positions up to its seqno.
"""


def history_id_at(history_ids: HistoryIds, seqno: int) -> int:
    """Return the history id of a position, or 0 if none is stored."""
    if not history_ids:
        return 0
    return history_ids[bisect_left(history_ids, seqno, 1, key=itemgetter(1)) - 1][0]


class Pub(NamedTuple):
    branch: Branch
    seqno: Seqno
    """The published seqno: the seqno of a boundary, or 0."""
    floor_seqno: Seqno
    """Seqno of the oldest kept boundary, or 0."""
    manifest_key: tuple[int, int] = (0, 0)
    """Branch and seqno of the row in `manifest`; (0, 0): the initial manifest, which has no row."""
    flags: int = 0

    @property
    def is_stale(self) -> bool:
        return bool(self.flags & keys.PUB_STALE)

    @property
    def is_unavailable(self) -> bool:
        """True while a resync is under way and readers are refused."""
        return bool(self.flags & keys.PUB_UNAVAILABLE)


def decode_pub(data: bytes | None) -> Pub:
    if data is None or len(data) != keys.PUB.size:
        raise CorruptedError("the pub record is missing or damaged")
    branch, seqno, floor_seqno, *manifest_key, flags = keys.PUB.unpack(data)
    return Pub(branch, seqno, floor_seqno, (manifest_key[0], manifest_key[1]), flags)


def encode_pub(pub: Pub) -> bytes:
    return keys.PUB.pack(pub.branch, pub.seqno, pub.floor_seqno, *pub.manifest_key, pub.flags)


class BranchRow(NamedTuple):
    parent: int | None
    base_seqno: int
    vbuuid: int
    reason: int
    time_ms: int
    """Time at which readers first saw the branch, milliseconds since 1970; 0: not yet, or branch 1."""
    kept_seqno: int = SEQNO_MAX
    """The purger may have removed the branch's rows above this seqno."""
    history_ms: int = 0
    """The moment of `time_ms` by the `HistoryClock` (storage/write/owner.py), in milliseconds, for the purger."""
    history_ids: HistoryIds = ()


def encode_branch(row: BranchRow) -> bytes:
    return _pack(*row)


@_reads("branch")
def decode_branch(data: bytes | None) -> BranchRow:
    *fields, history_ids = _unpack(data, "branch", 8)
    return BranchRow(*fields)._replace(history_ids=tuple((int(each), int(above)) for each, above in history_ids))


class StateRow(NamedTuple):
    """A row of `state`, from which a writer continues. `VbucketState` explains the fields except `indexed_seqno`."""

    staging_branch: int
    staged_seqno: int
    staging_published_seqno: int
    indexed_seqno: int
    """Rows of the staging branch up to here have their key rows."""
    open_snapshot: SnapshotRange | None
    failover_log: FailoverLog
    source_purge_seqno: int
    rollback_count: int
    last_rollback_ms: int | None
    stream_filter: str | None = None
    missing_seqno: int = 0

    @classmethod
    def of(cls, state: VbucketState) -> StateRow:
        """Return the row of a state. `indexed_seqno` becomes `staging_published_seqno`."""
        return cls(*_stored_fields(state))


_stored_fields = attrgetter(
    *("staging_published_seqno" if name == "indexed_seqno" else name for name in StateRow._fields)
)


def encode_state(row: StateRow) -> bytes:
    snapshot = row.open_snapshot
    packed = (snapshot.start_seqno, snapshot.end_seqno, snapshot.flags) if snapshot else None
    return _pack(*row[:4], packed, *row[5:])


@_reads("state")
def decode_state(data: bytes | None) -> StateRow:
    fields = _unpack(data, "state", 11)
    snapshot, log = fields[4:6]
    fields[4:6] = (
        SnapshotRange(Seqno(snapshot[0]), Seqno(snapshot[1]), snapshot[2]) if snapshot else None,
        FailoverLog.of(log),
    )
    return StateRow(*fields)


_MANIFEST_UID_END = 16
"""Bytes at the start of a `manifest` record that contain its uid: up to 9 bytes, after 2 others."""


def encode_manifest(change: ManifestChange) -> bytes:
    collections = [
        (cid,) if entry is None else (cid, entry.scope_id, entry.name, entry.begin_seqno, entry.max_ttl)
        for cid, entry in change.collections.items()
    ]
    return _pack(change.uid, list(change.scopes.items()), collections, change.emptied, change.whole)


@_reads("manifest")
def decode_manifest(data: bytes | None) -> ManifestChange:
    uid, scopes, collections, emptied, whole = _unpack(data, "manifest", 5)
    return ManifestChange(
        ManifestUid(uid),
        dict(scopes),
        {c[0]: Collection(c[0], c[1], c[2], Seqno(c[3]), c[4]) if len(c) > 1 else None for c in collections},
        tuple(emptied),
        bool(whole),
    )


def manifest_uid(data: bytes | None) -> int:
    """Return the uid from a row of `manifest` without decoding the rest."""
    if data is None:
        raise CorruptedError("the manifest record is missing", hint=RUN_CHECK)
    try:
        unpacker = msgpack.Unpacker(read_size=_MANIFEST_UID_END)  # the default buffer takes a megabyte
        unpacker.feed(data[:_MANIFEST_UID_END])
        unpacker.read_array_header()
        unpacker.skip()
        return int(unpacker.unpack())
    except (msgpack.UnpackException, TypeError, ValueError) as error:
        raise CorruptedError(f"the manifest record is damaged: {error}", hint=RUN_CHECK) from error


def encode_rollback(rollback: Rollback) -> bytes:
    return _pack(*astuple(rollback)[1:])


@_reads("rollback")
def decode_rollback(vbid: int, data: bytes | None) -> Rollback:
    return Rollback(vbid, *_unpack(data, "rollback", 7))
