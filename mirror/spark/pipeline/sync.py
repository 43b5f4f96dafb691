"""`sync`: read the changes since the tables' position, batch by batch, into Delta tables (lake.py).

A batch ends where the source's limits end it (`ChangesDriver.latest`). Tasks write its events to the folder of
`changes`, and merge them into `documents`. The driver gets names, sizes and statistics of files, and commits them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.feed.cluster.discovery import discover
from mirror.feed.connection import connection_string
from mirror.feed.connection.bootstrap import Access
from mirror.spark.places import folder_at
from mirror.spark.runner import Runner
from mirror.spark.source.changes import ChangesTask
from mirror.spark.source.columns import CHANGES
from mirror.spark.source.options import Options, parse
from mirror.spark.source.origin import batches_of, driver_of
from mirror.spark.tables.documents import Applied, Layout, prefix
from mirror.spark.tables.lake import Lake
from mirror.spark.tables.parts import Part, PartWriter, text_keys
from storage.read.view import open_view

TIDY_BATCHES = 100
"""Batches between two clean-ups of the tables."""
POLL_S = 0.1
"""Shortest time between two looks at a source that has nothing new."""
PARTS = 64
"""Parts of a table of documents, if the size of the source is unknown."""
PART_BYTES = 32 * 1024 * 1024
"""Stored bytes of the source for each part."""
PARTS_MIN, PARTS_MAX = 4, 256
GROUP_ROWS = 16 * 1024
"""Rows of a row group in `changes`. A merge reads only the row groups that have vbuckets of its part."""


@dataclass(frozen=True)
class How:
    trigger_s: float = 10.0
    """Time from the start of a batch to the start of the next."""
    available_now: bool = False
    max_age_s: float = 0.0
    """The time that events may wait in `changes` until they are merged into `documents`."""
    keep_hours: int = 1
    """Time for which replaced files of `documents` are kept. A reader of one version must finish within this time."""
    layout: Layout = field(default_factory=Layout)


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


@dataclass(frozen=True)
class BatchFigures:
    batch: int
    events: int
    events_per_s: float
    duration_ms: int
    """Time from the trigger to the end of the batch."""
    lag_seqnos: int
    """Number of published seqnos above the batch's end offset."""


@dataclass(frozen=True)
class MergeFigures:
    batch: int
    """The newest batch in `documents`."""
    inserted: int
    updated: int
    deleted: int
    misfits: int
    rewritten_bytes: int
    duration_ms: int


class EventsTask(NamedTuple):
    options: Options
    work: ChangesTask
    folder: str
    prefix: str


def look_at(options: Mapping[str, str], settings: Settings) -> SourceSize:
    parsed = parse({**options, "table": "changes"})
    if parsed.path is not None:
        with open_view(parsed.path) as view:
            vbids = parsed.vbids_of(view.vbids)
            return SourceSize(view.identity.vbucket_count, sum(view.history(vbid).row_bytes for vbid in vbids))
    assert parsed.connection is not None
    found = asyncio.run(discover(Access.of(connection_string.parse(parsed.connection), settings), SystemClock()))
    return SourceSize(found.vbucket_count)


def write_events(task: EventsTask) -> list[Part]:
    with PartWriter(task.folder, task.prefix, CHANGES, group_rows=GROUP_ROWS) as parts:
        for batch in batches_of(task.options, task.work):
            parts.write(text_keys(batch))
    return parts.finished


def sync(
    source: Mapping[str, str],
    to: Path | str,
    runner: Runner,
    how: How | None = None,
    *,
    part_vbuckets: int = SourceSize(1024).part_vbuckets,
    on_figures: Callable[[BatchFigures | MergeFigures], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Synced:
    """Keep the tables in `to` (a path or a URL, places.py) current until `stop` is set. With `how.available_now`,
    return when the tables have everything that the source had at the start.

    `source` are options of the data source. New tables have parts of `part_vbuckets`. Raises MirrorError and the
    store's errors.
    """
    how, stop = how or How(), stop or threading.Event()
    options = replace(parse({**source, "table": "changes"}), partitions=runner.parallelism)
    with (
        Lake(
            folder_at(to),
            how.layout,
            runner,
            part_vbuckets=part_vbuckets,
            max_age_s=how.max_age_s,
            keep_hours=how.keep_hours,
        ) as lake,
        closing(driver_of(options)) as driver,
    ):
        lake.remove_unfinished()
        work = _Sync(lake, driver, options, runner, on_figures)
        work.merge()
        if how.available_now:
            driver.stop_at_published()
        while not stop.is_set():
            began_s = time.monotonic()
            moved = work.batch()
            if how.available_now and not moved:
                break
            next_s = began_s if how.available_now else began_s + max(how.trigger_s, 0.0 if moved else POLL_S)
            while not stop.is_set():
                if lake.due_in_s <= 0:
                    work.merge()
                left_s = next_s - time.monotonic()
                if left_s <= 0:
                    break
                stop.wait(min(left_s, max(0.0, lake.due_in_s)))
        work.merge()
        return Synced(work.batches, work.events, *work.total)


class _Sync:
    def __init__(
        self,
        lake: Lake,
        driver: Any,
        options: Options,
        runner: Runner,
        on_figures: Callable[[BatchFigures | MergeFigures], None],
    ) -> None:
        self._lake, self._driver, self._options = lake, driver, options
        self._runner, self._on_figures = runner, on_figures
        self.batches = self.events = 0
        self.total = Applied()

    def batch(self) -> bool:
        """Append the next events to `changes`. Return False if there are none."""
        lake, driver, began_s = self._lake, self._driver, time.monotonic()
        start = driver.beginning() if lake.position is None else driver.decode(lake.position)
        end = driver.latest(start, limited=True)
        if end == start:
            return False
        number, name = lake.next_batch, prefix(lake.next_batch)
        tasks = [
            EventsTask(self._options, work, lake.changes_folder.url, f"{name}-{at:05d}")
            for at, work in enumerate(driver.plan(start, end))
        ]
        written = self._runner.run(write_events, tasks)
        events = lake.add_changes([part for parts in written for part in parts], end.encode())
        if events:
            took_s = time.monotonic() - began_s
            lag = sum(max(0, seqno - end.of(vbid).seqno) for vbid, seqno in driver.seqnos().items())
            self.batches += 1
            self.events += events
            self._on_figures(BatchFigures(number, events, round(events / took_s, 1), round(took_s * 1000), lag))
        if number % TIDY_BATCHES == TIDY_BATCHES - 1:
            self.merge()
            lake.tidy()
        return True

    def merge(self) -> None:
        began_s, before = time.monotonic(), self._lake.merged_batch
        done = self._lake.merge()
        if self._lake.merged_batch != before:
            self.total = self.total.plus(done)
            took_ms = round((time.monotonic() - began_s) * 1000)
            rewritten_bytes = self._lake.documents.rewritten_bytes
            self._on_figures(MergeFigures(self._lake.merged_batch, *done, rewritten_bytes, took_ms))
            self._lake.tidy_documents()
