"""Figures of `sync` for Prometheus: counters of its batches and merges, and the lag of the tables."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import time

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from mirror.errors import ConfigError


@dataclass(frozen=True)
class BatchFigures:
    batch: int
    events: int
    events_per_s: float
    duration_ms: int
    """Time from the trigger to the end of the batch."""
    lag_seqnos: int | None = None
    """Number of published seqnos above the batch's end offset; None if unknown."""


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


_COUNTERS = {
    "batches": "Batches that `changes` got.",
    "events": "Events that `changes` got.",
    "merges": "Merges of batches into the tables of documents.",
    "misfits": "Documents that did not fit the schema when they were merged.",
    "rewritten_bytes": "Bytes of the files that merges wrote.",
}
_GAUGES = {
    "lag_seqnos": "Seqnos that the mirror was ahead of `changes` when the last batch ended.",
    "waiting_events": "Events in `changes` that are not merged into the tables of documents yet.",
    "last_batch_timestamp_seconds": "When the last batch was committed.",
    "last_merge_timestamp_seconds": "When the last merge was committed.",
}


class SyncMetrics(Collector):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._rows = dict.fromkeys(("inserted", "updated", "deleted"), 0)
        self._gauges: dict[str, float] = {}
        self._waiting: dict[int, int] = {}
        """Number of events of each batch after `_merged_to`."""
        self._merged_to: int | None = None
        """The last merged batch. None before the process's first merge: how many events wait is unknown then."""

    def add(self, figures: BatchFigures | MergeFigures) -> None:
        """Count a batch or a merge. Two threads report them, so a merge may be reported before its last batch."""
        with self._lock:
            if isinstance(figures, BatchFigures):
                self._counts["batches"] += 1
                self._counts["events"] += figures.events
                self._gauges["last_batch_timestamp_seconds"] = time()
                if figures.lag_seqnos is not None:
                    self._gauges["lag_seqnos"] = figures.lag_seqnos
                if self._merged_to is None or figures.batch > self._merged_to:
                    self._waiting[figures.batch] = figures.events
                return
            self._counts["merges"] += 1
            self._counts["misfits"] += figures.misfits
            self._counts["rewritten_bytes"] += figures.rewritten_bytes
            for change in self._rows:
                self._rows[change] += getattr(figures, change)
            self._merged_to = figures.batch
            self._waiting = {batch: events for batch, events in self._waiting.items() if batch > figures.batch}
            self._gauges["last_merge_timestamp_seconds"] = time()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts, rows, gauges = dict(self._counts), dict(self._rows), dict(self._gauges)
            if self._merged_to is not None:
                gauges["waiting_events"] = sum(self._waiting.values())
        for name, count in counts.items():
            yield CounterMetricFamily(f"dcp_mirror_sync_{name}", _COUNTERS[name], value=count)
        changed = CounterMetricFamily(
            "dcp_mirror_sync_rows", "Rows that merges changed in the tables of documents.", labels=("change",)
        )
        for change, count in rows.items():
            changed.add_metric((change,), count)
        yield changed
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"dcp_mirror_sync_{name}", _GAUGES[name], value=value)


@contextmanager
def serving(metrics: SyncMetrics, host: str, port: int) -> Iterator[int]:
    """Answer scrapes of `metrics` at http://host:port/metrics, and yield the port. Raises ConfigError."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"--metrics {host}:{port}: {error.strerror or error}", hint="give another port") from None
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
