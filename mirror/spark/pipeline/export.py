"""`export`: the documents of a mirror as Parquet files or a Delta table, every vbucket at one boundary.

Each task reads some vbuckets and writes their documents into files of its own. At the end the driver makes these files
visible as one export. The boundaries are leased before the first task, so the service may publish, roll back and purge
during a long export.

- Delta: one commit makes the table's next version. The commit's metadata has the boundaries as tokens. Parquet: tasks
  write to the folder `<target>.incomplete`; its file `_SUCCESS` has the metadata as JSON. One rename moves an older
  target away, and a second rename makes the folder the target. A killed export leaves no version and no incomplete
  target; the next run removes its files.
- An object store has no rename, and takes Delta tables only.
"""

from __future__ import annotations

import json
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from mirror.errors import ConfigError, MirrorError
from mirror.spark.places import Folder, LocalFolder, folder_at
from mirror.spark.runner import Progress, Runner
from mirror.spark.source.columns import DOCUMENTS
from mirror.spark.source.local import Job, hold, plan, read
from mirror.spark.source.options import Options
from mirror.spark.tables import delta
from mirror.spark.tables.delta import (
    FolderLock,
    add_action,
    check_columns,
    commit,
    lock,
    open_table,
    remove_orphans,
    require_absent_or_table,
)
from mirror.spark.tables.parts import Part, PartWriter, run_name, text_keys
from mirror.typed.bodies import AS_DECLARED, MISFITS_MAX, Bodies, Reading, check_misfits
from mirror.typed.rows import Counts, Shape
from mirror.typed.values import folded
from storage.env.directory import sync_directory
from storage.read.view import open_view

TASKS_PER_CORE = 4
"""Small tasks keep all cores busy until the end, and show progress."""

SUCCESS_FILE = "_SUCCESS"


class ExportTask(NamedTuple):
    job: Job
    vbids: list[int]
    shape: Shape
    folder: str
    prefix: str


class Written(NamedTuple):
    parts: list[Part]
    counts: Counts


@dataclass(frozen=True)
class Exported:
    target: str
    format: str
    documents: int
    misfits: int
    files: int
    bytes: int
    vbuckets: int
    version: int | None
    orphans_removed: int
    elapsed_s: float


def shape_of(fields: pa.Schema | None, reading: Reading = AS_DECLARED) -> Shape:
    """Return the columns of an export. With `fields`, the names of the metadata columns begin with an underscore, and
    `fields` follow in place of `value`. Raises ConfigError for a field with the name of a metadata column, or with a
    type unfit for JSON.
    """
    if fields is None:
        return Shape(DOCUMENTS, (False,) * len(DOCUMENTS))
    Bodies(fields, reading)
    own = [field.with_name("_" + field.name) for field in DOCUMENTS if field.name != "value"]
    own_names = {field.name for field in own}
    if taken := [name for name in fields.names if folded(name) in own_names]:
        raise ConfigError(f"--schema names {taken[0]!r}, which is a column of every typed export")
    return Shape(pa.schema([*own, *fields]), (False,) * len(own) + (True,) * len(fields), reading)


def export(
    data: Path,
    target: Path | str,
    runner: Runner,
    *,
    delta_table: bool = False,
    collections: tuple[str | int, ...] | None = None,
    vbuckets: frozenset[int] | None = None,
    as_of_ms: int | None = None,
    fields: pa.Schema | None = None,
    reading: Reading | None = None,
    misfits_max: float = MISFITS_MAX,
    overwrite: bool = False,
    overwrite_schema: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the documents of the mirror at `data` into `target`: a path or a URL (places.py).

    `fields` are columns that replace `value`. `reading` says how they are read from JSON documents. If the share of
    documents that do not fit exceeds `misfits_max`, nothing is exported. `overwrite_schema` allows changes of a Delta
    table's columns. Raises MirrorError and the store's errors.
    """
    start_s = time.monotonic()
    data, folder = data.absolute(), folder_at(target)
    shape = shape_of(fields, reading or AS_DECLARED)
    if delta_table:
        delta.check_names(shape.schema)
    with open_view(str(data)) as view:
        identity = view.identity
    with _target(folder, delta_table, overwrite) as place:
        if not overwrite_schema:
            place.check_schema(shape.schema)
        count = runner.parallelism * TASKS_PER_CORE
        options = Options(
            path=str(data), collections=collections, vbuckets=vbuckets, as_of_ms=as_of_ms, partitions=count
        )
        job, written = _write(runner, options, shape, place, progress)
        parts = [part for each in written for part in each.parts]
        place.check(parts)
        misfits = sum(each.counts.misfits for each in written)
        check_misfits(misfits, sum(each.counts.documents for each in written), misfits_max)
        facts = {
            "bucket": identity.bucket_name,
            "bucket_uuid": identity.bucket_uuid,
            "boundaries": " ".join(map(str, job.pins)),
            delta.RUN: place.run,
        } | ({} if fields is None else {"misfits": str(misfits)})
        place.finish(parts, shape.schema, facts)
    return Exported(
        target=folder.url,
        format="delta" if delta_table else "parquet",
        documents=sum(part.rows for part in parts),
        misfits=misfits,
        files=len(parts),
        bytes=sum(part.size for part in parts),
        vbuckets=len(job.pins),
        version=place.version,
        orphans_removed=place.orphans_removed,
        elapsed_s=time.monotonic() - start_s,
    )


def _write(
    runner: Runner, options: Options, shape: Shape, place: _Target, progress: Progress | None
) -> tuple[Job, list[Written]]:
    job, shares = plan(options)
    lease = hold(job)
    try:
        tasks = [
            ExportTask(job, vbids, shape, place.folder.url, f"part-{place.run}-{number:05d}")
            for number, vbids in enumerate(shares)
        ]
        return job, runner.run(export_task, tasks, progress)
    finally:
        lease.release()


def export_task(task: ExportTask) -> Written:
    counts = Counts()
    with PartWriter(task.folder, task.prefix, task.shape.schema) as parts:
        for batch in read(task.job, task.vbids, task.shape, counts):
            parts.write(text_keys(batch))
    return Written(parts.finished, counts)


class _Target(ABC):
    """The destination of the files; on a disk it is locked until the context ends. After an error the context removes
    this run's files, except in an object store. The constructor raises MirrorError.
    """

    version: int | None = None
    orphans_removed = 0

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.run = run_name()

    def check(self, parts: Sequence[Part]) -> None:
        """Raise MirrorError for a reported file that the driver does not see: it may be on an executor's disk."""
        try:
            for part in parts:
                if self.folder.size(part.name) != part.size:
                    raise MirrorError(
                        f"{self.folder.child(part.name)} was written by an executor and is not here",
                        hint="give a folder that the driver and all executors share",
                    )
        except OSError as error:
            raise self.folder.error(error) from error

    def check_schema(self, schema: pa.Schema) -> None:  # noqa: B027 - only Delta tables have a schema
        ...

    def __enter__(self) -> _Target:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    @abstractmethod
    def finish(self, parts: Sequence[Part], schema: pa.Schema, facts: dict[str, str]) -> None: ...


def _target(folder: Folder, delta_table: bool, overwrite: bool) -> _Target:
    if delta_table:
        return _Delta(folder, overwrite)
    if not isinstance(folder, LocalFolder):
        raise ConfigError(
            f"{folder}: an object store cannot rename a complete export of Parquet files",
            hint="--format delta, or give a folder",
        )
    return _Folder(folder.path, overwrite)


class _Delta(_Target):
    def __init__(self, target: Folder, overwrite: bool) -> None:
        super().__init__(target)
        require_absent_or_table(target)
        self._lock = lock(target)
        try:
            self._table = open_table(target)
            if self._table is not None and not overwrite:
                raise ConfigError(
                    f"{target}: holds a Delta table already (version {self._table.version()})",
                    hint="--overwrite makes this export its next version",
                )
            if isinstance(target, LocalFolder):
                self.orphans_removed = len(remove_orphans(target, self._table))
        except BaseException:
            self._lock.close()
            raise

    def check_schema(self, schema: pa.Schema) -> None:
        if self._table is not None:
            check_columns(self.folder, self._table, schema)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and isinstance(self.folder, LocalFolder):
            remove_orphans(self.folder, open_table(self.folder))
        self._lock.close()

    def finish(self, parts: Sequence[Part], schema: pa.Schema, facts: dict[str, str]) -> None:
        commit(self.folder, self._table, map(add_action, parts), schema, overwrite=True, metadata=facts)
        table = open_table(self.folder)
        self.version = None if table is None else table.version()


class _Folder(_Target):
    """A folder of Parquet files, which gets its name when it is complete."""

    def __init__(self, target: Path, overwrite: bool) -> None:
        self._target = target
        self._old = target.with_name(target.name + ".old")
        self._incomplete = target.with_name(target.name + ".incomplete")
        super().__init__(LocalFolder(self._incomplete))
        self._lock = FolderLock(self._incomplete)
        try:
            if not target.exists() and self._old.exists():  # an earlier run was killed between its two renames
                self._old.rename(target)
            if target.exists() and not self._may_go(overwrite):
                raise ConfigError(
                    f"{target}: exists already",
                    hint="--overwrite replaces an export that is there; or give a new folder",
                )
            for left in self._left():
                left.unlink()
                self.orphans_removed += 1
        except BaseException:
            self.__exit__(None)
            raise

    def _left(self) -> list[Path]:
        return [each for each in self._incomplete.iterdir() if each.name != delta.LOCK_FILE]

    def _may_go(self, overwrite: bool) -> bool:
        """Return True for a target that may be replaced: an empty folder, or with `overwrite` an export."""
        if not self._target.is_dir():
            return False
        return not any(self._target.iterdir()) or (overwrite and (self._target / SUCCESS_FILE).is_file())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._incomplete.is_dir() and (kind is not None or not self._left()):
            shutil.rmtree(self._incomplete, ignore_errors=True)
        self._lock.close()

    def finish(self, parts: Sequence[Part], schema: pa.Schema, facts: dict[str, str]) -> None:
        try:
            self._success(parts or self._empty(schema, facts), facts)
            (self._incomplete / delta.LOCK_FILE).unlink()
            sync_directory(str(self._incomplete))
            if self._target.exists():
                self._target.rename(self._old)
            self._incomplete.rename(self._target)
            sync_directory(str(self._target.parent))
            shutil.rmtree(self._old, ignore_errors=True)
        except OSError as error:
            raise LocalFolder(self._target).error(error) from error

    def _success(self, parts: Sequence[Part], facts: dict[str, str]) -> None:
        counted = {"documents": sum(part.rows for part in parts), "files": len(parts)}
        file = self.folder.create(SUCCESS_FILE)
        file.write(json.dumps({**facts, **counted, "names": [part.name for part in parts]}).encode())
        file.close()

    def _empty(self, schema: pa.Schema, facts: dict[str, str]) -> list[Part]:
        """Write a file without rows, which shows readers the columns."""
        with PartWriter(self.folder.url, f"part-{facts[delta.RUN]}-00000", schema) as writer:
            writer.write_empty()
        return writer.finished
