"""Metrics for Prometheus: the status document and the listening processes' counts, as metric families.

A scrape reaches one of the processes that share a port; the status document has the counts of all processes. An unknown
figure is left out, never 0. Labels have few values
(vbuckets, workers, servers), never keys, users or names of leases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mirror import health
from mirror.server.latency import Latencies

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = (
    "starting", "waiting", "requesting", "backfilling", "streaming", "rolling-back", "resyncing", "refused",
    "no-active-node", "stalled", "failing", "finished", "damaged", "stored",
)  # fmt: skip
"""The states of vbuckets (docs/troubleshooting.md). Alerts need a series for each, even at 0."""

Report = dict[str, Any]


class Requests:
    def __init__(self) -> None:
        self.request_total = self.document_total = self.byte_total = 0
        self.streams: Counter[str] = Counter()
        """Open streams of changes, by user, or by peer for clients without a login."""
        self.latencies = Latencies()

    def answered(self, seconds: float | None, byte_count: int) -> None:
        """Count an answer; `seconds` is None for a stream."""
        self.request_total += 1
        self.byte_total += byte_count
        if seconds is not None:
            self.latencies.observe(seconds)

    def counters(self) -> dict[str, int]:
        """Return totals for the supervisor's status; they only rise while the process runs."""
        return {
            "http_requests": self.request_total,
            "http_documents": self.document_total,
            "http_sent_bytes": self.byte_total,
        }


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    rows: Iterable[tuple[list[str], Any]],
    labels: tuple[str, ...] = (),
) -> Metric:
    family = kind(f"dcp_mirror_{name}", text, labels=labels)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _one(name: str, text: str, value: Any) -> Metric:
    return _gauge(name, text, [([], value)])


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def families(report: Report) -> Iterator[Metric]:
    rows, sums = report["vbuckets"], report["totals"]
    yield _one("up", "1 while the service runs, 0 when only its store was read.", report["service"] == "up")
    yield _one("ready", "1 when /readyz says so.", not report["reasons"])
    judged = [([state], report["state"] == state) for state in health.STATES]
    yield _gauge("state", "1 for the state of the mirror, else 0.", judged, ("state",))
    since_s = _seconds(report["since_ms"])
    yield _one("state_since_seconds", "When the state began, seconds since 1970.", since_s)
    yield _one("uptime_seconds", "Age of the service.", report["uptime_s"])
    yield _one("vbuckets", "Vbuckets of the bucket.", report["vbucket_count"])
    yield _one("vbuckets_held", "Vbuckets that this mirror holds.", report["vbuckets_held"])
    states = dict.fromkeys(STATES, 0) | sums["states"]
    yield _gauge("vbucket_states", "Vbuckets by state.", [([s], n) for s, n in states.items()], ("state",))
    in_contact = sum(row["node"] is not None for row in rows) if report["service"] == "up" else None
    yield _one("source_contact_vbuckets", "Vbuckets in contact with the source.", in_contact)
    yield _one("lag_seqnos", "Seqnos of the source not published yet, summed.", sums["lag_seqnos"])
    yield _one(
        "lag_seconds", "Age of the oldest unpublished seqno; without contact, of the last contact.", sums["lag_s"]
    )
    yield _one("ingest_documents_per_second", "Documents received lately.", sums["documents_per_s"])
    yield _one("ingest_bytes_per_second", "Bytes received lately.", sums["bytes_per_s"])
    yield _counter("rollbacks", "Rollbacks that readers went through.", [([], sums["rollback_count"])])
    yield _counter("resyncs", "Resyncs whose new copy replaced the old one.", [([], sums["resync_count"])])
    yield _one("stale_vbuckets", "Vbuckets with a resync next to an old copy, or a deferred rollback.", sums["stale"])
    yield from _holders(report)
    yield _one("history_boundaries", "Kept boundaries.", sums["boundaries"])
    yield _one("history_versions", "Stored versions of documents, tombstones included.", sums["versions"])
    yield _one("history_row_bytes", "Pages of the trees of rows.", sums["row_bytes"])
    yield _one("history_key_bytes", "Pages of the trees of keys.", sums["key_bytes"])
    yield from _vbuckets(rows)
    yield from _processes("worker", report["workers"])
    yield from _processes("server", report.get("servers") or ())
    yield _latencies(report.get("servers") or ())
    yield from _disk_and_history(report)


def _vbuckets(rows: Sequence[Report]) -> Iterator[Metric]:
    for name, text, field in (
        ("published_seqno", "Published seqno.", "published_seqno"),
        ("staged_seqno", "Received seqno, published or not.", "staged_seqno"),
        ("source_high_seqno", "High seqno of the source.", "source_high_seqno"),
        ("vbucket_lag_seqnos", "Seqnos not published yet.", "lag_seqnos"),
        ("vbucket_lag_seconds", "Age of the oldest seqno not published.", "lag_s"),
        ("vbucket_rollbacks", "Rollbacks.", "rollback_count"),
    ):
        yield _gauge(name, text, [([str(row["vbid"])], row[field]) for row in rows], ("vbid",))


def _processes(kind: str, processes: Sequence[Report]) -> Iterator[Metric]:
    named = [(_name(kind, row), row) for row in processes]
    for name, text, field in (
        ("cpu_percent", "Share of one core.", "cpu_percent"),
        ("private_bytes", "Memory that is its own (RssAnon).", "private_bytes"),
        ("uptime_seconds", "Age of the process.", "uptime_s"),
    ):
        yield _gauge(f"{kind}_{name}", text, [([own], row.get(field)) for own, row in named], (kind,))
    running = [([own], row.get("phase") == "running") for own, row in named]
    yield _gauge(f"{kind}_running", "1 while it does its work.", running, (kind,))
    restarts = [([own], row.get("restarts")) for own, row in named]
    yield _counter(f"{kind}_restarts", "Restarts after a death.", restarts, (kind,))
    for counter in sorted({name for row in processes for name in row.get("counters") or {}}):
        family = _gauge if counter.endswith("_connections") else _counter
        counts = [([own], (row.get("counters") or {}).get(counter)) for own, row in named]
        yield family(f"{kind}_{counter}", "Since the process started.", counts, (kind,))


def _holders(report: Report) -> Iterator[Metric]:
    """Yield numbers of leases and long transactions. Names of leases are left out: not every reader may see them."""
    leases, readers = report["leases"], report["readers"]
    yield _one("leases", "Readers that hold history.", len(leases))
    yield _one("lease_vbuckets", "Vbuckets that leases hold, summed.", sum(each["vbuckets"] for each in leases))
    yield _one("reader_pins", "Processes that have read within one LMDB transaction for long.", len(readers))
    oldest_s = max((each["age_s"] for each in readers), default=0)
    yield _one("reader_pin_age_seconds", "Age of the oldest of these transactions; 0: none.", oldest_s)


def _latencies(servers: Iterable[Report]) -> Metric:
    family = HistogramMetricFamily(
        "dcp_mirror_server_request_seconds",
        "From a request to its answer, KV scans and streams left out; requests received together share their time.",
        labels=("server",),
    )
    for row in servers:
        if (figures := row.get("request_seconds")) is not None:
            below, buckets = 0, []
            for bound_s, count in zip(figures["bounds_s"], figures["counts"], strict=False):
                below += count
                buckets.append((f"{bound_s:g}", below))
            buckets.append(("+Inf", sum(figures["counts"])))
            family.add_metric([_name("server", row)], buckets, figures["sum_s"])
    return family


def _disk_and_history(report: Report) -> Iterator[Metric]:
    disk, history = report.get("disk"), report.get("history")
    if disk is not None:
        yield _one("store_bytes", "Size of the groups on disk.", disk["mirror_bytes"])
        yield _one("disk_free_bytes", "Free space next to the groups.", disk["free_bytes"])
        yield _one("disk_total_bytes", "Size of the groups' file system.", disk["total_bytes"])
    if history is not None:
        newest_s = _seconds(history["floor_newest_ms"])
        yield _one(
            "history_floor_seconds", "Earliest time as of which every vbucket can be read, since 1970.", newest_s
        )


def _name(kind: str, row: Report) -> str:
    return f"{row['kind']}-{row['slot'] % 1000}" if kind == "server" and row.get("kind") else str(row["slot"])


class _Report(Collector):
    def __init__(self, report: Report) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        return families(self._report)


def exposition(report: Report) -> bytes:
    """Return a status document in Prometheus's text format. Call this in a thread: 1,024 vbuckets take 30 ms."""
    return generate_latest(_Report(report))
