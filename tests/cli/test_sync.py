"""`sync` as a person calls it: what it prints, its exit codes, and what it says when something is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli import tasks
from cli.sync import batch_line
from mirror.errors import ConfigError
from mirror.sandbox.thread import SandboxThread
from mirror.spark.pipeline.sync import BatchFigures
from tests.cli.conftest import call_here, environment


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--to", "out", "--max-bytes", "many"], "maxBytesPerBatch"),
        (["--to", "out", "--source", "couchbase://h/b", "--max-bytes", "1g"], "maxBytesPerBatch is for a path"),
        (["--to", "out", "--on-lost-history", "cry"], "onLostHistory"),
        ([], "--to"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], what: str, mirrored: Path, tmp_path: Path) -> None:
    done = call_here("sync", *arguments, "--data", mirrored, cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())})
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
def test_a_missing_mirror_or_source_is_reported_before_java_starts(
    arguments: list[str], code: int, what: str, tmp_path: Path
) -> None:
    done = call_here("sync", "--to", "lake", *arguments, cwd=tmp_path, env={"PYTHONPATH": str(Path.cwd())})
    done.assert_complains(code, what)
    assert "Spark" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--schema", "n integr"], "expected a type"),
        (["--schema", "n int", "--mode", "dropmalformed"], "--mode dropmalformed"),
        (["--schema", "_key int"], "'_key'"),
    ],
)
def test_a_schema_that_sync_cannot_keep_is_refused_before_java_starts(
    mirrored: Path, arguments: list[str], what: str, tmp_path: Path
) -> None:
    call_here("sync", "--data", mirrored, "--to", tmp_path / "lake", *arguments).assert_complains(2, what)
    assert not (tmp_path / "lake").exists()


def test_a_source_that_refuses_is_exit_4(source: SandboxThread, tmp_path: Path) -> None:
    arguments = ["--source", source.connection_string, "--to", tmp_path / "lake"]
    call_here("sync", *arguments, env={"DCP_MIRROR_PASSWORD": "wrong"}).assert_complains(4, "password")


def test_an_error_for_missing_packages_says_how_to_install_them(mirrored: Path, tmp_path: Path) -> None:
    """The packages are hidden from a process of its own; the rest of the command line works without them."""
    script = (
        "import sys\n"
        "for name in ('pyspark', 'pyarrow', 'deltalake'): sys.modules[name] = None\n"
        "from cli.main import main\n"
        "main()\n"
    )
    for command in ("export --format delta --to out", "sync --to out"):
        done = subprocess.run(
            [sys.executable, "-c", script, *command.split(), "--data", mirrored],
            env=environment() | {"PYTHONPATH": str(Path.cwd())},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "pip install 'dcp-mirror[spark]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_batch_is_shown_on_one_line() -> None:
    figures = BatchFigures(7, 1200, 300.4, 4000, lag_seqnos=12)
    said = "batch 7 | 1,200 events | 300/s, 4.0 s | 12 seqnos behind"
    assert batch_line(figures) == said


def test_collections_are_given_as_names_with_commas() -> None:
    assert tasks.collections_from(None) is None
    assert tasks.collections_from("orders, s.c") == ("_default.orders", "s.c")


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="tables need the package no_such_package"):
        tasks.need("no_such_package.deep")
