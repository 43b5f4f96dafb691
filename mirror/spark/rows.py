"""Stored rows to Arrow columns, many at a time.

Knows the layout of a stored mutation (storage/FORMAT.md, "A row") and Arrow; must never know where the rows come from.
Numbers are cut out of all rows at once and turned around in C; only keys and values cost Python a step for each row.
Invariants: the same values as `storage.records.decode_row` gives, which is also who names a row that cannot be read.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mirror.spark.columns import CHANGES
from storage import records
from storage.model import Branch, Document, Vbid

HEAD = 55
"""Bytes of a mutation before its key: header and extras."""
BATCH_ROWS = 4096
BATCH_BYTES = 16 * 1024 * 1024
"""A batch is closed once it holds this much; one document may be larger."""

Number = tuple[int, int, str]
_KEY_LENGTH: Number = (2, 2, "H")
_BODY_LENGTH: Number = (8, 4, "I")
_CAS: Number = (16, 8, "Q")
_SEQNO: Number = (24, 8, "Q")
_REV_SEQNO: Number = (32, 8, "Q")
_FLAGS: Number = (40, 4, "I")
_EXPIRY: Number = (44, 4, "I")


class Documents:
    """Mutations of one batch as they were read: what its columns are made of."""

    def __init__(self) -> None:
        """Empty."""
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.datatypes = b""
        self._frames: list[bytes] = []
        self._wire_keys: list[bytes] = []
        self._origins: list[tuple[int, str, int]] = []  # vbid, collection, how many
        self._byte_count = 0
        self._heads: Any = None

    def __len__(self) -> int:
        """Rows."""
        return len(self._frames)

    @property
    def full(self) -> bool:
        """True when it is to be made a batch of."""
        return len(self._frames) >= BATCH_ROWS or self._byte_count >= BATCH_BYTES

    def add(self, vbid: int, collection: str, prefix_length: int, wire_keys: list[bytes], frames: list[bytes]) -> None:
        """Take rows of one collection of one vbucket; `prefix_length` is that of its id in front of each key."""
        self._frames += frames
        self._wire_keys += wire_keys
        self.keys += [key[prefix_length:] for key in wire_keys]
        self._origins.append((vbid, collection, len(frames)))
        self._byte_count += sum(map(len, frames))

    def close(self) -> None:
        """All rows are there: take them apart. Raises CorruptedError."""
        count = len(self._frames)
        heads = b"".join([frame[:HEAD] for frame in self._frames])
        if len(heads) == HEAD * count:
            self._heads = pa.Array.from_buffers(pa.binary(HEAD), count, [None, pa.py_buffer(heads)])
        if (
            self._heads is None
            or heads[0::HEAD] != b"\x80" * count
            or heads[1::HEAD] != b"\x57" * count
            or heads[4::HEAD] != b"\x1f" * count
            or any(heads[52::HEAD] + heads[53::HEAD])
            or self._number(_KEY_LENGTH) != array("H", map(len, self._wire_keys))
            or self._number(_BODY_LENGTH) != array("I", [len(frame) - 24 for frame in self._frames])
        ):
            self._rewrite()
            return self.close()
        self.values = [frame[HEAD + len(key) :] for frame, key in zip(self._frames, self._wire_keys, strict=True)]
        self.datatypes = heads[5::HEAD]
        if any(self.datatypes.translate(None, b"\0\1")):
            datatypes = bytearray(self.datatypes)
            for index, datatype in enumerate(self.datatypes):
                if datatype & 6:
                    self.values[index], datatypes[index] = records.body_of(self.values[index], datatype)
            self.datatypes = bytes(datatypes)
        return None

    def _rewrite(self) -> None:
        """One row is not in the common form: it has metadata of old behind its value, or is damaged."""
        vbids = (vbid for vbid, _, count in self._origins for _ in range(count))
        for index, (vbid, frame) in enumerate(zip(vbids, self._frames, strict=True)):
            row = records.decode_row(Vbid(vbid), Branch(0), frame, raw=True)
            self._frames[index] = records.encode_mutation(
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
            self._wire_keys[index] = self._frames[index][HEAD : len(self._frames[index]) - len(row.value)]
            self.keys[index] = row.key

    def _number(self, which: Number) -> array[int]:
        start, size, code = which
        part = pc.binary_slice(self._heads, start, start + size)
        numbers = array(code)
        numbers.frombytes(memoryview(part.buffers()[1])[: size * len(self)])
        if sys.byteorder == "little":
            numbers.byteswap()
        return numbers

    def _long(self, which: Number) -> Any:
        numbers = self._number(which)
        if which[1] == 8:
            return pa.Array.from_buffers(pa.int64(), len(self), [None, pa.py_buffer(numbers)])
        return pa.Array.from_buffers(pa.uint32(), len(self), [None, pa.py_buffer(numbers)]).cast(pa.int64())

    def _repeated(self, position: int, kind: Any) -> Any:
        return pa.concat_arrays([pa.repeat(pa.scalar(origin[position], kind), origin[2]) for origin in self._origins])

    def column(self, name: str) -> Any:
        """One column of `columns.DOCUMENTS`."""
        return _COLUMNS[name](self)

    def alive(self, now_ms: int) -> Any:
        """Which rows have not expired at `now_ms`; None: none has."""
        expiries = self._number(_EXPIRY)
        if not any(expiries):
            return None
        return pa.array([not each or each * 1000 > now_ms for each in expiries])


_COLUMNS: dict[str, Callable[[Documents], Any]] = {
    "key": lambda rows: pa.array(rows.keys, pa.binary()).view(pa.string()),
    "collection": lambda rows: rows._repeated(1, pa.string()),
    "vbid": lambda rows: rows._repeated(0, pa.int32()),
    "seqno": lambda rows: rows._long(_SEQNO),
    "rev_seqno": lambda rows: rows._long(_REV_SEQNO),
    "cas": lambda rows: rows._long(_CAS),
    "flags": lambda rows: rows._long(_FLAGS),
    "expiry": lambda rows: rows._long(_EXPIRY),
    "datatype": lambda rows: pa.array(rows.datatypes, pa.uint8()).cast(pa.int32()),
    "value": lambda rows: pa.array(rows.values, pa.binary()),
}


def signed(number: int) -> int:
    """The 64 bits of an unsigned number as Spark counts."""
    return number - (1 << 64) if number >> 63 else number


def change_row(
    document: Document,
    collection: str,
    kind: str,
    vbuuid: int,
    snapshot_end_seqno: int,
    at: tuple[int, int],
    branch: int | None = None,
) -> tuple[Any, ...]:
    """A change as a row in the order of `columns.CHANGES`."""
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
    )


def control_row(
    kind: str, vbid: int, collection: str, branch: int, seqno: int, vbuuid: int, snapshot_end_seqno: int
) -> tuple[Any, ...]:
    """A change that is not about one document, as a row in the order of `columns.CHANGES`."""
    document = (None, collection or None, vbid, signed(seqno), None, None, None, None, None, None)
    return (*document, kind, branch, signed(vbuuid), signed(snapshot_end_seqno), branch, signed(seqno))


def change_batches(rows: Iterable[tuple[Any, ...]], names: Sequence[str]) -> Iterator[Any]:
    """Rows of `change_row` as record batches with the columns `names`."""
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
        if field.name == "key":  # bytes that are not UTF-8 stand as they are
            arrays.append(pa.array(columns[position], pa.binary()).view(pa.string()))
        else:
            arrays.append(pa.array(columns[position], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
