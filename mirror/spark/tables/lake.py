"""Keep Delta tables current with batches of events. The table `changes` has every event. The table `documents` has the
current documents.

A batch's events come as files in the folder of `changes`. A merge applies the events of one or more batches to
`documents` (documents.py). Delta has no transaction over two tables. But each event counts exactly once in every table,
for these reasons:

1. One commit makes a batch's files part of `changes` and moves the position behind the batch. The commit may only
   become the version after the one whose position the batch began at (delta.py). So a batch counts with its position,
   or not at all, and then its files are orphans that no reader sees. The next attempt begins at the same position and
   may end at another one.
2. A position is a file in `_positions`, which is complete before the commit. A mark in the commit names it.
3. `documents` is the merge of all batches in `changes`, in order. A merge reads the committed files. It does not read
   the source, which may have forgotten superseded versions or rolled back. The commit of a merge is marked with the
   number of the newest batch in it. A merge takes the files whose names have a batch's number above the table's mark. A
   compaction of `changes` gives new names to files, so it runs only when no batch waits for a merge, and leaves a mark:
   `documents` must not be older.
4. There is a second guard: a merge changes a row only if the event's position is above the row's (merge.py). So a batch
   that is merged twice would have no second effect.

A merge writes each file again in which it changes a row. So batches wait for a merge until the oldest has waited for
`max_age_s`. Replaced files go after `keep_hours`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from deltalake import DeltaTable, Schema, Transaction

from mirror.errors import ConfigError
from mirror.spark.places import Folder, LocalFolder, plain
from mirror.spark.runner import LocalRunner, Runner
from mirror.spark.source.columns import CHANGES
from mirror.spark.tables.delta import add_action, commit, committing, compact, lock, open_table, vacuum
from mirror.spark.tables.documents import (
    BATCH_MARK,
    CONFIGURATION,
    STATISTICS,
    Applied,
    DocumentsTable,
    Layout,
    batch_of,
)
from mirror.spark.tables.parts import Part, run_name

CHANGES_FOLDER, DOCUMENTS_FOLDER = "changes", "documents"
POSITIONS_FOLDER = "_positions"

POSITION_MARK = "dcp-mirror/position"
COMPACTED_MARK = "dcp-mirror/compacted"

KEEP_CHANGES_HOURS = 168
"""Replaced files of `changes` are few. In an object store, no lock protects another process's unfinished files."""
VACUUM_INTERVAL_S = 900.0


class Lake:
    """The tables in one folder. A context manager, because it holds the folder's lock."""

    def __init__(
        self,
        folder: Folder,
        layout: Layout | None = None,
        runner: Runner | None = None,
        *,
        part_vbuckets: int = 16,
        max_age_s: float = 0.0,
        keep_hours: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the tables, and make missing ones. `runner` runs the tasks of merges. Raises ConfigError for tables of
        another layout, or that do not belong together, and MirrorError.
        """
        self.folder = folder
        self.changes_folder = folder.child(CHANGES_FOLDER)
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
                layout or Layout(),
                part_vbuckets,
                runner or LocalRunner(1),
            )
            self._check()
            self.position = self._read_position()
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
                    configuration=CONFIGURATION | {"delta.dataSkippingStatsColumns": ",".join(("kind", *STATISTICS))},
                )
        names = [field.name for field in table.schema().fields]
        if names != CHANGES.names:
            raise ConfigError(f"{folder}: a table with other columns ({', '.join(names)})", hint="give another folder")
        return table

    def _check(self) -> None:
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

    @property
    def next_batch(self) -> int:
        return 0 if self.done_batch is None else self.done_batch + 1

    def _position_file(self) -> str | None:
        """Return the name of the file with the position behind the newest batch; None before the first batch."""
        done, mark = self.done_batch, self.changes.transaction_version(POSITION_MARK)
        if done is None:
            return None
        if mark is None:
            raise ConfigError(f"{self.folder}: was made by an older version of this program", hint="give a new folder")
        return _name_of(done, mark)

    def _read_position(self) -> Mapping[str, Any] | None:
        name = self._position_file()
        if name is None:
            return None
        try:
            with self.folder.open(name) as file:
                return dict(json.loads(file.read()))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.folder.child(name)}: cannot be read: {plain(error)}",
                hint="restore the whole folder from one copy, or write to a new folder",
            ) from error

    def add_changes(self, parts: Iterable[Part], position: Mapping[str, Any]) -> int:
        """Commit the files of the next batch to `changes`, and `position` behind it. Return the number of events.
        Raises CommitConflict, MirrorError.
        """
        held, before, number, mark = list(parts), self._position_file(), self.next_batch, int(run_name()[:14], 16)
        try:
            file = self.folder.create(_name_of(number, mark))
            file.write(json.dumps(position).encode())
            file.close()
        except OSError as error:
            raise self.folder.error(error) from error
        marks = [Transaction(BATCH_MARK, number), Transaction(POSITION_MARK, mark)]
        metadata = {"batch": str(number)}
        commit(self.changes_folder, self.changes, map(add_action, held), CHANGES, marks=marks, metadata=metadata)
        self.position = position
        if before is not None:
            with suppress(OSError):  # a small file that is never read
                self.folder.remove(before)
        if self._waiting_since_s is None and held:
            self._waiting_since_s = self._clock()
        return sum(part.rows for part in held)

    @property
    def due_in_s(self) -> float:
        """The time until waiting events must be merged; infinite if none wait."""
        return math.inf if self._waiting_since_s is None else self._waiting_since_s + self._max_age_s - self._clock()

    def merge(self) -> Applied:
        """Merge all waiting batches into `documents`. Raises MirrorError."""
        done, merged = self.done_batch, self.merged_batch
        if done is None or done == merged:
            return Applied()
        applied = self.documents.merge(self.changes_folder, self._files_of(merged, done), done)
        self._waiting_since_s = None
        return applied

    def _files_of(self, above: int, to: int) -> list[str]:
        """Return the files in `changes` of batch numbers above `above` and up to `to`, in order."""
        found = ((batch_of(name), name) for name in names_of(self.changes))
        return [name for number, name in sorted((n, name) for n, name in found if n is not None and above < n <= to)]

    def remove_unfinished(self) -> list[str]:
        """Remove the files of uncommitted attempts and return their names. Do nothing on an object store: the files may
        be another process's, and `tidy` removes them by age.
        """
        removed = []
        for folder, table, done in (
            (self.changes_folder, self.changes, self.next_batch - 1),
            (self.documents.folder, self.documents.table, self.merged_batch),
        ):
            if isinstance(folder, LocalFolder):
                kept = names_of(table)
                for path in folder.path.glob("**/part-*.parquet"):
                    number = batch_of(path.name)
                    if number is not None and number > done and path.name not in kept:
                        path.unlink()
                        removed.append(path.name)
        if isinstance(self.folder, LocalFolder):
            for path in (self.folder.path / POSITIONS_FOLDER).glob("*.json"):
                if path.name != str(self._position_file()).rpartition("/")[2]:
                    path.unlink()
        return removed

    def tidy(self) -> None:
        """Compact `changes`, and remove replaced files. Call this only when every batch is merged: a
        merge would not find files with new names.
        """
        assert self.done_batch in (self.merged_batch, None), "not while batches wait"
        mark = Transaction(COMPACTED_MARK, self.merged_batch)
        compact(self.changes_folder, self.changes, CHANGES, [mark])
        vacuum(self.changes_folder, self.changes, KEEP_CHANGES_HOURS)
        self.documents.vacuum(self._keep_hours)

    def tidy_documents(self) -> None:
        """Remove replaced files of `documents`, at most every VACUUM_INTERVAL_S."""
        if self._clock() >= self._vacuumed_s + VACUUM_INTERVAL_S:
            self._vacuumed_s = self._clock()
            self.documents.vacuum(self._keep_hours)


def names_of(table: DeltaTable) -> set[str]:
    return {uri.rsplit("/", 1)[-1] for uri in table.file_uris()}


def _name_of(batch: int, mark: int) -> str:
    return f"{POSITIONS_FOLDER}/{batch}-{mark:014x}.json"
