"""Parts in a folder and in a tar: the same come out as went in, and what is no backup is refused."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from storage.admin import archive
from storage.admin.backup import MANIFEST, PART_BYTES, BackupPart
from storage.errors import CorruptedError, StorageError

PARTS = [
    BackupPart("group-0000/data.mdb.000000", b"a" * 70_000),
    BackupPart("group-0000/data.mdb.000001", b"b"),
    BackupPart("group-0001/data.mdb.000000", b"c" * 5),
    BackupPart(MANIFEST, b"{}"),
]


class Pipe(io.BytesIO):
    """Neither seekable nor readable twice."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: int) -> int:
        raise OSError("a pipe")


def tar(parts: list[BackupPart]) -> bytes:
    file = Pipe()
    sink = archive.TarSink(file, time_s=7)
    for part in parts:
        sink.put(part)
    sink.close()
    return file.getvalue()


def test_a_folder_returns_its_parts_with_the_manifest_last(tmp_path: Path) -> None:
    sink = archive.FolderSink(str(tmp_path / "made" / "here"))
    for part in PARTS:
        sink.put(part)
    assert list(archive.folder_parts(str(tmp_path / "made" / "here"))) == PARTS
    with pytest.raises(StorageError, match="is not empty"):
        archive.FolderSink(str(tmp_path / "made"))


def test_a_new_file_system_takes_a_backup_and_a_failed_one_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    for _ in range(2):
        sink = archive.FolderSink(str(tmp_path))
        sink.put(PARTS[0])
        sink.discard()
        assert [entry.name for entry in tmp_path.iterdir()] == ["lost+found"]


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_tar_is_streamed_both_ways_plain_or_compressed(compress: type[bytes]) -> None:
    assert list(archive.tar_parts(Pipe(compress(tar(PARTS))))) == PARTS


def test_a_tar_made_of_the_folder_is_accepted(tmp_path: Path) -> None:
    sink = archive.FolderSink(str(tmp_path / "folder"))
    for part in PARTS:
        sink.put(part)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        made.add(tmp_path / "folder", arcname=".")
    file.seek(0)
    assert sorted(archive.tar_parts(file)) == sorted(PARTS)


@pytest.mark.parametrize("length", [0, 100, 40_000])
def test_a_tar_that_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(CorruptedError, match=r"cut short|damaged"):
        list(archive.tar_parts(Pipe(tar(PARTS)[:length])))


def test_a_file_that_is_not_a_backup_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptedError, match=r"no backup.json"):
        list(archive.folder_parts(str(tmp_path)))
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        link = tarfile.TarInfo("group-0000/data.mdb.000000")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    file.seek(0)
    with pytest.raises(CorruptedError, match="is no part"):
        list(archive.tar_parts(file))
    with pytest.raises(CorruptedError, match="too large"):
        list(archive.tar_parts(Pipe(tar([BackupPart("large", b"x" * (PART_BYTES + 1))]))))
