"""Delta tables: many processes write a table's files, and one process commits them, each commit once.

A commit may carry marks (Delta's transaction actions: a name and a number), which show later that it was made. delta-rs
records marks, but accepts the same mark twice. So the caller looks a mark up in one version of the table, and its
commit may only become the next version (no retries). If another commit comes first, this commit raises `CommitConflict`
and has no effect.

Files that no commit names are orphans of killed runs. On a disk the next run takes the folder's lock and removes
orphans. In an object store, which has no lock, a file without a commit may belong to a running job: only `vacuum`
removes it, by its age.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.schema import ArrayType, MapType, PrimitiveType, StructType
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from mirror.errors import ConfigError, MirrorError
from mirror.spark.places import Folder, LocalFolder, plain
from mirror.spark.tables.parts import Part, PartWriter, files_to_merge, groups_of, run_name, run_of
from mirror.typed.bodies import names_of

LOCK_FILE = "_dcp_mirror.lock"
LOG_FOLDER = "_delta_log"
RUN = "dcp_mirror_run"
"""Key in a commit's metadata. The value is the run that wrote the commit's files."""

_NOT_IN_NAMES = re.compile(r"[\s,;{}()=.\"'`]")
"""Characters that a column's name must not have in SQL, or in a Delta table without column mapping."""


class CommitConflict(MirrorError):
    """Another writer committed meanwhile; this commit had no effect."""

    retryable = True


class FolderLock:
    """The lock of a folder for one writer. A missing folder is made. The lock ends with its process."""

    def __init__(self, folder: Path) -> None:
        """Take the lock at once or raise MirrorError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LocalFolder(folder).error(error) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise MirrorError(
                f"{folder}: another pipeline is writing here", hint="wait for it, or give another folder"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)


def lock(folder: Folder) -> FolderLock | ExitStack:
    """Lock a folder on a disk. An object store has no lock: of two writers there, the second to commit fails."""
    return FolderLock(folder.path) if isinstance(folder, LocalFolder) else ExitStack()


def open_table(folder: Folder) -> DeltaTable | None:
    if isinstance(folder, LocalFolder) and not (folder.path / LOG_FOLDER).is_dir():
        return None
    try:
        return DeltaTable(folder.url) if DeltaTable.is_deltatable(folder.url) else None
    except (DeltaError, OSError) as error:
        raise MirrorError(f"{folder}: cannot be read as a Delta table: {plain(error)}", hint=folder.remedy) from error


def only_next(marks: Sequence[Transaction] = (), metadata: dict[str, str] | None = None) -> CommitProperties:
    """Return the properties of a commit that may only become the next version."""
    return CommitProperties(
        custom_metadata=metadata, max_commit_retries=0, app_transactions=list(marks) if marks else None
    )


@contextmanager
def committing(folder: Folder, table: DeltaTable | None) -> Iterator[None]:
    """Turn the error of a commit to `table` (None: a new table) into CommitConflict or MirrorError."""
    try:
        yield
    except (DeltaError, OSError) as error:
        now = open_table(folder)
        if isinstance(error, CommitFailedError) or (now is None) != (table is None):
            raise CommitConflict(
                f"{folder}: another writer has committed to this table", hint="run it again"
            ) from error
        raise MirrorError(f"{folder}: the commit failed: {plain(error)}") from error


def add_action(part: Part, partition: Mapping[str, str] | None = None, *, new_rows: bool = True) -> AddAction:
    """Return Delta's action for a part. `new_rows`: False if all its rows were in other files before."""
    return AddAction(part.name, part.size, dict(partition or {}), part.time_ms, new_rows, part.stats)


def remove_action(name: str, *, rows_change: bool = True) -> RemoveAction:
    return RemoveAction(name, rows_change, time.time_ns() // 1_000_000)


def commit(
    folder: Folder,
    table: DeltaTable | None,
    actions: Iterable[AddAction | RemoveAction],
    schema: pa.Schema,
    *,
    partition_by: Sequence[str] = (),
    overwrite: bool = False,
    marks: Sequence[Transaction] = (),
    metadata: dict[str, str] | None = None,
) -> None:
    """Commit `actions` as the version after `table` (None: the first version). With `overwrite` the added files replace
    all others. Raises MirrorError; CommitConflict if that version exists already.
    """
    held, expected, how = list(actions), Schema.from_arrow(schema), only_next(marks, metadata)
    with committing(folder, table):
        if table is not None and _has_local_times(expected) and not _has_local_times(table.schema()):
            # without this feature delta-rs would commit the column, but no reader could read the table
            table.alter.add_feature(TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True)
        if table is None:
            create_table_with_add_actions(folder.url, expected, held, "error", commit_properties=how)  # type: ignore[arg-type]
        else:
            mode: Literal["overwrite", "append"] = "overwrite" if overwrite else "append"
            table.create_write_transaction(held, mode, expected, list(partition_by), commit_properties=how)
            table.update_incremental()


def compact(folder: Folder, table: DeltaTable, schema: pa.Schema, marks: Sequence[Transaction] = ()) -> int:
    """Merge small files of a table in one commit that changes no row. Return the number of replaced files. Memory holds
    one row group. Raises CommitConflict, MirrorError.
    """
    files = sorted(pa.table(table.get_add_actions()).to_pylist(), key=lambda each: each["modification_time"])
    chosen = [files[at]["path"] for at in files_to_merge([each["size_bytes"] for each in files])]
    if not chosen:
        return 0
    with PartWriter(folder.url, f"part-{run_name()}-compacted", schema) as parts:
        for name in chosen:
            for rows in groups_of(folder, name, schema.names):
                parts.write_table(rows.cast(schema))
    added = [add_action(part, new_rows=False) for part in parts.finished]
    removed = [remove_action(name, rows_change=False) for name in chosen]
    commit(folder, table, [*added, *removed], schema, marks=marks, metadata={"compacted": "1"})
    return len(chosen)


def vacuum(folder: Folder, table: DeltaTable, keep_hours: int) -> None:
    try:
        table.update_incremental()
        table.vacuum(keep_hours, dry_run=False, enforce_retention_duration=False, full=True)
    except (DeltaError, OSError) as error:
        raise MirrorError(f"{folder}: clean-up failed: {plain(error)}") from error


def _has_local_times(schema: Schema) -> bool:
    return '"timestamp_ntz"' in schema.to_json()


def is_name(name: str) -> bool:
    """Return True if a Delta table allows this name of a column, or of a field in one."""
    return not _NOT_IN_NAMES.search(name)


def check_names(schema: pa.Schema) -> None:
    """Raise ConfigError if a Delta table cannot have one of the names."""
    for name in names_of(schema):
        if not is_name(name):
            raise ConfigError(
                f"--schema names {name!r}: a Delta table cannot have this column name",
                hint="leave it out, or export Parquet files",
            )


def check_columns(folder: Folder, table: DeltaTable, schema: pa.Schema) -> None:
    """Raise ConfigError if `schema` lacks a column of the table, or has it with another type. New columns and new
    fields of a struct are allowed.
    """
    new = {field.name: field.type for field in Schema.from_arrow(schema).fields}
    for field in table.schema().fields:
        if field.name not in new or not _has_all_of(new[field.name], field.type):
            now = f"be {_type_name(new[field.name])}" if field.name in new else "be gone"
            raise ConfigError(
                f"{folder}: column {field.name} is {_type_name(field.type)} in the table and would {now}",
                hint="--overwrite-schema gives the table these columns",
            )


def _has_all_of(new: Any, old: Any) -> bool:
    """Return True if type `new` is type `old`, perhaps with more fields in structs."""
    if isinstance(old, StructType) and isinstance(new, StructType):
        fields = {each.name: each.type for each in new.fields}
        return all(each.name in fields and _has_all_of(fields[each.name], each.type) for each in old.fields)
    if isinstance(old, ArrayType) and isinstance(new, ArrayType):
        return _has_all_of(new.element_type, old.element_type)
    if isinstance(old, MapType) and isinstance(new, MapType):
        return bool(new.key_type == old.key_type) and _has_all_of(new.value_type, old.value_type)
    return bool(new == old)


def _type_name(kind: Any) -> str:
    if isinstance(kind, StructType):
        return f"struct<{', '.join(f'{each.name}: {_type_name(each.type)}' for each in kind.fields)}>"
    if isinstance(kind, ArrayType):
        return f"array<{_type_name(kind.element_type)}>"
    if isinstance(kind, MapType):
        return f"map<{_type_name(kind.key_type)}, {_type_name(kind.value_type)}>"
    return str(kind.type if isinstance(kind, PrimitiveType) else kind)


def remove_orphans(folder: LocalFolder, table: DeltaTable | None) -> list[str]:
    """Remove the parts of runs without a commit, and return their names.

    The caller must hold the folder's lock: without it, another unfinished run could lose its files. A run has a commit
    if the table's history names the run (`RUN`), or if the table has a file of the run.
    """
    named: set[str] = set()
    if table is not None:
        named |= {run for uri in table.file_uris() if (run := run_of(uri.rsplit("/", 1)[-1])) is not None}
        named |= {str(entry[RUN]) for entry in table.history() if RUN in entry}
    removed = []
    for name in folder.names():
        if (run := run_of(name)) is not None and run not in named:
            folder.remove(name)
            removed.append(name)
    return removed


def require_absent_or_table(folder: Folder) -> None:
    try:
        names = folder.names()
    except NotADirectoryError:
        return  # the error is raised when the table is made
    except OSError as error:
        raise folder.error(error) from error
    strangers = [each for each in names if each != LOCK_FILE and run_of(each) is None]
    if LOG_FOLDER not in names and strangers:
        raise ConfigError(
            f"{folder}: not empty, and no Delta table ({', '.join(strangers[:3])})", hint="give an empty or new folder"
        )
