"""Cursor files: replaced whole, read back, and refused in one line when they are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import changes as cursor
from mirror.errors import ConfigError, SupervisionError
from storage.model import Branch, Seqno
from storage.read.view import Token

TOKENS = {vbid: Token(vbid, Branch(2), Seqno(7 + vbid), 0xFF) for vbid in (3, 1)}


def test_what_is_saved_is_loaded_and_no_other_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "position"
    cursor.save_cursor(path, TOKENS.values())
    cursor.save_cursor(path, TOKENS.values())
    assert cursor.load_cursor(path) == TOKENS
    assert [line.split(":")[0] for line in path.read_text().splitlines()[1:]] == ["1", "3"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["position"]


@pytest.mark.parametrize("content", [b"1:2:3\n", b"\xff\xfe", b"{}"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "position"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a cursor file"):
        cursor.load_cursor(path)
    with pytest.raises(ConfigError, match="No such file"):
        cursor.load_cursor(tmp_path / "none")


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(SupervisionError, match="cannot be written"):
        cursor.save_cursor(tmp_path / "none" / "position", TOKENS.values())
