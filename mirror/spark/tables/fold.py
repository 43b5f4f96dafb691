"""Fold the events of a batch: find the rows to put into a table of current documents, and the rows to remove.

Knows the columns of `changes` (columns.py) and the order of its events; never a table, a file or Spark. In a batch only
the last event of each key counts: a mutation or restoration puts the document's row into the table, any other kind
removes the row. The drop or flush of a collection removes the collection's earlier rows in the event's vbucket; a
resync removes all earlier rows of its vbucket: in the batch and in the table. Invariants: the result has each key at
most once; besides its input, a fold needs memory for the keys and for one copy of the last events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from mirror.spark.source.columns import CHANGES, DOCUMENTS

PUTS = frozenset({"mutation", "restoration"})
"""Kinds after which the document exists."""

RESYNC = "resync"

STATE = pa.schema([*DOCUMENTS, CHANGES.field("vbuuid"), CHANGES.field("at_branch"), CHANGES.field("at_seqno")])
"""Columns of a table of documents: a document, and the position of the event that put it into the table."""

FOLD_COLUMNS = [*STATE.names, "kind"]

FOLDED = pa.schema([*STATE, pa.field("live", pa.bool_())])
"""Columns of a key's last event in a batch. If `live` is false, the event removes the row."""


@dataclass(frozen=True)
class Voids:
    """The vbuckets, and the collections in vbuckets, whose earlier rows a batch removes."""

    vbuckets: set[int] = field(default_factory=set)
    collections: set[tuple[int, str]] = field(default_factory=set)


def fold(events: pa.Table) -> tuple[pa.Table, Voids]:
    """Return the last event of each key, and the voids. `events` have FOLD_COLUMNS, and are in order in a vbucket."""
    voids = Voids()
    last: dict[tuple[str, bytes], int] = {}
    kinds = events.column("kind").to_pylist()
    names = events.column("collection").to_pylist()
    vbids = events.column("vbid").to_pylist()
    document_keys = _bytes_of(events.column("key"))
    for row, (kind, name, vbid, key) in enumerate(zip(kinds, names, vbids, document_keys, strict=True)):
        if key is not None:
            last[name, key] = row
        elif kind == RESYNC:
            voids.vbuckets.add(vbid)
            last = {each: at for each, at in last.items() if vbids[at] != vbid}
        else:
            voids.collections.add((vbid, name))
            last = {each: at for each, at in last.items() if vbids[at] != vbid or each[0] != name}
    rows = pa.array(sorted(last.values()), pa.int64())
    taken = events.select(STATE.names).take(rows)
    live = pc.is_in(events.column("kind").take(rows), pa.array(sorted(PUTS)))
    return taken.append_column("live", live).cast(FOLDED), voids


def fold_batches(tables: Iterable[pa.Table]) -> tuple[pa.Table, Voids]:
    """Fold files of several batches, in order, as if they were one batch."""
    return fold(pa.concat_tables(tables))


def fold_files(files: Iterable[Iterable[pa.Table]]) -> Iterator[tuple[pa.Table, Voids]]:
    """Fold files of one batch, each given in pieces. The events of a vbucket stand together in one file. So memory
    holds one piece, and those events of the piece's first vbucket that earlier pieces had.
    """
    seen: set[int] = set()
    for pieces in files:
        for events in _whole_vbuckets(pieces):
            vbids = set(pc.unique(events.column("vbid")).to_pylist())
            assert not vbids & seen, "a vbucket's events of one batch are in one file, in their order"
            seen |= vbids
            yield fold(events)


def _whole_vbuckets(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the events of a file in pieces that have whole vbuckets."""
    held: list[pa.Table] = []
    for piece in pieces:
        if not piece.num_rows:
            continue
        vbids = piece.column("vbid")
        if held and vbids[0] != held[-1].column("vbid")[-1]:
            yield pa.concat_tables(held)
            held = []
        last = pc.index(vbids, vbids[-1]).as_py()
        if last:
            yield pa.concat_tables([*held, piece.slice(0, last)])
            held = []
        held.append(piece.slice(last))
    if held:
        yield pa.concat_tables(held)


def _bytes_of(column: pa.ChunkedArray) -> list[bytes | None]:
    found: list[bytes | None] = column.cast(pa.binary()).to_pylist()
    return found
