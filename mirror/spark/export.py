"""`export`: the documents of a mirror as Parquet files or a Delta table, every vbucket at one boundary.

Knows how an export is cut into tasks, where its files go and when it is done; never a command line, nor Spark: a
Runner runs the tasks. Each task reads its vbuckets where it runs and writes its own files there; the driver gets a
few hundred bytes for each file, and makes them one export at the end. Invariants:

- The boundaries are pinned and leased before the first task, so a long export is as consistent as a short one, also
  while the service publishes, rolls back and purges.
- Delta: one commit, the next version of the table, and its metadata says the boundaries as tokens. Parquet: the files
  are written into `<target>.incomplete`, which becomes the target by one rename, with `_SUCCESS` (the same facts as
  JSON) in it. A killed export leaves no version and no `_SUCCESS`; its files are removed by the next run.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from mirror.errors import ConfigError, MirrorError
from mirror.spark import delta
from mirror.spark.bodies import Bodies
from mirror.spark.columns import DOCUMENTS
from mirror.spark.delta import FolderLock, commit_parts, open_table, remove_orphans, require_absent_or_table
from mirror.spark.local import Job, Shape, Wanted, hold, plan, read
from mirror.spark.options import Options
from mirror.spark.parts import Part, PartWriter, folder_error, run_name, text_keys
from mirror.spark.runner import Progress, Runner
from storage.directory import sync_directory
from storage.view import open_view

TASKS_PER_CORE = 4
"""More tasks than cores: the last ones to finish are small, and there is progress to show."""

SUCCESS_FILE = "_SUCCESS"


class Task(NamedTuple):
    """What one task writes."""

    job: Job
    vbids: list[int]
    shape: Shape
    folder: str
    prefix: str


@dataclass(frozen=True)
class Exported:
    """What an export did."""

    target: str
    format: str
    documents: int
    files: int
    bytes: int
    vbuckets: int
    version: int | None
    """The table's; None for Parquet."""
    orphans_removed: int
    elapsed_s: float


def shape_of(fields: pa.Schema | None, *, permissive: bool = False) -> Shape:
    """The columns of an export. `fields` of the body stand in the place of `value`, after the others, whose names are
    then marked as the data source marks them. Raises ConfigError for a type that JSON cannot be read as.
    """
    if fields is None:
        return Shape(DOCUMENTS, (False,) * len(DOCUMENTS), permissive)
    Bodies(fields)
    own = [field.with_name("_" + field.name) for field in DOCUMENTS if field.name != "value"]
    if taken := {field.name for field in own} & set(fields.names):
        raise ConfigError(f"--schema names {min(taken)!r}, which is a column of every typed export")
    return Shape(pa.schema([*own, *fields]), (False,) * len(own) + (True,) * len(fields), permissive)


def export(
    data: Path,
    target: Path,
    runner: Runner,
    *,
    delta_table: bool = False,
    collections: tuple[str, ...] | None = None,
    as_of_ms: int | None = None,
    fields: pa.Schema | None = None,
    permissive: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Export.

    `fields`: parse JSON documents into these columns, which stand in the place of `value`; `permissive`: nulls where a
    document does not fit them. Raises MirrorError and the store's errors.
    """
    start_s = time.monotonic()
    data, target = data.absolute(), target.absolute()
    shape = shape_of(fields, permissive=permissive)
    with open_view(str(data)) as view:
        identity = view.identity
    with _Delta(target, overwrite) if delta_table else _Folder(target, overwrite) as place:
        count = runner.parallelism * TASKS_PER_CORE
        options = Options(path=str(data), collections=collections, as_of_ms=as_of_ms, partitions=count)
        job, shares = plan(options, Wanted())
        lease = hold(job)
        try:
            run = run_name()
            folder = str(place.folder)
            tasks = [Task(job, vbids, shape, folder, f"part-{run}-{number:05d}") for number, vbids in enumerate(shares)]
            parts = [part for written in runner.run(export_task, tasks, progress) for part in written]
        finally:
            lease.release()
        place.check(parts)
        facts = {
            "bucket": identity.bucket_name,
            "bucket_uuid": identity.bucket_uuid,
            "boundaries": " ".join(f"{pin.vbid}:{pin.branch}:{pin.seqno}" for pin in job.pins),
            delta.RUN: run,
        }
        place.finish(parts, shape.schema, facts)
    return Exported(
        target=str(target),
        format="delta" if delta_table else "parquet",
        documents=sum(part.rows for part in parts),
        files=len(parts),
        bytes=sum(part.size for part in parts),
        vbuckets=len(job.pins),
        version=place.version,
        orphans_removed=place.orphans_removed,
        elapsed_s=time.monotonic() - start_s,
    )


def export_task(task: Task) -> list[Part]:
    """Write the documents of a task's vbuckets; called wherever a Runner runs it."""
    with PartWriter(task.folder, task.prefix, task.shape.schema) as parts:
        for batch in read(task.job, task.vbids, task.shape):
            parts.write(text_keys(batch))
    return parts.finished


class _Target:
    """Where the files go, from the lock to the last step."""

    folder: Path
    version: int | None = None
    orphans_removed = 0

    def check(self, parts: Sequence[Part]) -> None:
        """Every file that was told of must be here, too: executors may have written to a folder of their own."""
        for part in parts:
            path = self.folder / part.name
            if not path.is_file() or path.stat().st_size != part.size:
                raise MirrorError(
                    f"{path} was written by an executor and is not here",
                    hint="give a folder that the driver and all executors share",
                )


class _Delta(_Target):
    """A table's folder."""

    def __init__(self, target: Path, overwrite: bool) -> None:
        """Refuse before anything is done. Raises ConfigError, MirrorError."""
        require_absent_or_table(target)
        self.folder = target
        self._lock = FolderLock(target)
        try:
            self._table = open_table(target)
            if self._table is not None and not overwrite:
                raise ConfigError(
                    f"{target}: holds a Delta table already (version {self._table.version()})",
                    hint="--overwrite makes this export its next version",
                )
            self.orphans_removed = len(remove_orphans(target, self._table))
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> _Delta:
        """The lock is held."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the lock up; after an error remove what was written in vain."""
        if kind is not None:
            remove_orphans(self.folder, open_table(self.folder))
        self._lock.release()

    def finish(self, parts: Sequence[Part], schema: pa.Schema, facts: dict[str, Any]) -> None:
        """One commit."""
        commit_parts(self.folder, self._table, parts, schema, overwrite=True, metadata=facts)
        table = open_table(self.folder)
        self.version = None if table is None else table.version()


class _Folder(_Target):
    """A folder of Parquet files, made beside its place and moved there."""

    def __init__(self, target: Path, overwrite: bool) -> None:
        """Refuse before anything is done. Raises ConfigError, MirrorError."""
        self._target = target
        self._old = target.with_name(target.name + ".old")
        self.folder = target.with_name(target.name + ".incomplete")
        self._lock = FolderLock(self.folder)
        try:
            if not target.exists() and self._old.exists():  # killed between the two renames of an earlier finish
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
        return [each for each in self.folder.iterdir() if each.name != delta.LOCK_FILE]

    def _may_go(self, overwrite: bool) -> bool:
        """Only an export or an empty folder is ever replaced."""
        if not self._target.is_dir():
            return False
        return not any(self._target.iterdir()) or (overwrite and (self._target / SUCCESS_FILE).is_file())

    def __enter__(self) -> _Folder:
        """The lock is held."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Give the lock up, and the folder where nothing is in it; after an error remove what was written in vain."""
        if self.folder.is_dir() and (kind is not None or not self._left()):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()

    def finish(self, parts: Sequence[Part], schema: pa.Schema, facts: dict[str, Any]) -> None:
        """`_SUCCESS`, then the name."""
        facts = facts | {"documents": sum(part.rows for part in parts), "files": len(parts)}
        if not parts:  # readers of an empty folder would not know the columns
            with PartWriter(str(self.folder), f"part-{facts[delta.RUN]}-00000", schema) as empty:
                empty.write_empty()
        try:
            with (self.folder / SUCCESS_FILE).open("x") as file:
                json.dump(facts, file)
                file.flush()
                os.fsync(file.fileno())
            (self.folder / delta.LOCK_FILE).unlink()
            sync_directory(str(self.folder))
            if self._target.exists():
                self._target.rename(self._old)
            self.folder.rename(self._target)
            sync_directory(str(self._target.parent))
            shutil.rmtree(self._old, ignore_errors=True)
        except OSError as error:
            raise folder_error(self._target, error) from error
