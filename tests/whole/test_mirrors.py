"""Mirrors that share a bucket: a wrong list of them is refused at the start, or seen in each other's answers."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

from mirror.sandbox import SandboxCluster, SandboxThread
from tests.cli.conftest import call
from tests.crash.service import Service, until
from tests.ports import free_port
from tests.processes import caught_up

VBUCKETS = 8
HALVES = ("0-3", "4-7")
HOSTS = ("127.0.0.1", "127.0.0.2")


def test_a_list_that_one_mirror_can_judge_is_refused_at_its_start(tmp_path: Path) -> None:
    """`tests/serve/test_kv_map.py` has every such list."""
    port = free_port()
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS)) as source:
        for nodes, complaint in (
            (f"127.0.0.1:{port}=0-3,127.0.0.2:{port}=5-7", "no mirror for vbuckets 4"),
            (f"127.0.0.1:1=0-3,127.0.0.2:{port}=4-7", "does not name this mirror"),
        ):
            flags = ("--kv", port, "--set", f"kv_nodes={nodes}", "--set", "vbuckets=0-3")
            found = call("run", "--source", source.connection_string, "--data", tmp_path / "data", *flags)
            assert found.code == 2
            assert complaint in found.complaint
            assert not (tmp_path / "data" / "mirror.json").exists()


def test_mirrors_with_exchanged_ranges_notice_it_in_each_others_answers(tmp_path: Path) -> None:
    """Both have the same list, which each finds plausible: SDKs would time out for every key."""
    port = free_port()
    right = ",".join(f"{host}:{port}={half}" for host, half in zip(HOSTS, HALVES, strict=True))
    exchanged = ",".join(f"{host}:{port}={half}" for host, half in zip(HOSTS, reversed(HALVES), strict=True))
    settings = tmp_path / "settings.toml"
    settings.write_text(f'kv_nodes = "{exchanged}"')
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS)) as source, ExitStack() as stack:
        services = []
        for host, half in zip(HOSTS, HALVES, strict=True):
            folder = tmp_path / half
            folder.mkdir()
            flags = ("--kv", f"{host}:{port}", "--set", f"vbuckets={half}", "--config", str(settings))
            services.append(stack.enter_context(Service(source.connection_string, folder / "data", *flags)))
            services[-1].start()
        for service, half in zip(services, HALVES, strict=True):
            until(f"{half} to see it", lambda service=service: troubled(service))  # type: ignore[misc]
            assert "clients are led to a mirror" in call("status", "--data", service.data).out
            assert call("status", "--data", service.data, "--ready").code == 1
        settings.write_text(f'kv_nodes = "{right}"')
        for service in services:
            os.kill(service.pid, signal.SIGHUP)
        for service in services:
            until("it to follow", lambda service=service: caught_up(service.status()))  # type: ignore[misc]
            assert service.terminate() == 0
            assert not service.tracebacks()


def troubled(service: Service) -> bool:
    status = service.status()
    if status is None or status["state"] != "degraded":
        return False
    (trouble, *_) = status["troubles"]
    return "does not hold vbucket" in (trouble["error"] or "") and trouble["procedure"] == "settings.md#kv_nodes"
