"""`sync`: run a stream of changes into Delta tables (lake.py), and restart the stream from its checkpoint.

Knows Spark's streaming queries and their batches; lake.py explains why tables get each event exactly once. Spark writes
a batch's offsets to the checkpoint (`offsets/N`) before the batch runs, and `commits/N` after the batch. So after a
crash only the newest batch runs again, with the same number and offsets. Executors write events to the folder of
`changes` and merge them into `documents`; the driver gets names, sizes and statistics of files. Invariants: no stop
loses or repeats an event, even within a batch; the start and each batch check that the checkpoint and the tables belong
together.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import ConfigError, MirrorError
from mirror.feed.cluster.discovery import discover
from mirror.feed.connection import connection_string
from mirror.feed.connection.bootstrap import Access
from mirror.spark.pipeline.progress import BatchFigures, Listener, MergeFigures
from mirror.spark.pipeline.sink import write_parts
from mirror.spark.places import Folder, LocalFolder, folder_at
from mirror.spark.runner import SparkRunner, error_of
from mirror.spark.source.options import parse
from mirror.spark.tables.delta import FolderLock
from mirror.spark.tables.documents import Applied, Layout, prefix
from mirror.spark.tables.lake import Batch, Lake
from storage.errors import StorageError
from storage.read.view import open_view

CHECKPOINT_FOLDER = "_checkpoint"
TIDY_BATCHES = 100
"""Batches between two clean-ups of the tables."""
PARTS = 64
"""Parts of a table of documents, if the size of the source is unknown."""
PART_BYTES = 32 * 1024 * 1024
"""Stored bytes of the source for each part."""
PARTS_MIN, PARTS_MAX = 4, 256
POLL_S = 0.2
STARTS_MAX = 3
NOT_CONNECTED = "Python worker failed to connect back"
"""Spark's error if a Python process does not connect within ten seconds. No setting changes this time, and a busy
machine may need more. The query then restarts from its checkpoint.
"""


@dataclass(frozen=True)
class How:
    checkpoint: Path | None = None
    trigger_s: float = 10.0
    available_now: bool = False
    max_age_s: float = 0.0
    """The time that events may wait in `changes` until they are merged into `documents`."""
    keep_hours: int = 1
    """Time for which replaced files of `documents` are kept. A reader of one version must finish within this time."""
    layout: Layout = field(default_factory=Layout)
    tidy_batches: int = TIDY_BATCHES


@dataclass(frozen=True)
class SourceSize:
    vbucket_count: int
    stored_bytes: int | None = None
    """None if unknown."""

    @property
    def part_vbuckets(self) -> int:
        """The number of vbuckets in a part of a new table of documents."""
        parts = PARTS if self.stored_bytes is None else 1 << (self.stored_bytes // PART_BYTES).bit_length()
        return max(1, self.vbucket_count // min(max(parts, PARTS_MIN), PARTS_MAX))


@dataclass(frozen=True)
class Synced:
    batches: int
    events: int
    inserted: int
    updated: int
    deleted: int
    misfits: int = 0
    """Documents that did not fit the schema when they were merged."""


def checkpoint_for(folder: Folder, how: How) -> Path:
    """Return the folder of Spark's checkpoint. Raises ConfigError for tables in an object store if none is given.

    The checkpoint also keeps out a second writer: only one process can lock it, and the tables accept no batches of
    another checkpoint (lake.py).
    """
    if how.checkpoint is not None:
        return how.checkpoint.absolute()
    if isinstance(folder, LocalFolder):
        return folder.path / CHECKPOINT_FOLDER
    raise ConfigError(
        f"{folder}: tables in an object store need a checkpoint on this machine", hint="give --checkpoint DIR"
    )


def checkpoint_name(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "metadata").read_text())["id"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: cannot be read as a checkpoint: {error}", hint="restore it as a whole") from error


def look_at(options: Mapping[str, str], settings: Settings) -> SourceSize:
    """Check that the source can be read."""
    parsed = parse({**options, "table": "changes"})
    if parsed.path is not None:
        with open_view(parsed.path) as view:
            vbids = parsed.vbids_of(view.vbids)
            return SourceSize(view.identity.vbucket_count, sum(view.history(vbid).row_bytes for vbid in vbids))
    assert parsed.connection is not None
    found = asyncio.run(discover(Access.of(connection_string.parse(parsed.connection), settings), SystemClock()))
    return SourceSize(found.vbucket_count)


class SyncTarget:
    """The function for foreachBatch. `on_batch` gets the events of each batch, `on_merge` the figures of merges."""

    def __init__(
        self,
        lake: Lake,
        checkpoint: Path,
        how: How,
        on_batch: Callable[[int], None] = lambda _: None,
        on_merge: Callable[[MergeFigures], None] = lambda _: None,
    ) -> None:
        self._lake = lake
        self._checkpoint = checkpoint
        self._how = how
        self._on_batch = on_batch
        self._on_merge = on_merge
        self.failed: Exception | None = None
        self._busy = threading.Lock()

    def __call__(self, frame: Any, number: int) -> None:
        """Apply a batch. An error is kept in `failed`, because Spark passes on only its text."""
        try:
            with self._busy:
                self._apply(frame, number)
        except Exception as error:
            self.failed = error
            raise

    def _apply(self, frame: Any, number: int) -> None:
        name = checkpoint_name(self._checkpoint)
        assert name is not None, "Spark makes it before the first batch"
        offsets = (self._checkpoint / "offsets" / str(number)).read_text()
        batch = Batch(number, name, offsets)
        if not self._lake.has_changes(batch):
            parts = write_parts(frame, self._lake.changes_folder, prefix(number))
            if not parts:
                return
            self._on_batch(self._lake.add_changes(batch, parts))
        tidy = bool(self._how.tidy_batches) and number % self._how.tidy_batches == self._how.tidy_batches - 1
        if tidy or self._lake.due():
            self._merge()
        if tidy:
            self._lake.tidy()

    def _merge(self) -> None:
        began_s, before = time.monotonic(), self._lake.merged_batch
        done = self._lake.merge()
        if self._lake.merged_batch != before:
            took_ms = round((time.monotonic() - began_s) * 1000)
            rewritten_bytes = self._lake.documents.rewritten_bytes
            self._on_merge(MergeFigures(self._lake.merged_batch, *done, rewritten_bytes, took_ms))
            self._lake.tidy_documents()

    def catch_up(self, *, due_only: bool) -> None:
        """Merge waiting batches into `documents`. With `due_only`: only if they are due and no batch is running."""
        if not self._busy.acquire(blocking=not due_only):
            return
        try:
            if not due_only or self._lake.due():
                self._merge()
        finally:
            self._busy.release()


def sync(
    spark: Any,
    source: Mapping[str, str],
    to: Path | str,
    how: How | None = None,
    *,
    part_vbuckets: int = SourceSize(1024).part_vbuckets,
    on_figures: Callable[[BatchFigures | MergeFigures], None] | None = None,
    stop: threading.Event | None = None,
) -> Synced:
    """Keep the tables in `to` (a path or a URL, places.py) current until `stop` is set. With `how.available_now`,
    return when the tables are current.

    `source` are options of the data source. New tables have parts of `part_vbuckets`. Raises MirrorError and the
    store's errors.
    """
    how = how or How()
    folder = folder_at(to)
    checkpoint = checkpoint_for(folder, how)
    selection = parse({**source, "table": "changes"}).selection
    batches: list[int] = []
    total = Applied()
    with (
        FolderLock(checkpoint) if not isinstance(folder, LocalFolder) else nullcontext(),
        Lake(
            folder,
            checkpoint_name(checkpoint),
            selection,
            how.layout,
            SparkRunner(spark),
            part_vbuckets=part_vbuckets,
            max_age_s=how.max_age_s,
            keep_hours=how.keep_hours,
        ) as lake,
        _listening(spark, on_figures),
    ):
        if lake.done_batch is None and any((checkpoint / "commits").glob("[0-9]*")):
            raise ConfigError(
                f"{checkpoint}: belongs to tables that are gone, {folder} has none of its batches",
                hint="restore the tables, or remove the checkpoint to begin again",
            )
        lake.remove_unfinished()

        def on_merge(figures: MergeFigures) -> None:
            nonlocal total
            total = total.plus(Applied(figures.inserted, figures.updated, figures.deleted, figures.misfits))
            if on_figures is not None:
                on_figures(figures)

        sink = SyncTarget(lake, checkpoint, how, batches.append, on_merge)
        try:
            sink.catch_up(due_only=False)
            for left in reversed(range(STARTS_MAX)):
                try:
                    _run_query(spark, source, checkpoint, how, sink, stop)
                    break
                except Exception as error:
                    if not left or sink.failed is not None or NOT_CONNECTED not in str(error):
                        raise
            sink.catch_up(due_only=False)
        except Exception as error:
            raise _cause(sink, error) from error
    return Synced(len(batches), sum(batches), *total)


def _run_query(
    spark: Any, source: Mapping[str, str], checkpoint: Path, how: How, sink: SyncTarget, stop: threading.Event | None
) -> None:
    stream = spark.readStream.format("mirror").options(**source, table="changes").load()
    writer = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint)).queryName("sync")
    every = {"processingTime": f"{round(how.trigger_s * 1000)} milliseconds"}
    query = writer.trigger(**({"availableNow": True} if how.available_now else every)).start()
    while not query.awaitTermination(POLL_S):
        if stop is not None and stop.is_set():
            query.stop()
        else:
            sink.catch_up(due_only=True)


def _cause(sink: SyncTarget, error: Exception) -> BaseException:
    failed = sink.failed
    if isinstance(failed, MirrorError | StorageError):
        return failed
    return error_of(failed or error)


@contextmanager
def _listening(spark: Any, on_figures: Callable[[BatchFigures], None] | None) -> Iterator[None]:
    if on_figures is None:
        yield
        return
    listener = Listener(on_figures)
    spark.streams.addListener(listener)
    try:
        yield
    finally:
        spark.streams.removeListener(listener)
