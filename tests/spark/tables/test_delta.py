"""Commits that happen once, and files that no commit names."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Transaction

from mirror.errors import ConfigError, MirrorError
from mirror.spark.places import Folder, LocalFolder, folder_at
from mirror.spark.tables.delta import (
    RUN,
    CommitConflict,
    FolderLock,
    add_action,
    commit,
    compact,
    open_table,
    remove_orphans,
    require_absent_or_table,
)
from mirror.spark.tables.parts import JOINED_BYTES_MAX, Part, PartWriter, files_to_merge, run_name

SCHEMA = pa.schema([("key", pa.string()), ("seqno", pa.int64())])


def write(folder: Path, run: str, *seqnos: int, schema: pa.Schema = SCHEMA) -> list[Part]:
    columns = [[str(each) for each in seqnos], *[list(seqnos) for _ in schema.names[1:]]]
    with PartWriter(str(folder), f"part-{run}-0", schema) as parts:
        parts.write(pa.record_batch(columns, schema=schema))
    return parts.finished


def put(folder: Folder, table: DeltaTable | None, parts: list[Part], schema: pa.Schema, **more: Any) -> None:
    commit(folder, table, map(add_action, parts), schema, **more)


def seqnos(folder: Path) -> list[int]:
    return sorted(DeltaTable(str(folder)).to_pyarrow_table().column("seqno").to_pylist())


def test_parts_belong_to_the_table_only_after_their_commit(tmp_path: Path) -> None:
    run = run_name()
    parts = write(tmp_path, run, 1, 2)
    assert open_table(folder_at(tmp_path)) is None
    put(folder_at(tmp_path), None, parts, SCHEMA, metadata={RUN: run, "boundaries": "{}"})
    table = open_table(folder_at(tmp_path))
    assert table is not None
    assert table.history(1)[0]["boundaries"] == "{}"
    assert seqnos(tmp_path) == [1, 2]
    write(tmp_path, run_name(), 3)
    assert seqnos(tmp_path) == [1, 2]


def test_an_overwrite_may_change_the_columns_and_keeps_the_old_version_readable(tmp_path: Path) -> None:
    put(folder_at(tmp_path), None, write(tmp_path, run_name(), 1), SCHEMA)
    wider = SCHEMA.append(pa.field("age", pa.int64()))
    parts = write(tmp_path, run_name(), 7, schema=wider)
    put(folder_at(tmp_path), open_table(folder_at(tmp_path)), parts, wider, overwrite=True)
    assert DeltaTable(str(tmp_path)).to_pyarrow_table().column_names == ["key", "seqno", "age"]
    assert seqnos(tmp_path) == [7]
    assert DeltaTable(str(tmp_path), version=0).to_pyarrow_table().column("seqno").to_pylist() == [1]


def test_a_table_that_gets_a_column_of_local_times_stays_readable(tmp_path: Path) -> None:
    """delta-rs commits such a column to a table without the feature for it, and nothing opens the table any more."""
    folder = folder_at(tmp_path)
    put(folder, None, write(tmp_path, run_name(), 1), SCHEMA)
    wider = SCHEMA.append(pa.field("at", pa.timestamp("us")))
    with PartWriter(str(tmp_path), f"part-{run_name()}-0", wider) as parts:
        parts.write(pa.record_batch([["2"], [2], [0]], schema=wider))
    put(folder, open_table(folder), parts.finished, wider, overwrite=True)
    assert DeltaTable(str(tmp_path)).to_pyarrow_table().column("at").to_pylist() == [
        datetime.fromisoformat("1970-01-01")
    ]


@pytest.mark.parametrize("mark", [[Transaction("me", 1)], []], ids=["marked", "unmarked"])
@pytest.mark.parametrize("first", [True, False], ids=["the first version", "a later version"])
def test_the_second_of_two_commits_on_one_version_fails_and_changes_nothing(
    tmp_path: Path, first: bool, mark: list[Transaction]
) -> None:
    if not first:
        put(folder_at(tmp_path), None, write(tmp_path, run_name(), 0), SCHEMA)
    mine, other = open_table(folder_at(tmp_path)), open_table(folder_at(tmp_path))
    put(folder_at(tmp_path), mine, write(tmp_path, run_name(), 1), SCHEMA, marks=mark)
    with pytest.raises(CommitConflict):
        put(folder_at(tmp_path), other, write(tmp_path, run_name(), 2), SCHEMA, marks=mark)
    assert seqnos(tmp_path) == ([1] if first else [0, 1])
    now = open_table(folder_at(tmp_path))
    assert now is not None
    assert now.transaction_version("me") == (1 if mark else None)


def test_a_compaction_copies_no_file_into_one_of_less_than_twice_its_size() -> None:
    """The last file was copied at each compaction: with 100 batches between two, once for each 25 MB of events."""
    sizes: list[int] = []
    copied = added = 0
    for _ in range(64):
        sizes += [1 << 20] * 8
        added += 8 << 20
        chosen = files_to_merge(sizes)
        merged = sum(sizes[at] for at in chosen)
        assert all(2 * sizes[at] <= merged for at in chosen)
        copied += merged
        sizes = [size for at, size in enumerate(sizes) if at not in chosen] + ([merged] if merged else [])
    assert len(sizes) < 20
    assert copied <= 7 * added, "1 MiB can double seven times until 128"
    assert files_to_merge([]) == files_to_merge([5]) == files_to_merge([1, 5]) == []
    assert files_to_merge([3, 10, 3, 6]) == [0, 1, 2, 3]
    assert files_to_merge([JOINED_BYTES_MAX] * 3) == []


def test_a_compaction_changes_no_row_and_repeats_none_in_streams(tmp_path: Path) -> None:
    folder, table = folder_at(tmp_path), None
    for number in range(3):
        put(folder, table, write(tmp_path, run_name(), number, number + 10), SCHEMA)
        table = open_table(folder)
    assert table is not None
    assert compact(folder, table, SCHEMA) == 3
    assert seqnos(tmp_path) == [0, 1, 2, 10, 11, 12]
    assert len(table.file_uris()) == 1
    log = (tmp_path / "_delta_log" / f"{table.version():020d}.json").read_text().splitlines()
    actions = [action for line in log for name, action in json.loads(line).items() if name in ("add", "remove")]
    assert [action["dataChange"] for action in actions] == [False] * 4
    assert compact(folder, table, SCHEMA) == 0


def test_a_compaction_after_another_commit_changes_nothing(tmp_path: Path) -> None:
    folder, table = folder_at(tmp_path), None
    for number in range(2):
        put(folder, table, write(tmp_path, run_name(), number), SCHEMA)
        table = open_table(folder)
    assert table is not None
    put(folder, open_table(folder), write(tmp_path, run_name(), 2), SCHEMA)
    with pytest.raises(CommitConflict):
        compact(folder, table, SCHEMA)
    assert seqnos(tmp_path) == [0, 1, 2]


def test_orphans_are_the_files_that_no_version_names(tmp_path: Path) -> None:
    old, new, killed = run_name(), run_name(), run_name()
    put(folder_at(tmp_path), None, write(tmp_path, old, 1), SCHEMA, metadata={RUN: old})
    parts = write(tmp_path, new, 2)
    put(folder_at(tmp_path), open_table(folder_at(tmp_path)), parts, SCHEMA, overwrite=True, metadata={RUN: new})
    (orphan,) = write(tmp_path, killed, 3)
    (tmp_path / "of-another-program.parquet").touch()
    assert remove_orphans(LocalFolder(tmp_path), open_table(folder_at(tmp_path))) == [orphan.name]
    assert (tmp_path / "of-another-program.parquet").exists()
    assert DeltaTable(str(tmp_path), version=0).to_pyarrow_table().num_rows == 1


def test_a_part_without_a_table_is_an_orphan(tmp_path: Path) -> None:
    (part,) = write(tmp_path, run_name(), 1)
    assert remove_orphans(LocalFolder(tmp_path), None) == [part.name]


def test_a_folder_is_locked_for_one_pipeline(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "new"), pytest.raises(MirrorError, match="another pipeline is writing"):
        FolderLock(tmp_path / "new")
    with FolderLock(tmp_path / "new"):
        pass


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    require_absent_or_table(folder_at(tmp_path / "absent"))
    require_absent_or_table(folder_at(tmp_path))
    (tmp_path / "thesis.doc").touch()
    with pytest.raises(ConfigError, match=r"thesis\.doc"):
        require_absent_or_table(folder_at(tmp_path))


def test_a_table_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    (tmp_path / "_delta_log" / f"{0:020d}.json").write_text("no json")
    with pytest.raises(MirrorError, match="cannot be read as a Delta table"):
        open_table(folder_at(tmp_path))
