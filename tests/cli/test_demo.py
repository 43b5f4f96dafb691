"""The demo as a newcomer runs it, only shorter: each claim it makes is measured, so its own verdict is the test."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from cli.demo import LOST_CHANGES
from tests.cli.conftest import LIMIT_S, background, call, succeed

SMALL = ["--documents", "3000", "--rate", "300"]


def test_the_whole_demo_ends_well(tmp_path: Path) -> None:
    result = succeed("demo", "--seconds", "3", "--data", tmp_path / "data", "--json", *SMALL)
    summary = result.json
    assert summary["ok"] is True
    assert summary["kill"]["requested_again_bytes"] == 0
    assert summary["kill"]["vbuckets_requested_below_published"] == 0
    assert summary["kill"]["vbuckets"] == 32
    assert summary["failover"]["rolled_back"] >= 1
    assert summary["failover"]["retracted_seqnos"] >= 1
    lost = summary["failover"]["retracted_seqnos"] - summary["failover"]["sent_again_seqnos"]
    most = LOST_CHANGES + 1  # a failover that would part a durable write from its prepare loses the prepare too
    assert 0 < lost <= most * summary["failover"]["rolled_back"], "what the source lost, and no more"
    assert summary["failover"]["resynced"] == 0
    assert summary["documents"]["source"] == summary["documents"]["mirror"] > 3000
    assert summary["check_problems"] == []
    shown = [line for line in result.err.splitlines() if " s  " in line]
    assert "status page: http://127.0.0.1:" in shown[0]
    for line in ("SIGKILL to worker", "is back", "fails over", "rolled back", "writes stop"):
        assert line in result.err
    assert call("status", "--data", tmp_path / "data", "--json").json["totals"]["rollback_count"] >= 1


@pytest.mark.ci
@pytest.mark.parametrize(
    ("number", "prepare"),
    [(signal.SIGINT, None), (signal.SIGTERM, partial(signal.signal, signal.SIGINT, signal.SIG_IGN))],
    ids=["Ctrl-C", "SIGTERM in the background of a script"],
)
def test_a_signal_ends_the_demo_in_order_with_no_process_left(
    tmp_path: Path, number: signal.Signals, prepare: Callable[[], None] | None
) -> None:
    with background("demo", "--data", tmp_path / "data", *SMALL, preexec_fn=prepare) as demo:
        assert demo.stdout is not None
        while "mirrored" not in demo.stdout.readline():
            assert demo.poll() is None
        demo.send_signal(number)
        out, err = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, err
    assert "the demo ended well" in out
    assert "Traceback" not in err
    unreachable = ["--source", "couchbase://demo@127.0.0.1:1/demo", "--set", "bootstrap_timeout_s=0.1"]
    check = call("run", *unreachable, "--data", tmp_path / "data", "--until-caught-up")
    assert "serves" not in check.complaint, "no service of the demo may hold the lock any more"


@pytest.mark.ci
def test_a_killed_source_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    """The demo went on showing a mirror of a source that was dead."""
    with background("demo", "--data", tmp_path / "data", *SMALL) as demo:
        assert demo.stdout is not None
        while "mirrored" not in demo.stdout.readline():
            assert demo.poll() is None
        [source] = [each for each in psutil.Process(demo.pid).children() if "sandbox" in each.cmdline()]
        source.kill()
        _, err = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 1
    assert err.startswith(f"dcp-mirror: the demo's source (process {source.pid}) has ended: SIGKILL")
    assert err.count("\n") == 1


def test_an_existing_mirror_is_not_touched(mirrored: Path) -> None:
    call("demo", "--data", mirrored).assert_complains(2, "holds a mirror already")
