"""Figures of `sync` as a scrape gets them."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from cli.sync import merge_line, serving_metrics
from mirror.errors import ConfigError
from mirror.spark.pipeline.metrics import BatchFigures, MergeFigures, SyncMetrics, serving


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    return {name.removeprefix("dcp_mirror_sync_"): value for name, value in found.items() if "timestamp" not in name}


def test_batches_merges_and_waiting_events_are_counted() -> None:
    metrics = SyncMetrics()
    with serving(metrics, "127.0.0.1", 0) as port:
        assert scraped(port).keys().isdisjoint(("lag_seqnos", "waiting_events"))
        metrics.add(BatchFigures(0, 100, 50.0, 20, lag_seqnos=7))
        metrics.add(BatchFigures(1, 10, 50.0, 20, lag_seqnos=0))
        found = scraped(port)
        assert (found["events_total"], found["lag_seqnos"]) == (110, 0)
        assert "waiting_events" not in found, "batches of an earlier process may wait"
        metrics.add(BatchFigures(3, 5, 50.0, 20))  # it came while batches up to 2 were merged
        metrics.add(MergeFigures(2, 60, 4, 3, 2, 5_000, 9))
        metrics.add(BatchFigures(2, 20, 50.0, 20))  # it is in the merge that was reported before it
        assert scraped(port) == {
            "batches_total": 4,
            "events_total": 135,
            "merges_total": 1,
            "misfits_total": 2,
            "rewritten_bytes_total": 5_000,
            'rows_total{change="inserted"}': 60,
            'rows_total{change="updated"}': 4,
            'rows_total{change="deleted"}': 3,
            "lag_seqnos": 0,
            "waiting_events": 5,
        }
        metrics.add(MergeFigures(3, 0, 0, 0, 0, 0, 9))
        assert scraped(port)["waiting_events"] == 0


def test_an_unavailable_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--metrics {address}: Address already in use"):
            serving_metrics(SyncMetrics(), address).__enter__()
    for wrong in ("nowhere", "unix:/x", "1,2"):
        with pytest.raises(ConfigError, match="--metrics"):
            serving_metrics(SyncMetrics(), wrong)


def test_a_merge_is_shown_on_one_line() -> None:
    said = merge_line(MergeFigures(7, 1_000, 2, 0, 0, 3 << 20, 1_500))
    assert said == "merge up to batch 7 | 1,000 inserted, 2 updated, 0 deleted | 3.0 MiB rewritten, 1.5 s"
