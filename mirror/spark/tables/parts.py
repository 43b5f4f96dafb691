"""Write rows into parts: Parquet files that a commit can add to a Delta table.

The process that reads the data writes the parts, and reports a `Part` for each, complete and synced. An error removes
all files of the writer. If the process is killed, its files stay, and their names tell which run wrote them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq

from mirror.errors import MirrorError
from mirror.spark.places import Folder, folder_at, plain

ROW_GROUP_ROWS = 128 * 1024
ROW_GROUP_BYTES = 64 * 1024 * 1024
"""Bytes in memory at which a row group is written."""

TEXT_BOUND_MAX = 256
"""A text column with a longer minimum or maximum (in characters) gets no statistics in the table's log."""

PART_BYTES_MAX = 512 * 1024 * 1024
"""File size at which a part is finished."""

JOINED_BYTES_MAX = 128 * 1024 * 1024
"""Files of this size or larger are not joined with others."""

NAME = re.compile(r"part-([0-9a-f]{16})-.+\.parquet")


class Part(NamedTuple):
    name: str
    size: int
    rows: int
    stats: str
    """Delta's statistics: JSON."""
    time_ms: int


def run_name() -> str:
    return uuid.uuid4().hex[:16]


def run_of(name: str) -> str | None:
    found = NAME.fullmatch(name.rpartition("/")[2])
    return found[1] if found else None


def files_to_merge(sizes: Sequence[int]) -> list[int]:
    """Return the indexes of files to merge: the smallest files, as many as possible. The largest of them must not be
    larger than the others together.

    So a merge copies each file into a file of at least twice the size, and files of JOINED_BYTES_MAX are never copied.
    This limits how often a byte is copied.
    """
    ascending = sorted((size, at) for at, size in enumerate(sizes) if size < JOINED_BYTES_MAX)
    count = total = 0
    for before, (size, _) in enumerate(ascending):
        if before and size <= total:
            count = before + 1
        total += size
    return sorted(at for _, at in ascending[:count])


class PartWriter:
    """Turns Arrow batches into parts: `with PartWriter(...) as parts: parts.write(batch)`, then `parts.finished`.
    Without rows there is no file, unless `write_empty` is called.
    """

    def __init__(
        self,
        folder: str,
        prefix: str,
        schema: pa.Schema,
        *,
        group_rows: int | None = None,
    ) -> None:
        """Files are `<prefix>-<number>-<unique>.parquet` in `folder`, which must exist, in the order of rows. `prefix`
        begins with `part-<run>`, or with the name of a folder before that.
        """
        assert run_of(f"{prefix}-x.parquet"), "the prefix names the run"
        self.finished: list[Part] = []
        self._folder = folder_at(folder)
        self._prefix = prefix
        self._schema = schema
        self._group_rows = group_rows or ROW_GROUP_ROWS
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = 0
        self._name: str | None = None
        self._file: Any = None
        self._writer: pq.ParquetWriter | None = None
        self._metadata: list[pq.FileMetaData] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._finish()
        except BaseException:
            self._discard()
            raise

    def write(self, batch: pa.RecordBatch) -> None:
        """Raises MirrorError if the folder cannot be written."""
        if not batch.num_rows:
            return
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        if self._held_rows >= self._group_rows or self._held_bytes >= ROW_GROUP_BYTES:
            self._write_group()
            if self._file.tell() >= PART_BYTES_MAX:
                self._finish()

    def write_table(self, rows: pa.Table) -> None:
        for batch in rows.to_batches():
            self.write(batch)

    def write_empty(self) -> None:
        self._write_group()

    def _write_group(self) -> None:
        try:
            if self._writer is None:
                name = f"{self._prefix}-{len(self.finished):04d}-{uuid.uuid4().hex}.parquet"
                self._file = self._folder.create(name)
                self._name = name
                self._writer = pq.ParquetWriter(
                    self._file, self._schema, compression="zstd", metadata_collector=self._metadata
                )
            self._writer.write_table(pa.Table.from_batches(self._held, self._schema))
        except OSError as error:
            raise self._folder.error(error) from error
        self._held.clear()
        self._held_rows = self._held_bytes = 0

    def _finish(self) -> None:
        if self._held:
            self._write_group()
        if self._writer is None or self._name is None:
            return
        try:
            self._writer.close()
            size = self._file.tell()
            self._file.close()
        except OSError as error:
            raise self._folder.error(error) from error
        metadata = self._metadata.pop()
        self.finished.append(
            Part(self._name, size, metadata.num_rows, statistics_of(metadata), time.time_ns() // 1_000_000)
        )
        self._writer = self._file = self._name = None

    def _discard(self) -> None:
        with contextlib.suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        if self._name is not None:
            self._folder.discard(self._file, self._name)
        for part in self.finished:
            with contextlib.suppress(OSError):  # an error before this one matters more
                self._folder.remove(part.name)
        self.finished.clear()


@contextmanager
def opened(folder: Folder, name: str) -> Iterator[pq.ParquetFile]:
    try:
        with folder.open(name) as file:
            yield pq.ParquetFile(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise MirrorError(
            f"{folder.child(name)}: cannot be read: {plain(error)}",
            hint="another program has removed or changed a file of this table: restore it, or write to a new folder",
        ) from error


def groups_of(folder: Folder, name: str, columns: list[str]) -> Iterator[pa.Table]:
    with opened(folder, name) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns)


def text_keys(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Make keys valid text, which every reader of Parquet expects. A key that is not UTF-8 (no Couchbase SDK makes one)
    becomes U+FFFD, `base64:` and its bytes in base64, so that different keys stay different.
    """
    index = next((number for number, name in enumerate(batch.schema.names) if name in ("key", "_key")), None)
    if index is None:
        return batch
    column = batch.column(index)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        found = [None if key is None else _text_of(key) for key in column.cast(pa.binary()).to_pylist()]
        return batch.set_column(index, batch.schema.field(index), pa.array(found, pa.string()))
    return batch


def _text_of(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return "\ufffdbase64:" + base64.b64encode(key).decode()


def statistics_of(metadata: pq.FileMetaData) -> str:
    """Return the statistics by which Delta readers skip files: the row count, and bounds and null counts of top-level
    columns of integers and text.
    """
    least: dict[str, object] = {}
    most: dict[str, object] = {}
    nulls: dict[str, object] = {}
    known = {"minValues": least, "maxValues": most, "nullCount": nulls}
    for column in range(metadata.num_columns):
        described = metadata.schema.column(column)
        name = described.path
        integer = described.physical_type in ("INT32", "INT64") and described.logical_type.type in ("NONE", "INT")
        if "." in name or not (integer or described.logical_type.type == "STRING"):
            continue  # a date or time would need another notation
        for group in range(metadata.num_row_groups):
            found = metadata.row_group(group).column(column).statistics
            if found is None or not found.has_null_count:
                break
            nulls[name] = nulls.get(name, 0) + found.null_count
            if found.has_min_max and not integer and max(len(found.min), len(found.max)) > TEXT_BOUND_MAX:
                break
            if found.has_min_max:
                least[name] = min(least.get(name, found.min), found.min)
                most[name] = max(most.get(name, found.max), found.max)
            elif found.null_count != metadata.row_group(group).num_rows:
                break
        else:
            continue
        for bounds in known.values():  # a row group has no statistics, no bounds or too long ones
            bounds.pop(name, None)
    return json.dumps({"numRecords": metadata.num_rows, **known})
