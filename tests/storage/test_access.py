"""Members of a group read a mirror and write only the lock files; others have no access."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from storage.env import access, directory
from storage.env.directory import MapRecord, save_map
from storage.errors import ReadOnly, StorageError
from storage.read.view import open_view
from tests.storage.model import IDENTITY, keys_of
from tests.storage.rig import Clock, open_writer, publish

ROOT = os.geteuid() == 0
GROUP = "54321" if ROOT else str(os.getegid())
"""Only root may give files to a group that it is no member of; that there is none of that number does not matter."""
UNPRIVILEGED = 65534


@pytest.fixture
def place() -> Iterator[str]:
    """A path that another user can enter; pytest's own directories are closed."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o711)
        yield os.path.join(made, "mirror")


def modes(path: str) -> dict[str, str]:
    return {
        os.path.relpath(name, path): oct(stat.S_IMODE(os.stat(name).st_mode))
        for name in (path, *(str(each) for each in Path(path).rglob("*")))
    }


def as_member(groups: list[int], work: Callable[[], str]) -> str:
    """Run `work` in a process of an unprivileged user with these groups; return its answer."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups(groups)
            os.setgid(UNPRIVILEGED)
            os.setuid(UNPRIVILEGED)
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading, encoding="utf-8") as answer:
        return answer.read()


def test_members_can_read_and_register_but_not_write_data(place: str, clock: Clock) -> None:
    directory.create(place, IDENTITY)
    save_map(place, MapRecord("uuid", 1, 2))
    writer = open_writer(place, clock=clock)
    (key,) = keys_of(0, 1)
    publish(writer, 0, [(key, b"value", 1)])
    writer.close()
    gid = access.group_id(GROUP)
    access.share(place, gid)
    for group in range(IDENTITY.group_count):
        access.share_group(directory.group_path(place, group), gid)
    save_map(place, MapRecord("uuid", 1, 3))  # the service replaces it with each map
    found = modes(place)
    assert {name: mode for name, mode in found.items() if "group-0001" not in name} == {
        ".": "0o750", "mirror.json": "0o640", "map.json": "0o640", "group-0000": "0o750",
        "group-0000/data.mdb": "0o640", "group-0000/lock.mdb": "0o660", "group-0000/writer.lock": "0o600",
    }  # fmt: skip
    shared = [name for name in found if not name.endswith("writer.lock")]
    assert {os.stat(os.path.join(place, name)).st_gid for name in shared} == {gid}
    data = os.path.join(directory.group_path(place, 0), "data.mdb")

    def read() -> str:
        with open_view(place) as view:
            document = view.get(key)
            assert document is not None
            assert view.groups.environment(0).env.info()["num_readers"] > 0
            return document.value.decode()

    def write() -> str:
        for refused in (lambda: os.open(data, os.O_RDWR), lambda: os.mkdir(data + ".new"), lambda: os.unlink(data)):
            with pytest.raises(PermissionError):
                refused()
        return "refused"

    if ROOT:
        assert as_member([gid], read) == "value"
        assert as_member([gid], write) == "refused"
        assert as_member([], read).startswith("ReadOnly: ")


def test_a_folder_without_permission_is_not_reported_as_damage(place: str) -> None:
    """To those who may not look, its data file seems to be missing."""
    directory.create(place, IDENTITY)
    os.chmod(place, 0o755)
    os.chmod(os.path.join(place, "mirror.json"), 0o644)

    def read() -> str:
        with open_view(place) as view:
            return str(view.state(0))

    if ROOT:
        assert as_member([], read).startswith("ReadOnly: ")
    assert oct(os.stat(directory.group_path(place, 0)).st_mode)[-3:] == "700"


def test_an_unknown_or_foreign_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="there is no group 'no such group'"):
        access.group_id("no such group")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [1000, 54322])
    assert access.group_id("54322") == 54322
    with pytest.raises(StorageError, match="not a member of the group '54321'") as caught:
        access.group_id("54321")
    assert "usermod" in caught.value.hint


def test_links_are_not_followed_and_missing_files_are_no_error(place: str, tmp_path: Path) -> None:
    directory.create(place, IDENTITY)
    access.share(place, access.group_id(GROUP))  # without map.json
    victim = tmp_path / "victim"
    victim.write_text("")
    victim.chmod(0o600)
    folder = directory.group_path(place, 0)
    os.rename(os.path.join(folder, "data.mdb"), os.path.join(folder, "moved"))
    os.symlink(victim, os.path.join(folder, "data.mdb"))
    with pytest.raises(StorageError, match=r"data\.mdb: is a symbolic link"):
        access.share_group(folder, access.group_id(GROUP))
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600


def test_a_directory_above_that_members_may_not_enter_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "closed" / "data"
    inner.mkdir(parents=True)
    gid, other = os.stat(inner).st_gid, os.stat(inner).st_gid + 1
    (tmp_path / "closed").chmod(0o710)
    assert access.closed_parent(str(inner), other) == str(tmp_path / "closed")
    assert access.closed_parent(str(inner), gid) != str(tmp_path / "closed")
    assert access.closed_parent("/", other) is None


WRITES = """
import sys
from tests.storage.model import keys_of
from tests.storage.rig import open_writer, publish
writer = open_writer(sys.argv[1])
first = writer.vbuckets[0].state.published_seqno + 1
for seqno in range(first, first + 10):
    publish(writer, 0, [(keys_of(0, 1)[0], b"new", seqno)])
writer.close()
"""
IN_AN_IMAGE = """
import subprocess, sys
from storage.errors import ViewInvalidated
from storage.read.view import open_view
from tests.storage.model import keys_of
path, writes = sys.argv[1:]
key, views = keys_of(0, 1)[0], [open_view(path), open_view(path)]
def read(view):
    try:
        values = {view.get(key).value, view.get_many([key])[key].value, *(each.value for each in view.scan(0))}
    except ViewInvalidated:
        return "again"
    return b" and ".join(values).decode()
print(*map(read, views), end=" ")
subprocess.run([sys.executable, "-c", writes, path], check=True)
for _ in range(2):
    print(*map(read, views), end=" ")
print(*map(read, [open_view(path)]))
"""
OVERLAID = """cd "$1" && mkdir upper work merged && shift && \
mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged && exec "$@" """
BACKUP = """
import subprocess, sys
from storage.admin import backup
from storage.errors import ReadOnly
from storage.read.view import open_view
from tests.storage.model import keys_of
from tests.storage.test_backup import Kept
path, mounted, writes = sys.argv[1:]
def write(*_):
    subprocess.run([sys.executable, "-c", writes, path], check=True)
def walk():
    with open_view(mounted) as view, view.reader(0).environment.read():
        write()
for read in (walk, lambda: backup.create(mounted, Kept(write), time_ms=1)):
    try:
        print(read())
    except ReadOnly as error:
        print(error.message)
with open_view(mounted) as view:
    print(view.get(keys_of(0, 1)[0]).seqno)
"""
BOUND = 'mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" && shift 2 && exec "$@"'


def in_namespace(mounts: str, *words: str) -> list[str]:
    """Run a program after `mounts`, in a mount namespace of its own; return what it prints."""
    namespace = ["unshare", "-m"] if ROOT else ["unshare", "-rm"]
    variables = os.environ | {"PYTHONPATH": os.getcwd()}
    command = [*namespace, "sh", "-c", mounts, "sh", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"this cannot be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_reader_in_the_lower_layer_of_an_overlay_reads_the_copy_that_a_writer_makes(
    path: str, clock: Clock, tmp_path: Path
) -> None:
    """The copy has the same path and inode. For ever the reader saw a state without documents, and no error."""
    with closing(open_writer(path, clock=clock)) as writer:
        publish(writer, 0, [(keys_of(0, 1)[0], b"old", 1)])
    image = tmp_path / "image"
    (image / "lower").mkdir(parents=True)
    os.rename(path, image / "lower" / "mirror")
    python = [sys.executable, "-c", IN_AN_IMAGE, str(image / "merged" / "mirror"), WRITES]
    (said,) = in_namespace(OVERLAID, str(image), *python)
    assert said.split() == ["old", "old", "again", "new", "new", "new", "new"]


def test_a_read_on_a_read_only_mount_fails_if_a_writer_may_have_overwritten_its_pages(
    path: str, clock: Clock, tmp_path: Path
) -> None:
    """A backup copied such pages: it ended well, or called the sound mirror damaged."""
    with closing(open_writer(path, clock=clock)) as writer:
        publish(writer, 0, [(keys_of(0, 1)[0], b"old", 1)])
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    python = [sys.executable, "-c", BACKUP, path, str(mounted), WRITES]
    *refused, seqno = in_namespace(BOUND, path, str(mounted), *python)
    why = "mounted read-only, where LMDB cannot register readers, and a service began to write it during the read"
    assert refused == [f"it is {why}"] * 2
    assert int(seqno) > 11


def test_an_unregistered_reader_ends_with_a_writer(path: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only mount."""

    class Mounted:
        f_flag = os.ST_RDONLY

    (key,) = keys_of(0, 1)
    writer = open_writer(path, clock=clock)
    publish(writer, 0, [(key, b"value", 1)])
    writer.close()
    monkeypatch.setattr(os, "statvfs", lambda _path: Mounted)
    lock = directory.GroupLock(directory.group_path(path, 0))
    with monkeypatch.context() as patch, open_view(path) as view:
        patch.setattr("storage.env.environment.UNREGISTERED_LOOK_INTERVAL_S", 3600.0)
        with pytest.raises(ReadOnly, match="a service writes it now"):
            view.get(key)
    lock.release()
    monkeypatch.setattr("storage.env.environment.UNREGISTERED_LOOK_INTERVAL_S", 0.0)
    with open_view(path) as view:
        assert view.get(key) is not None
        lock = directory.GroupLock(directory.group_path(path, 0))
        with pytest.raises(ReadOnly, match="a service writes it now"):
            view.get(key)
        lock.release()
    os.unlink(os.path.join(directory.group_path(path, 0), "writer.lock"))
    with open_view(path) as view:
        assert view.get(key) is not None
    os.symlink("/nonexistent", os.path.join(directory.group_path(path, 0), "writer.lock"))
    with open_view(path) as view, pytest.raises(ReadOnly, match="a service writes it perhaps"):
        view.get(key)


def test_a_writer_waits_for_a_reader_that_looks_for_writers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = directory.GroupLock(directory.group_path(path, 0))
    pauses: list[float] = []

    def pause(pause_s: float) -> None:
        pauses.append(pause_s)
        looking.release()

    monkeypatch.setattr("storage.env.directory.time.sleep", pause)
    directory.GroupLock(directory.group_path(path, 0)).release()
    assert len(pauses) == 1
