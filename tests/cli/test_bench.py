"""`bench` prints ratios for people and JSON for scripts, and says what is wrong with its arguments."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import cli
from tests.cli.conftest import LIMIT_S, Result, background, call

BENCHES_MD = (
    Path(cli.__file__).with_name("JSON.md").read_text().partition("## `bench ... --json`\n")[2].partition("\n## ")[0]
)
FEW = ["--documents", "1000"]


def bench(*arguments: str) -> Result:
    return call("bench", *arguments)


def unpromised(shape: dict[str, Any]) -> list[str]:
    """The fields of what a bench has printed that cli/JSON.md does not name."""
    common, *each = BENCHES_MD.split("\n- ")
    (own,) = [text for text in each if text.startswith(f"`{shape['bench']}`:")]
    return [field for field in {**shape, **shape["rounds"][0]} if f"`{field}`" not in common + own]


def test_get_prints_a_ratio_for_each_round_and_the_median(tmp_path: Path) -> None:
    result = bench("get", "--documents", "2000", "--reads", "2000", "--rounds", "2", "--folder", str(tmp_path))
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert len(lines) == 4
    assert all("reads_per_s" in line and "ratio" in line for line in lines[:2])
    assert lines[2].startswith("get: ")
    assert "of the limit (median of 2" in lines[2]
    assert lines[3].startswith("get_many of 100: ")
    assert list(tmp_path.iterdir()) == []


def test_ingest_prints_json_alone_on_stdout(tmp_path: Path) -> None:
    result = bench(
        "ingest", "--documents", "2000", "--vbuckets", "4", "--rounds", "1", "--json", "--folder", str(tmp_path)
    )
    assert result.code == 0, result.err
    shape = result.json
    assert (shape["bench"], shape["documents"], shape["vbuckets"]) == ("ingest", 2000, 4)
    (figures,) = shape["rounds"]
    assert figures["ratio"] == shape["ratio_median"] > 0
    assert figures["peak_private_mib"] > 1
    assert unpromised(shape) == []


def test_sigterm_ends_it_with_its_processes_and_files_also_in_the_background_of_a_script(tmp_path: Path) -> None:
    ignored = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as shells without job control have it
    flags = ["--documents", "20000000", "--folder", str(tmp_path)]
    with background("bench", "ingest", *flags, preexec_fn=ignored) as running:
        itself = psutil.Process(running.pid)
        while not any(each.cpu_times().user > 1 for each in itself.children()):  # the source, which makes documents
            assert running.poll() is None
            time.sleep(0.02)
        children = itself.children()
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=LIMIT_S)
        assert (running.returncode, err) == (130, "")
        psutil.wait_procs(children, timeout=LIMIT_S)
        assert not [child for child in children if child.is_running()]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_ingest_prints_a_ratio_for_each_order_that_was_measured(tmp_path: Path) -> None:
    flags = ["--vbuckets", "4", "--rounds", "1", "--order", "both", "--folder", str(tmp_path)]
    result = bench("ingest", *FEW, *flags)
    assert result.code == 0, result.err
    first, second, turn, stream = result.out.splitlines()
    assert first.startswith("turn  ")
    assert second.startswith("stream  ")
    assert turn.startswith("ingest, turn: ")
    assert stream.startswith("ingest, stream: ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["ingest", "--sync", "maybe"], "--sync 'maybe': must be safe, full or unsafe"),
        (["lag", "--rates", "5,fast"], "--rates '5,fast': must be numbers from 1 to 100000, separated by commas"),
        (["dcp", "--clients", "0"], "--clients '0': must be numbers from 1 to 1000, separated by commas"),
        (["ingest", "--order", "any"], "--order 'any': must be turn, stream or both"),
        (["get", "--folder", "/no/such/folder"], "--folder /no/such/folder: no such directory"),
        (["get", "--documents", "5"], "documents"),
        (["growth", "--documents", "10,25"], "--documents '10,25': must be multiples of the first, rising"),
        (["growth", "--documents", "20,10"], "--documents '20,10': must be multiples of the first, rising"),
        (["nothing"], "nothing"),
    ],
)
def test_wrong_arguments_are_named_in_one_line_with_exit_code_2(arguments: list[str], complaint: str) -> None:
    result = bench(*arguments)
    assert result.code == 2
    assert complaint in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_rollback_prints_its_figures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = bench("rollback", "--rows", "2000", "--json", "--folder", str(tmp_path))
    assert result.code == 0, result.err
    shape = result.json
    assert (shape["bench"], shape["rows"], len(shape["rounds"])) == ("rollback", 2000, 1)
    figures = shape["rounds"][0]
    assert figures["retracted_rows"] == 2000
    assert {"rollback_ms", "step_ms_max", "removed_rows_per_s", "documents_per_s", "reads_per_s"} <= set(figures)
    assert unpromised(shape) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "few"),
    [
        ("lag", ["--rates", "200", "--seconds", "0.2"]),
        pytest.param("start", ["--vbuckets", "8", "--nodes", "2", "--workers", "1"], marks=pytest.mark.ci),
        pytest.param("get", [*FEW, "--reads", "1000", "--vbuckets", "4"], marks=pytest.mark.ci),
        ("http", [*FEW, "--requests", "100", "--connections", "2"]),
        ("kv", [*FEW, "--reads", "1000", "--vbuckets", "4"]),
        pytest.param("restart", [*FEW, "--vbuckets", "8", "--missed", "10", "--workers", "1"], marks=pytest.mark.ci),
        ("dcp", [*FEW, "--clients", "1,2", "--vbuckets", "4"]),
    ],
)
def test_every_field_that_is_printed_is_promised(name: str, few: list[str], tmp_path: Path) -> None:
    rounds = [] if name == "lag" else ["--rounds", "1"]
    result = bench(name, *few, *rounds, "--json", "--folder", str(tmp_path))
    assert result.code == 0, result.err
    assert result.json["bench"] == name
    assert unpromised(result.json) == []


def test_growth_prints_the_cost_at_each_size_and_how_it_grew(tmp_path: Path) -> None:
    flags = ["--documents", "400,1200", "--vbuckets", "4", "--reads", "100", "--folder", str(tmp_path)]
    first, second, grown = bench("growth", *flags).out.splitlines()
    assert first.startswith("documents 400  ")
    assert second.startswith("documents 1,200  ")
    assert grown.startswith("growth, 1,200 documents to 400: cpu_us ")
    shape = bench("growth", *flags, "--json").json
    assert [each["documents"] for each in shape["rounds"]] == [400, 1200]
    costs = {f"{name}_growth" for name in ("cpu_us", "limit_cpu_us", "get_us", "limit_get_us")}
    assert {name for name in shape if name.endswith("_growth")} == costs
    assert all(shape[name] > 0 for name in costs)
    assert unpromised(shape) == []
    assert list(tmp_path.iterdir()) == []


def test_start_times_a_start_that_makes_the_mirror_and_one_that_goes_on(tmp_path: Path) -> None:
    flags = ["--vbuckets", "8", "--nodes", "2", "--workers", "2", "--rounds", "2", "--folder", str(tmp_path)]
    result = bench("start", *flags)
    assert result.code == 0, result.err
    first, second = result.out.splitlines()
    assert first.startswith("a new mirror: ")
    assert second.startswith("again: ")
    memory = [float(each) for each in second.partition("workers: ")[2].split(", ")]
    assert len(memory) == 2
    assert min(memory) > 1
    assert list(tmp_path.iterdir()) == []
