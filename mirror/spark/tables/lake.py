"""Keep Delta tables current from a stream of batches of events. The table `changes` has every event. The table
`documents` has the current documents. The table `quarantine` has documents that do not fit the schema.

A batch's events come as files in the folder of `changes`. A merge applies the events of one or more batches to
`documents` (documents.py). Never knows the origin of events, nor Spark. Delta has no transaction over two tables. But
each event counts exactly once in every table, for these reasons:

1. A batch's files become part of `changes` in one commit, which carries the batch's number as a mark. The commit may
   only become the version after the one in which the mark was looked up (delta.py). So only one attempt at a batch is
   committed. The files of other attempts are orphans that no reader sees.
2. `documents` is the merge of all batches in `changes`, in order. A merge reads the committed files. It does not read
   the source, which may have forgotten superseded versions or rolled back. The commit of a merge is marked with the
   number of the newest batch in it.
3. A batch begins only when the batch before is in `changes` or has no events. So after a crash only the newest batch
   may be missing in `changes`, and runs again. `documents` is never ahead of `changes`, but may be some batches behind.
   A merge takes the files whose names have a batch's number above the table's mark. A compaction of `changes` gives new
   names to files, so it runs only when no batch waits for a merge, and leaves a mark: `documents` must not be older.
4. There is a second guard: a merge changes a row only if the event's position is above the row's (merge.py). So a batch
   that is merged twice would have no second effect.
5. Two more marks name the stream's checkpoint and the batch's offsets. Another checkpoint is refused: it would skip or
   repeat events. An older copy of the same checkpoint is refused, too: its batches may have other offsets.

A merge writes each file again in which it changes a row. So batches wait for a merge until the oldest has waited for
`max_age_s`. Replaced files go after `keep_hours`.

Invariant: at any moment every table can be read, and shows the state after some batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from deltalake import DeltaTable, Schema, Transaction

from mirror.errors import ConfigError
from mirror.spark.places import Folder, LocalFolder
from mirror.spark.runner import LocalRunner, Runner
from mirror.spark.source.columns import CHANGES
from mirror.spark.source.offsets import check_selection
from mirror.spark.tables.delta import add_action, commit, committing, compact, lock, open_table, vacuum
from mirror.spark.tables.documents import (
    BATCH_MARK,
    CONFIGURATION,
    STATISTICS,
    Applied,
    DocumentsTable,
    Layout,
    batch_of,
    fingerprint,
)
from mirror.spark.tables.merge import QUARANTINE
from mirror.spark.tables.parts import Part

CHANGES_FOLDER, DOCUMENTS_FOLDER, QUARANTINE_FOLDER = "changes", "documents", "quarantine"

CHECKPOINT_MARK = "dcp-mirror/checkpoint"
OFFSETS_MARK = "dcp-mirror/offsets"
COMPACTED_MARK = "dcp-mirror/compacted"

KEEP_CHANGES_HOURS = 168
"""Replaced files of `changes` are few. In an object store, no lock protects another process's unfinished files."""
VACUUM_INTERVAL_S = 900.0


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
        layout: Layout | None = None,
        runner: Runner | None = None,
        *,
        part_vbuckets: int = 16,
        max_age_s: float = 0.0,
        keep_hours: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the tables, and make missing ones. `checkpoint` is the id of the stream's checkpoint (None: a new one);
        `selection` is the stream's. `runner` runs the tasks of merges. Raises ConfigError for tables with another
        checkpoint, selection or layout, and MirrorError.
        """
        self.folder = folder
        self.changes_folder = folder.child(CHANGES_FOLDER)
        self.quarantine_folder = folder.child(QUARANTINE_FOLDER)
        self._selection = selection
        self._max_age_s = max_age_s
        self._keep_hours = keep_hours
        self._clock = clock
        self._waiting_since_s: float | None = None
        self._vacuumed_s = clock()
        self._lock = lock(folder)
        try:
            self.changes = self._open_or_make_changes()
            self.documents = DocumentsTable(
                folder.child(DOCUMENTS_FOLDER),
                self.quarantine_folder,
                layout or Layout(),
                selection,
                part_vbuckets,
                runner or LocalRunner(1),
            )
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

    def _open_or_make_changes(self) -> DeltaTable:
        folder = self.changes_folder
        table = open_table(folder)
        if table is None:
            with committing(folder, None):
                return DeltaTable.create(
                    folder.url,
                    Schema.from_arrow(CHANGES),
                    description=self._selection or None,
                    configuration=CONFIGURATION | {"delta.dataSkippingStatsColumns": ",".join(("kind", *STATISTICS))},
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
        first, merged, done = self.changes.transaction_version(COMPACTED_MARK), self.merged_batch, self.done_batch
        if not (-1 if first is None else first) <= merged <= (-1 if done is None else done):
            raise ConfigError(
                f"{self.documents.folder}: does not belong to {self.changes_folder}: they end at batches {merged} and "
                f"{done}",
                hint="restore both from one copy, or write to a new folder",
            )

    @property
    def done_batch(self) -> int | None:
        return self.changes.transaction_version(BATCH_MARK)

    @property
    def merged_batch(self) -> int:
        """The newest batch in `documents`, or -1."""
        batch = self.documents.batch
        return -1 if batch is None else batch

    def has_changes(self, batch: Batch) -> bool:
        """Return True if `changes` has the batch. Raises ConfigError if checkpoint and tables do not match."""
        self.changes.update_incremental()
        self.documents.table.update_incremental()
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
        held, metadata = list(parts), {"batch": str(batch.number)}
        actions = map(add_action, held)
        commit(self.changes_folder, self.changes, actions, CHANGES, marks=batch.marks(), metadata=metadata)
        if self._waiting_since_s is None:
            self._waiting_since_s = self._clock()
        return sum(part.rows for part in held)

    def due(self) -> bool:
        return self._waiting_since_s is not None and self._clock() >= self._waiting_since_s + self._max_age_s

    def merge(self) -> Applied:
        """Merge all waiting batches into `documents`. Raises MirrorError."""
        done, merged = self.done_batch, self.merged_batch
        if done is None or done == merged:
            return Applied()
        applied = self.documents.merge(self.changes_folder, self._files_of(merged, done), self._marks(), done)
        self._waiting_since_s = None
        return applied

    def _marks(self) -> list[Transaction]:
        marks = [(name, self.changes.transaction_version(name)) for name in (BATCH_MARK, CHECKPOINT_MARK, OFFSETS_MARK)]
        return [Transaction(name, version) for name, version in marks if version is not None]

    def _files_of(self, above: int, to: int) -> list[str]:
        """Return the files in `changes` of batch numbers above `above` and up to `to`, in order."""
        found = ((batch_of(name), name) for name in names_of(self.changes))
        return [name for number, name in sorted((n, name) for n, name in found if n is not None and above < n <= to)]

    def remove_unfinished(self) -> list[str]:
        """Remove the files of uncommitted attempts and return their names. Do nothing on an object store: the files may
        be another process's, and `tidy` removes them by age.
        """
        done = -1 if self.done_batch is None else self.done_batch
        removed = _remove_unfinished(self.changes_folder, self.changes, done)
        return removed + _remove_unfinished(self.documents.folder, self.documents.table, self.merged_batch)

    def tidy(self) -> None:
        """Compact `changes` and `quarantine`, and remove replaced files. Call this only when every batch is merged: a
        merge would not find files with new names.
        """
        assert self.done_batch in (self.merged_batch, None), "not while batches wait"
        mark = Transaction(COMPACTED_MARK, self.merged_batch)
        compact(self.changes_folder, self.changes, CHANGES, [mark])
        vacuum(self.changes_folder, self.changes, KEEP_CHANGES_HOURS)
        quarantine = open_table(self.quarantine_folder)
        if quarantine is not None:
            compact(self.quarantine_folder, quarantine, QUARANTINE)
            vacuum(self.quarantine_folder, quarantine, self._keep_hours)
        self.documents.vacuum(self._keep_hours)

    def tidy_documents(self) -> None:
        """Remove replaced files of `documents`, at most every VACUUM_INTERVAL_S."""
        if self._clock() >= self._vacuumed_s + VACUUM_INTERVAL_S:
            self._vacuumed_s = self._clock()
            self.documents.vacuum(self._keep_hours)


def names_of(table: DeltaTable) -> set[str]:
    return {uri.rsplit("/", 1)[-1] for uri in table.file_uris()}


def _remove_unfinished(folder: Folder, table: DeltaTable, done: int) -> list[str]:
    if not isinstance(folder, LocalFolder):
        return []
    kept = names_of(table)
    numbers = {each: batch_of(each) for each in folder.names() if each not in kept}
    removed = [each for each, number in numbers.items() if number is not None and number > done]
    for name in removed:
        folder.remove(name)
    return removed
