"""Mirrors that share a bucket: a wrong list of them is refused at the start."""

from __future__ import annotations

from pathlib import Path

from mirror.sandbox import SandboxCluster, SandboxThread
from tests.cli.conftest import call
from tests.ports import free_port

VBUCKETS = 8


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
