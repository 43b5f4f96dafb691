"""The columns of the data source: Arrow schemas of documents and of changes, and changes as rows and batches.

Knows names and types; never the origin of a change. Documents: `mirror.typed.rows`. Invariants: the columns of
`DOCUMENTS` stand first in `CHANGES`, in the same order and with the same meaning; 64-bit numbers are signed, as Spark
knows no others (a cas or vbuuid above 2^63-1 comes out negative, all bits kept).

`storage.model.DOCUMENT_FIELDS` explains the numbers of documents. Further:

    key         UTF-8. A key that is not UTF-8 keeps its bytes: cast(key as binary) gives them
    collection  `scope.collection`
    value       the body: decompressed, without xattrs; null in a tombstone

and of changes:

    kind        mutation, deletion, expiration: published events. After a rollback, retraction: a version that
                readers had and that is void (each key's newest), with the fields it came with; restoration: the version
                that is valid again in its place, with the fields it came with. Rows about more than one document have
                a null key: collection_dropped, collection_flushed: all documents of the collection in this
                vbucket up to here are gone; resync: the whole vbucket is void (its history could not be followed), and
                all of it follows, from the beginning
    branch      the line of history of the version; over a connection the number of resyncs of the stream
    vbuuid      the source's name of that history
    snapshot_end_seqno      the boundary that published the version (of those that are kept); of a retraction or
                restoration the boundary that the rollback went back to
    at_branch, at_seqno     the position of the event itself, which an upsert compares. It rises strictly for
                each key, also across rollbacks, where seqno falls; a resync begins again. For published events it is
                (branch, seqno) of the version. A rollback opens a branch at a boundary: its retractions stand at seqno
                0 of that branch, its restorations at the boundary, and later publishes above it
    event_time  when the source wrote the version, by the clock of the node that did: the upper 48 bits of the cas,
                which are nanoseconds since 1970. Rises for each key, as the cas does; between keys it is as good as the
                clocks of the nodes, and a cas that was set from elsewhere (XDCR, a restore) has the other cluster's
                clock. Null for rows about more than one document, and where the source gave no cas
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from mirror.typed.rows import BATCH_BYTES, BATCH_ROWS, NUMBERS
from mirror.typed.rows import DOCUMENTS as DOCUMENTS
from storage.model import Document

CHANGES = pa.schema(
    [
        *DOCUMENTS,
        pa.field("kind", pa.string()),
        *(pa.field(name, pa.int64()) for name in ("branch", "vbuuid", "snapshot_end_seqno", "at_branch", "at_seqno")),
        pa.field("event_time", pa.timestamp("us", "UTC")),
    ]
)

TABLES = {"documents": DOCUMENTS, "changes": CHANGES}

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
        elif field.type == pa.int64():  # larger numbers come out negative, all bits kept
            arrays.append(pa.array(columns[position], pa.uint64()).view(field.type))
        else:
            arrays.append(pa.array(columns[position], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
