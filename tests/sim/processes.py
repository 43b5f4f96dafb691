"""Other processes on the mirror's directory: a reader that holds a transaction, and a writer that takes a group over.

Each is a child that was forked from the simulation and does nothing unless it is commanded to, so a world stays one
story. Must never know what is right: a child says what it has read or done, and `checkers` judges.
"""

from __future__ import annotations

import os
import pickle
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha1
from typing import Any

from lmdb import _envid

from storage.env import directory
from storage.env.environment import MAP_SIZE, Environment


def digest(environment: Environment, txn: Any) -> bytes:
    """Every row of every tree, in one word."""
    found = sha1(usedforsecurity=False)
    for name in sorted(environment._handles):
        with txn.cursor(environment.db(name)) as cursor:
            for key, value in cursor:
                found.update(b"%d %d " % (len(key), len(value)) + key + value)
    return found.digest()


def _forked(work: Callable[[int, int], None]) -> tuple[int, int, int]:
    """Run `work(read_descriptor, write_descriptor)` in a child; (its pid, where to read from it, where to write)."""
    from_child, to_parent = os.pipe()
    from_parent, to_child = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads: the child needs none
        pid = os.fork()
    if pid == 0:
        try:
            _close_all_but(0, 1, 2, from_parent, to_parent)  # the locks of the writers among them
            # What is inherited is left alone; the binding would refuse to open it again, as if this were one process.
            _envid.env_keys = lambda _path, _subdir: ()
            work(from_parent, to_parent)
        except BaseException as error:
            _send(to_parent, error)
        finally:
            os._exit(0)
    os.close(to_parent)
    os.close(from_parent)
    return pid, from_child, to_child


def _close_all_but(*kept: int) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with suppress(OSError):
                os.close(descriptor)


def _send(descriptor: int, what: Any) -> None:
    data = pickle.dumps(repr(what) if isinstance(what, BaseException) else what)
    data = len(data).to_bytes(4) + data
    while data:
        data = data[os.write(descriptor, data) :]


def _receive(descriptor: int) -> Any:
    size = int.from_bytes(_exactly(descriptor, 4))
    found = pickle.loads(_exactly(descriptor, size))
    assert not isinstance(found, str), f"another process failed: {found}"
    return found


def _exactly(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(descriptor, count - len(data))
        assert more, "another process ended without a word"
        data += more
    return data


class OtherReader:
    """A process that has a read transaction of every group open."""

    def __init__(self, path: str) -> None:
        """It reads what is committed now."""
        self.path = path
        self.pid, self._from, self._to = _forked(self._read)
        self.first: list[bytes] = _receive(self._from)

    def _read(self, commands: int, answers: int) -> None:
        identity = directory.load(self.path)
        groups = [
            Environment(directory.group_path(self.path, group), identity.group_vbids(group), map_size=MAP_SIZE)
            for group in range(identity.group_count)
        ]
        for environment in groups:
            environment.open_all()
        transactions = [environment.begin() for environment in groups]
        while True:
            _send(answers, [digest(*each) for each in zip(groups, transactions, strict=True)])
            command = os.read(commands, 1)
            if not command:
                return
            if command == b"n":
                for each in zip(groups, transactions, strict=True):
                    each[0].end(each[1])
                transactions = [environment.begin() for environment in groups]

    def again(self) -> list[bytes]:
        """What its transactions see, of each group."""
        os.write(self._to, b"a")
        return list(_receive(self._from))

    def newest(self) -> list[bytes]:
        """The same of transactions that it begins now, in place of those."""
        os.write(self._to, b"n")
        self.first = list(_receive(self._from))
        return self.first

    def end(self) -> None:
        """It ends in an orderly way."""
        os.close(self._to)
        os.waitpid(self.pid, 0)
        os.close(self._from)

    def kill(self) -> None:
        """It is killed in its transactions."""
        os.kill(self.pid, signal.SIGKILL)
        self.end()


def elsewhere(work: Callable[[], Any]) -> Any:
    """What `work` returns in another process."""
    pid, from_child, to_child = _forked(lambda _commands, answers: _send(answers, work()))
    try:
        return _receive(from_child)
    finally:
        os.close(to_child)
        os.close(from_child)
        os.waitpid(pid, 0)
