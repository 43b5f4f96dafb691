"""A Delta table of current documents: its columns, and the fold of batches of events into it.

A fold applies the events of batches, which are files of the table `changes`, to this table. Never knows the origin of
events, nor other tables: lake.py explains why each event counts exactly once in all tables. The columns are STATE. With
a schema (`Layout.fields`) their names begin with an underscore, and columns for fields of the JSON body follow.
`_value` keeps the body: when a column is added, one commit writes all rows again, and reads the column from `_value`.

Invariants: rows are documents that exist, each once; a batch is folded in one commit, whose mark (delta.py) is the
number of the newest batch in it; all bodies were read with one schema and one `Reading` (`READING_MARK`); for a first
load or an added column, memory holds one row group.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import ColumnProperties, DeltaTable, Schema, Transaction, WriterProperties
from deltalake.exceptions import DeltaError

from mirror.errors import ConfigError, MirrorError
from mirror.spark.places import Folder, plain
from mirror.spark.source.offsets import check_selection
from mirror.spark.tables.delta import (
    batches_of,
    check_columns,
    check_names,
    commit_parts,
    committing,
    compact,
    is_name,
    only_next,
    open_table,
    vacuum,
)
from mirror.spark.tables.fold import FOLD_COLUMNS, FOLDED, RESYNC, STATE, Voids, fold_batches, fold_files
from mirror.spark.tables.misfits import MisfitsTable
from mirror.spark.tables.parts import ROW_GROUP_ROWS, PartWriter, run_name
from mirror.typed.bodies import JSON, MISFITS_MAX, Bodies, Parsed, Reading, check_misfits, names_of
from mirror.typed.values import folded

BATCH_MARK = "dcp-mirror"
READING_MARK = "dcp-mirror/reading"

CONFIGURATION = {"delta.logRetentionDuration": "interval 7 days", "delta.checkpointInterval": "50"}
"""Settings for a log that grows fast, because each batch makes a commit."""
STATISTICS = ("key", "collection", "vbid", "seqno", "at_branch", "at_seqno")
"""Columns whose statistics let readers skip files."""

PERMISSIVE = Reading("permissive")
"""The default reading: a document that does not fit must not stop a stream for ever."""

_NAME = re.compile(r"part-[0-9a-f]{16}-b(\d+)-[0-9a-f]{32}\.parquet")
"""The name of a file in `changes` that a batch wrote."""
_MERGE_ROWS = 8192


def is_column(field: pa.Field) -> bool:
    """Return True if a table of documents can have this column without being asked for another meaning of its name."""
    taken = {*(f"_{each}" for each in FOLDED.names), PERMISSIVE.corrupt_record}
    return all(map(is_name, names_of([field]))) and folded(field.name) not in taken


class Applied(NamedTuple):
    events: int
    inserted: int
    updated: int
    deleted: int
    misfits: int = 0

    def plus(self, other: Applied) -> Applied:
        return Applied(*(mine + others for mine, others in zip(self, other, strict=True)))


NOTHING = Applied(0, 0, 0, 0)


@dataclass(frozen=True)
class Layout:
    """The columns of a table. Raises ConfigError for a schema unfit for JSON or Delta, or mode dropmalformed."""

    fields: Any = None
    """Arrow schema of the columns from the body. None: only `value` has the body."""
    reading: Reading = PERMISSIVE
    misfits_max: float = MISFITS_MAX
    """The greatest allowed share of misfits. It is checked in the stream's first batch, and when a change of columns
    writes all rows again.
    """
    overwrite_schema: bool = False
    """True if columns of an existing table may be removed or get other types."""

    def __post_init__(self) -> None:
        if self.fields is None:
            return
        if self.reading.mode == "dropmalformed":
            raise ConfigError(
                "--mode dropmalformed: a table of current documents keeps misfits, with nulls",
                hint="read it with `where _corrupt_record is null`, with `_corrupt_record string` in --schema",
            )
        Bodies(self.fields, self.reading)
        taken = {f"_{name}" for name in FOLDED.names}
        check_names(self.fields)
        for name in self.fields.names:
            if folded(name) in taken:
                raise ConfigError(f"--schema names {name!r}, which is a column of every typed table")

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

    @property
    def marks(self) -> list[Transaction]:
        """The mark for the `Reading` that a table's bodies were read with."""
        if self.fields is None:
            return []
        reading = self.reading
        return [Transaction(READING_MARK, fingerprint(f"{reading.time_zone} {reading.epoch} {reading.corrupt_record}"))]


@dataclass(frozen=True)
class Layouts:
    per_collection: bool = False
    others: Layout = field(default_factory=Layout)
    """The layout of tables without their own."""
    own: Mapping[str, Layout] = field(default_factory=dict)

    def of(self, collection: str | None) -> Layout:
        return self.others if collection is None else self.own.get(collection, self.others)


def batch_of(name: str) -> int | None:
    """Return the number of the batch that wrote a file of `changes`; None if a compaction or delta-rs wrote it. The
    pattern is strict, because hexadecimal digits in other names may look like the number of a batch.
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


class DocumentsTable:
    def __init__(
        self, folder: Folder, layout: Layout, selection: str, misfits_table: MisfitsTable, collection: str | None = None
    ) -> None:
        """Open or make the table of `collection` (None: of all collections). If the table's columns differ from
        `layout`, write all rows again. `selection` is the stream's. Raises ConfigError, MirrorError.
        """
        self.folder = folder
        self._misfits_table = misfits_table
        self._layout = layout
        self._collection = collection
        self._bodies = None if layout.fields is None else Bodies(layout.fields, layout.reading)
        self._source_schema = pa.schema([*layout.schema, pa.field(f"{layout.mark}live", pa.bool_())])
        self._misfits = self._bodies_read = 0
        self.rewritten_bytes = 0
        self._failed: MirrorError | None = None
        self._folded_to = -1
        self._vbids: set[int] | None = None
        table = open_table(folder)
        if table is None:
            self.table = self._make(selection)
        else:
            self.table = table
            check_selection(folder.url, table.metadata().description or "", selection)
            self._adapt()

    def _make(self, selection: str) -> DeltaTable:
        skip_by = ",".join(self._layout.mark + name for name in STATISTICS)
        with committing(self.folder, None):
            return DeltaTable.create(
                self.folder.url,
                Schema.from_arrow(self._layout.schema),
                description=selection or None,
                configuration=CONFIGURATION | {"delta.dataSkippingStatsColumns": skip_by},
                commit_properties=only_next(self._layout.marks),
            )

    def _adapt(self) -> None:
        names = {each.name for each in self.table.schema().fields}
        if not names.issuperset(self._layout.state.names):
            raise ConfigError(
                f"{self.folder}: a table with other columns ({', '.join(sorted(names))})",
                hint="give another folder. Tables that are made with --schema have other names than those without",
            )
        marks = self._layout.marks
        same_reading = all(self.table.transaction_version(each.app_id) == each.version for each in marks)
        expected_types = {each.name: each.type for each in Schema.from_arrow(self._layout.schema).fields}
        if same_reading and expected_types == {each.name: each.type for each in self.table.schema().fields}:
            return
        if self.table.file_uris() and not self._layout.overwrite_schema:
            check_columns(self.folder, self.table, self._layout.schema)
            if not same_reading:
                raise ConfigError(
                    f"{self.folder}: its documents were read with another --time-zone, --epoch or corrupt record",
                    hint="--overwrite-schema reads all of them again",
                )
        self._write_again()

    def _write_again(self) -> None:
        """Write all rows again in one commit, with the layout's columns. Fields are read from `_value`."""
        with PartWriter(self.folder.url, f"part-{run_name()}-columns", self._layout.schema) as parts:
            for path in self._sizes():
                for batch in batches_of(self.folder, path):
                    state = batch.select(self._layout.state.names).cast(self._layout.state)
                    live = pa.array([True] * len(state))
                    rows = pa.RecordBatch.from_arrays([*state.columns, live], schema=FOLDED)
                    parts.write(self._typed(rows).select(self._layout.schema.names))
            self._misfits_table.flush()
            self._check_misfits()
        marks = self._layout.marks
        commit_parts(self.folder, self.table, parts.finished, self._layout.schema, overwrite=True, marks=marks)
        self.refresh()

    def _check_misfits(self) -> None:
        check_misfits(self._misfits, self._bodies_read, self._layout.misfits_max)

    def refresh(self) -> None:
        self.table.update_incremental()

    @property
    def marked_batch(self) -> int | None:
        return self.table.transaction_version(BATCH_MARK)

    @property
    def folded_to(self) -> int:
        """The newest batch known to be in the table, or -1."""
        marked = self.marked_batch
        return self._folded_to if marked is None else max(self._folded_to, marked)

    def bytes(self) -> int:
        return sum(self._sizes().values())

    def _sizes(self) -> dict[str, int]:
        files = pa.table(self.table.get_add_actions())
        return dict(zip(files.column("path").to_pylist(), files.column("size_bytes").to_pylist(), strict=True))

    def compact(self) -> None:
        compact(self.folder, self.table, self._layout.schema)

    def vacuum(self, keep_hours: int) -> None:
        vacuum(self.folder, self.table, keep_hours)

    def mark(self, marks: list[Transaction]) -> None:
        """Commit `marks` alone, after a batch that changed no row. Raises CommitConflict, MirrorError."""
        if all(self.table.transaction_version(each.app_id) == each.version for each in marks):
            return
        commit_parts(self.folder, self.table, [], self._layout.schema, marks=marks)
        self.refresh()

    # -- batches --------------------------------------------------------------------------------------------------

    def fold(self, changes: Folder, names: Sequence[str], number: int, marks: list[Transaction]) -> Applied:
        """Fold files of `changes` into the table. `names` are all files up to batch `number` that the table lacks, in
        the order of batches. The last commit has `marks`. The result's `events` is 0. Raises CommitConflict,
        TooManyMisfits, MirrorError.
        """
        self._misfits = self._bodies_read = self.rewritten_bytes = 0
        left, done = list(names), NOTHING
        while left:
            first = batch_of(left[0])
            batch, rest = ([name for name in left if (batch_of(name) == first) is own] for own in (True, False))
            if self._vbids_of(changes, batch) & self._vbids_there():
                break
            mark = [Transaction(BATCH_MARK, first)] if rest and first is not None else marks
            done = done.plus(self._load(changes, batch, mark))
            left = rest
        if left:
            self._vbids_there().update(self._vbids_of(changes, left))
            with opened(changes, left) as files:
                one_batch = len({batch_of(name) for name in left}) == 1
                self._find_misfits(files, one_batch)
                done = done.plus(self._merge(number, marks, files, one_batch=one_batch))
        self._folded_to = number
        return done._replace(misfits=self._misfits)

    def skip_to(self, number: int) -> None:
        self._folded_to = number

    def _load(self, changes: Folder, names: list[str], marks: list[Transaction]) -> Applied:
        """Add a batch to a table that has no rows of the batch's vbuckets yet, as in a first load.

        Rows are written as they are read. A merge would hold all of them in memory, and compare them with the whole
        table.
        """
        with PartWriter(self.folder.url, f"part-{run_name()}-00000", self._layout.schema) as parts:
            for name in names:
                with opened(changes, [name]) as (file,):
                    for batch in self._folds_of([file], one_batch=True):
                        rows = self._typed(batch.filter(batch.column("live")))
                        parts.write(rows.select(self._layout.schema.names))
                        self._vbids_there().update(pc.unique(rows.column(f"{self._layout.mark}vbid")).to_pylist())
            self._misfits_table.flush()
            if batch_of(names[0]) == 0:  # a later batch may have one document: its misfit must not stop the stream
                self._check_misfits()
        if not parts.finished:
            return NOTHING
        metadata = {"batch": str(batch_of(names[0]))}
        commit_parts(self.folder, self.table, parts.finished, self._layout.schema, marks=marks, metadata=metadata)
        self.refresh()
        return NOTHING._replace(inserted=sum(part.rows for part in parts.finished))

    def _merge(self, number: int, marks: list[Transaction], files: list[pq.ParquetFile], *, one_batch: bool) -> Applied:
        voids = self._voids_of(files)
        source = pa.RecordBatchReader.from_batches(self._source_schema, self._source_of(files, one_batch))
        columns = {f"`{name}`": f"s.`{name}`" for name in self._layout.schema.names}
        mark = self._layout.mark
        writer = WriterProperties(
            compression="ZSTD",
            max_row_group_size=ROW_GROUP_ROWS,
            column_properties={f"{mark}value": ColumnProperties(statistics_enabled="NONE")},
        )
        self._failed = None
        before = set(self._sizes())
        with committing(self.folder, self.table):
            merge = (
                self.table.merge(
                    source,
                    f"t.{mark}collection = s.{mark}collection AND t.{mark}key = s.{mark}key",
                    source_alias="s",
                    target_alias="t",
                    streamed_exec=True,
                    writer_properties=writer,
                    commit_properties=only_next(marks, {"batch": str(number)}),
                )
                .when_matched_update(columns, f"s.{mark}live AND {later(voids, mark)}")
                .when_matched_delete(f"NOT s.{mark}live AND {later(voids, mark)}")
                .when_not_matched_insert(columns, f"s.{mark}live")
            )
            if (gone := void_rows(voids, mark)) is not None:
                merge = merge.when_not_matched_by_source_delete(gone)
            try:
                done = merge.execute()
            except (DeltaError, OSError):
                if self._failed is not None:
                    raise self._failed from None
                raise
        changed = [int(done[f"num_target_rows_{what}"]) for what in ("inserted", "updated", "deleted")]
        # A merge without changes makes no version and no mark, and may run again.
        assert not any(changed) or self.marked_batch == number
        self.rewritten_bytes = sum(size for name, size in self._sizes().items() if name not in before)
        return Applied(0, *changed)

    def _find_misfits(self, files: Iterable[pq.ParquetFile], one_batch: bool) -> None:
        """Record misfits before the merge begins, because no other table can be written during a merge."""
        if self._bodies is not None:
            for batch in self._folds_of(files, one_batch):
                self._typed(batch)
            self._misfits_table.flush()

    def _source_of(self, files: Iterable[pq.ParquetFile], one_batch: bool) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a merge. delta-rs passes on only the text of an error, so `_failed` keeps the error."""
        try:
            for batch in self._folds_of(files, one_batch):
                yield self._source_rows(batch)[0]
        except MirrorError as error:
            self._failed = error
            raise

    def _typed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows, misfits = self._source_rows(batch)
        self._misfits += len(misfits)
        self._bodies_read += batch.column("live").true_count
        self._misfits_table.add(batch, misfits)
        return rows

    def _source_rows(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
        """Return rows of FOLDED with the layout's columns, and misfits (row -> reason). Raises DocumentDoesNotFit."""
        *state, live = batch.columns
        parsed = Parsed([], {})
        if self._bodies is not None:
            bodies = pc.fill_null(pc.if_else(live, batch.column("value"), pa.scalar(None, pa.binary())), b"")
            kinds = pc.if_else(live, batch.column("datatype"), JSON).to_pylist()
            parsed = self._bodies.columns(bodies, bytes(kinds), batch.column("key").cast(pa.binary()))
        columns = [*state, *parsed.columns, live]
        return pa.RecordBatch.from_arrays(columns, schema=self._source_schema), parsed.misfits

    def _folds_of(self, files: Iterable[pq.ParquetFile], one_batch: bool) -> Iterator[pa.RecordBatch]:
        with readable():
            pieces = (self._read(file, FOLD_COLUMNS) for file in files)
            folds = fold_files(pieces) if one_batch else [fold_batches(chain.from_iterable(pieces))]
            for table, _ in folds:
                yield from table.to_batches(max_chunksize=_MERGE_ROWS)

    def _read(self, file: pq.ParquetFile, columns: list[str]) -> Iterator[pa.Table]:
        """Yield the events of a file that concern this table, a row group at a time."""
        for number in range(file.num_row_groups):
            events = file.read_row_group(number, columns)
            if self._collection is not None:
                own, resync = pc.equal(events["collection"], self._collection), pc.equal(events["kind"], RESYNC)
                events = events.filter(pc.or_kleene(own, resync))
            yield events

    def _vbids_of(self, changes: Folder, names: list[str]) -> set[int]:
        found: set[int] = set()
        with opened(changes, names) as files, readable():
            for file in files:
                for events in self._read(file, ["kind", "collection", "vbid"]):
                    found.update(pc.unique(events.column("vbid")).to_pylist())
        return found

    def _vbids_there(self) -> set[int]:
        """Return the vbuckets that may have rows in the table. The files are read once: no other process writes."""
        if self._vbids is None:
            column = f"{self._layout.mark}vbid"
            self._vbids = set()
            for path in self._sizes():
                for batch in batches_of(self.folder, path, [column]):
                    self._vbids.update(pc.unique(batch.column(column)).to_pylist())
        return self._vbids

    def _voids_of(self, files: Iterable[pq.ParquetFile]) -> Voids:
        voids = Voids()
        with readable():
            for file in files:
                for events in self._read(file, ["kind", "collection", "vbid"]):
                    voids_in(events, voids)
        return voids


@contextmanager
def opened(changes: Folder, names: Iterable[str]) -> Iterator[list[pq.ParquetFile]]:
    """Open files of `changes` before a merge begins, because no object store can be read during a merge."""
    with ExitStack() as stack:
        with readable():
            files = [pq.ParquetFile(stack.enter_context(changes.open(name))) for name in names]
        yield files


@contextmanager
def readable() -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        raise MirrorError(
            f"events cannot be read again: {plain(error)}", hint="the table `changes` is damaged"
        ) from error


def voids_in(events: pa.Table, voids: Voids) -> None:
    """Add to `voids` the vbuckets and collections whose earlier rows the events remove."""
    for kind in events.column("kind").unique().to_pylist():
        if kind in (RESYNC, "collection_dropped", "collection_flushed"):
            rows = events.filter(pc.equal(events.column("kind"), kind))
            vbids, names = rows.column("vbid").to_pylist(), rows.column("collection").to_pylist()
            if kind == RESYNC:
                voids.vbuckets.update(vbids)
            else:
                voids.collections.update(zip(vbids, names, strict=True))


def later(voids: Voids, mark: str = "") -> str:
    """Return SQL that is true if an event (s) may change the table's row (t) with the same key."""
    branch, seqno = f"{mark}at_branch", f"{mark}at_seqno"
    rises = f"(s.{branch} > t.{branch} OR (s.{branch} = t.{branch} AND s.{seqno} > t.{seqno}))"
    if not voids.vbuckets:
        return rises
    return f"({rises} OR t.{mark}vbid IN ({', '.join(map(str, sorted(voids.vbuckets)))}))"


def void_rows(voids: Voids, mark: str = "") -> str | None:
    """Return SQL that is true for a table's row (t) that `voids` removes. None if they remove no rows."""
    parts = []
    if voids.vbuckets:
        parts.append(f"t.{mark}vbid IN ({', '.join(map(str, sorted(voids.vbuckets)))})")
    names = sorted({name for _, name in voids.collections})
    for name in names:
        vbids = ", ".join(str(vbid) for vbid, of in sorted(voids.collections) if of == name)
        quoted = name.replace("'", "''")
        parts.append(f"(t.{mark}collection = '{quoted}' AND t.{mark}vbid IN ({vbids}))")
    return " OR ".join(parts) or None
