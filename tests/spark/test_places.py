"""Destinations: what a text names, what is refused, and files that are there whole or not at all, also in S3."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from deltalake import DeltaTable

from mirror.errors import ConfigError, MirrorError
from mirror.spark.pipeline.export import export
from mirror.spark.places import LocalFolder, ObjectFolder, folder_at, local_path
from mirror.spark.runner import LocalRunner
from mirror.spark.source.columns import CHANGES
from mirror.spark.tables.delta import CommitConflict
from mirror.spark.tables.lake import Lake
from tests.cli.conftest import call_here
from tests.spark.events import event, table_of
from tests.spark.mirrors import SmallMirror, orders, scanned
from tests.spark.sessions import ObjectStore
from tests.spark.tables.test_lake import apply, current, reported, write_files

REFUSED = [
    ("hdfs://namenode/x", "hdfs:// cannot be written"),
    ("dbfs:/x", "dbfs:// cannot be written"),
    ("s3a://b/x", "s3a:// cannot be written"),
    ("http://localhost/x", "http:// cannot be written"),
    ("s3:/b/x", "not a URL of a bucket and a prefix"),
    ("s3://b", "names a whole bucket"),
    ("s3://b/x?version=1", "not a URL of a bucket and a prefix"),
    ("s3://key:secret@b/x", "must not contain a password"),
    ("file://elsewhere/x", "not a path of this machine"),
]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/a/b", "/a/b"),
        ("a/b", f"{os.getcwd()}/a/b"),
        ("./s3:/b", f"{os.getcwd()}/s3:/b"),
        ("file:///a/b", "/a/b"),
        ("file:/a/b", "/a/b"),
        ("file://localhost/a/b%20c", "/a/b c"),
    ],
)
def test_a_path_and_a_file_url_name_a_folder_of_this_machine(text: str, path: str) -> None:
    assert folder_at(text) == LocalFolder(Path(path))
    assert local_path(text) == Path(path)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://b/x/y/", "s3://b/x/y"),
        ("S3://b/x", "s3://b/x"),
        ("gs://b/x", "gs://b/x"),
        ("abfss://c@a.dfs.core.windows.net/x", "abfss://c@a.dfs.core.windows.net/x"),
    ],
)
def test_a_url_of_an_object_store_names_a_prefix_and_is_no_local_path(text: str, url: str) -> None:
    assert folder_at(text) == ObjectFolder(url)
    with pytest.raises(ConfigError, match="must be on this machine"):
        local_path(text)


@pytest.mark.parametrize(("text", "what"), REFUSED)
def test_any_other_url_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as raised:
        folder_at(text)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(("command", "text"), [("export --format parquet", "hdfs://namenode/x"), ("sync", "dbfs:/x")])
def test_a_command_refuses_another_url_in_one_line_and_makes_no_folder(
    command: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallMirror(tmp_path / "mirror").close()
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    done = call_here(*command.split(), "--data", "../mirror", "--to", text)
    assert done.code == 2
    assert text in done.complaint
    assert list(work.iterdir()) == []


def test_an_unreachable_store_is_one_line_without_colours() -> None:
    folder = folder_at("abfss://container/x")  # an account is missing, which the library finds out
    with pytest.raises(OSError, match="Account must be specified") as raised:
        folder.names()
    said = str(folder.error(raised.value))
    assert "abfss://container/x: cannot be written" in said
    assert "\x1b" not in said
    assert "\n" not in said


# -- a local S3 server -------------------------------------------------------------------------------------------------


def objects(url: str) -> list[str]:
    return folder_at(url).names()


def in_table(url: str, version: int | None = None) -> dict[str, tuple[int, bytes]]:
    rows = DeltaTable(url, version=version).to_pyarrow_table().to_pylist()
    return {row["key"]: (row["seqno"], row["value"]) for row in rows}


@pytest.fixture
def small(tmp_path: Path) -> SmallMirror:
    mirror = SmallMirror(tmp_path / "mirror")
    mirror.put(orders(0, 50))
    return mirror


def test_an_export_to_s3_is_written_to_s3(
    small: SmallMirror, s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once `./s3:/lake/...` was made, and called a success."""
    url = f"s3://lake/{tmp_path.name}"
    arguments = ["--data", small.path, "--to", url, "--format", "delta", "--json"]
    monkeypatch.chdir(tmp_path)
    done = call_here("export", *arguments)
    assert done.code == 0, done.err
    assert done.json["target"] == url
    assert in_table(url) == scanned(small.path)
    assert [each.name for each in tmp_path.iterdir()] == ["mirror"]
    with pytest.raises(ConfigError, match="--overwrite"):
        export(small.path, url, LocalRunner(1), delta_table=True)
    small.put(orders(50, 10))
    assert export(small.path, url, LocalRunner(1), delta_table=True, overwrite=True).version == 1
    assert in_table(url) == scanned(small.path)


def test_a_missing_bucket_is_one_line(small: SmallMirror, s3: ObjectStore) -> None:
    with pytest.raises(MirrorError, match="NoSuchBucket"):
        export(small.path, "s3://absent/x", LocalRunner(1), delta_table=True)
    with pytest.raises(ConfigError, match="cannot rename a complete export"):
        export(small.path, "s3://lake/x", LocalRunner(1))


def test_the_tables_of_a_lake_in_s3_have_each_batch_once(s3: ObjectStore, tmp_path: Path) -> None:
    folder = folder_at(f"s3://lake/{tmp_path.name}")
    events = [[event("mutation", "a", (1, 1), value=b"1"), event("mutation", "b", (1, 2), value=b"2")]]
    zombie = Lake(folder)
    written = write_files(zombie, events)
    with Lake(folder) as lake:  # no lock: commits decide
        apply(lake, events, position={"at": 1})
        with pytest.raises(CommitConflict):
            zombie.add_changes(written, {"at": 2})
        apply(lake, [[event("deletion", "b", (1, 3))]], position={"at": 3})
        assert lake.remove_unfinished() == []  # they may be another process's
        assert sum(reported(lake).values()) == 3
        assert current(lake) == {("_default._default", "a"): (1, b"1")}
        lake.tidy()
        assert sum(reported(lake).values()) == 3
    with Lake(folder) as lake:
        assert lake.position == {"at": 3}
    assert table_of([]).schema == CHANGES
