"""Parts: complete and reported, or not there."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mirror.errors import MirrorError
from mirror.spark.tables import parts
from mirror.spark.tables.parts import PartWriter, run_name, run_of, text_keys

SCHEMA = pa.schema([("key", pa.string()), ("seqno", pa.int64()), ("value", pa.binary())])


FILE_BYTES_MAX = 8192


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let this process write no file beyond FILE_BYTES_MAX."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rows(first: int, count: int) -> pa.RecordBatch:
    numbers = list(range(first, first + count))
    return pa.record_batch([[f"k{n}" for n in numbers], numbers, [b"x" * 100] * count], schema=SCHEMA)


def test_the_written_rows_are_in_the_reported_part(tmp_path: Path) -> None:
    run = run_name()
    with PartWriter(str(tmp_path), f"part-{run}-0", SCHEMA) as writer:
        writer.write(rows(0, 10))
        writer.write(rows(10, 0))
        writer.write(rows(10, 5))
    (part,) = writer.finished
    table = pq.read_table(tmp_path / part.name)
    assert table.column("seqno").to_pylist() == list(range(15))
    assert part.rows == 15
    assert part.size == (tmp_path / part.name).stat().st_size
    assert run_of(part.name) == run
    assert json.loads(part.stats) == {
        "numRecords": 15,
        "minValues": {"key": "k0", "seqno": 0},
        "maxValues": {"key": "k9", "seqno": 14},
        "nullCount": {"key": 0, "seqno": 0},
    }


def test_a_writer_without_rows_makes_no_file(tmp_path: Path) -> None:
    with PartWriter(str(tmp_path), f"part-{run_name()}-0", SCHEMA) as writer:
        writer.write(rows(0, 0))
    assert writer.finished == []
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_full_size_is_finished_and_another_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(parts, "PART_BYTES_MAX", 1)
    with PartWriter(str(tmp_path), f"part-{run_name()}-0", SCHEMA) as writer:
        for first in range(0, 1000, 50):
            writer.write(rows(first, 50))
    assert [part.rows for part in writer.finished] == [100] * 10


def test_a_writer_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(parts, "PART_BYTES_MAX", 1)

    def fail_in_the_middle() -> None:
        with PartWriter(str(tmp_path), f"part-{run_name()}-0", SCHEMA) as writer:
            writer.write(rows(0, 10))
            monkeypatch.setattr(parts, "PART_BYTES_MAX", 10**9)
            writer.write(rows(10, 10))
            assert len(list(tmp_path.iterdir())) == 2
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail_in_the_middle()
    assert list(tmp_path.iterdir()) == []


def test_a_last_write_that_fails_leaves_no_file(tmp_path: Path, small_files: None) -> None:
    """A full disk shows at the end: the last row group is written when the writer closes."""
    noise = pa.record_batch([["k"], [1], [os.urandom(3 * FILE_BYTES_MAX)]], schema=SCHEMA)
    with (
        pytest.raises(MirrorError, match="File too large"),
        PartWriter(str(tmp_path), f"part-{run_name()}-0", SCHEMA) as writer,
    ):
        writer.write(noise)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["absent", "file/below"])
def test_a_folder_that_cannot_be_written_is_named_with_its_machine(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 1)
    (tmp_path / "file").touch()
    with (
        pytest.raises(MirrorError, match="cannot be written on") as error,
        PartWriter(str(tmp_path / name), f"part-{run_name()}-0", SCHEMA) as writer,
    ):
        writer.write(rows(0, 1))
    assert str(tmp_path / name) in error.value.what


def test_an_object_store_that_refuses_a_part_is_named_with_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 1)
    with (  # an account is missing, which the library finds out when the file is made
        pytest.raises(MirrorError, match=r"cannot be written on.*Account must be specified"),
        PartWriter("abfss://container/x", f"part-{run_name()}-0", SCHEMA) as writer,
    ):
        writer.write(rows(0, 1))


def test_statistics_leave_out_columns_without_exact_bounds(tmp_path: Path) -> None:
    schema = pa.schema(
        [("all_null", pa.int64()), ("when", pa.timestamp("us", "UTC")), ("deep", pa.struct([("n", pa.int64())]))]
    )
    batch = pa.record_batch([[None, None], [0, 1], [{"n": 1}, {"n": 2}]], schema=schema)
    with PartWriter(str(tmp_path), f"part-{run_name()}-0", schema) as writer:
        writer.write(batch)
    stats = json.loads(writer.finished[0].stats)
    assert stats == {"numRecords": 2, "minValues": {}, "maxValues": {}, "nullCount": {"all_null": 2}}


@pytest.mark.parametrize("name", ["key", "_key"])
def test_a_binary_key_is_written_so_that_every_reader_accepts_it(name: str) -> None:
    keys = [b"\xff\x00", "\u00fcber".encode(), b"\xff\x01"]
    batch = pa.record_batch([[1, 2, 3], pa.array(keys).view(pa.string())], names=["seqno", name])
    assert text_keys(batch).column(1).to_pylist() == ["\ufffdbase64:/wA=", "\u00fcber", "\ufffdbase64:/wE="]
    plain = batch.slice(1, 1)
    assert text_keys(plain).equals(plain)
    assert text_keys(batch.select(["seqno"])).num_rows == 3


def test_files_of_other_programs_are_not_parts() -> None:
    assert run_of("part-00000-4c8c0d5c-c000.snappy.parquet") is None
    assert run_of("something.parquet") is None
