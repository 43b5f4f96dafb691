"""Two Delta tables kept from a stream of batches: `changes`, every event once, and `documents`, what is current.

Knows the two tables, and batches as files of events that somebody has written into the folder of `changes`; never
where events come from, nor Spark. Delta has no transaction over two tables, so exactly-once rests on this argument:

1. `changes` is the truth. A batch's files become part of it in ONE commit, which carries the batch's number as a mark.
   The commit is built upon the version in which the mark was looked up and may only become the next version
   (delta.py); so of any number of attempts at a batch (a replay after a crash, an executor's second try, a process that
   was thought dead) one is committed and all others are not. Files of the others are orphans that no reader sees.
2. `documents` is a function of `changes`: the fold of its batches in their order. A batch is folded from the committed
   files, not from a second reading of the source, which may have forgotten superseded versions or have rolled back
   meanwhile; its merge is one commit with the same kind of mark.
3. A batch is begun only when the one before is in `changes`. So after a crash the marks say one of two things:
   `changes` lacks the batch (write it), or has it (do not). `documents` is never ahead, and may be some batches
   behind: their files keep their names until they are folded, all in one commit, in their order. (A batch that changes
   no document leaves no mark in `documents`; folding it again, also with those after it, changes nothing again.)
4. The second guard: a merge changes a row only by an event that stands later in (at_branch, at_seqno), which rises for
   each key also across rollbacks, where seqno falls. So even a batch that was folded twice would change nothing.
   Where a whole vbucket is void (a resync) this does not apply: positions may begin again there.
5. Further marks name the checkpoint that the stream runs from, and the offsets of the batch. Another checkpoint, or one
   that was set back so that a number means other offsets, would skip or repeat events: it is refused.

What `documents` costs: a merge rewrites every file in which it changes a row, and changes that are spread over all keys
meet all files, so each merge writes the table once more. delta-rs writes no deletion vectors, which would avoid that.
So the bound is on how often: merging writes `rewrite_rate` bytes a second on average (`Costs`), whatever the size of
the table and of the batches; and what was rewritten is kept for `keep_documents_hours` alone.

Invariants: rows of `documents` are live documents alone; both tables are readable by anyone at any moment, at the end
of some batch.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import ColumnProperties, DeltaTable, Schema, Transaction, WriterProperties
from deltalake.exceptions import DeltaError

from mirror.errors import ConfigError, MirrorError
from mirror.spark.columns import CHANGES
from mirror.spark.delta import commit_parts, compact, conflict_or, lock, only_next, open_table
from mirror.spark.fold import FOLD_COLUMNS, FOLDED, RESYNC, STATE, Voids, fold_batches, fold_files
from mirror.spark.offsets import check_selection
from mirror.spark.parts import ROW_GROUP_ROWS, Part, PartWriter, run_name
from mirror.spark.places import Folder, LocalFolder, plain

CHANGES_FOLDER, DOCUMENTS_FOLDER = "changes", "documents"

BATCH_MARK = "dcp-mirror"
CHECKPOINT_MARK = "dcp-mirror/checkpoint"
OFFSETS_MARK = "dcp-mirror/offsets"

CONFIGURATION = {"delta.logRetentionDuration": "interval 7 days", "delta.checkpointInterval": "50"}
"""A commit for each batch: the log is summed up often, and its old entries go after a week."""
STATISTICS = {
    CHANGES_FOLDER: "key,kind,collection,vbid,seqno,at_branch,at_seqno",
    DOCUMENTS_FOLDER: "key,collection,vbid,seqno,at_branch,at_seqno",
}
"""Columns by which readers skip files; values would only make the log large."""

ADDED_LATER = ("event_time",)
"""Columns that tables of older versions do not have, at the end of the schema. Their rows have null in them."""

_NAME = re.compile(r"part-[0-9a-f]{16}-b(\d+)-[0-9a-f]{32}\.parquet")
"""Of files that were written with `Lake.prefix`."""

LATER = "(s.at_branch > t.at_branch OR (s.at_branch = t.at_branch AND s.at_seqno > t.at_seqno))"


WRITER = WriterProperties(
    compression="ZSTD",
    max_row_group_size=ROW_GROUP_ROWS,
    column_properties={"value": ColumnProperties(statistics_enabled="NONE")},
)
WAITING_BYTES_MAX = 64 * 1024 * 1024
"""Of compressed events: they are folded in memory, together."""
VACUUM_INTERVAL_S = 900.0
"""So long are two clean-ups of `documents` apart."""


@dataclass(frozen=True)
class Costs:
    """What keeping `documents` may cost."""

    rewrite_rate: int = 1 << 20
    """Bytes a second that merging may write on average; 0: merge each batch, whatever it costs."""
    keep_documents_hours: int = 1
    """How long files of older versions of `documents` stay: so long may a reader of one version take."""


class Batch(NamedTuple):
    """Which batch of which checkpoint, and what it covers."""

    number: int
    checkpoint: str
    offsets: str
    """The batch's offsets as text, compared and never understood."""

    def marks(self) -> list[Transaction]:
        """What both tables say once they have it."""
        return [
            Transaction(BATCH_MARK, self.number),
            Transaction(CHECKPOINT_MARK, fingerprint(self.checkpoint)),
            Transaction(OFFSETS_MARK, fingerprint(self.offsets)),
        ]


class Applied(NamedTuple):
    """What a batch did. Zeros where it had been done before."""

    events: int
    inserted: int
    updated: int
    deleted: int


def batch_of(name: str) -> int | None:
    """The batch that wrote a file of that name; None: it is no batch's own, but delta-rs's, whose names have pieces of
    hexadecimal digits that may look like anything.
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def fingerprint(text: str) -> int:
    """A text as a number that fits a mark."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


class Lake:
    """The two tables in one folder. Use it as a context manager: it holds the folder's lock."""

    def __init__(
        self,
        folder: Folder,
        checkpoint: str | None,
        selection: str = "",
        costs: Costs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the tables where they are missing. `checkpoint` is the name of the one that the stream will run from;
        None: it is about to be made. `selection` is what the stream reads of its source. Raises ConfigError when the
        tables come from another checkpoint or have another selection: it is their description from the beginning.
        """
        self.folder = folder
        self.changes_folder = folder.child(CHANGES_FOLDER)
        self.documents_folder = folder.child(DOCUMENTS_FOLDER)
        self._lock = lock(folder)
        self._costs = costs or Costs()
        self._clock = clock
        self._folded: int | None = None
        """The newest batch that this object has brought into `documents`."""
        self._due_s = self._vacuumed_s = clock()
        self._waiting_bytes = 0
        """Of files in `changes` that are not folded yet."""
        try:
            self.changes = self._open_or_make(self.changes_folder, CHANGES, selection)
            self.documents = self._open_or_make(self.documents_folder, STATE, selection)
            self._check(checkpoint)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lake:
        """It is open already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Give the folder up."""
        self._lock.release()

    @staticmethod
    def _open_or_make(folder: Folder, schema: pa.Schema, selection: str) -> DeltaTable:
        table = open_table(folder)
        if table is None:
            try:
                return DeltaTable.create(
                    folder.url,
                    Schema.from_arrow(schema),
                    description=selection or None,
                    configuration=CONFIGURATION
                    | {"delta.dataSkippingStatsColumns": STATISTICS[folder.url.rpartition("/")[2]]},
                )
            except (DeltaError, OSError) as error:
                raise conflict_or(folder, None, error) from error
        names = [field.name for field in table.schema().fields]
        missing = [field for field in schema if field.name in ADDED_LATER and field.name not in names]
        if missing and names == [field.name for field in schema if field not in missing]:
            try:
                table.alter.add_columns(Schema.from_arrow(pa.schema(missing)).fields)
            except (DeltaError, OSError) as error:
                raise conflict_or(folder, table, error) from error
        elif names != schema.names:
            raise ConfigError(f"{folder}: a table with other columns ({', '.join(names)})", hint="give another folder")
        check_selection(folder.url, table.metadata().description or "", selection)
        return table

    def _check(self, checkpoint: str | None) -> None:
        marked = self.changes.transaction_version(CHECKPOINT_MARK)
        if marked is not None and (checkpoint is None or fingerprint(checkpoint) != marked):
            raise ConfigError(
                f"{self.folder}: its tables were written from another checkpoint than this one",
                hint="bring that checkpoint back, or write to a new folder",
            )
        ahead = self.documents.transaction_version(BATCH_MARK)
        if ahead is not None and (done := self.done_batch) is not None and ahead > done:
            raise ConfigError(f"{self.documents_folder}: is ahead of {self.changes_folder}: one of them was set back")

    @property
    def done_batch(self) -> int | None:
        """The newest batch that `changes` has."""
        return self.changes.transaction_version(BATCH_MARK)

    @staticmethod
    def prefix(batch_number: int) -> str:
        """How the files of an attempt at a batch are to be named (PartWriter's `prefix`)."""
        return f"part-{run_name()}-b{batch_number}"

    def has_changes(self, batch: Batch) -> bool:
        """True when `changes` has the batch, so that no files need be written. Raises ConfigError when the checkpoint
        does not go with the tables.
        """
        self.changes.update_incremental()
        self.documents.update_incremental()
        self._check(batch.checkpoint)
        done = self.done_batch
        if done is None or batch.number > done:
            return False
        if batch.number < done or self.changes.transaction_version(OFFSETS_MARK) != fingerprint(batch.offsets):
            raise ConfigError(
                f"the checkpoint stands at batch {batch.number}, but {self.folder} has batch {done} with other offsets",
                hint="the checkpoint was set back: bring the newer one back, or write to a new folder",
            )
        return True

    def add_changes(self, batch: Batch, parts: Iterable[Part]) -> int:
        """Make an attempt's files part of `changes`: its events, once. Raises CommitConflict."""
        held = list(parts)
        metadata = {"batch": str(batch.number)}
        commit_parts(self.changes_folder, self.changes, held, CHANGES, marks=batch.marks(), metadata=metadata)
        self.changes.update_incremental()
        self._waiting_bytes += sum(part.size for part in held)
        return sum(part.rows for part in held)

    def update_documents(self, batch: Batch) -> Applied:
        """Fold a batch that `changes` has into `documents`, once, and with it those before it that were put off.

        Raises CommitConflict.
        """
        return self._fold(batch.number, batch.marks())

    def due(self) -> bool:
        """True when the last merge is long enough ago for what it wrote, or more is waiting than memory should hold."""
        return self._clock() >= self._due_s or self._waiting_bytes > WAITING_BYTES_MAX

    def catch_up(self) -> Applied:
        """Fold what was put off, if anything; its events were counted when they were added. Raises CommitConflict."""
        done = self.done_batch
        if done is None or done == self._folded:
            return Applied(0, 0, 0, 0)
        marks = [(name, self.changes.transaction_version(name)) for name in (CHECKPOINT_MARK, OFFSETS_MARK)]
        kept = [Transaction(name, version) for name, version in marks if version is not None]
        return self._fold(done, [Transaction(BATCH_MARK, done), *kept])._replace(events=0)

    def _fold(self, number: int, marks: list[Transaction]) -> Applied:
        self.documents.update_incremental()
        merged = self.documents.transaction_version(BATCH_MARK)
        if merged == number:
            self._folded = number
            return Applied(0, 0, 0, 0)
        names = self._files_of(-1 if merged is None else merged, number)
        if not names:  # batches that changed no document, and were put together with others since
            self._folded = number
            return Applied(0, 0, 0, 0)
        if not self.documents.file_uris():
            return self._fold_first(names, number, marks)
        with self._opened(names) as files:
            one_batch = len({batch_of(name) for name in names}) == 1
            done = self._merge(number, marks, files, one_batch=one_batch)
            new = (file for file, name in zip(files, names, strict=True) if batch_of(name) == number)
            events = sum(file.metadata.num_rows for file in new)
        changed = [int(done[f"num_target_rows_{what}"]) for what in ("inserted", "updated", "deleted")]
        # A merge that changes nothing makes no version, and no mark: doing it again would change nothing either.
        assert not any(changed) or self.documents.transaction_version(BATCH_MARK) == number
        self._folded, self._waiting_bytes = number, 0
        self._put_off(any(changed[1:]))
        return Applied(events, *changed)

    def _fold_first(self, names: list[str], number: int, marks: list[Transaction]) -> Applied:
        """Fold the first of some batches into the empty table, then the others.

        There is nothing to compare with: rows are written as they come, file by file. A merge would hold all of them,
        and a first load is the largest batch there is.
        """
        first = batch_of(names[0])
        assert first is not None
        inserted = events = 0
        with PartWriter(self.documents_folder.url, f"part-{run_name()}-00000", STATE) as parts:
            for name in names:
                if batch_of(name) == first:
                    with self._opened([name]) as (file,):
                        events += file.metadata.num_rows
                        for batch in self._folds_of([file], one_batch=True):
                            parts.write(batch.filter(batch.column("live")).select(STATE.names))
        if parts.finished:
            kept = marks if first == number else [Transaction(BATCH_MARK, first)]
            metadata = {"batch": str(first)}
            commit_parts(self.documents_folder, self.documents, parts.finished, STATE, marks=kept, metadata=metadata)
            self.documents.update_incremental()
            inserted = sum(part.rows for part in parts.finished)
        if first == number:
            self._folded, self._waiting_bytes = number, 0
            return Applied(events, inserted, 0, 0)
        if parts.finished:
            more = self._fold(number, marks)
        else:
            more = self._fold_first([name for name in names if batch_of(name) != first], number, marks)
        return more._replace(inserted=more.inserted + inserted)

    def _put_off(self, rewritten: bool) -> None:
        """Decide when the next merge is due. One that only inserts adds files and rewrites none."""
        if rewritten and self._costs.rewrite_rate:
            self._due_s = self._clock() + self.documents_bytes() / self._costs.rewrite_rate

    def documents_bytes(self) -> int:
        """The size of `documents` as it is now."""
        return sum(pa.table(self.documents.get_add_actions()).column("size_bytes").to_pylist())

    def _merge(
        self, number: int, marks: list[Transaction], files: list[pq.ParquetFile], *, one_batch: bool
    ) -> dict[str, Any]:
        voids = self._voids_of(files)
        source = pa.RecordBatchReader.from_batches(FOLDED, self._folds_of(files, one_batch))
        columns = {name: f"s.{name}" for name in STATE.names}
        merge = (
            self.documents.merge(
                source,
                "t.collection = s.collection AND t.key = s.key",
                source_alias="s",
                target_alias="t",
                streamed_exec=True,
                writer_properties=WRITER,
                commit_properties=only_next(marks, {"batch": str(number)}),
            )
            .when_matched_update(columns, f"s.live AND {later(voids)}")
            .when_matched_delete(f"NOT s.live AND {later(voids)}")
            .when_not_matched_insert(columns, "s.live")
        )
        if (gone := void_rows(voids)) is not None:
            merge = merge.when_not_matched_by_source_delete(gone)
        try:
            return merge.execute()
        except (DeltaError, OSError) as error:
            raise conflict_or(self.documents_folder, self.documents, error) from error

    def _files_of(self, above: int, to: int) -> list[str]:
        """The files in `changes` of the batches above one and up to another, in the batches' order; they keep their
        names until the batch is in both tables.
        """
        found = ((batch_of(name), name) for name in self._files())
        return [name for number, name in sorted((n, name) for n, name in found if n is not None and above < n <= to)]

    @contextmanager
    def _opened(self, names: Iterable[str]) -> Iterator[list[pq.ParquetFile]]:
        """Files of `changes`, all of them before a merge begins: within it no object store can be asked."""
        with ExitStack() as stack, self._readable():
            yield [pq.ParquetFile(stack.enter_context(self.changes_folder.open(name))) for name in names]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowInvalid) as error:
            raise MirrorError(
                f"{self.changes_folder}: cannot be read: {plain(error)}", hint="the table `changes` is damaged"
            ) from error

    def _files(self) -> set[str]:
        return {uri.rsplit("/", 1)[-1] for uri in self.changes.file_uris()}

    def remove_unfinished(self) -> list[str]:
        """Remove the files of attempts at batches that were not committed; returns their names. Not on an object store,
        where they may be another process's: `tidy` removes them there, once they are old.
        """
        if not isinstance(self.changes_folder, LocalFolder):
            return []
        done = -1 if self.done_batch is None else self.done_batch
        kept = self._files()
        removed = []
        for name in self.changes_folder.names():
            number = batch_of(name)
            if number is not None and number > done and name not in kept:
                self.changes_folder.remove(name)
                removed.append(name)
        return removed

    def tidy(self, keep_hours: int) -> None:
        """Fewer and larger files in `changes`; files that no version of the last `keep_hours` needs are removed.

        Only between batches: a batch's files must not be moved before they are folded.
        """
        assert self.done_batch == self._folded, "not within a batch"
        try:
            compact(self.changes_folder, self.changes, CHANGES)
            compact(self.documents_folder, self.documents, STATE)
            self._vacuum(self.changes, keep_hours)
            self._vacuum(self.documents, min(keep_hours, self._costs.keep_documents_hours))
        except (DeltaError, OSError) as error:
            raise MirrorError(f"{self.folder}: could not be tidied: {plain(error)}") from error

    def tidy_documents(self) -> None:
        """Remove files of older versions of `documents` that are old enough, now and then."""
        if self._clock() < self._vacuumed_s + VACUUM_INTERVAL_S:
            return
        self._vacuumed_s = self._clock()
        try:
            self._vacuum(self.documents, self._costs.keep_documents_hours)
        except (DeltaError, OSError) as error:
            raise MirrorError(f"{self.documents_folder}: could not be tidied: {plain(error)}") from error

    @staticmethod
    def _vacuum(table: DeltaTable, keep_hours: int) -> None:
        table.update_incremental()
        table.vacuum(keep_hours, dry_run=False, enforce_retention_duration=False, full=True)

    def _folds_of(self, files: Iterable[pq.ParquetFile], one_batch: bool) -> Iterator[pa.RecordBatch]:
        with self._readable():
            tables = (file.read(FOLD_COLUMNS) for file in files)
            for table, _ in fold_files(tables) if one_batch else [fold_batches(tables)]:
                yield from table.to_batches(max_chunksize=8192)

    @staticmethod
    def _voids_of(files: Iterable[pq.ParquetFile]) -> Voids:
        """What the events of a batch void, without reading their values."""
        voids = Voids()
        for file in files:
            voids.add(voids_in(file.read(["kind", "collection", "vbid"])))
        return voids


def voids_in(events: pa.Table) -> Voids:
    """What events with these columns void: kind, collection, vbid."""
    voids = Voids()
    for kind in events.column("kind").unique().to_pylist():
        if kind in (RESYNC, "collection_dropped", "collection_flushed"):
            rows = events.filter(pa.compute.equal(events.column("kind"), kind))
            vbids, names = rows.column("vbid").to_pylist(), rows.column("collection").to_pylist()
            if kind == RESYNC:
                voids.vbuckets.update(vbids)
            else:
                voids.collections.update(zip(vbids, names, strict=True))
    return voids


def later(voids: Voids) -> str:
    """SQL: whether an event may change the row it meets."""
    if not voids.vbuckets:
        return LATER
    return f"({LATER} OR t.vbid IN ({', '.join(map(str, sorted(voids.vbuckets)))}))"


def void_rows(voids: Voids) -> str | None:
    """SQL: which rows that no event of the batch speaks of are gone all the same; None: none."""
    parts = []
    if voids.vbuckets:
        parts.append(f"t.vbid IN ({', '.join(map(str, sorted(voids.vbuckets)))})")
    names = sorted({name for _, name in voids.collections})
    for name in names:
        vbids = ", ".join(str(vbid) for vbid, of in sorted(voids.collections) if of == name)
        quoted = name.replace("'", "''")
        parts.append(f"(t.collection = '{quoted}' AND t.vbid IN ({vbids}))")
    return " OR ".join(parts) or None
