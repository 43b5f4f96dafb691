"""`sync`: run a stream of changes into Delta tables (lake.py), and restart the stream from its checkpoint.

Knows Spark's streaming queries and their batches; lake.py explains why tables get each event exactly once. Spark writes
a batch's offsets to the checkpoint (`offsets/N`) before the batch runs, and `commits/N` after the batch. So after a
crash only the newest batch runs again, with the same number and offsets. The driver collects no events: executors write
them to the folder of `changes`, and return names, sizes and statistics of files. Invariants: no stop loses or repeats
an event, even within a batch; the start and each batch check that the checkpoint and the tables belong together.
"""

from __future__ import annotations

import asyncio
import json
import shutil
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
from mirror.spark.pipeline.runner import error_of
from mirror.spark.pipeline.sink import write_parts
from mirror.spark.places import Folder, LocalFolder, folder_at
from mirror.spark.source.options import parse
from mirror.spark.tables.delta import FolderLock
from mirror.spark.tables.documents import NOTHING, Applied, Layouts
from mirror.spark.tables.lake import Batch, Costs, Lake
from storage.errors import StorageError
from storage.read.view import open_view

CHECKPOINT_FOLDER = "_checkpoint"
TIDY_BATCHES = 100
"""Batches between two clean-ups of the tables."""
KEEP_HOURS = 168
KEEP_HOURS_OBJECTS_MIN = 24
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
    keep_hours: int = KEEP_HOURS
    costs: Costs = field(default_factory=Costs)
    layouts: Layouts = field(default_factory=Layouts)
    tidy_batches: int = TIDY_BATCHES


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
    """Return the folder of Spark's checkpoint. Raises ConfigError for tables in an object store if no checkpoint is
    given, or if `keep_hours` is so short that a clean-up could remove the files of a batch in progress.

    The checkpoint also keeps out a second writer: only one process can lock it, and the tables accept no batches of
    another checkpoint (lake.py).
    """
    if how.checkpoint is not None:
        checkpoint = how.checkpoint.absolute()
    elif isinstance(folder, LocalFolder):
        checkpoint = folder.path / CHECKPOINT_FOLDER
    else:
        raise ConfigError(
            f"{folder}: tables in an object store need a checkpoint on this machine", hint="give --checkpoint DIR"
        )
    if not isinstance(folder, LocalFolder) and how.keep_hours < KEEP_HOURS_OBJECTS_MIN:
        raise ConfigError(
            f"{folder}: in an object store files must be kept for {KEEP_HOURS_OBJECTS_MIN} hours at least",
            hint="no lock protects the unfinished files of another process there",
        )
    return checkpoint


def checkpoint_name(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / "metadata").read_text())["id"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: cannot be read as a checkpoint: {error}", hint="restore it as a whole") from error


def check_source(options: Mapping[str, str], settings: Settings) -> None:
    parsed = parse({**options, "table": "changes"})
    if parsed.path is not None:
        with open_view(parsed.path) as view:
            parsed.vbids_of(view.vbids)
    elif parsed.connection is not None:
        asyncio.run(discover(Access.of(connection_string.parse(parsed.connection), settings), SystemClock()))


class SyncTarget:
    """The function for foreachBatch. `on_batch` gets the figures of each batch, `on_merge` those of each merge."""

    def __init__(
        self,
        lake: Lake,
        checkpoint: Path,
        how: How,
        on_batch: Callable[[int, Applied], None],
        on_merge: Callable[[MergeFigures], None] = lambda _: None,
    ) -> None:
        self._lake = lake
        self._checkpoint = checkpoint
        self._how = how
        self._on_batch = on_batch
        self._on_merge = on_merge
        self.failed: Exception | None = None
        self._busy = threading.Lock()
        self._number = -1

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
        self._number = number
        events = 0
        if not self._lake.has_changes(batch):
            parts = write_parts(frame, self._lake.changes_folder, self._lake.prefix(number))
            if not parts:
                self._on_batch(number, NOTHING)
                return
            events = self._lake.add_changes(batch, parts)
        tidy = bool(self._how.tidy_batches) and number % self._how.tidy_batches == self._how.tidy_batches - 1
        if not tidy and not self._lake.due():
            self._on_batch(number, NOTHING._replace(events=events))
            return
        self._on_batch(number, self._merged(lambda: self._lake.update_documents(batch)))
        if tidy:
            self._lake.tidy(self._how.keep_hours)
        else:
            self._lake.tidy_documents()

    def _merged(self, fold: Callable[[], Applied]) -> Applied:
        began_s, before = time.monotonic(), self._lake.folded_batch
        done = fold()
        batch = self._lake.folded_batch
        if batch is not None and (any(done) or before not in (None, batch)):
            took_ms = round((time.monotonic() - began_s) * 1000)
            changed = (done.inserted, done.updated, done.deleted, done.misfits)
            self._on_merge(MergeFigures(batch, *changed, self._lake.rewritten_bytes, took_ms))
        return done

    def catch_up(self, *, due_only: bool) -> None:
        """Fold deferred batches into `documents`. With `due_only`: only if a fold is due and no batch is running."""
        if not self._busy.acquire(blocking=not due_only):
            return
        try:
            if not due_only or self._lake.due():
                done = self._merged(self._lake.catch_up)
                if any(done):
                    self._on_batch(self._number, done)
                    self._lake.tidy_documents()
        finally:
            self._busy.release()


def sync(
    spark: Any,
    source: Mapping[str, str],
    to: Path | str,
    how: How | None = None,
    *,
    on_figures: Callable[[BatchFigures | MergeFigures], None] | None = None,
    on_warning: Callable[[str], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Synced:
    """Keep the tables in `to` (a path or a URL, places.py) current until `stop` is set. With `how.available_now`,
    return when the tables are current.

    `source` are options of the data source. `on_warning` gets a warning if the disk may become full. Raises MirrorError
    and the store's errors.
    """
    how = how or How()
    folder = folder_at(to)
    checkpoint = checkpoint_for(folder, how)
    selection = parse({**source, "table": "changes"}).selection
    batches: set[int] = set()
    total = NOTHING
    with (
        FolderLock(checkpoint) if not isinstance(folder, LocalFolder) else nullcontext(),
        Lake(folder, checkpoint_name(checkpoint), selection, how.costs, layouts=how.layouts) as lake,
        _listening(spark, on_figures) as listener,
    ):
        if lake.done_batch is None and any((checkpoint / "commits").glob("[0-9]*")):
            raise ConfigError(
                f"{checkpoint}: belongs to tables that are gone, {folder} has none of its batches",
                hint="restore the tables, or remove the checkpoint to begin again",
            )
        lake.remove_unfinished()
        warned = False

        def warn() -> None:
            nonlocal warned
            if not warned and (warning := space_warning(folder, lake.projected_bytes())):
                warned = True
                on_warning(warning)

        warn()

        def on_batch(number: int, applied: Applied) -> None:
            nonlocal total
            batches.add(number)
            total = total.plus(applied)
            if listener is not None:
                listener.applied(number, applied)

        def on_merge(figures: MergeFigures) -> None:
            warn()
            if on_figures is not None:
                on_figures(figures)

        sink = SyncTarget(lake, checkpoint, how, on_batch, on_merge)
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
    return Synced(len(batches), *total)


def space_warning(folder: Folder, projected_bytes: int) -> str | None:
    """Return a warning if the disk has less than `projected_bytes` free. An object store has no limit."""
    if not isinstance(folder, LocalFolder):
        return None
    free_bytes = shutil.disk_usage(folder.path).free
    if projected_bytes <= free_bytes:
        return None
    return (
        f"{folder}: older versions of documents may take {projected_bytes >> 20:,} MiB, and {free_bytes >> 20:,} MiB "
        "are free (give a lower --rewrite-rate above 0, or lower --keep-documents-hours)"
    )


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
def _listening(spark: Any, on_figures: Callable[[BatchFigures], None] | None) -> Iterator[Listener | None]:
    if on_figures is None:
        yield None
        return
    listener = Listener(on_figures)
    spark.streams.addListener(listener)
    try:
        yield listener
    finally:
        spark.streams.removeListener(listener)
