"""Backups: made next to a writer, refused when damaged or unfinished, and restored as a mirror of its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import storage.admin.backup
from storage.admin import archive, backup
from storage.admin.backup import BackupPart
from storage.admin.check import check
from storage.env import directory
from storage.env.directory import MapRecord
from storage.errors import CorruptedError, NoSuchBoundary, StorageError, UnknownFormat, ViewInvalidated
from storage.format import keys
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter
from tests.storage import rig
from tests.storage.model import IDENTITY, keys_of, log
from tests.storage.rig import Clock, open_writer, snapshots

KEYS = keys_of(0, 8)


class Kept:
    """A sink that keeps the parts, and calls `after` with each."""

    def __init__(self, after: Callable[[BackupPart], None] = lambda part: None) -> None:
        self.parts: list[BackupPart] = []
        self.after = after

    def put(self, part: BackupPart) -> None:
        self.parts.append(part)
        self.after(part)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of each file."""
    monkeypatch.setattr(storage.admin.backup, "PART_BYTES", 16384)


def publish(writer: GroupWriter, first_seqno: int, values: dict[bytes, bytes | None]) -> None:
    snapshots(writer, [(key, value, first_seqno + at) for at, (key, value) in enumerate(values.items())])


def contents(view: View) -> dict[bytes, bytes]:
    return {document.key: document.value for document in view.scan()}


def made(path: str, as_of_ms: int | None = None) -> list[BackupPart]:
    sink = Kept()
    backup.create(path, sink, time_ms=5, as_of_ms=as_of_ms)
    return sink.parts


def restored(parts: list[BackupPart], target: Path) -> str:
    backup.restore(parts, str(target), clock_ms=Clock())
    assert check(str(target)).problems == []
    return str(target)


@pytest.fixture
def filled(writer: GroupWriter) -> GroupWriter:
    publish(writer, 1, dict.fromkeys(KEYS[:4], b"first"))
    publish(writer, 5, {KEYS[0]: b"second", KEYS[1]: None})
    return writer


def test_a_backup_does_not_hold_changes_published_while_it_runs(path: str, filled: GroupWriter, tmp_path: Path) -> None:
    directory.save_map(path, MapRecord(IDENTITY.bucket_uuid, 3, 14))
    with open_view(path, partial=True) as view:
        before, token = contents(view), view.token(0)
    parts: list[BackupPart] = []

    def go_on(part: BackupPart) -> None:
        if part.name == backup.part_name(0, 0):
            publish(filled, 7, {KEYS[5]: b"third", KEYS[0]: None})

    sink = Kept(go_on)
    summary = backup.create(path, sink, time_ms=5)
    parts = sink.parts
    assert [part.name for part in parts][:2] == [backup.part_name(0, 0), backup.part_name(0, 1)]
    assert (parts[-1].name, summary.published[0]) == (backup.MANIFEST, 6)
    target = restored(parts, tmp_path / "target")
    with open_view(target, partial=True) as view:
        assert contents(view) == before
        assert view.token(0) == token
        assert view.state(0).failover_log == log()
        assert [state.published_seqno for state in view.states()] == [6, 0, 0, 0]
    assert directory.load_map(target, IDENTITY.bucket_uuid) == MapRecord(IDENTITY.bucket_uuid, 3, 14)
    assert sorted(entry.name for entry in (tmp_path / "target").iterdir()) == [
        "group-0000",
        "group-0001",
        "map.json",
        "mirror.json",
    ]


def test_a_token_newer_than_the_backup_is_refused_even_if_its_seqno_comes_again(
    path: str, filled: GroupWriter, tmp_path: Path
) -> None:
    parts = made(path)
    with open_view(path, partial=True) as view:
        at_backup = view.token(0)
    publish(filled, 7, {KEYS[6]: b"only in the original"})
    with open_view(path, partial=True) as view:
        newer = view.token(0)
    target = restored(parts, tmp_path / "target")
    with open_view(target, partial=True) as view:
        assert list(view.changes(0, since=at_backup)) == []
        with pytest.raises(ViewInvalidated, match="of a history that this mirror does not have"):
            list(view.changes(0, since=newer))
    copy = open_writer(target)
    publish(copy, 7, {KEYS[7]: b"only in the copy"})
    with open_view(target, partial=True) as view:
        of_copy = view.token(0)
        assert (of_copy.branch, of_copy.seqno) == (newer.branch, newer.seqno)
        assert [change.document.key for change in view.changes(0, since=at_backup) if change.document] == [KEYS[7]]
        with pytest.raises(ViewInvalidated, match="of a history that this mirror does not have"):
            list(view.changes(0, since=newer))
    copy.close()
    with (
        open_view(path, partial=True) as view,
        pytest.raises(ViewInvalidated, match="of a history that this mirror does not have"),
    ):
        list(view.changes(0, since=of_copy))


def test_branches_of_original_and_copy_have_different_histories(path: str, filled: GroupWriter, tmp_path: Path) -> None:
    target = restored(made(path), tmp_path / "target")
    copy = open_writer(target)
    tokens = []
    for writer, where in ((filled, path), (copy, target)):
        writer.vbuckets[0].rollback(4)
        publish(writer, 5, {KEYS[3]: b"again"})
        with open_view(where, partial=True) as view:
            tokens.append(view.token(0))
    copy.close()
    ours, theirs = tokens
    assert (ours.branch, ours.seqno) == (theirs.branch, theirs.seqno) == (2, 5)
    for where, foreign in ((path, theirs), (target, ours)):
        with open_view(where, partial=True) as view, pytest.raises(ViewInvalidated):
            list(view.changes(0, since=foreign))


def test_a_copy_as_of_an_older_boundary_serves_that_boundary(path: str, filled: GroupWriter, tmp_path: Path) -> None:
    with open_view(path, partial=True) as view:
        newest, older = view.boundaries(0)
        newer_token, older_token = view.token(0), view.token(0, 1, 4)
    target = restored(made(path, as_of_ms=older.time_ms), tmp_path / "target")
    with open_view(target, partial=True) as view:
        assert contents(view) == dict.fromkeys(KEYS[:4], b"first")
        assert (view.state(0).published_seqno, view.state(0).rollback_count) == (older.seqno, 1)
        assert list(view.changes(0, since=older_token)) == []
        kinds = [change.kind for change in view.changes(0, since=newer_token)]
        assert (kinds[0], sorted(kinds[1:])) == ("rollback", ["restoration", "restoration", "retraction", "retraction"])
    with pytest.raises(NoSuchBoundary):
        made(path, as_of_ms=older.time_ms - 1)
    assert newest.time_ms > older.time_ms


def test_only_vbuckets_with_newer_changes_are_rolled_back_to_the_moment(
    path: str, writer: GroupWriter, tmp_path: Path
) -> None:
    """The restored mirror served the changes after the moment, too."""
    for vbid in (0, 2):
        rig.publish(writer, vbid, [(keys_of(vbid, 1)[0], b"before", 1)])
    with open_view(path, partial=True) as view:
        moment = max(view.boundaries(vbid)[0].time_ms for vbid in (0, 2))
    rig.publish(writer, 2, [(keys_of(2, 1)[0], b"after", 2)])
    parts = made(path, as_of_ms=moment)
    assert backup.read_manifest(parts[-1].data)["rollbacks"] == {"2": 1}
    target = restored(parts, tmp_path / "target")
    with open_view(target, partial=True) as view:
        assert set(contents(view).values()) == {b"before"}
        assert [(state.published_seqno, state.rollback_count) for state in view.states()][::2] == [(1, 0), (1, 1)]


def flipped(part: BackupPart) -> BackupPart:
    middle = len(part.data) // 2
    return part._replace(data=part.data[:middle] + bytes([part.data[middle] ^ 4]) + part.data[middle + 1 :])


def refused(parts: list[BackupPart], target: Path) -> str:
    with pytest.raises(StorageError) as found:
        backup.restore(parts, str(target), clock_ms=Clock())
    assert not target.exists()
    return str(found.value)


def test_a_flipped_byte_is_refused_by_the_name_of_its_file(path: str, filled: GroupWriter, tmp_path: Path) -> None:
    parts = made(path)
    for at, part in enumerate(parts):
        damaged = [*parts[:at], flipped(part), *parts[at + 1 :]]
        assert part.name in refused(damaged, tmp_path / "target")


def test_a_mirror_damaged_when_it_was_copied_is_refused_by_its_rows(path: str, clock: Clock, tmp_path: Path) -> None:
    """The checksums of the files match: they were made of the damaged rows."""
    writer = open_writer(path, clock=clock)
    writer.vbuckets[0].save(failover_log=log())
    publish(writer, 1, dict.fromkeys(KEYS[:3], b"a value"))
    writer.close()
    file = Path(directory.group_path(path, 0)) / "data.mdb"
    stored = file.read_bytes()
    assert stored.count(b"a value") >= 3
    file.write_bytes(stored.replace(b"a value", b"a vaIue", 2))
    parts = made(path)
    said = refused(parts, tmp_path / "target")
    assert "2 problems in group 0, first vbucket 0: row 1:" in said
    assert "checksum does not match" in said
    assert "--no-check" in said
    backup.restore(parts, str(tmp_path / "target"), clock_ms=Clock(), check_rows=False)
    assert check(str(tmp_path / "target")).problems != []


def test_a_reference_damaged_when_it_was_copied_is_refused(path: str, clock: Clock, tmp_path: Path) -> None:
    writer = open_writer(path, clock=clock)
    writer.vbuckets[0].save(failover_log=log())
    publish(writer, 1, dict.fromkeys(KEYS[:3], b"a value"))
    with writer.environment.begin(write=True) as txn:
        txn.put(b"\0" + KEYS[0], keys.DUP.pack(1, 2, 0x57), db=writer.environment.db(keys.keys_db(0)))
    writer.close()
    assert "another document's" in refused(made(path), tmp_path / "target")


def test_each_data_file_is_synced_before_the_mirror_is_in_place(
    path: str, filled: GroupWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after a restore has said that it is done left pages of zeros."""
    parts, target = made(path), tmp_path / "target"
    synced: set[str] = set()
    known = os.fsync

    def fsync(descriptor: int) -> None:
        assert not (target / directory.FILE).exists()
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        known(descriptor)

    monkeypatch.setattr("storage.admin.backup.os.fsync", fsync)
    monkeypatch.setattr("storage.admin.backup._open_once", lambda *_: synced.add("end of copying"))
    with suppress(AssertionError):  # of the folder, when all is in place
        backup.restore(parts, str(target), clock_ms=Clock())
    expected = {directory.group_path(f"{target}/{backup.WORK}", group) + "/data.mdb" for group in range(2)}
    assert expected <= synced


def test_missing_repeated_foreign_and_truncated_parts_are_refused(
    path: str, filled: GroupWriter, tmp_path: Path
) -> None:
    parts, target = made(path), tmp_path / "target"
    first, second = parts[0], parts[1]
    for wrong, words in (
        (parts[:-1], "has no backup.json"),
        ([], "has no backup.json"),
        ([first, *parts[2:]], f"{second.name} is missing"),
        (parts[1:], "group-0000/data.mdb.000000 is missing"),
        ([*parts[:2], parts[-1]], "is missing"),
        ([first, *parts], "comes twice"),
        ([*parts[:-1], BackupPart("group-0007/data.mdb.000000", b"x"), parts[-1]], "does not belong to this backup"),
        ([BackupPart("../etc/passwd", b"x"), *parts], "is no part of a backup"),
        ([first._replace(data=first.data[:-1]), *parts[1:]], f"{first.name}: 16383 bytes, not 16384"),
        ([*parts[:-1], BackupPart(backup.MANIFEST, b"[]")], "backup.json is damaged"),
        ([*parts[:-1], BackupPart(backup.MANIFEST, b"{}")], "backup.json is damaged"),
    ):
        assert words in refused(wrong, target)


def test_another_version_or_format_is_refused(path: str, filled: GroupWriter, tmp_path: Path) -> None:
    *parts, last = made(path)
    for field in ("version", "store_format"):
        other = json.loads(last.data) | {field: 99}
        with pytest.raises(UnknownFormat, match="99"):
            restored([*parts, last._replace(data=json.dumps(other).encode())], tmp_path / "target")


def test_a_folder_of_another_mirror_is_refused(path: str, filled: GroupWriter, tmp_path: Path) -> None:
    manifest = backup.read_manifest(made(path)[-1].data)
    other = tmp_path / "other"
    directory.create(str(other), replace(IDENTITY, bucket_uuid="another"))
    parts = made(str(other))
    files = backup.read_manifest(parts[-1].data)["files"]
    mixed = manifest | {"files": files}
    mixed["sha256"] = backup._digest(mixed)
    assert "another" in refused(
        [*parts[:-1], BackupPart(backup.MANIFEST, json.dumps(mixed).encode())], tmp_path / "target"
    )


def test_an_earlier_moment_of_an_unsettled_vbucket_is_neither_copied_nor_rolled_back_to(
    path: str, filled: GroupWriter
) -> None:
    """During a deferred rollback the errors spoke of a resync."""
    vbucket = filled.vbuckets[0]
    for unsettle, words in (
        (lambda: vbucket.rollback(4, deferred=True), "readers still see the history before a failover"),
        (vbucket.begin_resync, "it is being resynced"),
    ):
        unsettle()
        assert made(path)
        for refused in (lambda: made(path, as_of_ms=2_000_000), lambda: vbucket.check_rollback(4)):
            with pytest.raises(StorageError, match=rf"{words}.*\(wait until .* try again\)"):
                refused()


def test_what_would_end_a_backup_is_found_before_the_first_part(path: str, filled: GroupWriter, tmp_path: Path) -> None:
    """A bad map.json, or a vbucket without history at the time, was found after all groups, and their parts stayed."""
    sink = Kept()
    filled.vbuckets[0].begin_resync()
    with pytest.raises(StorageError, match="being resynced"):
        backup.create(path, sink, time_ms=5, as_of_ms=2_000_000)
    Path(path, "map.json").write_text("{")
    with pytest.raises(CorruptedError, match="cluster map"):
        backup.create(path, sink, time_ms=5)
    assert sink.parts == []


def test_a_restore_needs_an_empty_directory(path: str, filled: GroupWriter, tmp_path: Path) -> None:
    parts, target = made(path), tmp_path / "target"
    target.mkdir()
    (target / "notes").write_text("mine")
    with pytest.raises(StorageError, match=r"is not empty: it holds notes"):
        backup.restore(parts, str(target), clock_ms=Clock())
    assert [entry.name for entry in target.iterdir()] == ["notes"]
    (target / "notes").unlink()
    restored(parts, target)


def test_a_killed_restore_leaves_no_mirror_and_names_the_files_to_remove(
    path: str, filled: GroupWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, target = made(path), tmp_path / "target"
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process cleans nothing
        with pytest.raises(StorageError):
            backup.restore(parts[:-1], str(target), clock_ms=Clock())
    assert not directory.exists(str(target))
    with pytest.raises(StorageError, match=r"remove .*restore\.new"):
        backup.restore(parts, str(target), clock_ms=Clock())


def test_a_backup_ends_when_its_sink_fails(path: str, filled: GroupWriter, tmp_path: Path) -> None:
    def fail(part: BackupPart) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        backup.create(path, Kept(fail), time_ms=5)
    folder = tmp_path / "folder"
    sink = archive.FolderSink(str(folder))
    sink.put(made(path)[0])
    with pytest.raises(CorruptedError, match=r"no backup.json"):
        restored(list(archive.folder_parts(str(folder))), tmp_path / "target")
