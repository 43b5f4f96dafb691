"""Turn changes into rows and Arrow batches.

Knows the columns of changes; must never know their origin. Documents: `mirror.typed.rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from mirror.spark.source.columns import CHANGES
from mirror.typed.rows import BATCH_BYTES, BATCH_ROWS, NUMBERS
from storage.model import Document

_numbers = attrgetter(*NUMBERS)


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
    """Return a row in the order of `columns.CHANGES`, numbers without a sign."""
    value = document.value if document.value or not document.deleted else None
    return (
        document.key,
        collection,
        *_numbers(document),
        value,
        kind,
        document.branch if branch is None else branch,
        vbuuid,
        snapshot_end_seqno,
        *at,
        event_micros(document.cas),
    )


def control_row(
    kind: str, vbid: int, collection: str, branch: int, seqno: int, vbuuid: int, snapshot_end_seqno: int
) -> tuple[Any, ...]:
    """Return a change that is not about one document as a row."""
    numbers = {"vbid": vbid, "seqno": seqno}
    document = (None, collection or None, *map(numbers.get, NUMBERS), None)
    return (*document, kind, branch, vbuuid, snapshot_end_seqno, branch, seqno, None)


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
        elif field.type == pa.int64():  # what exceeds its range comes out negative, all bits kept
            arrays.append(pa.array(columns[position], pa.uint64()).view(field.type))
        else:
            arrays.append(pa.array(columns[position], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
