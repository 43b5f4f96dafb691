from __future__ import annotations

from pathlib import Path

import lmdb

from tests.cli.conftest import call, copy_of


def test_a_sound_mirror_has_no_problems(mirrored: Path) -> None:
    result = call("check", "--data", mirrored, "--json")
    assert result.code == 0
    assert result.json["ok"] is True
    assert (result.json["problems"], result.json["vbuckets"]) == ([], 16)
    assert result.json["rows"] >= 203
    assert "sound" in call("check", "--data", mirrored).out


def test_a_lost_row_is_found(mirrored: Path, tmp_path: Path) -> None:
    data = copy_of(mirrored, tmp_path / "copy")
    with lmdb.open(str(data / "group-0001"), max_dbs=100) as env:
        rows = env.open_db(b"v1", create=False)
        with env.begin(write=True, db=rows) as txn:
            assert txn.delete(next(txn.cursor().iternext(values=False)))
    result = call("check", "--data", data)
    assert result.code == 3
    assert "vbucket 1" in result.out
    as_json = call("check", "--data", data, "--json")
    assert as_json.code == 3
    assert as_json.json["ok"] is False
    assert as_json.json["problems"]
    assert result.err == ""


def test_a_file_of_garbage_is_found(mirrored: Path, tmp_path: Path) -> None:
    data = copy_of(mirrored, tmp_path / "copy")
    (data / "group-0002" / "data.mdb").write_bytes(b"garbage" * 1000)
    assert call("check", "--data", data).code == 3
