"""The record of the newest map that was followed: kept whole, of one bucket, and never half believed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from storage.env import directory
from storage.env.directory import MapRecord
from storage.errors import CorruptedError, StorageError

RECORD = MapRecord("b1", 2, 2**40)


def test_a_record_is_what_was_saved_last(tmp_path: Path) -> None:
    assert directory.load_map(str(tmp_path), "b1") is None
    directory.save_map(str(tmp_path), MapRecord("b1", 0, 1))
    directory.save_map(str(tmp_path), RECORD)
    found = directory.load_map(str(tmp_path), "b1")
    assert found == RECORD
    assert found is not None
    assert found.revision == (2, 2**40)
    assert os.listdir(tmp_path) == ["map.json"]


def test_a_record_of_another_bucket_is_none(tmp_path: Path) -> None:
    directory.save_map(str(tmp_path), RECORD)
    assert directory.load_map(str(tmp_path), "b2") is None


def test_the_record_is_on_the_disk_under_its_name_only_once_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before the rename leaves the old record."""
    directory.save_map(str(tmp_path), MapRecord("b1", 1, 1))
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        calls.append("fsync")
        fsync(descriptor)

    def recorded_rename(old: str, new: str) -> None:
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    directory.save_map(str(tmp_path), RECORD)
    assert calls == ["fsync", "rename", "fsync"]

    def crash(_a: str, _b: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", crash)
    with pytest.raises(StorageError):
        directory.save_map(str(tmp_path), MapRecord("b1", 9, 9))
    assert directory.load_map(str(tmp_path), "b1") == RECORD


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"bucket_uuid": "b1"}',
        json.dumps({"bucket_uuid": "b1", "rev_epoch": 1, "rev": "7"}),
        json.dumps({"bucket_uuid": 5, "rev_epoch": 1, "rev": 7}),
        json.dumps({"bucket_uuid": "b1", "rev_epoch": True, "rev": 7}),
        "\xff\xfe",
    ],
)
def test_a_damaged_record_is_one_error_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "map.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptedError, match="remove the file"):
        directory.load_map(str(tmp_path), "b1")
