"""What Prometheus gets: the status document, and what the listening processes counted, as metric families.

Knows prometheus_client and the shape of the status; never a socket or a store. The processes of a listener share their
port, so a scrape reaches any of them: whatever a process counts carries its name (`server`), and what all of them count
comes from the service's report. Invariants: a figure that is not known is left out, never 0; labels have few values
(vbuckets, workers, servers, routes), never keys or users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from mirror import health

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
STATES = (
    "starting", "waiting", "requesting", "backfilling", "streaming", "rolling-back", "refilling", "refused",
    "no-active-node", "stalled", "failing", "finished", "damaged", "stored",
)  # fmt: skip
"""Every state of cli/JSON.md; each has its series even at 0, so that an alert on one does not lack it."""

Report = dict[str, Any]


class Requests:
    """What one HTTP process counts of its own requests."""

    def __init__(self, server: str) -> None:
        """`server` names the process among those that share a port."""
        self.server = server
        self.registry = CollectorRegistry(auto_describe=False)
        self.answers = Counter(
            "dcp_mirror_http_requests", "Requests answered.", ("server", "route", "code"), registry=self.registry
        )
        self.seconds = Histogram(
            "dcp_mirror_http_request_seconds",
            "From a request's head to its answer's end, streams left out.",
            ("server", "route"),
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.sent = Counter("dcp_mirror_http_sent_bytes", "Bytes of bodies.", ("server",), registry=self.registry)
        self.documents = Counter(
            "dcp_mirror_http_documents", "Documents given to readers.", ("server",), registry=self.registry
        )
        self.connections = Gauge(
            "dcp_mirror_http_connections", "Open connections.", ("server",), registry=self.registry
        )
        self.streams = Gauge("dcp_mirror_http_streams", "Open streams of changes.", ("server",), registry=self.registry)
        self._answers: dict[tuple[str, int], Any] = {}
        self._seconds: dict[str, Any] = {}
        self._sent = self.sent.labels(server)
        self._documents = self.documents.labels(server)
        self.open_connections = self.connections.labels(server)
        self._streams = self.streams.labels(server)
        self.stream_count = 0
        self.total = 0
        self.document_total = 0
        self.byte_total = 0

    def answered(self, route: str, code: int, seconds: float | None, byte_count: int) -> None:
        """Count one answer."""
        counter = self._answers.get((route, code))
        if counter is None:
            counter = self._answers[route, code] = self.answers.labels(self.server, route, str(code))
        counter.inc()
        if seconds is not None:
            histogram = self._seconds.get(route)
            if histogram is None:
                histogram = self._seconds[route] = self.seconds.labels(self.server, route)
            histogram.observe(seconds)
        self._sent.inc(byte_count)
        self.total += 1
        self.byte_total += byte_count

    def stream_began(self) -> None:
        """One more reader of changes."""
        self.stream_count += 1
        self._streams.inc()

    def stream_ended(self) -> None:
        """One less."""
        self.stream_count -= 1
        self._streams.dec()

    def gave(self, count: int) -> None:
        """Count documents."""
        self._documents.inc(count)
        self.document_total += count

    def counters(self) -> dict[str, int]:
        """Sums for the supervisor's status; they only rise while the process lives."""
        return {
            "http_requests": self.total,
            "http_documents": self.document_total,
            "http_sent_bytes": self.byte_total,
        }


def _gauge(name: str, text: str, rows: Iterable[tuple[list[str], Any]], labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(f"dcp_mirror_{name}", text, labels=labels)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family


def _counter(name: str, text: str, rows: Iterable[tuple[list[str], Any]], labels: tuple[str, ...] = ()) -> Metric:
    family = CounterMetricFamily(f"dcp_mirror_{name}", text, labels=labels)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, value)
    return family


def families(report: Report) -> Iterator[Metric]:
    """The metric families of a status document."""
    rows, workers, sums = report["vbuckets"], report["workers"], report["totals"]
    yield _gauge("up", "1 while the service runs, 0 when only its store was read.", [([], report["service"] == "up")])
    yield _gauge("ready", "1 when /readyz says so.", [([], not report["reasons"])])
    judged = [([state], report["state"] == state) for state in health.STATES]
    yield _gauge("state", "1 for the state of the mirror, else 0.", judged, ("state",))
    yield _gauge("uptime_seconds", "Age of the service.", [([], report["uptime_s"])])
    yield _gauge("vbuckets", "Vbuckets of the bucket.", [([], report["vbucket_count"])])
    yield _gauge("vbuckets_held", "Vbuckets that this mirror holds.", [([], report["vbuckets_held"])])
    states = dict.fromkeys(STATES, 0) | sums["states"]
    yield _gauge("vbucket_states", "Vbuckets by state.", [([s], n) for s, n in states.items()], ("state",))
    yield _gauge("lag_seqnos", "Seqnos of the source not published yet, summed.", [([], sums["lag_seqnos"])])
    yield _gauge("lag_seconds", "Age of the oldest unpublished seqno, or of the last contact.", [([], sums["lag_s"])])
    yield _gauge("ingest_documents_per_second", "Documents received lately.", [([], sums["documents_per_s"])])
    yield _gauge("ingest_bytes_per_second", "Bytes received lately.", [([], sums["bytes_per_s"])])
    yield _counter("rollbacks", "Rollbacks that readers went through.", [([], sums["rollback_count"])])
    yield _gauge("leases", "Readers that hold history.", [([], len(report["leases"]))])
    for name, text, field in (
        ("published_seqno", "What readers see.", "published_seqno"),
        ("staged_seqno", "What was received.", "staged_seqno"),
        ("source_high_seqno", "What the source has.", "source_high_seqno"),
        ("vbucket_lag_seqnos", "Seqnos not published yet.", "lag_seqnos"),
        ("vbucket_lag_seconds", "Age of the oldest seqno not published.", "lag_s"),
        ("vbucket_rollbacks", "Rollbacks.", "rollback_count"),
    ):
        yield _gauge(name, text, [([str(row["vbid"])], row[field]) for row in rows], ("vbid",))
    for kind, processes in (("worker", workers), ("server", report.get("servers") or ())):
        named = [(_name(kind, row), row) for row in processes]
        for name, text, field in (
            ("cpu_percent", "Share of one core.", "cpu_percent"),
            ("private_bytes", "Memory that is its own (RssAnon).", "private_bytes"),
            ("uptime_seconds", "Age of the process.", "uptime_s"),
        ):
            yield _gauge(f"{kind}_{name}", text, [([own], row.get(field)) for own, row in named], (kind,))
        yield _gauge(
            f"{kind}_running", "1 while it does its work.",
            [([own], row.get("phase") == "running") for own, row in named], (kind,),
        )  # fmt: skip
        yield _counter(
            f"{kind}_restarts", "Started again after a death.", [([own], row.get("restarts")) for own, row in named],
            (kind,),
        )  # fmt: skip
        for counter in sorted({name for row in processes for name in row.get("counters") or {}}):
            family = _gauge if counter.endswith("_connections") else _counter
            yield family(
                f"{kind}_{counter}", "Since the process started.",
                [([own], (row.get("counters") or {}).get(counter)) for own, row in named], (kind,),
            )  # fmt: skip
    yield from _surroundings(report)


def _surroundings(report: Report) -> Iterator[Metric]:
    disk, history = report.get("disk"), report.get("history")
    if disk is not None:
        yield _gauge("store_bytes", "What the groups take on the disk.", [([], disk["mirror_bytes"])])
        yield _gauge("disk_free_bytes", "Free space beside them.", [([], disk["free_bytes"])])
    if history is not None:
        yield _counter("refills", "Vbuckets resynced from 0.", [([], history["refill_count"])])
        newest = history["floor_newest_ms"]
        yield _gauge(
            "history_floor_seconds", "From here on every vbucket can be read as of, seconds since 1970.",
            [([], None if newest is None else newest / 1000)],
        )  # fmt: skip


def _name(kind: str, row: Report) -> str:
    return f"{row['kind']}-{row['slot'] % 1000}" if kind == "server" and row.get("kind") else str(row["slot"])


class _Given:
    """Families as a collector."""

    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = list(found)

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._found


def exposition(report: Report | None, requests: Requests) -> bytes:
    """The text that a scrape gets; without a report (no mirror yet) what this process counted."""
    registry = CollectorRegistry(auto_describe=False)
    if report is not None:
        registry.register(_Given(families(report)))
    return generate_latest(registry) + generate_latest(requests.registry)
