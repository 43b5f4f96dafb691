"""`pipeline` as a person calls it: what it prints, its exit codes, and what it says when something is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from cli import pipeline
from cli.pipeline import batch_line, collections_from, layouts_from, reading_from
from mirror.errors import ConfigError
from mirror.sandbox.thread import SandboxThread
from mirror.spark.pipeline.progress import BatchFigures
from tests.bench import stores
from tests.cli.conftest import LIMIT_S, background, call, call_here, environment, succeed
from tests.supervise.conftest import eventually_now as eventually


def test_export_writes_parquet_and_says_what(mirrored: Path, tmp_path: Path) -> None:
    done = succeed("pipeline", "export", "--data", mirrored, "--to", tmp_path / "out", "--processes", "1", "--json")
    facts = done.json
    assert (facts["documents"], facts["format"], facts["vbuckets"], facts["version"]) == (183, "parquet", 16, None)
    table = ds.dataset(tmp_path / "out", format="parquet").to_table()
    assert table.num_rows == 183
    assert {each.stat().st_mode & 0o077 for each in ((tmp_path / "out"), *(tmp_path / "out").rglob("*"))} == {0}
    assert "\ufffdbase64://5rZXk=" in table.column("key").to_pylist()
    call("pipeline", "export", "--data", mirrored, "--to", tmp_path / "out").assert_complains(2, "--overwrite")


def test_export_writes_a_delta_table_with_typed_columns(mirrored: Path, tmp_path: Path) -> None:
    arguments = ["--format", "delta", "--schema", "number int, `stra\u00dfe` string", "--processes", "1"]
    done = call("pipeline", "export", "--data", mirrored, "--to", tmp_path / "out", *arguments)
    done.assert_complains(3, "the body is not a JSON object")
    arguments += ["--mode", "permissive", "--max-misfits", "0.5"]
    done = succeed("pipeline", "export", "--data", mirrored, "--to", tmp_path / "out", *arguments)
    for words in ("183 documents of 16 vbuckets", "version 0", "do not fit the schema"):
        assert words in done.out
    rows = DeltaTable(str(tmp_path / "out")).to_pyarrow_table().to_pylist()
    assert {row["number"] for row in rows if row["_key"].startswith("order::")} == {
        number for number in range(200) if number % 10
    }


def test_a_schema_that_most_documents_do_not_fit_is_exit_3_and_no_export(mirrored: Path, tmp_path: Path) -> None:
    arguments = ["--schema", "number boolean", "--mode", "permissive", "--processes", "1"]
    done = call("pipeline", "export", "--data", mirrored, "--to", tmp_path / "out", *arguments)
    done.assert_complains(3, "documents do not fit the schema")
    assert list(tmp_path.iterdir()) == []


def test_compare_is_silent_about_what_is_equal(source: SandboxThread, mirrored: Path) -> None:
    arguments = ["--data", mirrored, "--source", source.connection_string, "--processes", "1"]
    done = call("pipeline", "compare", *arguments)
    assert (done.code, len(done.out.splitlines())) == (0, 1), done.err + done.out
    assert "equal (16 vbuckets, 183 documents" in done.out
    facts = call("pipeline", "compare", *arguments, "--vbuckets", "0-3", "--json").json
    assert facts["equal"]
    assert [row["vbid"] for row in facts["vbuckets"]] == [0, 1, 2, 3]
    assert facts["vbuckets"][0]["differences"] == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["export", "--to", "out", "--format", "csv"], "must be parquet or delta"),
        (["export", "--to", "out", "--as-of", "12"], "takes a time here"),
        (["export", "--to", "out", "--schema", "a uuid"], "expected a type"),
        (["export", "--to", "out", "--collection", "no.such"], "no collection 'no.such'"),
        (
            ["export", "--to", "out", "--processes", "2", "--master", "local[1]"],
            "--processes is for a run without Spark",
        ),
        (["export", "--to", "out", "--schema", "a int", "--epoch", "days"], "option epoch='days'"),
        (["compare", "--source", "couchbase://demo@localhost/demo", "--vbuckets", "x"], "--vbuckets 'x'"),
        (["sync", "--to", "out", "--max-bytes", "many"], "maxBytesPerBatch"),
        (["sync", "--to", "out", "--source", "couchbase://h/b", "--max-bytes", "1g"], "maxBytesPerBatch is for a path"),
        (["sync", "--to", "out", "--on-lost-history", "cry"], "onLostHistory"),
        (["export"], "--to"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], what: str, mirrored: Path, tmp_path: Path) -> None:
    done = call_here("pipeline", *arguments, "--data", mirrored, cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())})
    done.assert_complains(2, what)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["--data", "nowhere"], 2, "no such directory"),
        (["--source", "http://x/y"], 2, "'http' is not a scheme"),
        (["--source", "couchbase://demo@127.0.0.1:1/demo"], 1, "127.0.0.1:1"),
    ],
)
def test_a_stream_of_nothing_ends_before_java_starts(
    arguments: list[str], code: int, what: str, tmp_path: Path
) -> None:
    done = call_here("pipeline", "sync", "--to", "lake", *arguments, cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())})
    done.assert_complains(code, what)
    assert "Spark" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_schemas_of_sync_are_for_all_tables_or_for_a_collection_s() -> None:
    reading = reading_from("permissive", None, None)
    one = layouts_from(["total double, state string"], False, reading, 0.5, True)
    assert one.of(None).fields.names == ["total", "state"]
    assert (one.of(None).misfits_max, one.of(None).overwrite_schema) == (0.5, True)
    many = layouts_from(["shop.orders=total double", "users = name: string", "n int"], True, reading, 0.5, False)
    found = {name: many.of(name).fields.names for name in ("shop.orders", "_default.users", "shop.other")}
    assert found == {"shop.orders": ["total"], "_default.users": ["name"], "shop.other": ["n"]}
    assert layouts_from([], True, reading, 0.5, False).of("a.b").fields is None


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--schema", "shop.orders=n int"], "give --table-per-collection"),
        (["--schema", "n int", "--schema", "m int"], "given twice for all tables"),
        (["--schema", "n integr"], "expected a type"),
        (["--schema", "n int", "--mode", "dropmalformed"], "--mode dropmalformed"),
        (["--schema", "_key int"], "'_key'"),
    ],
)
def test_a_schema_that_sync_cannot_keep_is_refused_before_java_starts(
    mirrored: Path, arguments: list[str], what: str, tmp_path: Path
) -> None:
    call_here("pipeline", "sync", "--data", mirrored, "--to", tmp_path / "lake", *arguments).assert_complains(2, what)
    assert not (tmp_path / "lake").exists()


def test_a_source_that_refuses_is_exit_4(source: SandboxThread, tmp_path: Path) -> None:
    arguments = ["--source", source.connection_string, "--to", tmp_path / "lake"]
    call_here("pipeline", "sync", *arguments, env={"DCP_MIRROR_PASSWORD": "wrong"}).assert_complains(4, "password")


def test_no_mirror_and_no_space_are_reported_with_their_place(mirrored: Path, tmp_path: Path) -> None:
    done = call_here("pipeline", "export", "--data", tmp_path / "nowhere", "--to", tmp_path / "out")
    done.assert_complains(2, "no such directory")
    (tmp_path / "file").touch()
    done = call_here("pipeline", "export", "--data", mirrored, "--to", tmp_path / "file" / "out")
    done.assert_complains(1, str(tmp_path / "file" / "out"))


def test_without_the_extra_the_remedy_is_said(mirrored: Path, tmp_path: Path) -> None:
    """The packages are hidden from a process of its own; the rest of the command line works without them."""
    script = (
        "import sys\n"
        "for name in ('pyspark', 'pyarrow', 'deltalake'): sys.modules[name] = None\n"
        "from cli.main import main\n"
        "main()\n"
    )
    for arguments in (["export", "--to", "out"], ["sync", "--to", "out"]):
        done = subprocess.run(
            [sys.executable, "-c", script, "pipeline", *arguments, "--data", mirrored],
            env=environment() | {"PYTHONPATH": str(Path.cwd())},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "pip install 'dcp-mirror[spark]'" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror that takes some time to export."""
    data = tmp_path_factory.mktemp("large") / "data"
    stores.mirror(str(data), 60_000)
    return data


@pytest.mark.ci
@pytest.mark.parametrize("form", ["parquet", "delta"])
def test_a_killed_export_leaves_nothing_to_be_read_and_no_process(form: str, large: Path, tmp_path: Path) -> None:
    """SIGKILL while its processes write, seen by the files that grow; then the same command again."""
    target = tmp_path / "out"
    arguments = ["pipeline", "export", "--data", large, "--to", target, "--format", form, "--processes", "2"]
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
        eventually(lambda: not any(running(pid) for pid in children))
    assert not (target / "_SUCCESS").exists()
    assert not DeltaTable.is_deltatable(str(target))
    again = succeed(*arguments, "--json")
    assert again.json["documents"] == 60_000
    assert again.json["orphans_removed"] > 0
    assert len(list(target.glob("*.parquet"))) == again.json["files"]


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_ends_an_export_with_130_and_without_a_trace(large: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with background("pipeline", "export", "--data", large, "--to", target, "--processes", "2") as process:
        while not list((tmp_path / "out.incomplete").glob("*.parquet")):
            assert process.poll() is None
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert not target.exists()


def test_a_batch_in_a_line() -> None:
    figures = BatchFigures(7, 1200, 300.4, 4000, inserted=1000, updated=150, deleted=50, lag_seqnos=12)
    said = "batch 7 | 1,200 events (1,000 inserted, 150 updated, 50 deleted) | 300/s, 4.0 s | 12 seqnos behind"
    assert batch_line(figures) == said


def test_collections_are_names_with_commas() -> None:
    assert collections_from(None) is None
    assert collections_from("orders, s.c") == ("_default.orders", "s.c")


def test_a_package_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="pipelines need the package no_such_package"):
        pipeline.need("no_such_package.deep")
