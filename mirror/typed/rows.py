"""Turn stored rows into Arrow columns, many at a time.

A column that is read is cut out of all rows at once, in C, by the layout of a stored mutation (storage/FORMAT.md, "A
row"). The values equal those of `storage.format.records.decode_row`, which also raises the error for a damaged row. A
value whose body cannot be taken out (it cannot be decompressed, would exceed `VALUE_LENGTH_MAX`, or is shorter than its
xattr section claims) stays as stored, with its datatype bits.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from struct import pack
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mirror.typed.bodies import AS_DECLARED, Bodies, Parsed, Reading
from storage.format import records
from storage.format.tokens import Pin, has_expired
from storage.model import DOCUMENT_FIELDS, Branch

NUMBERS = {each.name: pa.int64() if each.byte_count >= 4 else pa.int32() for each in DOCUMENT_FIELDS if each.is_column}
"""Numbers of a document -> types of their columns. They are signed, because Spark has no unsigned types."""
DOCUMENTS = pa.schema({"key": pa.string(), "collection": pa.string(), **NUMBERS, "value": pa.binary()})
HEAD = 55
"""Bytes of a mutation before its key: header and extras."""
_HEADER, _HEAD, _THREE, _KEY, _VALUE = (pa.scalar(each, pa.int32()) for each in (24, HEAD, 3, -2, -1))
BATCH_ROWS = 4096
BATCH_BYTES = 16 * 1024 * 1024
"""Bytes of rows at which a batch is closed. The rows added last may exceed this size."""

Number = tuple[int, int, str]
_KEY_LENGTH: Number = (2, 2, "H")
_BODY_LENGTH: Number = (8, 4, "I")
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
_STORED: dict[str, Number] = {
    each.name: (records.NUMBERS_AT[each.name], each.byte_count, _CODES[each.byte_count])
    for each in DOCUMENT_FIELDS
    if each.name in records.NUMBERS_AT
}
_TYPES = {"B": pa.uint8(), "H": pa.uint16(), "I": pa.uint32(), "Q": pa.uint64()}


class Documents:
    """One batch of mutations. After `close`, it gives their columns.

    The joined rows become one Arrow array with three elements for each row: the bytes before the key, the key, the
    value. The checksum after a value is in the next row's first element.
    """

    def __init__(self, checksum_size: int = 0) -> None:
        self._checksum_size = checksum_size
        self._frames: list[bytes] = []
        self._origins: list[tuple[int, str, int, int]] = []  # vbid, collection, its id's length, row count
        self._byte_count = 0
        self._stored_datatypes = b""
        self._lengths: Any = None
        self._heads = b""
        self._key_lengths: Any = None

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def full(self) -> bool:
        return len(self._frames) >= BATCH_ROWS or self._byte_count >= BATCH_BYTES

    def add(self, vbid: int, collection: str, prefix_length: int, frames: list[bytes], byte_count: int) -> None:
        """Add rows of one collection in one vbucket. `prefix_length` is the length of the collection id before each
        key."""
        self._frames += frames
        self._origins.append((vbid, collection, prefix_length, len(frames)))
        self._byte_count += byte_count

    def close(self) -> None:
        """Check the rows, and encode all again unless all are `_common`. Raises CorruptedError."""
        count = len(self._frames)
        # `array` would append the numbers of an iterator one by one, which takes twice as long.
        self._lengths = _numbers(array("i", pack(f"{count}i", *map(len, self._frames))), pa.int32())
        self._heads = b"".join([frame[:HEAD] for frame in self._frames])
        if not self._common(self._heads):
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
        return pa.Array.from_buffers(
            pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(self._frames))]
        )

    def _every_third(self, first: Any) -> Any:
        return self._parts.take(pc.add(pc.cumulative_sum(pa.repeat(_THREE, len(self))), first))

    @cached_property
    def keys(self) -> Any:
        return self._every_third(_KEY)

    @cached_property
    def _bodies(self) -> tuple[Any, bytes]:
        """The decompressed bodies without xattrs, and their datatypes. A value that cannot be decoded is unchanged."""
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
        return self._bodies[1]

    def _common(self, heads: bytes) -> bool:
        """Return True if each row is a whole mutation without the metadata that old servers put after the value."""
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
        """Encode the rows again, without metadata after the value. Raises CorruptedError for a damaged row."""
        vbids = (vbid for vbid, *_, count in self._origins for _ in range(count))
        for index, (vbid, frame) in enumerate(zip(vbids, self._frames, strict=True)):
            message = frame[: len(frame) - self._checksum_size]
            row = records.decode_row(vbid, Branch(0), message, raw=True)
            numbers = {name: getattr(row, name) for name in ("collection_id", "datatype", *_STORED)}
            message = records.encode_mutation(row.key, row.value, **numbers)
            self._frames[index] = message + bytes(self._checksum_size)

    def _number(self, which: Number) -> array[int]:
        start, size, code = which
        laid = bytearray(size * len(self))
        for at in range(size):
            laid[at::size] = self._heads[start + (size - 1 - at if sys.byteorder == "little" else at) :: HEAD]
        return array(code, bytes(laid))

    def _arrow(self, which: Number) -> Any:
        return _numbers(self._number(which), _TYPES[which[2]])

    def _long(self, which: Number) -> Any:
        numbers = self._arrow(which)
        return numbers.view(pa.int64()) if which[1] == 8 else numbers.cast(pa.int64())

    def _repeated(self, position: int, kind: Any) -> Any:
        return pa.concat_arrays([pa.repeat(pa.scalar(origin[position], kind), origin[3]) for origin in self._origins])

    def column(self, name: str) -> Any:
        return self._long(_STORED[name]) if name in _STORED else _COLUMNS[name](self)

    def alive(self, now_ms: int) -> Any:
        """Return a mask of the rows that are not expired at `now_ms`; None if no row has an expiry."""
        expiries = self._number(_STORED["expiry"])
        if not expiries.tobytes().strip(b"\0"):
            return None
        return pa.array([not has_expired(each, now_ms / 1000) for each in expiries])


_COLUMNS: dict[str, Callable[[Documents], Any]] = {
    "key": lambda rows: rows.keys.view(pa.string()),
    "collection": lambda rows: rows._repeated(1, pa.string()),
    "vbid": lambda rows: rows._repeated(0, pa.int32()),
    "datatype": lambda rows: _numbers(rows.datatypes, pa.uint8()).cast(pa.int32()),
    "value": lambda rows: rows.values,
}


def _numbers(numbers: array[int] | bytes, kind: Any) -> Any:
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _array(numbers: Any) -> array[int]:
    found = array("i")
    found.frombytes(memoryview(numbers.buffers()[1])[: found.itemsize * len(numbers)])
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns of a job. `from_body` is True for a field of the body, False for a column of `DOCUMENTS`."""

    schema: Any
    from_body: tuple[bool, ...]
    reading: Reading = AS_DECLARED


@dataclass(slots=True)
class Counts:
    documents: int = 0
    misfits: int = 0


class Maker:
    """Collects rows of many vbuckets for large record batches. Each row ends with a checksum of `checksum_size` bytes.

    `add` and `rest` yield functions that make a batch. Any thread may call them, but only one if there are `counts`.
    """

    def __init__(self, shape: Shape, counts: Counts | None = None, checksum_size: int = 0) -> None:
        self._shape = shape
        self._checksum_size = checksum_size
        self._counts = counts or Counts()
        fields = [field for field, of_body in zip(shape.schema, shape.from_body, strict=True) if of_body]
        self._bodies = Bodies(pa.schema(fields), shape.reading) if fields else None
        self._rows = Documents(checksum_size)
        self._now_ms = 0

    def add(
        self, pin: Pin, collection: str, prefix_length: int, frames: list[bytes], byte_count: int
    ) -> Iterator[Callable[[], Any]]:
        """Take rows; yield a function for each batch that becomes full."""
        if pin.now_ms != self._now_ms:
            yield from self.rest()
            self._now_ms = pin.now_ms
        whole = byte_count <= BATCH_BYTES
        for part in [frames] if whole else [[frame] for frame in frames]:
            self._rows.add(pin.vbid, collection, prefix_length, part, byte_count if whole else len(part[0]))
            if self._rows.full:
                yield from self.rest()

    def rest(self) -> Iterator[Callable[[], Any]]:
        rows, self._rows = self._rows, Documents(self._checksum_size)
        if len(rows):
            yield partial(self._batch, rows, self._now_ms)

    def _batch(self, rows: Documents, now_ms: int) -> Any:
        rows.close()
        parsed = Parsed([], {})
        if self._bodies is not None:
            parsed = self._bodies.columns(rows.values, rows.datatypes, rows.keys)
        body = iter(parsed.columns)
        columns = [
            next(body) if of_body else rows.column(field.name.removeprefix("_"))
            for field, of_body in zip(self._shape.schema, self._shape.from_body, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._shape.schema)
        kept = rows.alive(now_ms)
        misfits = [row for row in parsed.misfits if kept is None or kept[row].as_py()]
        self._counts.documents += len(rows) if kept is None else kept.true_count
        self._counts.misfits += len(misfits)
        if misfits and self._shape.reading.mode == "dropmalformed":
            fitting = [True] * len(rows)
            for row in misfits:
                fitting[row] = False
            kept = pa.array(fitting) if kept is None else pc.and_(kept, pa.array(fitting))
        return batch if kept is None else batch.filter(kept)
