"""Exports without Spark: what `scan` finds, at one boundary, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from mirror.errors import ConfigError, MirrorError
from mirror.spark.pipeline import export as exports
from mirror.spark.pipeline.export import export
from mirror.spark.runner import LocalRunner
from mirror.spark.source.columns import DOCUMENTS
from mirror.spark.tables.delta import FolderLock
from mirror.spark.tables.parts import Part
from mirror.typed.bodies import Reading, TooManyMisfits
from mirror.typed.ddl import fields_of
from mirror.typed.rows import Counts
from storage.errors import NoSuchBoundary, NotAMirror, UnknownCollection
from storage.read.view import open_view
from tests.spark.mirrors import SmallMirror, order, orders, scanned

HERE = LocalRunner(1)
PERMISSIVE = Reading(mode="permissive")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallMirror]:
    mirror = SmallMirror(tmp_path / "mirror")
    mirror.put(orders(0, 200))
    yield mirror
    mirror.close()


def exported(folder: Path) -> dict[str, tuple[int, bytes]]:
    table = ds.dataset(folder, format="parquet").to_table()
    assert table.schema.equals(DOCUMENTS)
    found = {row["key"]: (row["seqno"], row["value"]) for row in table.to_pylist()}
    assert len(found) == table.num_rows
    return found


def in_table(folder: Path, version: int | None = None) -> dict[str, tuple[int, bytes]]:
    rows = DeltaTable(str(folder), version=version).to_pyarrow_table().to_pylist()
    return {row["key"]: (row["seqno"], row["value"]) for row in rows}


def test_parquet_files_equal_a_scan_and_success_lists_the_boundaries(small: SmallMirror, tmp_path: Path) -> None:
    done = export(small.path, tmp_path / "out", HERE)
    assert exported(tmp_path / "out") == scanned(small.path)
    facts = json.loads((tmp_path / "out" / "_SUCCESS").read_text())
    with open_view(str(small.path)) as view:
        tokens = [str(view.pin(vbid)) for vbid in view.vbids]
    assert facts["boundaries"].split() == tokens
    assert (facts["bucket"], facts["documents"], done.documents, done.version) == ("orders", 200, 200, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mirror", "out"]


def test_a_delta_export_is_one_version_with_its_boundaries_in_the_metadata(small: SmallMirror, tmp_path: Path) -> None:
    first = export(small.path, tmp_path / "out", HERE, delta_table=True)
    before = scanned(small.path)
    small.put({"order::000000": None, "order::000001": order(9), "new": order(1)})
    with pytest.raises(ConfigError, match=r"version 0.*--overwrite"):
        export(small.path, tmp_path / "out", HERE, delta_table=True)
    second = export(small.path, tmp_path / "out", HERE, delta_table=True, overwrite=True)
    assert (first.version, second.version) == (0, 1)
    assert in_table(tmp_path / "out") == scanned(small.path) != before
    assert in_table(tmp_path / "out", 0) == before
    commit = DeltaTable(str(tmp_path / "out")).history(1)[0]
    assert len(commit["boundaries"].split()) == 8
    assert commit["bucket_uuid"] == "bucket-uuid"


@pytest.mark.parametrize("delta_table", [False, True], ids=["parquet", "delta"])
def test_an_export_shows_the_moment_at_which_it_began(
    small: SmallMirror, tmp_path: Path, delta_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the pinning and the reading the mirror publishes, deletes and rolls back."""
    before = scanned(small.path)
    run = HERE.run

    def later(*arguments: object) -> object:
        small.put(dict.fromkeys(orders(0, 100)) | orders(500, 50))
        small.roll_back(3, 5)
        return run(*arguments)  # type: ignore[arg-type]

    runner = LocalRunner(1)
    monkeypatch.setattr(runner, "run", later)
    export(small.path, tmp_path / "out", runner, delta_table=delta_table)
    assert (in_table if delta_table else exported)(tmp_path / "out") == before != scanned(small.path)


def test_an_export_as_of_a_time_shows_that_time(small: SmallMirror, tmp_path: Path) -> None:
    before, then = scanned(small.path), small.now_ms
    small.now_ms += 10_000
    small.put(orders(100, 200))
    export(small.path, tmp_path / "out", HERE, as_of_ms=then + 1)
    assert exported(tmp_path / "out") == before
    with pytest.raises(NoSuchBoundary, match=r"nothing is kept as of 2023-11-14T22:13:19\.000\+00:00; history begins"):
        export(small.path, tmp_path / "never", HERE, as_of_ms=then - 1000)


def test_expired_documents_are_left_out(small: SmallMirror, tmp_path: Path) -> None:
    small.put({"old": order(1), "older": order(2)}, expiry=1_000_000_000)
    small.put({"young": order(3)}, expiry=2**32 - 1)
    export(small.path, tmp_path / "out", HERE)
    assert exported(tmp_path / "out").keys() == orders(0, 200).keys() | {"young"}


def test_a_collection_is_exported_and_an_unknown_one_refused(small: SmallMirror, tmp_path: Path) -> None:
    assert export(small.path, tmp_path / "out", HERE, collections=("_default._default",)).documents == 200
    with pytest.raises(UnknownCollection, match=r"no collection 's\.c'"):
        export(small.path, tmp_path / "out2", HERE, collections=("s.c",))
    assert not (tmp_path / "out2").exists()


class Killed(BaseException):
    """Stands for SIGKILL: no code after it runs."""


@pytest.mark.parametrize("delta_table", [False, True], ids=["parquet", "delta"])
def test_a_broken_export_leaves_no_result_and_its_files_go_with_the_next_run(
    small: SmallMirror, tmp_path: Path, delta_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(exports, "commit" if delta_table else "sync_directory", killed)
        for place in (exports._Delta, exports._Folder):
            patch.setattr(place, "__exit__", lambda self, *_: self._lock.close())
        with pytest.raises(Killed):
            export(small.path, target, HERE, delta_table=delta_table)
    if delta_table:
        assert not DeltaTable.is_deltatable(str(target))
    else:
        assert not target.exists()
        assert (tmp_path / "out.incomplete").is_dir()
    done = export(small.path, target, HERE, delta_table=delta_table)
    assert done.orphans_removed >= done.files
    assert (in_table if delta_table else exported)(target) == scanned(small.path)
    assert len(list(target.glob("*.parquet"))) == done.files


@pytest.mark.parametrize("delta_table", [False, True], ids=["parquet", "delta"])
def test_an_export_that_fails_cleans_up_after_itself(
    small: SmallMirror, tmp_path: Path, delta_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MirrorError("no")

    monkeypatch.setattr(exports, "commit" if delta_table else "sync_directory", fail)
    with pytest.raises(MirrorError, match="no"):
        export(small.path, tmp_path / "out", HERE, delta_table=delta_table)
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_crash_between_the_renames_of_an_overwrite_is_undone_first(small: SmallMirror, tmp_path: Path) -> None:
    export(small.path, tmp_path / "out", HERE)
    (tmp_path / "out").rename(tmp_path / "out.old")
    with pytest.raises(ConfigError, match="exists already"):
        export(small.path, tmp_path / "out", HERE)
    assert exported(tmp_path / "out") == scanned(small.path)


def test_an_overwrite_replaces_only_an_export(small: SmallMirror, tmp_path: Path) -> None:
    export(small.path, tmp_path / "out", HERE)
    small.put(orders(300, 10))
    with pytest.raises(ConfigError, match="exists already"):
        export(small.path, tmp_path / "out", HERE)
    export(small.path, tmp_path / "out", HERE, overwrite=True)
    assert exported(tmp_path / "out") == scanned(small.path)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "love.txt").touch()
    for delta_table in (False, True):
        with pytest.raises(ConfigError, match="letters"):
            export(small.path, tmp_path / "letters", HERE, overwrite=True, delta_table=delta_table)
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["love.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letters", "mirror", "out"]


def test_an_empty_mirror_gives_columns_without_rows(tmp_path: Path) -> None:
    SmallMirror(tmp_path / "mirror").close()
    export(tmp_path / "mirror", tmp_path / "out", HERE)
    assert exported(tmp_path / "out") == {}
    export(tmp_path / "mirror", tmp_path / "table", HERE, delta_table=True)
    assert in_table(tmp_path / "table") == {}


def test_an_impossible_export_is_refused_before_a_file_is_made(small: SmallMirror, tmp_path: Path) -> None:
    with pytest.raises(NotAMirror):
        export(tmp_path / "nowhere", tmp_path / "out", HERE)
    with FolderLock(tmp_path / "out.incomplete"), pytest.raises(MirrorError, match="another pipeline"):
        export(small.path, tmp_path / "out", HERE)
    assert not (tmp_path / "out").exists()


def test_a_file_that_only_an_executor_sees_is_noticed(
    small: SmallMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = LocalRunner(1)
    elsewhere = [exports.Written([Part("part-0123456789abcdef-0-x.parquet", 5, 1, "{}", 0)], Counts())]
    monkeypatch.setattr(runner, "run", lambda function, tasks, progress=None: elsewhere)
    with pytest.raises(MirrorError, match="all executors share"):
        export(small.path, tmp_path / "out", runner, delta_table=True)
    assert not DeltaTable.is_deltatable(str(tmp_path / "out"))


def test_a_schema_gives_columns_in_the_place_of_the_value(small: SmallMirror, tmp_path: Path) -> None:
    fields = fields_of("id bigint, total double, items array<struct<sku:string,count:int>>, absent string")
    export(small.path, tmp_path / "out", HERE, delta_table=True, fields=fields)
    table = DeltaTable(str(tmp_path / "out")).to_pyarrow_table()
    assert "value" not in table.column_names
    found = {row["_key"]: row for row in table.to_pylist()}
    for number in range(200):
        row, document = found[f"order::{number:06d}"], json.loads(order(number))
        assert {name: row[name] for name in ("id", "total", "items", "absent")} == {
            "id": number,
            "total": document["total"],
            "items": document["items"],
            "absent": None,
        }


def test_a_document_that_does_not_fit_is_named_or_has_nulls(small: SmallMirror, tmp_path: Path) -> None:
    small.put({"odd": b'{"id": "text"}', "no json": b"\x00\x01"})
    fields = fields_of("id bigint")
    with pytest.raises(MirrorError, match="document 'odd' does not fit the schema"):
        export(small.path, tmp_path / "out", HERE, fields=fields)
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        TooManyMisfits, match=r"2 of 202 documents do not fit.*more than 0\.500% of them.*--max-misfits"
    ):
        export(small.path, tmp_path / "out", HERE, fields=fields, reading=PERMISSIVE, misfits_max=0.005)
    assert not (tmp_path / "out").exists()
    assert export(small.path, tmp_path / "out", HERE, fields=fields, reading=PERMISSIVE).misfits == 2
    assert json.loads((tmp_path / "out" / "_SUCCESS").read_text())["misfits"] == "2"
    rows = {row["_key"]: row["id"] for row in ds.dataset(tmp_path / "out", format="parquet").to_table().to_pylist()}
    assert (rows["odd"], rows["no json"], rows["order::000007"]) == (None, None, 7)


def test_documents_that_do_not_fit_can_be_left_out_and_expired_ones_are_not_counted(
    small: SmallMirror, tmp_path: Path
) -> None:
    small.put({"odd": b'{"id": "text"}'})
    small.put({"expired": b'{"id": "text"}'}, expiry=1_000_000_000)
    reading = Reading(mode="dropmalformed")
    done = export(small.path, tmp_path / "out", HERE, fields=fields_of("id bigint"), reading=reading)
    assert (done.documents, done.misfits) == (200, 1)


def test_a_wrong_schema_neither_replaces_a_table_nor_changes_its_types(small: SmallMirror, tmp_path: Path) -> None:
    """All values were null, the exit code 0, and the column's type another one."""
    target = tmp_path / "out"
    export(small.path, target, HERE, delta_table=True, fields=fields_of("total double, customer string"))

    def again(text: str, **more: Any) -> int | None:
        fields = fields_of(text)
        return export(
            small.path, target, HERE, delta_table=True, overwrite=True, fields=fields, reading=PERMISSIVE, **more
        ).version

    with pytest.raises(ConfigError, match=r"column total is double in the table and would be date.*--overwrite-schema"):
        again("total date, customer string")
    with pytest.raises(ConfigError, match="column customer is string in the table and would be gone"):
        again("total double")
    with pytest.raises(TooManyMisfits, match="200 of 200 documents"):
        again("total date, customer string", overwrite_schema=True)
    assert DeltaTable(str(target)).version() == 0
    assert again("total double, customer string, note string") == 1
    assert again("total float", overwrite_schema=True, misfits_max=1.0) == 2


@pytest.mark.parametrize(
    "schema", ["`US Gross` double", "`a.b` int", "s struct<`a b`:int>", "m map<string,struct<`=`:int>>"]
)
def test_a_name_that_delta_cannot_have_is_refused_at_once(small: SmallMirror, tmp_path: Path, schema: str) -> None:
    with pytest.raises(ConfigError, match="a Delta table cannot have this column name"):
        export(small.path, tmp_path / "out", HERE, delta_table=True, fields=fields_of(schema))
    assert not (tmp_path / "out").exists()
    assert export(small.path, tmp_path / "out", HERE, fields=fields_of(schema)).documents


def test_a_schema_with_a_metadata_column_is_refused_at_once(small: SmallMirror, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'_SEQNO', which is a column of every typed export"):
        export(small.path, tmp_path / "out", HERE, fields=fields_of("_SEQNO bigint"))
    with pytest.raises(ConfigError, match="'_seqno', which is a column of every typed export"):
        export(small.path, tmp_path / "out", HERE, fields=fields_of("_seqno bigint"))
    assert not (tmp_path / "out").exists()
