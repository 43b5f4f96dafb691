"""Every query of the dashboard, and every alert rule, in a real Prometheus that scrapes a running mirror.

Prometheus comes with Debian's package `prometheus`; .ci/run installs it, and there nothing may be skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from tests.crash.service import Service, until
from tests.ports import fetched
from tests.processes import ProcessGroup, caught_up

ASSETS = Path(__file__).parents[2] / "mirror" / "serve" / "assets"
PANELS = json.loads((ASSETS / "dashboard.json").read_text())["panels"]
VARIABLES = {"$instance": ".*", "$__rate_interval": "1m"}
"""Values that Grafana puts in; the rate interval is at least four scrapes."""
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']} {number}")
    for panel in PANELS
    for number, target in enumerate(panel["targets"])
]


class Prometheus:
    def __init__(self, process: ProcessGroup) -> None:
        """Wait until Prometheus answers."""
        self._url = until("Prometheus to listen", lambda: _address(process))
        until("Prometheus to be ready", lambda: fetched(f"{self._url}/-/ready")[0] == 200)

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]

    def series(self, query: str) -> list[dict[str, Any]]:
        """Return the current series of a query."""
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        found: list[dict[str, Any]] = self.ask("query", query=query)["result"]
        return found


def _address(process: ProcessGroup) -> str | None:
    assert process.poll() is None, "Prometheus has ended"
    listening = [each.laddr for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"]
    return f"http://{listening[0].ip}:{listening[0].port}" if listening else None


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed (Debian package prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        source = stack.enter_context(SandboxThread(SandboxCluster(vbuckets=8)))
        source.call(source.cluster.set, "key", b"1")
        flags = ("--workers", "1", "--groups", "2", "--http", "0", "--kv", "0")
        service = stack.enter_context(Service(source.connection_string, folder / "data", *flags))
        service.start()
        until("the mirror to be filled", lambda: caught_up(service.status()))
        listeners = until("HTTP to listen", lambda: (service.status() or {}).get("listeners", {}).get("http"))
        target = listeners[0].removeprefix("http://")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ASSETS / "alerts.yml")],
            "scrape_configs": [{"job_name": "mirror", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        process = stack.enter_context(
            ProcessGroup(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stack.enter_context((folder / "log").open("w")),
                text=True,
                process_group=0,
            )
        )
        found = Prometheus(process)
        until("three scrapes", lambda: _samples(found) >= 3)
        yield found


def _samples(prometheus: Prometheus) -> int:
    found = prometheus.series("count_over_time(dcp_mirror_up[1m])")
    return int(found[0]["value"][1]) if found else 0


@pytest.mark.ci
@pytest.mark.parametrize("query", QUERIES)
def test_each_query_of_a_panel_yields_series(prometheus: Prometheus, query: str) -> None:
    assert prometheus.series(query)


@pytest.mark.ci
def test_each_rule_is_evaluated_and_none_fires_for_a_healthy_mirror(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = prometheus.ask("rules")["groups"][0]["rules"]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    states = {
        rule["name"]: (rule["health"], rule.get("lastError", ""), rule["state"]) for rule in until("a look", rules)
    }
    assert len(states) > 10
    healthy = ("ok", "", "inactive")
    if states["DcpMirrorSlowAnswers"] == ("ok", "", "pending"):  # the machine is busy: not for 10 minutes
        states["DcpMirrorSlowAnswers"] = healthy
    assert {name: state for name, state in states.items() if state != healthy} == {}
