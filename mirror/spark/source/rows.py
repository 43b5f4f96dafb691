"""Turn stored rows into Arrow columns, many at a time.

Knows the layout of a stored mutation (storage/FORMAT.md, "A row") and Arrow; must never know where rows come from.
Keys, values and numbers are cut out of all rows at once, in C, and only on request: a count inflates nothing.
Invariants: the values are those of `storage.format.records.decode_row`, which also reports an unreadable row. A value
that cannot be taken apart (more than `VALUE_LENGTH_MAX` when inflated, or with xattrs longer than it) stays as it is
stored, and its datatype says so: it harms no other document.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from struct import pack
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mirror.spark.source.columns import CHANGES
from storage.format import records
from storage.model import Branch, Document

HEAD = 55
"""Bytes of a mutation before its key: header and extras."""
_HEADER, _HEAD, _THREE, _KEY, _VALUE = (pa.scalar(each, pa.int32()) for each in (24, HEAD, 3, -2, -1))
BATCH_ROWS = 4096
BATCH_BYTES = 16 * 1024 * 1024
"""Size at which a batch is closed; one document may be larger."""

Number = tuple[int, int, str]
_KEY_LENGTH: Number = (2, 2, "H")
_BODY_LENGTH: Number = (8, 4, "I")
_CAS: Number = (16, 8, "Q")
_SEQNO: Number = (24, 8, "Q")
_REV_SEQNO: Number = (32, 8, "Q")
_FLAGS: Number = (40, 4, "I")
_EXPIRY: Number = (44, 4, "I")
_TYPES = {"H": pa.uint16(), "I": pa.uint32(), "Q": pa.uint64()}


class Documents:
    """The mutations of one batch, and the columns made from them once it is closed.

    Laid end to end they are one Arrow array with three parts for each row: the bytes before the key, the key, the
    value. A checksum behind a value belongs to the bytes before the next key.
    """

    def __init__(self, checksum_size: int = 0) -> None:
        self._checksum_size = checksum_size
        self._frames: list[bytes] = []
        self._origins: list[tuple[int, str, int, int]] = []  # vbid, collection, bytes of its id before a key, how many
        self._byte_count = 0
        self._stored_datatypes = b""
        self._lengths: Any = None
        self._heads: Any = None
        self._key_lengths: Any = None

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def full(self) -> bool:
        return len(self._frames) >= BATCH_ROWS or self._byte_count >= BATCH_BYTES

    def add(self, vbid: int, collection: str, prefix_length: int, frames: list[bytes], byte_count: int) -> None:
        """Take rows of one collection of one vbucket, of `byte_count` bytes; `prefix_length` is that of the
        collection's id before each key."""
        self._frames += frames
        self._origins.append((vbid, collection, prefix_length, len(frames)))
        self._byte_count += byte_count

    def close(self) -> None:
        """Check the rows. Raises CorruptedError."""
        count = len(self._frames)
        # An array out of an iterator grows by one number at a time, which takes twice as long.
        self._lengths = _numbers(array("i", pack(f"{count}i", *map(len, self._frames))), pa.int32())
        heads = b"".join([frame[:HEAD] for frame in self._frames])
        self._heads = _binary(array("i", range(0, len(heads) + 1, HEAD)), pa.py_buffer(heads))
        if not self._common(heads):
            self._rewrite()
            self.close()

    @cached_property
    def _parts(self) -> Any:
        ends = pc.cumulative_sum_checked(self._lengths)
        starts = array("i", (0,)) + _array(ends)
        key_starts = pc.add(_numbers(starts, pa.int32())[: len(self)], _HEAD)
        offsets = array("i", bytes(starts.itemsize * (3 * len(self) + 1)))
        offsets[0::3] = array("i", (0,)) + _array(pc.subtract(ends, pa.scalar(self._checksum_size, pa.int32())))
        offsets[1::3] = _array(pc.add(key_starts, self._repeated(2, pa.int32())))
        offsets[2::3] = _array(pc.add(key_starts, self._key_lengths))
        return _binary(offsets, pa.py_buffer(b"".join(self._frames)))

    def _every_third(self, first: Any) -> Any:
        return self._parts.take(pc.add(pc.cumulative_sum(pa.repeat(_THREE, len(self))), first))

    @cached_property
    def keys(self) -> Any:
        return self._every_third(_KEY)

    @cached_property
    def _bodies(self) -> tuple[Any, bytes]:
        """Values without compression and xattrs, and their datatypes."""
        values = self._every_third(_VALUE)
        if not any(self._stored_datatypes.translate(None, b"\0\1")):
            return values, self._stored_datatypes
        texts, datatypes = values.to_pylist(), bytearray(self._stored_datatypes)
        for index, datatype in enumerate(self._stored_datatypes):
            if datatype & 6:
                texts[index], datatypes[index] = records.body_or_all(texts[index], datatype)
        return pa.array(texts, pa.binary()), bytes(datatypes)

    @property
    def values(self) -> Any:
        return self._bodies[0]

    @property
    def datatypes(self) -> bytes:
        """One byte for each row."""
        return self._bodies[1]

    def _common(self, heads: bytes) -> bool:
        """Return True if each row is a whole mutation without old metadata behind its value."""
        count = len(self)
        if (
            len(heads) != HEAD * count
            or heads[0::HEAD] != b"\x80" * count
            or heads[1::HEAD] != b"\x57" * count
            or heads[4::HEAD] != b"\x1f" * count
            or heads[52::HEAD] + heads[53::HEAD] != bytes(2 * count)
        ):
            return False
        self._stored_datatypes = heads[5::HEAD]
        lengths = pc.subtract(self._lengths, pa.scalar(self._checksum_size, pa.int32()))
        key_lengths = self._key_lengths = self._arrow(_KEY_LENGTH).cast(pa.int32())
        right = (
            pc.equal(pc.add(self._long(_BODY_LENGTH), _HEADER), lengths),
            pc.less_equal(pc.add(key_lengths, _HEAD), lengths),
            pc.less_equal(self._repeated(2, pa.int32()), key_lengths),
        )
        return all(pc.all(each).as_py() for each in right)

    def _rewrite(self) -> None:
        """Rewrite rows of which one has old metadata behind its value, or is damaged."""
        vbids = (vbid for vbid, *_, count in self._origins for _ in range(count))
        for index, (vbid, frame) in enumerate(zip(vbids, self._frames, strict=True)):
            message = frame[: len(frame) - self._checksum_size]
            row = records.decode_row(vbid, Branch(0), message, raw=True)
            message = records.encode_mutation(
                row.key,
                row.value,
                row.seqno,
                collection_id=row.collection_id,
                rev_seqno=row.rev_seqno,
                cas=row.cas,
                flags=row.flags,
                expiry=row.expiry,
                datatype=row.datatype,
            )
            self._frames[index] = message + bytes(self._checksum_size)

    def _number(self, which: Number) -> array[int]:
        start, size, code = which
        numbers = array(code)
        numbers.frombytes(_bytes(pc.binary_slice(self._heads, start, start + size)))
        if sys.byteorder == "little":
            numbers.byteswap()
        return numbers

    def _arrow(self, which: Number) -> Any:
        return _numbers(self._number(which), _TYPES[which[2]])

    def _long(self, which: Number) -> Any:
        numbers = self._arrow(which)
        return numbers.view(pa.int64()) if which[1] == 8 else numbers.cast(pa.int64())

    def _repeated(self, position: int, kind: Any) -> Any:
        return pa.concat_arrays([pa.repeat(pa.scalar(origin[position], kind), origin[3]) for origin in self._origins])

    def column(self, name: str) -> Any:
        """Return a column of `columns.DOCUMENTS`."""
        return _COLUMNS[name](self)

    def alive(self, now_ms: int) -> Any:
        """Return which rows have not expired at `now_ms`, or None if none has."""
        expiries = self._number(_EXPIRY)
        if not expiries.tobytes().strip(b"\0"):
            return None
        return pa.array([not each or each * 1000 > now_ms for each in expiries])


_COLUMNS: dict[str, Callable[[Documents], Any]] = {
    "key": lambda rows: rows.keys.view(pa.string()),
    "collection": lambda rows: rows._repeated(1, pa.string()),
    "vbid": lambda rows: rows._repeated(0, pa.int32()),
    "seqno": lambda rows: rows._long(_SEQNO),
    "rev_seqno": lambda rows: rows._long(_REV_SEQNO),
    "cas": lambda rows: rows._long(_CAS),
    "flags": lambda rows: rows._long(_FLAGS),
    "expiry": lambda rows: rows._long(_EXPIRY),
    "datatype": lambda rows: _numbers(rows.datatypes, pa.uint8()).cast(pa.int32()),
    "value": lambda rows: rows.values,
}


def _binary(offsets: array[int], text: Any) -> Any:
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), text])


def _numbers(numbers: array[int] | bytes, kind: Any) -> Any:
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _array(numbers: Any) -> array[int]:
    found = array("i")
    found.frombytes(memoryview(numbers.buffers()[1])[: found.itemsize * len(numbers)])
    return found


def _bytes(texts: Any) -> bytes:
    found: bytes = texts.buffers()[2].to_pybytes()
    return found


def signed(number: int) -> int:
    """Return the 64 bits of an unsigned number as a signed one."""
    return number - (1 << 64) if number >> 63 else number


def event_micros(cas: int) -> int | None:
    """Return microseconds since 1970 of the clock in a cas: its low 16 bits count versions of one moment."""
    return (cas & ~0xFFFF) // 1000 or None


def change_row(
    document: Document,
    collection: str,
    kind: str,
    vbuuid: int,
    snapshot_end_seqno: int,
    at: tuple[int, int],
    branch: int | None = None,
) -> tuple[Any, ...]:
    """Return a change as a row in the order of `columns.CHANGES`."""
    value = document.value if document.value or not document.deleted else None
    return (
        document.key,
        collection,
        document.vbid,
        signed(document.seqno),
        signed(document.rev_seqno),
        signed(document.cas),
        document.flags,
        document.expiry,
        document.datatype,
        value,
        kind,
        document.branch if branch is None else branch,
        signed(vbuuid),
        signed(snapshot_end_seqno),
        at[0],
        signed(at[1]),
        event_micros(document.cas),
    )


def control_row(
    kind: str, vbid: int, collection: str, branch: int, seqno: int, vbuuid: int, snapshot_end_seqno: int
) -> tuple[Any, ...]:
    """Return a change that is not about one document as a row in the order of `columns.CHANGES`."""
    document = (None, collection or None, vbid, signed(seqno), None, None, None, None, None, None)
    return (*document, kind, branch, signed(vbuuid), signed(snapshot_end_seqno), branch, signed(seqno), None)


def change_batches(rows: Iterable[tuple[Any, ...]], names: Sequence[str]) -> Iterator[Any]:
    """Yield rows of `change_row` as record batches with the columns `names`."""
    schema = pa.schema([CHANGES.field(name) for name in names])
    positions = [CHANGES.get_field_index(name) for name in names]
    value_at = CHANGES.get_field_index("value")
    held: list[tuple[Any, ...]] = []
    byte_count = 0
    for row in rows:
        held.append(row)
        byte_count += len(row[value_at] or b"")
        if len(held) >= BATCH_ROWS or byte_count >= BATCH_BYTES:
            yield _batch(held, schema, positions)
            held, byte_count = [], 0
    if held:
        yield _batch(held, schema, positions)


def _batch(rows: list[tuple[Any, ...]], schema: Any, positions: list[int]) -> Any:
    columns = list(zip(*rows, strict=True))
    arrays = []
    for field, position in zip(schema, positions, strict=True):
        if field.name == "key":  # bytes that are not UTF-8 stay as they are
            arrays.append(pa.array(columns[position], pa.binary()).view(pa.string()))
        else:
            arrays.append(pa.array(columns[position], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
