"""Destinations: what a text names, what is refused, and files that are there whole or not at all, also in S3."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.fs as pf
import pytest
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from cli.tasks import check_destination
from mirror.errors import ConfigError, MirrorError
from mirror.lease import Lease
from mirror.spark.pipeline import export as exports
from mirror.spark.pipeline.export import export
from mirror.spark.places import LocalFolder, ObjectFolder, folder_at, local_path
from mirror.spark.runner import LocalRunner
from mirror.spark.source.columns import CHANGES
from mirror.spark.source.local import Job, hold
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


def exported(url: str) -> dict[str, tuple[int, bytes]]:
    with folder_at(url).open("_SUCCESS") as file:
        names = json.load(file)["names"]
    table = ds.dataset(names, format="parquet", filesystem=pf.PyFileSystem(DeltaStorageHandler(url))).to_table()
    return {row["key"]: (row["seqno"], row["value"]) for row in table.to_pylist()}


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


def test_an_export_to_parquet_in_s3_is_complete_once_success_is_written(
    small: SmallMirror, s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://lake/{tmp_path.name}"
    seen: list[list[str]] = []
    check = exports._Target.check

    def killed(self: exports._Target, parts: object) -> None:
        check(self, parts)  # type: ignore[arg-type]
        seen.append(objects(url))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(exports._Target, "check", killed)
        patch.setattr(exports._Prefix, "__exit__", lambda *_: None)  # as after SIGKILL
        with pytest.raises(KeyboardInterrupt):
            export(small.path, url, LocalRunner(1))
    assert seen
    assert "_SUCCESS" not in objects(url)
    with pytest.raises(ConfigError, match="unfinished export"):
        export(small.path, url, LocalRunner(1))
    done = export(small.path, url, LocalRunner(1), overwrite=True)
    assert done.orphans_removed == len(seen[0])
    assert exported(url) == scanned(small.path)
    assert len(objects(url)) == done.files + 1
    small.put(orders(50, 10))
    export(small.path, url, LocalRunner(1), overwrite=True)
    assert exported(url) == scanned(small.path)


def test_a_failed_export_to_s3_leaves_nothing(
    small: SmallMirror, s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://lake/{tmp_path.name}"

    def fail(*_: object) -> None:
        raise OSError("the store went away")

    monkeypatch.setattr(exports._Target, "success", fail)
    with pytest.raises(MirrorError, match="the store went away"):
        export(small.path, url, LocalRunner(1))
    assert objects(url) == []


def test_the_later_of_two_exports_to_one_prefix_fails_and_leaves_the_other(
    small: SmallMirror, s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://lake/{tmp_path.name}"

    def other_first(job: Job) -> Lease:
        """Both found the prefix empty."""
        monkeypatch.setattr(exports, "hold", hold)
        export(small.path, url, LocalRunner(1))
        return hold(job)

    monkeypatch.setattr(exports, "hold", other_first)
    with pytest.raises(MirrorError, match="another export is writing here"):
        export(small.path, url, LocalRunner(1))
    assert exported(url) == scanned(small.path)


def test_a_missing_bucket_is_one_line(small: SmallMirror, s3: ObjectStore) -> None:
    for delta_table in (False, True):
        with pytest.raises(MirrorError, match="NoSuchBucket"):
            export(small.path, "s3://absent/x", LocalRunner(1), delta_table=delta_table)


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


def test_an_object_store_without_credentials_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last that is asked is the metadata service of a cloud's machines; elsewhere it may never answer."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"no AWS credentials were found \(set AWS_ACCESS_KEY_ID and "):
            check_destination("s3://lake/orders")
        monkeypatch.setenv("AWS_PROFILE", "lake")
        check_destination("s3://lake/orders")
    check_destination(str(tmp_path))
