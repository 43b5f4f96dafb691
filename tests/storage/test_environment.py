"""Environments: one per file and process, fork guard, map growth seen by readers, and errors by name."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import lmdb
import pytest

from storage.admin.check import check
from storage.env import directory
from storage.env.environment import SHARED, Environment, storage_error
from storage.errors import Closed, CorruptedError, DeviceFailed, Full, Locked, ReadOnly, StorageError
from storage.format import keys
from storage.read.view import open_view
from tests.processes import without_rootly_powers
from tests.storage.model import keys_of
from tests.storage.rig import Clock, open_writer, publish


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), Full, "no space left"),
        (OSError(errno.EDQUOT, "quota"), Full, "no space left"),
        (OSError(errno.EFBIG, "File too large"), Full, "no space left"),
        (lmdb.DiskError("mdb_txn_commit: No space left on device"), Full, "no space left"),
        (lmdb.Error("mdb_txn_commit: Input/output error"), DeviceFailed, "input/output error"),
        (OSError(errno.EIO, "Input/output error"), DeviceFailed, "see the kernel's log"),
        (AssertionError("7"), CorruptedError, "the stored data contradicts itself: AssertionError: 7"),
        (lmdb.MapFullError("map"), Full, "map is full"),
        (OSError(errno.EACCES, "x"), ReadOnly, "permission denied"),
        (OSError(errno.EROFS, "x"), ReadOnly, "permission denied"),
        (lmdb.ReadersFullError("x"), Locked, "reader slots"),
        (lmdb.LockError("mdb_txn_begin: Resource temporarily unavailable"), Locked, "same PID"),
        (OSError(errno.ENXIO, "No such device"), StorageError, "No such device"),
        (OSError(errno.EMFILE, "Too many open files", "/somewhere/data.mdb"), StorageError, "Too many open files"),
        (lmdb.Error("/somewhere: No such file or directory"), StorageError, "Error: No such file"),
        (lmdb.BadTxnError("mdb_get: MDB_BAD_TXN"), CorruptedError, "is damaged or is none: mdb_get: MDB_BAD_TXN"),
    ],
)
def test_system_errors_become_storage_errors(error: Exception, kind: type[StorageError], text: str) -> None:
    ours = storage_error(error, "/somewhere")
    assert type(ours) is kind
    assert text in str(ours)
    assert str(ours).startswith("/somewhere: ")
    assert "/somewhere" not in ours.message, "it is sent to clients"


_NOT_DAMAGE = {
    "BadDbiError", "BadRslotError", "BadValsizeError", "DbsFullError", "DiskError", "InvalidParameterError",
    "KeyExistsError", "LockError", "MapFullError", "MapResizedError", "MemoryError", "NotFoundError", "PanicError",
    "ReadersFullError", "ReadonlyError", "TlsFullError", "TxnFullError",
    "BadChecksumError", "CryptoFailError", "EnvEncryptionError",  # of LMDB 1.0's encryption
}  # fmt: skip


@pytest.mark.parametrize("kind", lmdb.Error.__subclasses__(), ids=lambda kind: kind.__name__)
def test_each_error_of_lmdb_is_classified_as_damage_or_not(kind: type[lmdb.Error]) -> None:
    is_damage = isinstance(storage_error(kind("x"), "/somewhere"), CorruptedError)
    assert is_damage is (kind.__name__ not in _NOT_DAMAGE)


@pytest.mark.parametrize(("version", "patched", "text"), [("2.3.0", 1, "lmdb 2.3.0"), ("3.0.0", 0, "of the system")])
def test_an_lmdb_that_trusts_damaged_pages_is_refused_in_one_line(
    path: str, version: str, patched: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb, "__version__", version)
    monkeypatch.setattr(lmdb, "version", lambda subpatch=False: (0, 9, 36, patched) if subpatch else (0, 9, 36))
    with pytest.raises(StorageError, match=rf"{text}.*install lmdb 3\.0 or newer"):
        open_view(path).state(0)


def test_a_new_environment_is_of_lmdb_0_9_whatever_a_variable_prefers(tmp_path: Path) -> None:
    command = "from storage.env.environment import Environment; Environment('.', [], writable=True, create=True)"
    variables = os.environ | {"LMDB_DEFAULT_LIB_VERSION": "1", "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", command], check=True, cwd=tmp_path, env=variables)
    assert lmdb.open(str(tmp_path)).lib_version()[:2] == (0, 9)


def test_a_write_cut_short_is_a_full_disk_only_without_space(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_short = lmdb.Error("mdb_txn_commit: Input/output error")
    folder = directory.group_path(path, 0)
    assert type(storage_error(cut_short, folder)) is DeviceFailed
    monkeypatch.setattr("storage.env.environment.SPACE_MIN", 2**63)
    assert type(storage_error(cut_short, folder)) is Full


def test_a_group_without_its_file_is_damage_not_a_new_store(path: str) -> None:
    folder = directory.group_path(path, 0)
    os.unlink(os.path.join(folder, "data.mdb"))
    with pytest.raises(CorruptedError, match="data file is missing"):
        Environment(folder, [0, 2], writable=True)
    assert not os.path.exists(os.path.join(folder, "data.mdb"))


def test_a_file_that_was_cut_short_is_named_and_not_read(path: str) -> None:
    """Anyone who touches a page that the file lacks gets SIGBUS: the file must be refused before."""
    folder = directory.group_path(path, 0)
    file = os.path.join(folder, "data.mdb")
    sound = Environment(folder, [0, 2], writable=True)
    assert sound.missing_bytes() == 0
    sound.close()
    os.truncate(file, os.stat(file).st_size // 2 // 4096 * 4096)
    for writable in (True, False):
        with pytest.raises(CorruptedError, match="cut short"):
            Environment(folder, [0, 2], writable=writable)
    with open_view(path) as view, pytest.raises(CorruptedError, match="cut short"):
        view.state(0)
    problems = check(path).problems
    assert problems
    assert all(problem.startswith("group 0") for problem in problems)


def test_a_file_that_is_no_environment_is_named(path: str) -> None:
    with open(os.path.join(directory.group_path(path, 0), "data.mdb"), "wb") as file:
        file.write(b"not LMDB at all" * 1000)
    with pytest.raises(CorruptedError, match="damaged"):
        Environment(directory.group_path(path, 0), [0, 2])


def test_two_views_of_one_process_share_an_environment_and_the_last_one_closes_it(path: str) -> None:
    one, two = open_view(path), open_view(path)
    assert one.groups.environment(0) is two.groups.environment(0)
    one.close()
    assert two.state(0).published_seqno == 0
    two.close()
    assert not any(real.startswith(os.path.realpath(path)) for real in SHARED.open)
    with pytest.raises(Closed):
        two.state(0)


def test_handles_are_opened_once_and_trees_are_named_when_missing(path: str) -> None:
    environment = Environment(directory.group_path(path, 0), [0, 2, 4])
    with pytest.raises(CorruptedError, match="a tree is missing"):
        environment.open_all()
    environment.close()
    environment = Environment(directory.group_path(path, 0), [0, 2])
    environment.open_all()
    handle = environment.db(keys.DB_META)
    environment.open_all()
    assert environment.db(keys.DB_META) is handle
    assert environment.file_bytes() > 4096
    environment.close()


def test_a_writer_stops_when_its_file_is_gone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.env.environment.LOOK_INTERVAL_S", 0.0)
    writer = open_writer(path)
    shutil.rmtree(path)
    with pytest.raises(StorageError, match="No such file"):
        writer.figures()
    with pytest.raises(CorruptedError, match="moved, removed or replaced while the service runs"):
        writer.step()
    writer.give_up()


GROWING = """
import os, sys
from tests.storage.model import keys_of
from tests.storage.rig import open_writer, publish
writer = open_writer(sys.argv[1], map_size=1 << 20)
publish(writer, 0, [(keys_of(0, 1)[0], os.urandom(100_000), seqno) for seqno in range(2, 102)])
writer.close()
"""


LIMITED = """
import resource, subprocess, sys
from storage.env import environment
from storage.errors import StorageError
from storage.read.view import open_view
from tests.storage.model import keys_of
path, growing = sys.argv[1:]
environment.MAP_SIZE = 1 << 20
with open_view(path) as view:
    print(view.get(keys_of(0, 1)[0]).seqno)
    subprocess.run([sys.executable, "-c", growing, path], check=True)
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 20), resource.RLIM_INFINITY))
    for _ in range(2):
        try:
            view.get(keys_of(0, 1)[0])
        except StorageError as error:
            print(type(error).__name__, error.message)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(view.get(keys_of(0, 1)[0]).seqno)
"""


def test_a_view_without_address_space_for_a_grown_map_raises_full_until_there_is_some(path: str) -> None:
    """LMDB's own error came first, then 'the view is closed', for ever."""
    writer = open_writer(path, map_size=1 << 20)
    publish(writer, 0, [(keys_of(0, 1)[0], b"old", 1)])
    writer.close()
    said = subprocess.run(
        [sys.executable, "-c", LIMITED, path, GROWING], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said == ["1", *["Full no address space to map the file"] * 2, "101"]


@pytest.mark.parametrize("grown_by", ["the writer of another process", "the writer of this process"])
def test_a_read_of_another_thread_ends_before_the_map_is_taken_over_in_its_new_size(
    path: str, grown_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB moved the map under it: hundreds of errors in a few milliseconds, in whatever threads were reading."""
    key = keys_of(0, 1)[0]
    writer = open_writer(path, map_size=1 << 20)
    publish(writer, 0, [(key, b"old", 1)])
    if "another" in grown_by:
        writer.close()
    begun, written, grown = threading.Event(), threading.Event(), threading.Event()
    seen: list[object] = []
    monkeypatch.setattr("storage.env.environment.MAP_SIZE", 1 << 20)
    with open_view(path) as view:
        environment = view.groups.environment(0)

        def read_slowly() -> None:
            try:
                with environment.read() as txn:
                    before = txn.get(keys.DB_PUB, b"\0\0")
                    begun.set()
                    written.wait(60)
                    grown.wait(0.5)  # who meets the new size waits for this read
                    seen.append(before == txn.get(keys.DB_PUB, b"\0\0"))
            except Exception as error:
                seen.append(error)

        reading = threading.Thread(target=read_slowly)
        reading.start()
        begun.wait()
        if "another" in grown_by:
            subprocess.run([sys.executable, "-c", GROWING, path], check=True)
            written.set()
        else:
            written.set()
            publish(writer, 0, [(key, os.urandom(100_000), seqno) for seqno in range(2, 102)])
        found = view.get(key)  # meets the new size
        grown.set()
        reading.join()
        assert seen == [True]
        assert found is not None
        assert found.seqno == 101
        assert environment.running == []
    if "this" in grown_by:
        assert writer.figures()["map_bytes"] > 1 << 20
        writer.close()


def test_a_read_that_stays_open_keeps_the_map_and_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.env.environment.REMAP_WAIT_S", 0.01)
    with open_view(path) as view:
        environment = view.groups.environment(0)
        with environment.read() as txn:
            with pytest.raises(StorageError, match="stays open"):
                environment.grow()
            assert txn.get(b"pub", b"\0\0") is not None
        assert environment.grow() > 0


def test_a_killed_reader_is_noticed_by_the_writer(path: str) -> None:
    clock = Clock()
    writer = open_writer(path, clock=clock)
    program = (
        "import sys, os, signal; from storage.read.view import open_view; v = open_view(sys.argv[1]);"
        "o = v.reader(0); t = o.environment.begin(); t.get(o.vbid_key, db=o.pub); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, path], check=False)

    def pinned() -> int:
        return sum(not line.endswith("-") for line in writer.environment.env.readers().splitlines()[1:])

    assert pinned() == 1
    writer.owner.check_readers_ms = 0
    writer.step()
    assert pinned() == 0
    writer.close()


def test_a_link_in_place_of_the_lock_file_is_not_followed(path: str, clock: Clock, tmp_path: Path) -> None:
    open_writer(path, clock=clock).close()
    victim, lock = tmp_path / "victim", os.path.join(directory.group_path(path, 0), "lock.mdb")
    victim.write_bytes(b"precious")
    os.unlink(lock)
    os.symlink(victim, lock)
    for attempt in (lambda: open_writer(path, clock=clock), lambda: open_view(path).get(keys_of(0, 1)[0])):
        with pytest.raises(StorageError, match=r"lock\.mdb is a symbolic link"):
            attempt()
    assert victim.read_bytes() == b"precious"


def test_a_reader_that_may_not_write_the_lock_file_gets_an_error_about_that_file(path: str, clock: Clock) -> None:
    """In a process of its own, in which permissions bind root too."""
    open_writer(path, clock=clock).close()
    lock = os.path.join(directory.group_path(path, 0), "lock.mdb")
    os.chmod(lock, 0o444)
    program = (
        "import sys\n"
        "from storage.errors import ReadOnly\n"
        "from storage.read.view import open_view\n"
        "try:\n    open_view(sys.argv[1]).get(sys.argv[2])\n"
        "except ReadOnly as error:\n    print(error.path, error.hint)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, path, keys_of(0, 1)[0].decode()],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=without_rootly_powers,
    ).stdout
    os.chmod(lock, 0o600)
    assert said.startswith(f"{lock} a reader needs write access to this file alone")
