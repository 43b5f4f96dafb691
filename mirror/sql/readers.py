"""Read a collection for a query: in this process, and on more cores if the read is large.

Helpers are processes that read, verify and type documents, and send Arrow batches over a socket. Each reader takes its
next vbucket from one pipe, so that no reader waits while vbuckets are left. Invariants: all readers of a read have the
boundaries of one `BoundaryRead`, whose lease stays in this process; a read yields the rows of every vbucket, or raises;
a helper ends with its session, with an unfinished read, or with the session's process.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from weakref import finalize

import pyarrow as pa

from mirror.errors import MirrorError
from mirror.sql.read import Columns, batches
from storage.read.reading import BoundaryRead

READERS_MAX = 4
"""Processes of one read. A helper takes up to 100 MiB."""
HELPED_S = 1.0
"""Expected processor time of the rest of a read above which helpers pay: they start within some 0.4 s."""
EVERY_VBID = range(1 << 16)

Progress = Callable[[int, int], None]
"""Called with the numbers of vbuckets that a read has, and that it has ended, since the last call."""


class ReaderDied(MirrorError):
    default_hint = "look for a kill or short memory, and ask again"


class Read(NamedTuple):
    collection: str
    columns: pa.Schema
    """The columns that the answer or the condition needs."""
    names: Sequence[str]
    """The columns of the answer."""
    condition: Any
    """An Arrow expression that chooses the rows; None: all."""
    bounds: dict[str, Any]
    """Bounds of these rows: arguments of `batches`."""

    def batches(self, of: BoundaryRead, vbids: Iterator[int] | None = None) -> Iterator[Any]:
        table = Columns(self.columns, "_")
        bounds = self.bounds if vbids is None else {**self.bounds, "vbids": vbids}
        for batch in batches(of, self.collection, table.shape, **bounds):
            found = table.finished(batch)
            if self.condition is not None:
                found = found.filter(self.condition)
            yield found.select(self.names)


class Readers:
    """The helpers of a session. They start with its first large read, and stay for others."""

    def __init__(self) -> None:
        self._started: list[_Helper] = []
        finalize(self, _end, self._started)
        self._free: list[_Helper] = []
        self._lock = Lock()

    def batches(self, read: Read, of: BoundaryRead, progress: Progress) -> Iterator[Any]:
        """Yield the batches of a read. Raises ReaderDied, and the errors of `mirror.sql.read.batches`."""
        vbids = [vbid for vbid in of.vbids if vbid in read.bounds.get("vbids", EVERY_VBID)]
        progress(len(vbids), 0)
        left, dealt = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # a forked child may keep it open
        dealt_count = os.write(dealt, array("H", vbids).tobytes()) // 2
        os.close(dealt)
        kept = vbids[dealt_count:]  # a pipe holds 32,768 of them; of a user with many pipes 2,048
        helping: list[_Helper] | None = None
        busy: list[Connection] = []
        spent_s, done = 0.0, 0

        def ended() -> None:
            nonlocal done
            done += 1
            progress(0, 1)

        try:
            mine = read.batches(of, _taken(left, ended, kept))
            while True:
                began_s = time.thread_time()
                batch = next(mine, None)
                spent_s += time.thread_time() - began_s
                if batch is None:
                    break
                yield batch
                if helping is None and spent_s * (len(vbids) - done) > HELPED_S * max(done, 1):
                    helping = self._joining(read, of, left)
                    busy = [each.connection for each in helping]
                yield from _received(busy, progress, 0)
            yield from _received(busy, progress, None)
            self._free += helping or []
        finally:
            os.close(left)

    def _joining(self, read: Read, of: BoundaryRead, left: int) -> list[_Helper]:
        """Let the free helpers join a read, and return them. Start them before the session's first large read."""
        with self._lock:
            if not self._started and Path(sys.executable or "").name.startswith("python"):
                with suppress(OSError):  # no memory or process: read alone
                    for _ in range(min(len(os.sched_getaffinity(0)), READERS_MAX) - 1):
                        self._started.append(_Helper())
                self._free = [*self._started]
            free, self._free = self._free, []
        return [each for each in free if each.joins(read, of, left)]

    def abandon(self) -> None:
        """End the helpers unless all are free."""
        if len(self._free) < len(self._started):
            self.close()

    def close(self) -> None:
        self._free = []
        _end(self._started)


class _Helper:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            program = f"from {__name__} import help_with; help_with({theirs.fileno()})"
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
            )
            self.connection = Connection(ours.detach())

    def joins(self, read: Read, of: BoundaryRead, left: int) -> bool:
        """Let the helper join a read. Return False if it has died."""
        try:
            self.connection.send((read, of))
            send_handle(self.connection, left, self.process.pid)
        except ConnectionError:
            return False
        return True


def _end(helpers: list[_Helper]) -> None:
    """Kill the helpers. In a forked child they live on: they are its parent's."""
    ended = [*helpers]
    helpers.clear()
    for each in ended:
        each.process.kill()
    for each in ended:
        each.process.wait()
        each.connection.close()


def help_with(descriptor: int) -> None:
    """Run a helper: join one read after the other, until the other end of the socket is closed."""
    with Connection(descriptor) as connection, suppress(EOFError, ConnectionError):
        while True:
            read, of = connection.recv()
            left = recv_handle(connection)
            try:
                for batch in read.batches(of, _taken(left, lambda: connection.send(1))):
                    connection.send(batch)
                connection.send(None)
            except ConnectionError:
                raise
            except Exception as error:
                connection.send(error)
            os.close(left)


def _received(busy: list[Connection], progress: Progress, timeout_s: float | None) -> Iterator[Any]:
    """Yield batches of helpers until none comes within the time. Drop the helpers that have ended from `busy`."""
    while busy and (ready := wait(busy, timeout_s)):
        for each in ready:
            assert isinstance(each, Connection)
            try:
                found = each.recv()
            except (EOFError, OSError) as error:
                raise ReaderDied("a process that read for this query died") from error
            if found is None:
                busy.remove(each)
            elif isinstance(found, int):
                progress(0, found)
            elif isinstance(found, BaseException):
                raise found
            else:
                yield found


def _taken(pipe: int, ended: Callable[[], object], kept: Sequence[int] = ()) -> Iterator[int]:
    """Yield vbuckets from the pipe, and then those of `kept`. Call `ended` after each."""
    with suppress(BlockingIOError):
        while found := os.read(pipe, 2):
            yield int.from_bytes(found, sys.byteorder)
            ended()
    for vbid in kept:
        yield vbid
        ended()
