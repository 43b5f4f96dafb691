"""Metric families: nothing invented, one name for each process, and text that Prometheus reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from mirror.health import STATES
from mirror.serve.latency import BOUNDS_S, Latencies
from mirror.serve.metrics import Requests, exposition, own_exposition
from mirror.supervise.status import stored_status
from tests.serve.http_site import Source, service_report


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_what_is_not_known_is_left_out(source: Source) -> None:
    found = samples(exposition(stored_status(Path(source.path))) + own_exposition(Requests("http-0")))
    assert found["dcp_mirror_up", ()] == 0
    assert found["dcp_mirror_ready", ()] == 0
    names = {name for name, _ in found}
    assert "dcp_mirror_published_seqno" in names
    assert not names & {"dcp_mirror_lag_seqnos", "dcp_mirror_lag_seconds", "dcp_mirror_vbucket_lag_seqnos"}


def test_workers_and_servers_have_their_names(source: Source) -> None:
    worker: dict[str, Any] = {
        "slot": 0, "phase": "running", "cpu_percent": 1.5, "private_bytes": 7, "uptime_s": 3.0, "restarts": 2,
        "counters": {"commits": 9},
    }  # fmt: skip
    server = worker | {"slot": 2001, "kind": "http", "counters": {"http_documents": 5, "kv_connections": 3}}
    report = service_report(Path(source.path), workers=[worker], servers=[server])
    found = samples(exposition(report))
    assert found["dcp_mirror_worker_running", (("worker", "0"),)] == 1
    assert found["dcp_mirror_worker_restarts_total", (("worker", "0"),)] == 2
    assert found["dcp_mirror_worker_commits_total", (("worker", "0"),)] == 9
    assert found["dcp_mirror_server_http_documents_total", (("server", "http-1"),)] == 5
    assert found["dcp_mirror_server_kv_connections", (("server", "http-1"),)] == 3
    assert found["dcp_mirror_ready", ()] == 1
    assert {labels[0][1]: value for (name, labels), value in found.items() if name == "dcp_mirror_state"} == (
        dict.fromkeys(STATES, 0) | {"following": 1}
    )


def test_a_process_counts_its_own() -> None:
    requests = Requests("http-3")
    requests.answered("get_document", 200, 0.002, 100)
    requests.answered("get_changes", 200, None, 50)
    requests.document_total += 4
    requests.streams["user ann"] += 1
    found = samples(own_exposition(requests))
    own = ("server", "http-3")
    assert found["dcp_mirror_http_requests_total", (("code", "200"), ("route", "get_document"), own)] == 1
    assert found["dcp_mirror_http_request_seconds_count", (("route", "get_document"), own)] == 1
    assert ("dcp_mirror_http_request_seconds_count", (("route", "get_changes"), own)) not in found
    assert found["dcp_mirror_http_sent_bytes_total", (own,)] == 150
    assert found["dcp_mirror_http_streams", (own,)] == 1
    assert requests.counters() == {"http_requests": 2, "http_documents": 4, "http_sent_bytes": 150}


def test_requests_are_counted_in_classes_by_the_time_that_they_took() -> None:
    latencies = Latencies()
    latencies.observe(0.00005)
    latencies.observe(0.001, 3)
    latencies.observe(0.0011)
    latencies.observe(60.0)
    figures = latencies.figures()
    counts = dict(zip([*figures["bounds_s"], "longer"], figures["counts"], strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {
        0.0001: 1, 0.001: 3, 0.0025: 1, "longer": 1,
    }  # fmt: skip
    assert figures["sum_s"] == 60.00415
    assert list(BOUNDS_S) == sorted(BOUNDS_S)
