"""The Delta table of misfits: versions of documents that do not fit a schema, with the reason and the text's beginning.

Knows its own columns; never how documents are read, nor the tables of documents. The first misfit makes the table.
Invariant: a document's version is recorded once for each reason, even if it is read again, and before its row is
committed to a table of documents.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from deltalake import DeltaTable, Schema

from mirror.spark.places import Folder
from mirror.spark.source.columns import CHANGES
from mirror.spark.tables.delta import committing, compact, only_next, open_table, vacuum

IDENTITY = ("collection", "key", "vbid", "seqno", "cas", "at_branch", "at_seqno")
"""Columns of `changes` that identify a version. Together with the reason they are unique in this table."""
COLUMNS = pa.schema([*map(CHANGES.field, IDENTITY), pa.field("reason", pa.string()), pa.field("text", pa.string())])
TEXT_LENGTH_MAX = 1_000
"""Most characters of a reason, and of a text."""
ROWS_HELD_MAX = 10_000


class MisfitsTable:
    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._held: list[pa.RecordBatch] = []

    def add(self, rows: pa.RecordBatch, problems: Mapping[int, str]) -> None:
        if not problems:
            return
        found = rows.take(pa.array(list(problems), pa.int64()))
        texts = [each.decode(errors="replace")[:TEXT_LENGTH_MAX] for each in found.column("value").to_pylist()]
        reasons = [each[:TEXT_LENGTH_MAX] for each in problems.values()]
        columns = [found.column(name) for name in IDENTITY]
        self._held.append(pa.RecordBatch.from_arrays([*columns, pa.array(reasons), pa.array(texts)], schema=COLUMNS))
        if sum(map(len, self._held)) > ROWS_HELD_MAX:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        table = open_table(self.folder)
        same = " AND ".join(f"t.{name} = s.{name}" for name in (*IDENTITY, "reason"))
        with committing(self.folder, table):
            if table is None:
                table = DeltaTable.create(self.folder.url, Schema.from_arrow(COLUMNS))
            merge = table.merge(
                pa.Table.from_batches(self._held, COLUMNS),
                same,
                source_alias="s",
                target_alias="t",
                commit_properties=only_next(),
            )
            merge.when_not_matched_insert_all().execute()
        self._held.clear()

    def tidy(self, keep_hours: int) -> None:
        table = open_table(self.folder)
        if table is not None:
            compact(self.folder, table, COLUMNS)
            vacuum(self.folder, table, keep_hours)
