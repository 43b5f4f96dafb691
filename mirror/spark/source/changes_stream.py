"""PySpark's readers of changes, as a stream and as a batch.

A reader has its own process beside Spark's driver until the query ends; tasks get pickled copies. A batch is about as
large as its limit (`admit`), unless Spark requests all changes. With AvailableNow a vbucket ends at the seqno that was
published when the query began, or at the next kept boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from mirror.errors import ConfigError
from mirror.spark.source import changes
from mirror.spark.source.changes import LocalChanges
from mirror.spark.source.failures import Carried, clear_errors, with_clear_errors
from mirror.spark.source.offsets import Encoded
from mirror.spark.source.options import Options
from mirror.spark.source.origin import batches_of, driver_of
from storage.errors import ViewInvalidated
from storage.model import SEQNO_MAX

if TYPE_CHECKING:
    from mirror.spark.source.remote import RemoteChanges


@dataclass(repr=False)
class StreamTask(InputPartition):
    work: changes.ChangesTask


def rows_of(options: Options, task: InputPartition) -> Iterator[Any]:
    assert isinstance(task, StreamTask)
    with clear_errors():
        yield from batches_of(options, task.work)


class ChangesReader(Carried, DataSourceReader):
    def __init__(self, options: Options) -> None:
        self._options = options

    @with_clear_errors
    def partitions(self) -> Sequence[InputPartition]:
        driver = driver_of(self._options)
        try:
            end = driver.published()
            tasks = driver.plan(driver.beginning(), end)
            whole = {way.vbid for work in tasks for way in work.ways if way.last_seqno == SEQNO_MAX}
            if lost := sorted(end.at.keys() - whole):  # a stream's next batch has the rest; here is none
                message = "the purger or a rollback removed what was published a moment ago"
                raise ViewInvalidated(message, vbid=lost[0], hint="start the read again")
            return [StreamTask(work) for work in tasks or (changes.ChangesTask(()),)]
        finally:
            driver.close()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return rows_of(self._options, partition)


class ChangesStream(Carried, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The first call opens the source or raises `refusal`: PySpark's clean-up would hide an error of `__init__`."""

    def __init__(self, options: Options, refusal: ConfigError | None = None) -> None:
        self._options = options
        self._refusal = refusal
        self._opened: LocalChanges | RemoteChanges | None = None
        self._initial: Encoded | None = None
        self._begun = not options.latest

    @property
    def _driver(self) -> LocalChanges | RemoteChanges:
        if self._refusal is not None:
            raise self._refusal
        if self._opened is None:
            self._opened = driver_of(self._options)
        return self._opened

    @with_clear_errors
    def initialOffset(self) -> Encoded:
        """Return the start of a query without a checkpoint. Spark calls this more than once."""
        if self._initial is None:
            driver = self._driver
            self._initial = (driver.published() if self._options.latest else driver.beginning()).encode()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of rows. `LocalChanges.latest` also applies the limit of bytes."""
        return ReadMaxRows(self._options.max_rows)

    @with_clear_errors
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> Encoded:
        """With startingFrom=latest the first batch is empty: its end tells a restarted query where to begin."""
        if not self._begun:
            self._begun = True
            if start == self._initial:
                return dict(start)
        driver = self._driver
        return driver.latest(driver.decode(start), not isinstance(limit, ReadAllAvailable)).encode()

    @with_clear_errors
    def prepareForTriggerAvailableNow(self) -> None:
        self._driver.stop_at_published()

    @with_clear_errors
    def reportLatestOffset(self) -> Encoded:
        return self._driver.published().encode()

    @with_clear_errors
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        driver = self._driver
        since, to = driver.decode(start), driver.decode(end)
        if self._options.latest:  # if the first batch runs again, its start may be after its end: make it empty
            at = {vbid: since.of(vbid) if since.of(vbid).follows(each) else each for vbid, each in to.at.items()}
            to = replace(to, at=at)
        return [StreamTask(work) for work in driver.plan(since, to)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return rows_of(self._options, partition)

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
