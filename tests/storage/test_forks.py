"""Programs that fork, as preforking servers do: parent and child each read in a view of their own, and no process
loses its place in LMDB's table of readers.

    pytest tests/storage/test_forks.py             2 rounds with backups and counts
    pytest -m long tests/storage/test_forks.py     100 rounds
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from storage.admin import backup
from storage.admin.check import check
from storage.env.environment import Environment
from storage.errors import Closed
from storage.read.view import View, open_view
from tests.processes import ProcessGroup, in_child
from tests.storage.forking import ENDS, KEYS, REQUESTS_MAX, STATES, fill, found_in, read_again
from tests.storage.rig import Clock
from tests.storage.test_backup import Kept

COMMITS = 30
"""So many commits overwrite the pages of a read that has lost its place."""


@contextmanager
def program(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A program of `tests.storage.forking`, which ends with its standard input."""
    command = [sys.executable, "-m", "tests.storage.forking", *words]
    with ProcessGroup(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0) as running:
        yield running


def ask(running: subprocess.Popen[str], line: str) -> str:
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(line + "\n")
    running.stdin.flush()
    return running.stdout.readline().strip()


def registered(environment: Environment) -> list[str]:
    """The rows of this process in the table of readers that are in a transaction."""
    rows = (row.split() for row in environment.env.readers().splitlines()[1:])
    return [row[2] for row in rows if row[0] == str(os.getpid()) and row[2].isdigit()]


@pytest.mark.parametrize("state", STATES)
def test_a_forked_child_reads_in_its_own_view_and_does_not_disturb_its_parent(path: str, state: str) -> None:
    """The child was refused, or hung; at its end the parent's read failed, and this process lost its place."""
    fill(path)
    with open_view(path) as view, program("PARENT", path, state) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        environment = view.groups.environment(0)
        for end in ENDS:
            assert (end, ask(parent, end)) == (end, "right")
            with environment.read():
                places = registered(environment)
                assert places
                assert (end, ask(parent, "read")) == (end, "right")
                assert registered(environment) == places


def test_an_iterator_of_keys_that_forks_ends_in_the_child(path: str) -> None:
    """It is code of the caller in the middle of a read."""
    fill(path)

    def keys_and_a_fork() -> Iterator[bytes]:
        yield KEYS[0]
        pids.append(os.fork())
        yield KEYS[1]

    pids: list[int] = []
    with open_view(path) as view:
        found: object = None
        try:
            found = view.get_many(keys_and_a_fork())
        except BaseException as error:
            found = error
        if pids == [0]:
            os._exit(0 if isinstance(found, Closed) else 1)
        assert os.waitpid(pids[0], 0)[1] == 0
        assert isinstance(found, dict)
        assert sorted(found) == sorted(KEYS[:2])
        assert found_in(view) == "right"


def test_an_inherited_reading_ends_in_the_child_although_a_thread_was_inside_of_it(path: str) -> None:
    """The thread holds a lock, and is not there in the child. The lease of the reading is its parent's."""
    fill(path)
    begun, answered, ended = threading.Event(), threading.Event(), threading.Event()

    @contextmanager
    def lease(_: object) -> Iterator[None]:
        begun.set()
        answered.wait(60)
        yield
        ended.set()

    with open_view(path) as view, view.reading(vbids=[0], lease=lease) as reading:

        def leave() -> None:
            with pytest.raises(Closed, match="open another view in the child"):
                reading.pin(0)
            reading.close()
            assert not ended.is_set()

        holder = threading.Thread(target=reading.hold)
        holder.start()
        begun.wait(60)
        in_child(leave)
        answered.set()
        holder.join()
    assert ended.is_set()


def test_children_of_a_forkserver_that_has_a_view_read_in_views_of_their_own(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    monkeypatch.setenv("PRELOADED_MIRROR", path)
    with program("FORKSERVER", path) as running:
        said, _ = running.communicate(timeout=120)
    assert said.splitlines() == ["right"] * 6


def answer(port: int) -> tuple[int, str]:
    """A worker's process id, and what it found. A worker that is killed at that moment gives no answer."""
    received = ""
    while not received:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection, suppress(ConnectionError):
            received = connection.makefile().read().strip()
    pid, _, said = received.partition(" ")
    return int(pid), said


def test_a_preforking_server_that_read_before_its_forks_answers_correctly(path: str) -> None:
    """As gunicorn with preload_app: workers end after some requests, or are killed, and are replaced."""
    fill(path)
    with program("WRITER", path), program("SERVER", path) as server, open_view(path, partial=True) as view:
        assert server.stdout is not None
        loaded, port = server.stdout.readline().split()
        assert loaded == "right"
        pids = set()
        for number in range(24):
            pid, said = answer(int(port))
            assert said == "right"
            pids.add(pid)
            if number % 8 == 5:
                assert slow_count(view) == len(KEYS)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert len(pids) >= 24 // REQUESTS_MAX
        assert server.communicate(timeout=60)[0] == ""
        assert server.returncode == 0


# -- rounds ------------------------------------------------------------------------------------------------------------


def wait_for_commits(view: View) -> None:
    environment = view.groups.environment(0)
    until = environment.newest_commit() + COMMITS
    while environment.newest_commit() < until:
        time.sleep(0.01)


def slow_count(view: View) -> int:
    """Count keys in one transaction, most of them after the writer could have used its pages again."""
    reader = view.reader(0)
    with reader.environment.read() as txn:
        keys = txn.raw.cursor(reader.keys).iternext_nodup()
        first = [next(keys) for _ in range(10)]
        wait_for_commits(view)
        return len(first) + sum(1 for _ in keys)


def backup_while_written(path: str, view: View, target: Path) -> str:
    """What a restored backup holds that was made slowly."""
    sink = Kept(lambda part: wait_for_commits(view) if part.name == backup.part_name(0, 0) else None)
    backup.create(path, sink, time_ms=5)
    backup.restore(sink.parts, str(target), clock_ms=Clock())
    assert check(str(target)).problems == []
    return read_again(str(target))


def live_through(path: str, folder: Path, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "PART_BYTES", 1 << 16)
    fill(path)
    with ExitStack() as stack:
        stack.enter_context(program("WRITER", path))
        forkers = [stack.enter_context(program("FORKER", path, str(seed))) for seed in range(2)]
        view = stack.enter_context(open_view(path))
        for number in range(rounds):
            assert slow_count(view) == len(KEYS)
            assert found_in(view) == "right"
            assert backup_while_written(path, view, folder / f"restored {number}") == "right"
        for forker in forkers:
            assert forker.poll() is None
            said, _ = forker.communicate(timeout=120)
            *wrong, forks = said.splitlines()
            assert (wrong, forker.returncode) == ([], 0)
            assert int(forks) > 0


def test_counts_and_backups_are_correct_while_programs_fork(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup was made that could not be restored; counts were wrong, and a process died of a signal."""
    live_through(path, tmp_path, 2, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_counts_and_backups_are_correct_while_programs_fork(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_through(path, tmp_path, 100, monkeypatch)
