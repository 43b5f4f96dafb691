"""Keep Delta tables current from a stream of batches of events. The table `changes` has every event. The table
`documents` has the current documents; on request each collection has its own table of documents. The table `quarantine`
has documents that do not fit the schema.

A batch's events come as files in the folder of `changes`. A fold applies the events of one or more batches to a table
of documents (documents.py). Never knows the origin of events, nor Spark. Delta has no transaction over two tables. But
each event counts exactly once in every table, for these reasons:

1. A batch's files become part of `changes` in one commit, which carries the batch's number as a mark. The commit may
   only become the version after the one in which the mark was looked up (delta.py). So only one attempt at a batch is
   committed. The files of other attempts are orphans that no reader sees.
2. Each table of documents is the fold of all batches in `changes`, in order. A fold reads the committed files. It does
   not read the source, which may have forgotten superseded versions or rolled back. Each commit of a fold is marked
   with the number of the newest batch in it.
3. A batch begins only when the batch before is in `changes` or has no events. So after a crash only the newest batch
   may be missing in `changes`, and runs again. `documents` is never ahead of `changes`, but may be some batches behind.
   A fold takes the files whose names have a batch's number above the table's mark. Batches that together change no
   document leave no mark, and may be folded again, without effect. But compaction gives new names to some of their
   files, and a fold of only the others could be wrong. So before a compaction every table gets the newest batch's mark.
4. There is a second guard: a merge changes a row only if the event's (at_branch, at_seqno) is above the row's. This
   position rises for each key even across rollbacks, where seqno falls. So a batch folded twice would have no second
   effect. The resync of a vbucket overrides the guard for the vbucket's rows, because new positions may be lower.
5. Two more marks name the stream's checkpoint and the batch's offsets. Another checkpoint is refused: it would skip or
   repeat events. An older copy of the same checkpoint is refused, too: its batches may have other offsets.

The cost of `documents`: a merge writes again every file in which it changes a row. If changes are spread over all keys,
each merge writes the whole table. So batches wait for a merge: on average merges write at most `rewrite_rate` bytes a
second (`Costs`), or more if more than WAITING_BYTES_MAX wait. Replaced files go after `keep_documents_hours`.

Invariant: at any moment every table can be read, and shows the state after some batch.
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

from mirror.errors import ConfigError
from mirror.spark.places import Folder, LocalFolder
from mirror.spark.source.columns import CHANGES
from mirror.spark.source.offsets import check_selection
from mirror.spark.tables.delta import commit_parts, committing, compact, lock, open_table, vacuum
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
"""Columns of `changes` whose statistics let readers skip files."""

WAITING_BYTES_MAX = 64 * 1024 * 1024
"""A fold is due at once if more bytes of compressed events wait. The fold holds all these events in memory."""
VACUUM_INTERVAL_S = 900.0


@dataclass(frozen=True)
class Costs:
    rewrite_rate: int = 1 << 20
    """Bytes a second that merging may write on average. 0: merge after every batch."""
    keep_documents_hours: int = 1
    """Time for which replaced files of `documents` are kept. A reader of one version must finish within this time."""


class Batch(NamedTuple):
    number: int
    checkpoint: str
    offsets: str
    """The batch's offsets as text, which is compared but never parsed."""

    def marks(self) -> list[Transaction]:
        return [
            Transaction(BATCH_MARK, self.number),
            Transaction(CHECKPOINT_MARK, fingerprint(self.checkpoint)),
            Transaction(OFFSETS_MARK, fingerprint(self.offsets)),
        ]


class Lake:
    """The tables in one folder. A context manager, because it holds the folder's lock."""

    def __init__(
        self,
        folder: Folder,
        checkpoint: str | None,
        selection: str = "",
        costs: Costs | None = None,
        clock: Callable[[], float] = time.monotonic,
        layouts: Layouts | None = None,
    ) -> None:
        """Open the tables, and make missing ones. `checkpoint` is the id of the stream's checkpoint (None: a new one);
        `selection` is the stream's. Raises ConfigError for tables with another checkpoint, selection or layout, and
        MirrorError.
        """
        self.folder = folder
        self.changes_folder = folder.child(CHANGES_FOLDER)
        self.documents_folder = folder.child(DOCUMENTS_FOLDER)
        self._lock = lock(folder)
        self._selection = selection
        self._costs = costs or Costs()
        self._layouts = layouts or Layouts()
        self._clock = clock
        self.folded_batch: int | None = None  # the newest batch that this object has folded into `documents`
        self._due_s = self._vacuumed_s = clock()
        self.rewritten_bytes = 0  # bytes that the last merge wrote
        self._since_vacuum_bytes = 0  # bytes that merges wrote since `_vacuumed_s`
        self._waiting_bytes = 0  # bytes of files in `changes` that are not folded yet
        self._misfits_table = MisfitsTable(folder.child(QUARANTINE_FOLDER))
        self._tables: dict[str | None, DocumentsTable] = {}  # by collection; None: the table of all
        self._collections: dict[str, frozenset[str] | None] = {}  # in a file of `changes`; None: all
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
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._lock.close()

    def _collections_there(self) -> list[str]:
        """Return the collections with a table. Raises ConfigError if --table-per-collection has changed."""
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
        folder = self.documents_folder
        if collection is not None:
            folder = self.folder.child(COLLECTIONS_FOLDER).child(folder_name(collection))
        table = DocumentsTable(folder, self._layouts.of(collection), self._selection, self._misfits_table, collection)
        self._tables[collection] = table
        return table

    @property
    def documents(self) -> DeltaTable:
        return self._tables[None].table

    def documents_of(self, collection: str) -> DeltaTable:
        return self._tables[collection].table

    def _open_or_make_changes(self) -> DeltaTable:
        folder = self.changes_folder
        table = open_table(folder)
        if table is None:
            with committing(folder, None):
                return DeltaTable.create(
                    folder.url,
                    Schema.from_arrow(CHANGES),
                    description=self._selection or None,
                    configuration=CONFIGURATION | {"delta.dataSkippingStatsColumns": STATISTICS},
                )
        names = [field.name for field in table.schema().fields]
        if names != CHANGES.names:
            raise ConfigError(f"{folder}: a table with other columns ({', '.join(names)})", hint="give another folder")
        check_selection(folder.url, table.metadata().description or "", self._selection)
        return table

    def _check(self, checkpoint: str | None) -> None:
        marked = self.changes.transaction_version(CHECKPOINT_MARK)
        if marked is not None and (checkpoint is None or fingerprint(checkpoint) != marked):
            raise ConfigError(
                f"{self.folder}: its tables were written from another checkpoint than this one",
                hint="restore that checkpoint, or write to a new folder",
            )
        done = self.done_batch
        for table in self._tables.values():
            if done is not None and (table.marked_batch or 0) > done:
                raise ConfigError(
                    f"{table.folder}: is ahead of {self.changes_folder}",
                    hint="one of them was restored from an older copy",
                )

    @property
    def done_batch(self) -> int | None:
        return self.changes.transaction_version(BATCH_MARK)

    @staticmethod
    def prefix(batch_number: int) -> str:
        """Return PartWriter's `prefix` for an attempt at a batch."""
        return f"part-{run_name()}-b{batch_number}"

    def has_changes(self, batch: Batch) -> bool:
        """Return True if `changes` has the batch. Raises ConfigError if checkpoint and tables do not match."""
        self.changes.update_incremental()
        self._refresh_documents()
        self._check(batch.checkpoint)
        done = self.done_batch
        if done is None or batch.number > done:
            return False
        if batch.number < done or self.changes.transaction_version(OFFSETS_MARK) != fingerprint(batch.offsets):
            raise ConfigError(
                f"the checkpoint stands at batch {batch.number}, but {self.folder} has batch {done} with other offsets",
                hint="the checkpoint is an older copy: restore the newer one, or write to a new folder",
            )
        return True

    def add_changes(self, batch: Batch, parts: Iterable[Part]) -> int:
        """Commit an attempt's files to `changes` and return the number of events. Raises MirrorError."""
        held = list(parts)
        metadata = {"batch": str(batch.number)}
        commit_parts(self.changes_folder, self.changes, held, CHANGES, marks=batch.marks(), metadata=metadata)
        self.changes.update_incremental()
        self._waiting_bytes += sum(part.size for part in held)
        return sum(part.rows for part in held)

    def update_documents(self, batch: Batch) -> Applied:
        """Fold a batch of `changes`, and the deferred batches before it, into `documents`. Raises MirrorError."""
        return self._fold(batch.number, batch.marks())

    def due(self) -> bool:
        return self._clock() >= self._due_s or self._waiting_bytes > WAITING_BYTES_MAX

    def catch_up(self) -> Applied:
        """Fold deferred batches. The result's `events` is 0: `add_changes` counted them. Raises MirrorError."""
        done = self.done_batch
        if done is None or done == self.folded_batch:
            return NOTHING
        return self._fold(done, self._marks())._replace(events=0)

    def _marks(self) -> list[Transaction]:
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
            if not names:  # no new file has events of this table
                table.skip_to(number)
                continue
            applied = table.fold(self.changes_folder, names, number, marks)
            done, folded = done.plus(applied), True
            self.rewritten_bytes += table.rewritten_bytes
        if folded:
            with opened(self.changes_folder, self._files_of(number - 1, number)) as files:
                done = done._replace(events=sum(file.metadata.num_rows for file in files))
        self.folded_batch, self._waiting_bytes = number, 0
        self._collections.clear()
        self._since_vacuum_bytes += self.rewritten_bytes
        if self.rewritten_bytes and self._costs.rewrite_rate:
            self._due_s = self._clock() + self.rewritten_bytes / self._costs.rewrite_rate
        return done

    def _make_missing(self, number: int) -> None:
        """Make the table of each collection whose first documents are in unfolded batches up to `number`."""
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
        return sum(table.bytes() for table in self._tables.values())

    def projected_bytes(self) -> int:
        """Estimate the bytes that merges write while replaced files are kept, plus one merge of all documents. Without
        a `rewrite_rate`, merges are expected to write as much as since the last vacuum.
        """
        rate = self._costs.rewrite_rate or self._since_vacuum_bytes / VACUUM_INTERVAL_S
        return round(rate * 3600 * max(1, self._costs.keep_documents_hours)) + self.documents_bytes()

    def _files_of(self, above: int, to: int) -> list[str]:
        """Return the files in `changes` of batch numbers above `above` and up to `to`, in order."""
        found = ((batch_of(name), name) for name in self._files())
        return [name for number, name in sorted((n, name) for n, name in found if n is not None and above < n <= to)]

    def _files(self) -> set[str]:
        return {uri.rsplit("/", 1)[-1] for uri in self.changes.file_uris()}

    def remove_unfinished(self) -> list[str]:
        """Remove the files of uncommitted attempts and return their names. Do nothing on an object store: the files may
        be another process's, and `tidy` removes them by age.
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
        """Compact the tables, and remove files that were replaced more than `keep_hours` ago, in tables of documents
        more than `keep_documents_hours` ago if that is shorter.

        Call this only when every batch is folded: a fold would not find files with new names.
        """
        assert self.done_batch == self.folded_batch, "not within a batch"
        for table in self._tables.values():
            table.mark(self._marks())
        compact(self.changes_folder, self.changes, CHANGES)
        vacuum(self.changes_folder, self.changes, keep_hours)
        self._misfits_table.tidy(keep_hours)
        for table in self._tables.values():
            table.compact()
            table.vacuum(min(keep_hours, self._costs.keep_documents_hours))

    def tidy_documents(self) -> None:
        """Remove files that were replaced more than `keep_documents_hours` ago, at most every VACUUM_INTERVAL_S."""
        if self._clock() >= self._vacuumed_s + VACUUM_INTERVAL_S:
            self._vacuumed_s, self._since_vacuum_bytes = self._clock(), 0
            for table in self._tables.values():
                table.vacuum(self._costs.keep_documents_hours)


def folder_name(collection: str) -> str:
    """Return a folder name for a collection. It has only letters, digits and `._-=`, so URLs need no escapes."""
    return quote(collection, safe="").replace("~", "%7E").replace("%", "=")


def collection_of(folder_name: str) -> str:
    return unquote(folder_name.replace("=", "%"))
