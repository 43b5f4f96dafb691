"""`restore`: from a directory, a tar and stdin; what is damaged is named, and nothing is left of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, call, copy_of, environment, succeed


@pytest.fixture(scope="module")
def made(mirrored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup as a directory, `copy`, and as a tar, `copy.tar`. Tests only read them."""
    folder = tmp_path_factory.mktemp("backup")
    assert call("backup", "--data", mirrored, "--to", folder / "copy").code == 0
    (folder / "copy.tar").write_bytes(call("backup", "--data", mirrored, "--to", "-").raw)
    return folder


def test_a_directory_and_a_tar_on_stdin_give_the_same_mirror(mirrored: Path, made: Path, tmp_path: Path) -> None:
    first = succeed("restore", "--from", made / "copy", "--data", tmp_path / "a")
    assert "restored (bucket demo, 16 vbuckets" in first.out
    with (made / "copy.tar").open("rb") as tar:
        command = [*COMMAND, "restore", "--from", "-", "--data", str(tmp_path / "b")]
        subprocess.run(command, stdin=tar, env=environment(), check=True, timeout=60, stdout=subprocess.DEVNULL)
    contents = call("scan", "--data", mirrored, "--json", "--deletions").out
    assert len(contents.splitlines()) == 203
    for name in ("a", "b"):
        assert call("scan", "--data", tmp_path / name, "--json", "--deletions").out == contents
        assert call("check", "--data", tmp_path / name).code == 0


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda copy: flip(copy / "group-0002" / "data.mdb.000000"), "group-0002/data.mdb.000000: its SHA-256"),
        (lambda copy: flip(copy / "backup.json"), "backup.json is damaged"),
        (lambda copy: (copy / "group-0002" / "data.mdb.000000").unlink(), "group-0002/data.mdb.000000 is missing"),
        (lambda copy: (copy / "backup.json").unlink(), "is no complete backup: it has no backup.json"),
    ],
    ids=["a part", "the manifest", "a part that is gone", "a manifest that is gone"],
)
def test_a_damaged_part_of_a_backup_is_named_and_nothing_is_left(
    made: Path, tmp_path: Path, harm: Callable[[Path], None], words: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made / "copy", copy)
    harm(copy)
    call("restore", "--from", copy, "--data", tmp_path / "target").assert_complains(3, words)
    assert not (tmp_path / "target").exists()


def test_rows_damaged_before_the_backup_are_refused_unless_allowed(mirrored: Path, made: Path, tmp_path: Path) -> None:
    harmed = copy_of(mirrored, tmp_path / "harmed")
    file = harmed / "group-0002" / "data.mdb"
    data = file.read_bytes()
    key = call("scan", "--data", mirrored, "--vbid", "2", "--limit", "1", "--json").lines[0]["key"].encode()
    file.write_bytes(data.replace(key, key.upper() if key != key.upper() else key.lower()))
    succeed("backup", "--data", harmed, "--to", tmp_path / "copy")
    refused = call("restore", "--from", tmp_path / "copy", "--data", tmp_path / "target")
    refused.assert_complains(3, "its checksum does not match")
    assert not (tmp_path / "target").exists()
    arguments = ("--from", tmp_path / "copy", "--data", tmp_path / "target", "--no-check")
    assert call("restore", *arguments).code == 0


def test_a_directory_that_is_not_empty_is_refused(mirrored: Path, made: Path) -> None:
    call("restore", "--from", made / "copy", "--data", mirrored).assert_complains(1, "is not empty: it holds")


def test_a_missing_backup_is_named(tmp_path: Path) -> None:
    """The error named the data directory."""
    backup = tmp_path / "backup"
    (backup / "group-0000").mkdir(parents=True)
    (backup / "backup.json").write_text("{}")
    (part := backup / "group-0000" / "data.mdb.000000").symlink_to("nowhere")
    for source, unread in ((tmp_path / "missing", tmp_path / "missing"), (backup, part)):
        result = call("restore", "--from", source, "--data", tmp_path / "data")
        assert result.code == 1
        assert result.complaint.startswith(f"dcp-mirror: {unread}: cannot be read: No such file or directory")
