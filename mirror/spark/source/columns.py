"""The columns of the data source, as Arrow schemas of documents and of changes. Makes rows and batches of changes.

`mirror.typed.rows` makes batches of documents. The columns of `DOCUMENTS` stand first in `CHANGES`. 64-bit numbers are
signed, because Spark has no unsigned ones (a cas or vbuuid above 2^63-1 becomes negative, with the same bits).

`storage.model.DOCUMENT_FIELDS` explains the numbers of documents. The other columns of documents are:

    key         UTF-8. A key that is not UTF-8 keeps its bytes: cast(key as binary) gives them
    collection  `scope.collection`
    value       the body: decompressed, without xattrs; null in a tombstone

The other columns of changes are:

    kind        - mutation, deletion, expiration: a published version
                - retraction: a rollback took this version, the newest of its key, from readers
                - restoration: after a rollback this older version is valid again
                - collection_dropped, collection_flushed: all documents of the collection in this vbucket, up to this
                  row, are gone. The key is null
                - resync: the vbucket's history could not be followed. All earlier rows of the vbucket are void, and
                  all its documents follow. The key is null
    branch      from a directory: the branch of the version; from a connection, which has no branches: the number of
                resyncs of the vbucket so far
    vbuuid      the source's name of the version's history
    snapshot_end_seqno      the first kept boundary that has the version (from a connection: its snapshot's end); of a
                retraction or restoration the boundary that the rollback went back to
    at_branch, at_seqno     the position of the event, which an upsert compares. It rises strictly for each key, even
                across rollbacks, where seqno falls. After a row of kind resync positions may be lower. The event of a
                published version has the version's branch and seqno. A rollback opens a branch at a boundary. In this
                branch, retractions have seqno 0, restorations the boundary's seqno, and later events higher seqnos
    event_time  the time when a node of the source wrote the version, by this node's clock: the upper 48 bits of the
                cas, in nanoseconds since 1970. Like the cas it rises for each key. The order of different keys is only
                as exact as the nodes' clocks. If XDCR or a restore set the cas, it has the other cluster's time. Null
                without a document or a cas
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
    """Return the time in a cas as microseconds since 1970, or None. The low 16 bits of a cas are a counter."""
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
    """Return a row in the order of `CHANGES`. Its numbers are unsigned."""
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
    """Return a row without a document: a change of a collection, or a resync."""
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
        elif field.type == pa.int64():  # numbers above 2^63-1 become negative, with the same bits
            arrays.append(pa.array(columns[position], pa.uint64()).view(field.type))
        else:
            arrays.append(pa.array(columns[position], field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
