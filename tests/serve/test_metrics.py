"""Metrics, alert rules and the dashboard: what these name is exported, and promtool accepts and fires rules.

It comes with Debian's package `prometheus`; .ci/run installs it, and there nothing may be skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mirror.health import BROKEN, STATES, Trouble
from mirror.serve.metrics import exposition
from mirror.server.latency import BOUNDS_S, Latencies
from mirror.supervise.status import stored_status
from tests.serve.http_site import Source, service_report


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_unknown_figures_are_left_out(source: Source) -> None:
    found = samples(exposition(stored_status(Path(source.path))))
    assert found["dcp_mirror_up", ()] == 0
    assert found["dcp_mirror_ready", ()] == 0
    names = {name for name, _ in found}
    assert "dcp_mirror_published_seqno" in names
    assert not names & {"dcp_mirror_lag_seqnos", "dcp_mirror_lag_seconds", "dcp_mirror_vbucket_lag_seqnos"}


def test_metrics_name_their_worker_or_server(source: Source) -> None:
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


FOLDER = Path(__file__).parents[2] / "mirror" / "serve" / "assets"
RULES, DASHBOARD = FOLDER / "alerts.yml", FOLDER / "dashboard.json"
DOCS = Path(__file__).parents[2] / "docs"

Series = dict[str, str]
"""Labels behind the metric's name -> samples, one a minute, as promtool writes them."""

STATE, BUCKET = "dcp_mirror_state", "dcp_mirror_server_request_seconds_bucket"
FREE, TOTAL = "dcp_mirror_disk_free_bytes", {"dcp_mirror_disk_total_bytes": "1000x80"}


def answers(fast: str, all_of_them: str) -> Series:
    labels = 'server="kv-0",le='
    return {f'{BUCKET}{{{labels}"0.1"}}': fast, **dict.fromkeys(
        (f'{BUCKET}{{{labels}"1"}}', f'{BUCKET}{{{labels}"+Inf"}}'), all_of_them
    )}  # fmt: skip


CASES: dict[str, tuple[int, Series, Series]] = {
    "DcpMirrorAbsent": (5, {}, {"dcp_mirror_up": "1x20"}),
    "DcpMirrorSourceUnreachable": (
        5, {STATE + '{state="source unreachable"}': "1x20"}, {STATE + '{state="source unreachable"}': "0x4 1 0x20"},
    ),
    "DcpMirrorDegraded": (
        9, {STATE + '{state="degraded"}': "0x5 1x20"}, {STATE + '{state="degraded"}': "0x6 1 1 0x20"},
    ),
    "DcpMirrorDiskFull": (
        5, {STATE + '{state="disk full"}': "0x2 1x20"}, {STATE + '{state="disk full"}': "1x3 0x20"},
    ),
    "DcpMirrorNotReady": (15, {"dcp_mirror_ready": "0x20"}, {"dcp_mirror_ready": "0x9 1 0x20"}),
    "DcpMirrorDamaged": (
        5,
        {'dcp_mirror_vbucket_states{state="refused"}': "0 0 3x20"},
        {'dcp_mirror_vbucket_states{state="streaming"}': "64x20", 'dcp_mirror_vbucket_states{state="damaged"}': "0x20"},
    ),
    "DcpMirrorLag": (10, {"dcp_mirror_lag_seconds": "90x20"}, {"dcp_mirror_lag_seconds": "90x7 5x20"}),
    "DcpMirrorRolledBack": (
        12, {"dcp_mirror_rollbacks_total": "0x9 33x11"}, {"dcp_mirror_rollbacks_total": "33x20"},
    ),
    "DcpMirrorResync": (
        12,
        {"dcp_mirror_stale_vbuckets": "0x20", "dcp_mirror_resyncs_total": "0x9 64x11"},
        {"dcp_mirror_stale_vbuckets": "0x20", "dcp_mirror_resyncs_total": "64x20"},
    ),
    "DcpMirrorWorkerRestarts": (
        15, {'dcp_mirror_worker_restarts_total{worker="0"}': "0+1x20"},
        {'dcp_mirror_worker_restarts_total{worker="0"}': "0x9 1x20"},
    ),
    "DcpMirrorDiskFilling": (40, TOTAL | {FREE: "100-1x80"}, TOTAL | {FREE: "100x80"}),
    "DcpMirrorDiskAlmostFull": (10, TOTAL | {FREE: "49x20"}, TOTAL | {FREE: "51x20"}),
    "DcpMirrorReaderPin": (
        2, {"dcp_mirror_reader_pin_age_seconds": "301x5"}, {"dcp_mirror_reader_pin_age_seconds": "299x5"},
    ),
    "DcpMirrorSlowAnswers": (20, answers("0x20", "0+60x20"), answers("0+60x20", "0+60x20")),
}  # fmt: skip
"""For each rule: the minute that is looked at, samples with which it fires, and samples with which it does not."""


def promtool_test(name: str, minute: int, series: Series, *, fires: bool) -> dict[str, Any]:
    expected = [{"labels": "{}", "value": 1}] if fires else []
    firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    return {
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": f"{minute}m", "exp_samples": expected}],
    }


def whole_report(path: Path) -> dict[str, Any]:
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
    return report | {"disk": disk, "history": {"floor_newest_ms": 1, "resync_count": 0}}


@pytest.fixture
def scraped(source: Source) -> str:
    source.put("a")
    return exposition(whole_report(Path(source.path))).decode()


def exported(text: str) -> set[str]:
    return set(re.findall(r"^(dcp_mirror_\w+)", text, re.M))


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_every_metric_named_in_a_file_is_exported(file: Path, scraped: str) -> None:
    named = set(re.findall(r"\bdcp_mirror_\w+", file.read_text()))
    assert len(named) > 10
    assert named <= exported(scraped)


def test_the_dashboard_can_be_imported() -> None:
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


def test_promtool_finds_no_problem_in_the_metrics(scraped: str) -> None:
    assert promtool("check", "metrics", text=scraped) == ""


def test_every_rule_fires_exactly_in_its_case(tmp_path: Path) -> None:
    assert set(re.findall(r"- alert: (\w+)", RULES.read_text())) == set(CASES)
    tests = [
        promtool_test(name, minute, series, fires=fires)
        for name, (minute, firing, quiet) in CASES.items()
        for series, fires in ((firing, True), (quiet, False))
    ]
    file = tmp_path / "rules.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", file)


def of_instance(series: Series, instance: str) -> Series:
    label = f'instance="{instance}",job="dm"'
    return {
        each.replace("{", f"{{{label},") if "{" in each else f"{each}{{{label}}}": values
        for each, values in series.items()
    }


def test_every_rule_fires_for_one_of_two_mirrors_and_stops_when_its_series_end(tmp_path: Path) -> None:
    tests = []
    for name, (minute, firing, quiet) in CASES.items():
        if name == "DcpMirrorAbsent":
            continue
        one = of_instance(firing, "b") | of_instance(quiet, "a")
        tests.append(promtool_test(name, minute, one, fires=True))
        ended = {each: f"{values} stale _x100" for each, values in of_instance(firing, "b").items()}
        tests.append(promtool_test(name, 120, ended, fires=False))
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", file)


ALIVE = {"dcp_mirror_up": "1x2000", "up": "1x2000"}


@pytest.mark.parametrize(
    ("series", "absent"),
    [
        (of_instance(ALIVE, "a"), []),
        (
            of_instance(ALIVE, "a") | of_instance({"dcp_mirror_up": "1x10 stale _x2000", "up": "1x10 0x2000"}, "b"),
            ["b"],
        ),
        (of_instance(ALIVE, "a") | of_instance({"dcp_mirror_up": "1x10 _x2000", "up": "1x10 0x2000"}, "b"), ["b"]),
        (of_instance(ALIVE, "a") | of_instance({"dcp_mirror_up": "1x10 0x2000", "up": "1x2000"}, "b"), ["b"]),
        (of_instance(ALIVE, "a") | of_instance({"dcp_mirror_up": "1x10 stale", "up": "1x10 stale"}, "b"), []),
        (of_instance(ALIVE, "a") | {'up{instance="node:9100",job="other"}': "0x2000"}, []),
        ({}, [None]),
    ],
    ids=["alive", "dead", "dead without a marker", "no service", "no longer scraped", "another job", "none"],
)
def test_the_alert_of_a_mirror_that_is_gone_names_it(series: Series, absent: list[str | None], tmp_path: Path) -> None:
    """One of two mirrors was dead for an hour, and for days, and no alert fired: the other one answered."""
    expected = [
        {
            "exp_labels": {"severity": "critical"} | ({"instance": name, "job": "dm"} if name else {}),
            "exp_annotations": {
                "runbook": "docs/troubleshooting.md#states-of-the-service",
                "summary": f"{name} does not answer scrapes" if name else "No mirror answers scrapes",
                "description": "No service of dcp-mirror runs there, or its HTTP listener is not reached.",
            },
        }
        for name in absent
    ]
    checks = [
        {"eval_time": f"{minute}m", "alertname": "DcpMirrorAbsent", "exp_alerts": expected} for minute in (70, 1500)
    ]
    given = [{"series": each, "values": values} for each, values in series.items()]
    test = {"interval": "1m", "input_series": given, "alert_rule_test": checks}
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", file)


def headings(document: str) -> set[str]:
    lines = re.findall(r"(?m)^#+ (.*)$", (DOCS / document).read_text())
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_each_alert_and_each_trouble_leads_to_a_procedure() -> None:
    links = re.findall(r"runbook: docs/(\S+)", RULES.read_text())
    assert len(links) == len(CASES)
    links += [Trouble(state, what).procedure for state in STATES for what in ("x", *BROKEN.values())]
    for link in set(links):
        document, _, heading = link.partition("#")
        assert heading in headings(document), link
