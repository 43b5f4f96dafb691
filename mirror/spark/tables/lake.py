"""Delta tables kept from a stream of batches: `changes`, every event once, and `documents`, what is current; where
a user chose so, a table of documents for each collection; and `quarantine`, documents that do not fit the schema.

Knows which tables there are, and batches as files of events that somebody has written into the folder of `changes`;
never where events come from, nor Spark, nor how a batch gets into a table of documents (documents.py). Delta has no
transaction over two tables, so exactly-once rests on this argument:

1. `changes` is the truth. A batch's files become part of it in ONE commit, which carries the batch's number as a mark.
   The commit is built upon the version in which the mark was looked up and may only become the next version
   (delta.py); so of any number of attempts at a batch (a replay after a crash, an executor's second try, a process that
   was thought dead) one is committed and all others are not. Files of the others are orphans that no reader sees.
2. Each table of documents is a function of `changes`: the fold of its batches in their order. A batch is folded from
   the committed files, not from a second reading of the source, which may have forgotten superseded versions or have
   rolled back meanwhile; its merge is one commit with the same kind of mark.
3. A batch is begun only when the one before is in `changes`. So after a crash the marks say one of two things:
   `changes` lacks the batch (write it), or has it (do not). `documents` is never ahead, and may be some batches
   behind: their files keep their names until they are folded, all in one commit, in their order. A batch that changes
   no document leaves no mark in `documents`; folding it again, with those after it, changes nothing again. Before files
   are put together, which takes their names, every table gets the mark.
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

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError

from mirror.errors import ConfigError, MirrorError
from mirror.spark.places import Folder, LocalFolder, plain
from mirror.spark.source.columns import CHANGES
from mirror.spark.source.offsets import check_selection
from mirror.spark.tables.delta import commit_parts, compact, conflict_or, lock, open_table, vacuum
from mirror.spark.tables.documents import (
    BATCH_MARK,
    CONFIGURATION,
    NOTHING,
    Applied,
    DocumentsTable,
    Layouts,
    batch_of,
    fingerprint,
    opened,
)
from mirror.spark.tables.fold import PUTS, RESYNC
from mirror.spark.tables.misfits import MisfitsTable
from mirror.spark.tables.parts import Part, run_name

CHANGES_FOLDER, DOCUMENTS_FOLDER, COLLECTIONS_FOLDER = "changes", "documents", "collections"
QUARANTINE_FOLDER = "quarantine"

CHECKPOINT_MARK = "dcp-mirror/checkpoint"
OFFSETS_MARK = "dcp-mirror/offsets"

STATISTICS = "key,kind,collection,vbid,seqno,at_branch,at_seqno"
"""Columns of `changes` by which readers skip files; values would only make the log large."""

ADDED_LATER = ("event_time",)
"""Columns that tables of older versions do not have, at the end of the schema. Their rows have null in them."""

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


class Lake:
    """The tables in one folder. Use it as a context manager: it holds the folder's lock."""

    def __init__(
        self,
        folder: Folder,
        checkpoint: str | None,
        selection: str = "",
        costs: Costs | None = None,
        clock: Callable[[], float] = time.monotonic,
        layouts: Layouts | None = None,
    ) -> None:
        """Make the tables where they are missing. `checkpoint` is the name of the one that the stream will run from;
        None: it is about to be made. `selection` is what the stream reads of its source. Raises ConfigError when the
        tables come from another checkpoint, have another selection (it is their description from the beginning) or
        another layout.
        """
        self.folder = folder
        self.changes_folder = folder.child(CHANGES_FOLDER)
        self.documents_folder = folder.child(DOCUMENTS_FOLDER)
        self._lock = lock(folder)
        self._selection = selection
        self._costs = costs or Costs()
        self._layouts = layouts or Layouts()
        self._clock = clock
        self._folded: int | None = None
        """The newest batch that this object has brought into `documents`."""
        self._due_s = self._vacuumed_s = clock()
        self.rewritten_bytes = 0
        """By the last merge."""
        self._waiting_bytes = 0
        """Of files in `changes` that are not folded yet."""
        self._misfits_table = MisfitsTable(folder.child(QUARANTINE_FOLDER))
        self._tables: dict[str | None, DocumentsTable] = {}
        """Of documents, by collection; the one of all has the name None."""
        self._collections: dict[str, frozenset[str] | None] = {}
        """Which collections the files of `changes` have documents of; None: they concern all."""
        try:
            collections = self._collections_there()
            self.changes = self._open_or_make_changes()
            for collection in collections if self._layouts.per_collection else [None]:
                self._open_documents(collection)
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

    def _collections_there(self) -> list[str]:
        """Which collections have a table. Raises ConfigError where tables were made by the other choice."""
        one = open_table(self.documents_folder) is not None
        try:
            names = self.folder.child(COLLECTIONS_FOLDER).names()
        except OSError as error:
            raise self.folder.error(error) from error
        if names if not self._layouts.per_collection else one:
            was, hint = ("a table for each collection", "with") if names else ("one table of documents", "without")
            raise ConfigError(
                f"{self.folder}: was made with {was}", hint=f"run {hint} --table-per-collection, or give another folder"
            )
        return [collection_of(name) for name in names]

    def _open_documents(self, collection: str | None) -> DocumentsTable:
        """Open or make a table of documents."""
        folder = self.documents_folder
        if collection is not None:
            folder = self.folder.child(COLLECTIONS_FOLDER).child(folder_name(collection))
        table = DocumentsTable(folder, self._layouts.of(collection), self._selection, self._misfits_table, collection)
        self._tables[collection] = table
        return table

    @property
    def documents(self) -> DeltaTable:
        """The one table of documents."""
        return self._tables[None].table

    def documents_of(self, collection: str) -> DeltaTable:
        """The table of a collection's documents. Raises KeyError while it has had none."""
        return self._tables[collection].table

    def _open_or_make_changes(self) -> DeltaTable:
        folder = self.changes_folder
        table = open_table(folder)
        if table is None:
            try:
                return DeltaTable.create(
                    folder.url,
                    Schema.from_arrow(CHANGES),
                    description=self._selection or None,
                    configuration=CONFIGURATION | {"delta.dataSkippingStatsColumns": STATISTICS},
                )
            except (DeltaError, OSError) as error:
                raise conflict_or(folder, None, error) from error
        names = [field.name for field in table.schema().fields]
        missing = [field for field in CHANGES if field.name in ADDED_LATER and field.name not in names]
        if missing and names == [field.name for field in CHANGES if field not in missing]:
            try:
                table.alter.add_columns(Schema.from_arrow(pa.schema(missing)).fields)
            except (DeltaError, OSError) as error:
                raise conflict_or(folder, table, error) from error
        elif names != CHANGES.names:
            raise ConfigError(f"{folder}: a table with other columns ({', '.join(names)})", hint="give another folder")
        check_selection(folder.url, table.metadata().description or "", self._selection)
        return table

    def _check(self, checkpoint: str | None) -> None:
        marked = self.changes.transaction_version(CHECKPOINT_MARK)
        if marked is not None and (checkpoint is None or fingerprint(checkpoint) != marked):
            raise ConfigError(
                f"{self.folder}: its tables were written from another checkpoint than this one",
                hint="bring that checkpoint back, or write to a new folder",
            )
        done = self.done_batch
        for table in self._tables.values():
            if done is not None and (table.marked_batch or 0) > done:
                raise ConfigError(f"{table.folder}: is ahead of {self.changes_folder}: one of them was set back")

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
        self._refresh_documents()
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
            return NOTHING
        return self._fold(done, self._marks())._replace(events=0)

    def _marks(self) -> list[Transaction]:
        """What tables of documents say once they have all that `changes` has."""
        marks = [(name, self.changes.transaction_version(name)) for name in (BATCH_MARK, CHECKPOINT_MARK, OFFSETS_MARK)]
        return [Transaction(name, version) for name, version in marks if version is not None]

    def _refresh_documents(self) -> None:
        for table in self._tables.values():
            table.refresh()

    def _fold(self, number: int, marks: list[Transaction]) -> Applied:
        self._refresh_documents()
        if self._layouts.per_collection:
            self._make_missing(number)
        done, folded = NOTHING, False
        self.rewritten_bytes = 0
        for collection, table in self._tables.items():
            names = self._files_of(table.folded_to, number)
            if collection is not None:
                names = [name for name in names if self._concerns(name, collection)]
            if not names:  # nothing new; or batches that changed no document, and were put together with others since
                table.skip_to(number)
                continue
            applied = table.fold(self.changes_folder, names, number, marks)
            done, folded = done.plus(applied), True
            self.rewritten_bytes += table.rewritten_bytes
        if folded:
            with opened(self.changes_folder, self._files_of(number - 1, number)) as files:
                done = done._replace(events=sum(file.metadata.num_rows for file in files))
        self._folded, self._waiting_bytes = number, 0
        self._collections.clear()
        if self.rewritten_bytes and self._costs.rewrite_rate:
            self._due_s = self._clock() + self.rewritten_bytes / self._costs.rewrite_rate
        return done

    def _make_missing(self, number: int) -> None:
        """Make the tables of collections that have documents for the first time. Before that no file of theirs was
        folded, so all of them still have the names of their batches.
        """
        for name in self._files_of(min((each.folded_to for each in self._tables.values()), default=-1), number):
            with opened(self.changes_folder, [name]) as (file,):
                events = file.read(["kind", "collection"])
            kinds = events.column("kind")
            everywhere = pc.any(pc.equal(kinds, RESYNC)).as_py()
            found = None if everywhere else frozenset(pc.unique(events.column("collection")).to_pylist())
            self._collections[name] = found
            puts = events.filter(pc.is_in(kinds, pa.array(sorted(PUTS)))).column("collection")
            for collection in sorted(set(pc.unique(puts).to_pylist()) - self._tables.keys()):
                self._open_documents(collection)

    def _concerns(self, name: str, collection: str) -> bool:
        found = self._collections.get(name, None)
        return found is None or collection in found

    def documents_bytes(self) -> int:
        """The size of the tables of documents as they are now."""
        return sum(table.bytes() for table in self._tables.values())

    def projected_bytes(self) -> int:
        """What merging at the rate that is set writes before any of it is removed, with the last merge, which is not
        broken off.
        """
        return self._costs.rewrite_rate * 3600 * max(1, self._costs.keep_documents_hours) + self.documents_bytes()

    def _files_of(self, above: int, to: int) -> list[str]:
        """The files in `changes` of the batches above one and up to another, in the batches' order; they keep their
        names until the batch is in both tables.
        """
        found = ((batch_of(name), name) for name in self._files())
        return [name for number, name in sorted((n, name) for n, name in found if n is not None and above < n <= to)]

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
        for table in self._tables.values():
            table.mark(self._marks())
        try:
            compact(self.changes_folder, self.changes, CHANGES)
            vacuum(self.changes, keep_hours)
            self._misfits_table.tidy(keep_hours)
        except (DeltaError, OSError) as error:
            raise MirrorError(f"{self.folder}: could not be tidied: {plain(error)}") from error
        for table in self._tables.values():
            table.compact()
            table.vacuum(min(keep_hours, self._costs.keep_documents_hours))

    def tidy_documents(self) -> None:
        """Remove files of older versions of `documents` that are old enough, now and then."""
        if self._clock() >= self._vacuumed_s + VACUUM_INTERVAL_S:
            self._vacuumed_s = self._clock()
            for table in self._tables.values():
                table.vacuum(self._costs.keep_documents_hours)


def folder_name(collection: str) -> str:
    """The folder of a collection's table: letters, digits and `._-=` alone, so that it means the same in a URL."""
    return quote(collection, safe="").replace("~", "%7E").replace("%", "=")


def collection_of(folder_name: str) -> str:
    """The inverse of `folder_name`."""
    return unquote(folder_name.replace("=", "%"))
