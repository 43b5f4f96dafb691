"""The Delta table of current documents: its columns, its parts, and merges of waiting events into them.

The table is partitioned by `_part`, a range of vbuckets. A merge is a task for each part that has waiting events
(merge.py); one commit makes their files the next version. lake.py explains why each event counts exactly once. With a
schema (`Layout.fields`) the metadata columns begin with an underscore, and columns for fields of the JSON body follow.
`_value` keeps the body: when a column is added, one commit writes all rows again.

The mark of a commit (delta.py) is the number of the newest batch in it. All bodies were read with one schema and one
`Reading` (`READING_MARK`). The number of vbuckets in a part never changes (`PART_MARK`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema, Transaction

from mirror.errors import ConfigError
from mirror.spark.places import Folder
from mirror.spark.runner import Runner
from mirror.spark.tables.delta import (
    add_action,
    check_columns,
    check_names,
    commit,
    committing,
    is_name,
    only_next,
    open_table,
    remove_action,
    vacuum,
)
from mirror.spark.tables.merge import (
    PART,
    STATE,
    DocumentColumns,
    Merged,
    MergeTask,
    merge_part,
    vbids_of,
)
from mirror.spark.tables.parts import opened, run_name, run_of
from mirror.typed.bodies import MISFITS_MAX, Bodies, Reading, check_misfits, names_of
from mirror.typed.values import folded

BATCH_MARK = "dcp-mirror"
READING_MARK = "dcp-mirror/reading"
PART_MARK = "dcp-mirror/vbuckets-of-a-part"

CONFIGURATION = {"delta.logRetentionDuration": "interval 7 days", "delta.checkpointInterval": "50"}
"""Settings for a log that grows fast, because each batch makes a commit."""
STATISTICS = ("key", "collection", "vbid", "seqno", "at_branch", "at_seqno")
"""Columns whose statistics let readers skip files."""

ROWS_OF_A_PART = 64
"""In a row group with this many rows for each part between its bounds, all of these parts are taken to have events."""

PERMISSIVE = Reading("permissive")
"""The default reading: a document that does not fit must not stop a stream for ever."""

_NAME = re.compile(r"part-[0-9a-f]{16}-b(\d+)(?:-\d+)*-[0-9a-f]{32}\.parquet")
_TAKEN = frozenset((PART, *(f"_{name}" for name in STATE.names)))


def is_column(field: pa.Field) -> bool:
    """Return True if a table of documents can have this column without being asked for another meaning of its name."""
    return all(map(is_name, names_of([field]))) and folded(field.name) not in {*_TAKEN, PERMISSIVE.corrupt_record}


class Applied(NamedTuple):
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    misfits: int = 0

    def plus(self, other: Applied) -> Applied:
        return Applied(*(mine + others for mine, others in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Layout(DocumentColumns):
    """The columns of a table. Raises ConfigError for a schema unfit for JSON or Delta, or mode dropmalformed."""

    reading: Reading = PERMISSIVE
    misfits_max: float = MISFITS_MAX
    """The greatest allowed share of misfits. It is checked in the first merge, and when a change of columns writes all
    rows again.
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
        check_names(self.fields)
        for name in self.fields.names:
            if folded(name) in _TAKEN:
                raise ConfigError(f"--schema names {name!r}, which is a column of every typed table")

    @property
    def whole_schema(self) -> pa.Schema:
        """The table's columns: those of its files, and the column of the partition."""
        return self.schema.append(pa.field(PART, pa.int32()))

    @property
    def marks(self) -> list[Transaction]:
        """The mark for the `Reading` that a table's bodies were read with."""
        if self.fields is None:
            return []
        reading = self.reading
        return [Transaction(READING_MARK, fingerprint(f"{reading.time_zone} {reading.epoch} {reading.corrupt_record}"))]


def batch_of(name: str) -> int | None:
    """Return the number of the batch for which a file was written; None if a compaction or delta-rs wrote it. The
    pattern is strict, because hexadecimal digits in other names may look like the number of a batch.
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def prefix(batch_number: int) -> str:
    return f"part-{run_name()}-b{batch_number}"


def fingerprint(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


class DocumentsTable:
    def __init__(self, folder: Folder, layout: Layout, part_vbuckets: int, runner: Runner) -> None:
        """Open or make the table. A new table has parts of `part_vbuckets`. If the table's columns differ from
        `layout`, write all rows again. Raises ConfigError, MirrorError.
        """
        self.folder = folder
        self._layout = layout
        self._runner = runner
        self.rewritten_bytes = 0
        table = open_table(folder)
        if table is None:
            self.table = self._make(part_vbuckets)
        else:
            self.table = table
        width = self.table.transaction_version(PART_MARK)
        if width is None or self.table.metadata().partition_columns != [PART]:
            raise ConfigError(
                f"{folder}: was not made by this program, or by an older version of it", hint="give another folder"
            )
        self._width = width
        if table is not None:
            self._adapt()

    def _make(self, part_vbuckets: int) -> DeltaTable:
        skip_by = ",".join(self._layout.mark + name for name in STATISTICS)
        with committing(self.folder, None):
            return DeltaTable.create(
                self.folder.url,
                Schema.from_arrow(self._layout.whole_schema),
                partition_by=[PART],
                configuration=CONFIGURATION | {"delta.dataSkippingStatsColumns": skip_by},
                commit_properties=only_next([*self._layout.marks, Transaction(PART_MARK, part_vbuckets)]),
            )

    def _adapt(self) -> None:
        there = {each.name: each.type for each in self.table.schema().fields}
        if not there.keys() >= set(self._layout.state.names):
            raise ConfigError(
                f"{self.folder}: a table with other columns ({', '.join(sorted(there))})",
                hint="give another folder. Tables that are made with --schema have other names than those without",
            )
        marks = self._layout.marks
        same_reading = all(self.table.transaction_version(each.app_id) == each.version for each in marks)
        expected = {each.name: each.type for each in Schema.from_arrow(self._layout.whole_schema).fields}
        if same_reading and there == expected:
            return
        if self.table.file_uris() and not self._layout.overwrite_schema:
            check_columns(self.folder, self.table, self._layout.whole_schema)
            if not same_reading:
                raise ConfigError(
                    f"{self.folder}: its documents were read with another --time-zone, --epoch or corrupt record",
                    hint="--overwrite-schema reads all of them again",
                )
        files = self._files()
        merged = self._run([self._task(part, files[part], again=True) for part in files], self.batch or 0)
        self._check_misfits(merged)
        self._commit(merged, marks, {}, again=True)

    @property
    def batch(self) -> int | None:
        return self.table.transaction_version(BATCH_MARK)

    def vacuum(self, keep_hours: int) -> None:
        vacuum(self.folder, self.table, keep_hours)

    # -- merges ---------------------------------------------------------------------------------------------------

    def merge(self, changes: Folder, names: Sequence[str], number: int) -> Applied:
        """Merge files of `changes` into the table. `names` are all files up to batch `number` that the table lacks, in
        the order of batches. Raises CommitConflict, TooManyMisfits, MirrorError.
        """
        files = self._files()
        waiting: dict[int, list[str]] = {}
        for name in names:
            for part in self._parts_of(changes, name):
                waiting.setdefault(part, []).append(name)
        tasks = [self._task(part, files.get(part, []), changes.url, waiting[part]) for part in sorted(waiting)]
        merged = self._run(tasks, number)
        if self.batch is None:  # a later batch may have one document: its misfit must not stop the stream
            self._check_misfits(merged)
        self._commit(merged, [Transaction(BATCH_MARK, number)], {"batch": str(number)}, again=False)
        done = Applied()
        for each in merged.values():
            done = done.plus(Applied(each.inserted, each.updated, each.deleted, each.misfit_count))
        return done

    def _files(self) -> dict[int, list[tuple[str, int]]]:
        """Return names and sizes of each part's files. Raises ConfigError for a file of another program."""
        found: dict[int, list[tuple[str, int]]] = {}
        for file in pa.table(self.table.get_add_actions()).to_pylist():
            name, part = file["path"], file["partition"][PART]
            if run_of(name) is None or part is None:
                raise ConfigError(
                    f"{self.folder}: has a file of another program ({name})",
                    hint="restore the version before it (DeltaTable.restore), or write to a new folder",
                )
            found.setdefault(part, []).append((name, file["size_bytes"]))
        return found

    def _parts_of(self, changes: Folder, name: str) -> set[int]:
        """Return the parts that have events in a file. Only statistics are read, unless a row group has few rows: of
        many, each part between its bounds has some.
        """
        parts: set[int] = set()
        with opened(changes, name) as file:
            for group in range(file.num_row_groups):
                first, last = vbids_of(file.metadata.row_group(group))
                between = range(first // self._width, last // self._width + 1)
                if ROWS_OF_A_PART * len(between) > file.metadata.row_group(group).num_rows:
                    vbids = file.read_row_group(group, ["vbid"])["vbid"]
                    parts.update(pc.unique(pc.divide(vbids, self._width)).to_pylist())
                else:
                    parts.update(between)
        return parts

    def _task(
        self,
        part: int,
        files: Sequence[tuple[str, int]],
        changes: str = "",
        names: Sequence[str] = (),
        *,
        again: bool = False,
    ) -> MergeTask:
        vbids = (part * self._width, (part + 1) * self._width - 1)
        return MergeTask(self._layout, part, vbids, changes, names, self.folder.url, files, "", again)

    def _run(self, tasks: Sequence[MergeTask], number: int) -> dict[int, Merged]:
        start = prefix(number)
        found = self._runner.run(merge_part, [task._replace(prefix=start) for task in tasks])
        return {task.part: merged for task, merged in zip(tasks, found, strict=True)}

    def _check_misfits(self, merged: Mapping[int, Merged]) -> None:
        """Raise TooManyMisfits if more than the allowed share of the bodies does not fit."""
        misfits, bodies = sum(x.misfit_count for x in merged.values()), sum(x.bodies_count for x in merged.values())
        check_misfits(misfits, bodies, self._layout.misfits_max)

    def _commit(
        self, merged: Mapping[int, Merged], marks: Sequence[Transaction], metadata: dict[str, str], *, again: bool
    ) -> None:
        added = [add_action(each, {PART: str(part)}) for part, done in merged.items() for each in done.added]
        removed = [] if again else [remove_action(name) for done in merged.values() for name in done.removed]
        self.rewritten_bytes = sum(each.size for done in merged.values() for each in done.added)
        schema = self._layout.whole_schema
        commit(
            self.folder,
            self.table,
            [*added, *removed],
            schema,
            partition_by=[PART],
            overwrite=again,
            marks=marks,
            metadata=metadata,
        )
