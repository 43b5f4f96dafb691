"""Merge waiting events into one part of a table of documents: the task of an executor.

A part is the rows of a range of vbuckets. The task reads the part's files and the events of its vbuckets, which are
files of `changes`, and writes the part's new files. Of each key only the last event counts: a mutation or restoration
puts the document's row into the table, any other kind removes the row. The drop or flush of a collection removes the
collection's earlier rows in the event's vbucket; a resync removes all earlier rows of its vbucket.

A row changes only if the event's position (at_branch, at_seqno) is above the row's. The position rises for each key,
even across rollbacks, where seqno falls. After the resync of a vbucket positions may be lower, so there the order of
events decides.

A file whose rows all stay is not written again, unless small files are joined. Besides one row group, memory holds the
keys of the waiting events, and a bit for each row of the part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from mirror.spark.places import Folder, folder_at
from mirror.spark.source.columns import CHANGES, DOCUMENTS
from mirror.spark.tables.parts import Part, PartWriter, files_to_merge, groups_of, opened
from mirror.typed.bodies import AS_DECLARED, Bodies, Reading

PUTS = pa.array(["mutation", "restoration"])
"""Kinds after which the document exists."""
RESYNC = "resync"
PART = "_part"
"""The column of the partition. Files lie in a folder `_part=N`, from which Hive's readers take its value."""

STATE = pa.schema([*DOCUMENTS, CHANGES.field("vbuuid"), CHANGES.field("at_branch"), CHANGES.field("at_seqno")])
"""Columns of a table of documents: a document, and the position of the event that put it into the table."""
NAME = ["collection", "key"]
POSITION = [*NAME, "vbid", "at_branch", "at_seqno"]

BODIES_AT_ONCE = 8192


@dataclass(frozen=True)
class DocumentColumns:
    """The columns of a table of documents: those of STATE, and those of the body's fields, if there is a schema."""

    fields: Any = None
    """Arrow schema of the columns from the body. None: only `value` has the body."""
    reading: Reading = AS_DECLARED

    @property
    def mark(self) -> str:
        """Prefix of the metadata columns."""
        return "" if self.fields is None else "_"

    @property
    def state(self) -> pa.Schema:
        return pa.schema([each.with_name(self.mark + each.name) for each in STATE])

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*self.state, *(self.fields or ())])


class MergeTask(NamedTuple):
    columns: DocumentColumns
    part: int
    vbids: tuple[int, int]
    """The part's first and last vbucket."""
    changes: str
    names: Sequence[str]
    """Files of `changes` with the waiting events, in the order of batches."""
    documents: str
    files: Sequence[tuple[str, int]]
    """The part's files, with sizes."""
    prefix: str
    again: bool = False
    """True to write all rows again, with the columns read from the body."""


class Merged(NamedTuple):
    added: list[Part]
    removed: list[str]
    bodies_count: int
    misfit_count: int
    inserted: int
    updated: int
    deleted: int


def merge_part(task: MergeTask) -> Merged:
    """Raises MirrorError; DocumentDoesNotFit in mode failfast."""
    columns, folder = task.columns, folder_at(task.documents)
    waiting = WaitingEvents(folder_at(task.changes), task.names, task.vbids)
    position = [columns.mark + each for each in POSITION]
    effects: list[Effect] = []
    with PartWriter(task.documents, f"{PART}={task.part}/{task.prefix}", columns.schema) as parts:
        typed = Typed(columns)
        removed, kept = [], []
        for name, size in task.files:
            found = [waiting.effect_on(rows.rename_columns(POSITION)) for rows in groups_of(folder, name, position)]
            effects += found
            if task.again or any(each.removes for each in found):
                _copy(folder, name, [each.gone for each in found], parts, typed, task)
                removed.append(name)
            else:
                kept.append((size, name))
        for at in files_to_merge([size for size, _ in kept]):
            for rows in groups_of(folder, kept[at][1], columns.schema.names):
                parts.write_table(rows.cast(columns.schema))
            removed.append(kept[at][1])
        puts = waiting.puts([each.stale for each in effects])
        for rows in waiting.documents(puts):
            parts.write_table(typed.rows(rows))
    updated, deleted = sum(each.updated for each in effects), sum(each.deleted for each in effects)
    return Merged(
        parts.finished, removed, typed.bodies_count, typed.misfit_count, len(puts) - updated, updated, deleted
    )


def _copy(folder: Folder, name: str, gone: list[Any], parts: PartWriter, typed: Typed, task: MergeTask) -> None:
    """Write the rows of a file that stay. `gone` has a mask for each row group."""
    columns = task.columns
    names = columns.state.names if task.again else columns.schema.names
    for rows, mask in zip(groups_of(folder, name, names), gone, strict=True):
        left = rows.filter(pc.invert(mask))
        parts.write_table(typed.rows(left.rename_columns(STATE.names)) if task.again else left.cast(columns.schema))


class Effect(NamedTuple):
    """The effect of the waiting events on rows of the table."""

    gone: Any
    """Mask of the rows that the events remove or replace."""
    stale: pa.ChunkedArray
    """Numbers of the events that are not above their row: the row stays."""
    updated: int
    """Number of rows that an event replaces."""

    @property
    def removes(self) -> bool:
        return bool(pc.any(self.gone).as_py())

    @property
    def deleted(self) -> int:
        return (pc.sum(self.gone).as_py() or 0) - self.updated


class WaitingEvents:
    """The last event of each key of a part. An event's number is its place among the events of all files."""

    def __init__(self, changes: Folder, names: Sequence[str], vbids: tuple[int, int]) -> None:
        self._changes, self._names, self._vbids = changes, names, vbids
        self._resynced: dict[int, int] = {}  # vbid -> number of the event
        self._ended: dict[
            tuple[int, str], tuple[int, int, int]
        ] = {}  # vbid, collection -> number and position of its last end
        held: list[pa.Table] = []
        for number, events in self._events([*POSITION, "kind"]):
            own = self._own(number, events)
            self._note(own.filter(pc.is_null(own["key"])))
            held.append(own.filter(pc.is_valid(own["key"])))
            if len(held) > 1 and sum(map(len, held)) > 2 * len(held[0]):
                held = [_last(pa.concat_tables(held))]
        last = _last(pa.concat_tables(held)) if held else None
        self._last = None if last is None else self._valid(last).combine_chunks()

    def _events(self, columns: list[str]) -> Iterator[tuple[int, pa.Table]]:
        """Yield the row groups that may have the part's events, each with the number of its first event."""
        first, last = self._vbids
        number = 0
        for name in self._names:
            with opened(self._changes, name) as file:
                for group in range(file.num_row_groups):
                    low, high = vbids_of(file.metadata.row_group(group))
                    if low <= last and high >= first:
                        yield number, file.read_row_group(group, columns)
                    number += file.metadata.row_group(group).num_rows

    def _own(self, number: int, events: pa.Table) -> pa.Table:
        first, last = self._vbids
        vbids = events["vbid"]
        mine = pc.and_(pc.greater_equal(vbids, first), pc.less_equal(vbids, last))
        numbers = pc.add(pc.indices_nonzero(mine).cast(pa.int64()), number)
        return events.filter(mine).append_column("number", numbers)

    def _note(self, control: pa.Table) -> None:
        for row in control.to_pylist():
            if row["kind"] == RESYNC:
                self._resynced[row["vbid"]] = row["number"]
            else:
                place = (row["number"], row["at_branch"], row["at_seqno"])
                self._ended[row["vbid"], row["collection"]] = place  # of several ends the last: events come in order

    def _valid(self, last: pa.Table) -> pa.Table:
        """Return the events without those before the end of their collection, or before the resync of their vbucket."""
        for vbid, number in self._resynced.items():
            last = last.filter(pc.or_(pc.not_equal(last["vbid"], vbid), pc.greater(last["number"], number)))
        for (vbid, name), (number, *_) in self._ended.items():
            other = pc.or_(pc.not_equal(last["vbid"], vbid), pc.not_equal(last["collection"], name))
            last = last.filter(pc.or_(other, pc.greater(last["number"], number)))
        return last.append_column("live", pc.is_in(last["kind"], PUTS))

    def effect_on(self, rows: pa.Table) -> Effect:
        """Return the effect on rows with the columns POSITION. A row without a waiting event stays, unless its
        collection ended after it, or its vbucket was resynced.
        """
        resynced = pa.array(list(self._resynced), pa.int32())
        void: Any = pc.is_in(rows["vbid"], resynced)
        for (vbid, name), (_, *ended) in self._ended.items():
            mine = pc.and_(pc.equal(rows["vbid"], vbid), pc.equal(rows["collection"], name))
            void = pc.or_(void, pc.and_(mine, _below(rows["at_branch"], rows["at_seqno"], *ended)))
        if self._last is None:
            return Effect(void, pa.chunked_array([], pa.int64()), 0)
        numbers = pa.array(range(len(rows)), pa.int64())
        met = rows.append_column("row", numbers).join(
            self._last.select([*NAME, "at_branch", "at_seqno", "number", "live"]),
            NAME,
            join_type="inner",
            right_suffix="_new",
            use_threads=False,
        )
        rises = _below(met["at_branch"], met["at_seqno"], met["at_branch_new"], met["at_seqno_new"])
        rises = pc.or_(rises, pc.is_in(met["vbid"], resynced))
        risen = met.filter(rises)
        gone = pc.or_(void, pc.is_in(numbers, risen["row"].combine_chunks()))
        return Effect(gone, met.filter(pc.invert(rises))["number"], pc.sum(risen["live"]).as_py() or 0)

    def puts(self, stale: Sequence[pa.ChunkedArray]) -> Any:
        """Return the numbers of the events whose documents come into the table: not the `stale` ones of any row."""
        if self._last is None:
            return pa.array([], pa.int64())
        live = self._last.filter(self._last["live"])["number"]
        left_out = pa.chunked_array([chunk for each in stale for chunk in each.chunks], pa.int64())
        return live.filter(pc.invert(pc.is_in(live, left_out.combine_chunks()))).combine_chunks()

    def documents(self, puts: Any) -> Iterator[pa.Table]:
        if not len(puts):
            return
        for number, events in self._events(STATE.names):
            numbers = pc.add(pa.array(range(len(events)), pa.int64()), number)
            yield events.filter(pc.is_in(numbers, puts)).cast(STATE)


def vbids_of(group: Any) -> tuple[int, int]:
    """Return the lowest and highest vbucket in a row group of `changes`, by the statistics of its writer."""
    found = group.column(CHANGES.get_field_index("vbid")).statistics
    return found.min, found.max


def _last(events: pa.Table) -> pa.Table:
    numbers = events.group_by(NAME, use_threads=False).aggregate([("number", "max")])["number_max"]
    return events.filter(pc.is_in(events["number"], numbers.combine_chunks()))


def _below(branch: Any, seqno: Any, other_branch: Any, other_seqno: Any) -> Any:
    same = pc.and_(pc.equal(branch, other_branch), pc.less(seqno, other_seqno))
    return pc.or_(pc.less(branch, other_branch), same)


class Typed:
    """Adds the columns of the body to rows of STATE, and counts misfits."""

    def __init__(self, columns: DocumentColumns) -> None:
        self._columns = columns
        self._bodies = None if columns.fields is None else Bodies(columns.fields, columns.reading)
        self.bodies_count = self.misfit_count = 0

    def rows(self, rows: pa.Table) -> pa.Table:
        schema = self._columns.schema
        if self._bodies is None:
            return rows.cast(schema)
        return pa.Table.from_batches([self._typed(each) for each in rows.to_batches(BODIES_AT_ONCE)], schema)

    def _typed(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        assert self._bodies is not None
        bodies = pc.fill_null(rows.column("value"), b"")
        keys = rows.column("key").cast(pa.binary())
        parsed = self._bodies.columns(bodies, bytes(rows.column("datatype").to_pylist()), keys)
        self.bodies_count += len(rows)
        self.misfit_count += len(parsed.misfits)
        return pa.RecordBatch.from_arrays([*rows.columns, *parsed.columns], schema=self._columns.schema)
