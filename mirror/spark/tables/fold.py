"""From events to the state that they leave: which rows of a table a batch of changes replaces, and which it voids.

Knows the columns of `changes` (columns.py) and their order; never a table, a file or Spark. A batch holds the events of
a vbucket in their order. Of each key only its last event counts: a mutation or restoration puts the row, everything
else takes it away. An event about many documents (a dropped or flushed collection, a resync) takes away what stood
before it, in the batch as in the table. Invariants: a key comes out at most once; rows are kept in Arrow, so that a
fold costs the memory of its keys and not of its values a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from mirror.spark.source.columns import CHANGES, DOCUMENTS

PUTS = frozenset({"mutation", "restoration"})
"""Kinds after which the document is there."""

RESYNC = "resync"

STATE = pa.schema([*DOCUMENTS, CHANGES.field("vbuuid"), CHANGES.field("at_branch"), CHANGES.field("at_seqno")])
"""Columns of a table of current state: a document, and where the event stands that put it there."""

FOLD_COLUMNS = [*STATE.names, "kind"]
"""Of CHANGES: what a fold needs."""

FOLDED = pa.schema([*STATE, pa.field("live", pa.bool_())])
"""A key's last event in a batch; `live` false: the row is to go."""


@dataclass(frozen=True)
class Voids:
    """What a batch takes away as a whole, of what stood in the table before it."""

    vbuckets: set[int] = field(default_factory=set)
    """All rows of these."""
    collections: set[tuple[int, str]] = field(default_factory=set)
    """All rows of these collections in these vbuckets."""

    def add(self, other: Voids) -> None:
        """Take away that, too."""
        self.vbuckets.update(other.vbuckets)
        self.collections.update(other.collections)


def fold(events: pa.Table) -> tuple[pa.Table, Voids]:
    """The last event of each key in `events` (with FOLD_COLUMNS; a vbucket's in their order), and
    what they void.
    """
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
    """Fold files of several batches, which come in their order, as if they were one batch."""
    return fold(pa.concat_tables(tables))


def fold_files(files: Iterable[Iterable[pa.Table]]) -> Iterator[tuple[pa.Table, Voids]]:
    """Fold files of one batch, each of them given in pieces. A vbucket's events are in one file, without another's
    between, so no more is held than a piece and the vbucket that the one before ended with.
    """
    seen: set[int] = set()
    for pieces in files:
        for events in _whole_vbuckets(pieces):
            vbids = set(pc.unique(events.column("vbid")).to_pylist())
            assert not vbids & seen, "a vbucket's events of one batch are in one file, in their order"
            seen |= vbids
            yield fold(events)


def _whole_vbuckets(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The pieces of a file, cut where a vbucket ends."""
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
    """Keys as bytes: they need not be UTF-8."""
    found: list[bytes | None] = column.cast(pa.binary()).to_pylist()
    return found
