"""The directory: mirror.json last, groups fixed, and every way it can be wrong said by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from storage.env import directory
from storage.env.directory import MapRecord
from storage.env.environment import WRITER_LOCK_FILE
from storage.errors import CorruptedError, Locked, NotAMirror, StorageError, UnknownFormat, WrongBucket
from storage.model import Identity
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.model import IDENTITY


def test_a_created_directory_is_loaded_again(tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "b")
    directory.create(path, IDENTITY)
    assert directory.exists(path)
    assert directory.load(path) == IDENTITY
    assert os.stat(path).st_mode & 0o777 == 0o700
    with pytest.raises(StorageError, match="already holds a mirror"):
        directory.create(path, IDENTITY)


def test_a_creation_that_was_cut_short_counts_as_empty_and_can_be_repeated(tmp_path: Path) -> None:
    path = str(tmp_path)
    directory.create(path, IDENTITY)
    os.rename(tmp_path / "mirror.json", tmp_path / "mirror.json.new")
    assert not directory.exists(path)
    with pytest.raises(NotAMirror, match="no mirror here yet"):
        directory.load(path)
    directory.create(path, IDENTITY)
    assert directory.load(path) == IDENTITY


@pytest.mark.parametrize("held", [None, (1, 2)])
@pytest.mark.parametrize("selection", ["", "scope it's"])
def test_groups_without_a_description_stay_and_the_error_says_how_to_restore_it(
    tmp_path: Path, held: tuple[int, int] | None, selection: str
) -> None:
    """All groups were deleted, and everything was fetched again."""
    path = str(tmp_path / "a b")
    identity = replace(IDENTITY, held=held, selection=selection)
    directory.create(path, identity)
    GroupWriter(directory.group_path(path, 1), WriterOptions(group=1, identity=identity, clock_ms=int)).close()
    os.unlink(os.path.join(path, "mirror.json"))
    for read in (directory.check_unused, directory.load, lambda path: directory.create(path, identity)):
        with pytest.raises(CorruptedError, match=r"mirror.json is missing, .* hold a mirror") as caught:
            read(path)
    command = caught.value.hint.removeprefix("to make the file again: ").partition("; to begin")[0]
    subprocess.run(command, shell=True, check=True)
    assert directory.load(path) == identity


def test_unreadable_groups_without_a_description_stay(tmp_path: Path) -> None:
    directory.create(str(tmp_path), IDENTITY)
    os.unlink(tmp_path / "mirror.json")
    (tmp_path / "group-0001" / "data.mdb").write_bytes(b"x" * 100_000)
    with pytest.raises(StorageError, match="group-0001"):
        directory.create(str(tmp_path), IDENTITY)
    (tmp_path / "group-0001" / "data.mdb").write_bytes(bytes(5_000))
    directory.create(str(tmp_path), IDENTITY)
    os.unlink(tmp_path / "mirror.json")
    with open(tmp_path / "group-0000" / "data.mdb", "r+b") as file:
        file.seek(directory.META_BYTES)
        file.write(bytes(os.path.getsize(file.name) - directory.META_BYTES))
    with pytest.raises(StorageError, match="group-0000"):
        directory.load(str(tmp_path))
    os.unlink(tmp_path / "group-0000" / "data.mdb")
    (tmp_path / "group-0000" / "data.mdb").mkdir()
    with pytest.raises(StorageError, match=r"group-0000/data\.mdb: .*Is a directory"):
        directory.load(str(tmp_path))


def test_a_disk_that_fills_up_during_a_creation_is_named(tmp_path: Path) -> None:
    """LMDB's own error, from the second commit, ended the worker that filled a removed group again."""
    program = (
        "import os, resource, sys\n"
        "from dataclasses import replace\n"
        "from storage.env import directory\n"
        "from storage.errors import Full\n"
        "from tests.storage.model import IDENTITY\n"
        "for pages in range(10, 100, 10):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (pages * 4096, resource.RLIM_INFINITY))\n"
        "    os.mkdir(folder := f'{sys.argv[1]}/{pages}')\n"
        "    try:\n        directory.create_environment(folder, 0, replace(IDENTITY, vbucket_count=1024))\n"
        "    except Full:\n        continue\n"
        "    print(pages)\n"
        "    break\n"
    )
    made = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert made.stderr == ""
    assert int(made.stdout) > 40, "a limit lay between the first commit and the second"


def test_the_selection_is_part_of_the_identity(tmp_path: Path) -> None:
    selected = replace(IDENTITY, selection="scope inventory")
    directory.create(str(tmp_path), selected)
    assert directory.load(str(tmp_path)) == selected
    stored = directory.identity_bytes(selected, 0)
    with pytest.raises(WrongBucket):
        directory.check_identity(stored, IDENTITY, 0, "x")
    whole = directory.identity_bytes(IDENTITY, 0)
    assert len(msgpack.unpackb(whole)) == 7, "a mirror of the whole bucket is as it always was"


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", CorruptedError, "cannot be read"),
        ("[]", CorruptedError, "no mirror description"),
        ("{}", CorruptedError, "no mirror description"),
        ('{"format": 99}', UnknownFormat, "format 99; this program knows format 3 .use the version"),
        (
            '{"format": 2}',
            UnknownFormat,
            "format 2, filled by a pre-release; this program knows format 3 .move it away and fill it again",
        ),
        ('{"format": 3}', CorruptedError, "lacks 'cluster_uuid'"),
        (
            '{"format":3,"cluster_uuid":"","bucket_name":"b","bucket_uuid":"u","vbucket_count":0,"group_count":1}',
            CorruptedError,
            "cannot be true",
        ),
        (
            '{"format":3,"cluster_uuid":"","bucket_name":7,"bucket_uuid":"u","vbucket_count":4,"group_count":1}',
            CorruptedError,
            "cannot be true",
        ),
    ],
)
def test_an_invalid_description_is_named(tmp_path: Path, text: str, kind: type[StorageError], message: str) -> None:
    (tmp_path / "mirror.json").write_text(text)
    with pytest.raises(kind, match=message):
        directory.load(str(tmp_path))


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotAMirror, match="not a directory"):
        directory.load(str(tmp_path / "file"))
    with pytest.raises(NotAMirror, match="no such directory"):
        directory.load(str(tmp_path / "nowhere"))


def test_an_environment_of_another_mirror_is_refused() -> None:
    other = Identity("cluster", "bucket", "another", 4, 2)
    with pytest.raises(WrongBucket, match="another"):
        directory.check_identity(directory.identity_bytes(other, 0), IDENTITY, 0, "/data")
    with pytest.raises(CorruptedError, match="has no identity"):
        directory.check_identity(None, IDENTITY, 0, "/data")
    directory.check_identity(directory.identity_bytes(IDENTITY, 1), IDENTITY, 1, "/data")


def test_the_lock_is_exclusive_until_it_is_released(tmp_path: Path) -> None:
    lock = directory.GroupLock(str(tmp_path))
    with pytest.raises(Locked, match="another process"):
        directory.GroupLock(str(tmp_path))
    lock.release()
    directory.GroupLock(str(tmp_path)).release()


def test_the_description_has_the_fields_of_the_format(tmp_path: Path) -> None:
    directory.create(str(tmp_path / "m"), IDENTITY)
    assert json.loads((tmp_path / "m" / "mirror.json").read_text()) == {
        "format": 3,
        "cluster_uuid": "cluster",
        "bucket_name": "bucket",
        "bucket_uuid": "uuid",
        "vbucket_count": 4,
        "group_count": 2,
    }


def test_a_group_folder_that_is_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = tmp_path / "data"
    path.mkdir()
    (path / "group-0000").symlink_to(elsewhere)
    with pytest.raises(StorageError, match="is a symbolic link"):
        directory.create(str(path), IDENTITY)
    with pytest.raises(StorageError, match="is a symbolic link"):
        directory.GroupLock(str(path / "group-0000"))
    assert list(elsewhere.iterdir()) == []
    (elsewhere / WRITER_LOCK_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(StorageError):
        directory.GroupLock(str(elsewhere))
    assert not (tmp_path / "victim").exists()


def test_the_files_of_a_mirror_are_readable_only_by_its_user(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        directory.create(str(tmp_path / "data"), IDENTITY)
    finally:
        os.umask(before)
    for file in (tmp_path / "data").glob("group-*/*"):
        assert file.stat().st_mode & 0o077 == 0, file


# --- the record of the newest map


RECORD = MapRecord("b1", 2, 2**40)


def test_a_record_is_the_last_one_saved(tmp_path: Path) -> None:
    assert directory.load_map(str(tmp_path), "b1") is None
    directory.save_map(str(tmp_path), MapRecord("b1", 0, 1))
    directory.save_map(str(tmp_path), RECORD)
    found = directory.load_map(str(tmp_path), "b1")
    assert found == RECORD
    assert found is not None
    assert found.revision == (2, 2**40)
    assert directory.load_map(str(tmp_path), "another bucket") is None
    assert os.listdir(tmp_path) == ["map.json"]


def test_a_record_gets_its_name_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_damaged_record_is_one_error_with_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "map.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptedError, match="remove the file"):
        directory.load_map(str(tmp_path), "b1")
