"""`export` to CSV, Parquet and Delta as a person calls it: what it prints, its exit codes, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from tests.bench import stores
from tests.cli.conftest import LIMIT_S, background, call, call_here, succeed
from tests.crash.service import gone
from tests.supervise.conftest import eventually_now as eventually


def test_an_export_to_parquet_reports_its_figures(mirrored: Path, tmp_path: Path) -> None:
    done = succeed("export", "--format", "parquet", "--data", mirrored, "--to", tmp_path / "out", "--json")
    facts = done.json
    assert (facts["documents"], facts["format"], facts["vbuckets"], facts["version"]) == (183, "parquet", 16, None)
    table = ds.dataset(tmp_path / "out", format="parquet").to_table()
    assert table.num_rows == 183
    assert {each.stat().st_mode & 0o077 for each in ((tmp_path / "out"), *(tmp_path / "out").rglob("*"))} == {0}
    assert "\ufffdbase64://5rZXk=" in table.column("key").to_pylist()
    call("export", "--format", "parquet", "--data", mirrored, "--to", tmp_path / "out").assert_complains(
        2, "--overwrite"
    )


def test_an_export_to_delta_has_typed_columns(mirrored: Path, tmp_path: Path) -> None:
    arguments = ["--format", "delta", "--schema", "number int, `stra\u00dfe` string"]
    done = call("export", "--data", mirrored, "--to", tmp_path / "out", *arguments)
    done.assert_complains(3, "the body is not a JSON object")
    arguments += ["--mode", "permissive", "--max-misfits", "0.5"]
    done = succeed("export", "--data", mirrored, "--to", tmp_path / "out", *arguments)
    for words in ("183 documents of 16 vbuckets", "version 0", "do not fit the schema"):
        assert words in done.out
    rows = DeltaTable(str(tmp_path / "out")).to_pyarrow_table().to_pylist()
    assert {row["number"] for row in rows if row["_key"].startswith("order::")} == {
        number for number in range(200) if number % 10
    }


def test_a_schema_that_most_documents_do_not_fit_is_exit_3_and_no_export(mirrored: Path, tmp_path: Path) -> None:
    arguments = ["--format", "parquet", "--schema", "number boolean", "--mode", "permissive"]
    done = call("export", "--data", mirrored, "--to", tmp_path / "out", *arguments)
    done.assert_complains(3, "documents do not fit the schema")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--to", "out", "--format", "arrow"], "give jsonl, parquet, delta"),
        (["--format", "parquet"], "it makes files (give --to a place)"),
        (["--schema", "a int"], "--schema is not for --format jsonl (it is for parquet and delta)"),
        (["--to", "out", "--format", "parquet", "--cursor", "c"], "--cursor is not for --format parquet"),
        (["--to", "out", "--format", "parquet", "--as-of", "12"], "takes a time here"),
        (["--to", "out", "--format", "parquet", "--schema", "a uuid"], "expected a type"),
        (["--to", "out", "--format", "parquet", "--collection", "no.such"], "no collection 'no.such'"),
        (["--format", "jsonl", "--collection", "no.such"], "no collection 'no.such'"),
        (["--to", "out", "--format", "delta", "--schema", "a int", "--epoch", "days"], "option epoch='days'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], what: str, mirrored: Path, tmp_path: Path) -> None:
    done = call_here("export", *arguments, "--data", mirrored, cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())})
    done.assert_complains(2, what)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_mirror_and_a_bad_target_are_reported_with_their_path(mirrored: Path, tmp_path: Path) -> None:
    done = call_here("export", "--format", "parquet", "--data", tmp_path / "nowhere", "--to", tmp_path / "out")
    done.assert_complains(2, "no such directory")
    (tmp_path / "file").touch()
    done = call_here("export", "--format", "parquet", "--data", mirrored, "--to", tmp_path / "file" / "out")
    done.assert_complains(1, str(tmp_path / "file" / "out"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror that takes some time to export."""
    data = tmp_path_factory.mktemp("large") / "data"
    stores.mirror(str(data), 60_000)
    return data


@pytest.mark.ci
@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_a_killed_export_leaves_no_readable_table_and_no_process(form: str, large: Path, tmp_path: Path) -> None:
    """SIGKILL while its processes write, seen by the files that grow; then the same command again."""
    target = tmp_path / "out"
    arguments = ["export", "--data", large, "--to", target, "--format", form]
    folder = target if form == "delta" else tmp_path / "out.incomplete"
    with background(*arguments) as process:
        while not list(folder.glob("*.parquet")):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
        assert children
        eventually(lambda: all(gone(int(pid)) for pid in children))
    assert not (target / "_SUCCESS").exists()
    assert not DeltaTable.is_deltatable(str(target))
    again = succeed(*arguments, "--json")
    assert again.json["documents"] == 60_000
    assert again.json["orphans_removed"] > 0
    assert len(list(target.glob("*.parquet"))) == again.json["files"]


def test_ctrl_c_ends_an_export_with_130_and_without_a_trace(large: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with background("export", "--format", "parquet", "--data", large, "--to", target) as process:
        while not list((tmp_path / "out.incomplete").glob("*.parquet")):
            assert process.poll() is None
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert not target.exists()
