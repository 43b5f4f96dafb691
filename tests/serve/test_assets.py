"""Alert rules and dashboard: each metric in them is exported, and Prometheus' own tool accepts and fires the rules.

promtool comes with Debian's package `prometheus`; .ci/run installs it, and there nothing may be skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mirror.serve.latency import Latencies
from mirror.serve.metrics import Requests, exposition
from tests.serve.http_site import Source, service_report

FOLDER = Path(__file__).parents[2] / "mirror" / "serve" / "assets"
RULES, DASHBOARD = FOLDER / "alerts.yml", FOLDER / "dashboard.json"

BUCKET = 'dcp_mirror_server_request_seconds_bucket{instance="a",server="kv-0",'
FIRED = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'dcp_mirror_up{{instance="a"}}', values: '1x20'}}
      - {{series: 'dcp_mirror_ready{{instance="a"}}', values: '0x20'}}
      - {{series: 'dcp_mirror_state{{instance="a",state="source unreachable"}}', values: '0x4 1x16'}}
      - {{series: 'dcp_mirror_vbucket_states{{instance="a",state="damaged"}}', values: '0x9 8x11'}}
      - {{series: 'dcp_mirror_rollbacks_total{{instance="a"}}', values: '0x9 33x11'}}
      - {{series: '{bucket}le="0.1"}}', values: '0x20'}}
      - {{series: '{bucket}le="1"}}', values: '0+60x20'}}
      - {{series: '{bucket}le="+Inf"}}', values: '0+60x20'}}
    promql_expr_test:
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 20m
        exp_samples:
          - {{labels: '{{alertname="DcpMirrorNotReady"}}', value: 1}}
          - {{labels: '{{alertname="DcpMirrorSourceUnreachable"}}', value: 1}}
          - {{labels: '{{alertname="DcpMirrorDamaged"}}', value: 1}}
          - {{labels: '{{alertname="DcpMirrorSlowAnswers"}}', value: 1}}
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 10m
        exp_samples:
          - {{labels: '{{alertname="DcpMirrorNotReady"}}', value: 1}}
          - {{labels: '{{alertname="DcpMirrorSourceUnreachable"}}', value: 1}}
          - {{labels: '{{alertname="DcpMirrorDamaged"}}', value: 1}}
          - {{labels: '{{alertname="DcpMirrorRolledBack"}}', value: 1}}
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 3m
  - interval: 1m
    promql_expr_test:
      - expr: count by (alertname) (ALERTS{{alertstate="firing"}})
        eval_time: 5m
        exp_samples: [{{labels: '{{alertname="DcpMirrorAbsent"}}', value: 1}}]
"""


def whole_report(path: Path) -> dict[str, Any]:
    """A report in which every figure is known."""
    counters = {"received_documents": 9, "received_bytes": 9, "commits": 9, "stalls": 0, "retries": 1}
    worker = {
        "slot": 0, "phase": "running", "cpu_percent": 1.5, "private_bytes": 7, "uptime_s": 3.0, "restarts": 2,
        "counters": counters, "request_seconds": None,
    }  # fmt: skip
    latencies = Latencies()
    latencies.observe(0.002, 5)
    server = worker | {"slot": 1000, "kind": "kv", "counters": {"kv_requests": 5, "kv_connections": 1}}
    report = service_report(
        path,
        workers=[worker],
        servers=[server | {"request_seconds": latencies.figures()}],
        leases=[{"id": "a", "name": "job", "until_ms": 1, "vbuckets": 2}],
        readers=[{"group": 0, "pid": 1, "age_s": 12.5, "grown_bytes": 4096}],
    )
    disk = {"mirror_bytes": 5, "free_bytes": 6, "total_bytes": 11}
    report["totals"] |= {"documents_per_s": 1.0, "bytes_per_s": 2.0, "lag_s": 0.0, "lag_seqnos": 0}
    return report | {"disk": disk, "history": {"floor_newest_ms": 1, "refill_count": 0}}


@pytest.fixture
def scraped(source: Source) -> str:
    source.put("a")
    requests = Requests("http-0")
    requests.answered("get_document", 200, 0.002, 100)
    return exposition(whole_report(Path(source.path)), requests).decode()


def exported(text: str) -> set[str]:
    return set(re.findall(r"^(dcp_mirror_\w+)", text, re.M))


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_every_metric_that_they_name_is_exported(file: Path, scraped: str) -> None:
    named = set(re.findall(r"\bdcp_mirror_\w+", file.read_text()))
    assert len(named) > 10
    assert named <= exported(scraped)


def test_the_dashboard_is_one_that_can_be_imported() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["uid"] == "dcp-mirror"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


def test_a_histogram_of_each_listener_adds_up(scraped: str) -> None:
    assert 'dcp_mirror_server_request_seconds_bucket{le="0.001",server="kv-0"} 0.0' in scraped
    assert 'dcp_mirror_server_request_seconds_bucket{le="0.0025",server="kv-0"} 5.0' in scraped
    assert 'dcp_mirror_server_request_seconds_bucket{le="+Inf",server="kv-0"} 5.0' in scraped
    assert 'dcp_mirror_server_request_seconds_count{server="kv-0"} 5.0' in scraped
    assert 'dcp_mirror_server_request_seconds_sum{server="kv-0"} 0.01' in scraped


def promtool(*arguments: str | Path, text: str = "") -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    done = subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", RULES)


def test_promtool_finds_nothing_to_say_about_the_metrics(scraped: str) -> None:
    assert promtool("check", "metrics", text=scraped) == ""


def test_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    file = tmp_path / "fired.yml"
    file.write_text(FIRED.format(rules=RULES, bucket=BUCKET))
    assert "SUCCESS" in promtool("test", "rules", file)
