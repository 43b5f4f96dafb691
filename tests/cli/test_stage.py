from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cli.stage import Stage
from mirror.errors import SupervisionError
from tests.processes import caught_up
from tests.supervise.conftest import eventually_now as eventually


def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "data", tmp_path, nodes=1, vbuckets=4, documents=10, rate=0, workers=1)


def test_source_and_mirror_start_and_end_together_and_ignore_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MIRROR_WORKERS", "nonsense")
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "another")
    before = set(psutil.Process().children(recursive=True))
    with stage(tmp_path) as both:
        assert both.connection_string.startswith("couchbase://demo@")
        eventually(lambda: caught_up(both.status()))
        status = both.status()
        assert status is not None
        assert both.ask_source("status")["documents"] == 10
        assert status["totals"]["published_seqnos"] == 10
        pid = status["workers"][0]["pid"]
        both.kill_worker(pid)
        both.kill_worker(pid)
        assert both.end_service() == 0
        with pytest.raises(SupervisionError, match=r"service .* has ended: exit 0"):
            both.status()
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_source_that_fails_to_start_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr("cli.stage.COMMAND", ["/bin/sh", "-c", "echo dcp-mirror: no way >&2"])
    with pytest.raises(SupervisionError, match="no way"):
        stage(tmp_path).__enter__()
    assert not set(psutil.Process().children(recursive=True)) - before
