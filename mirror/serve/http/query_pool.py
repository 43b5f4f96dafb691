"""The processes that answer SQL for an HTTP process: started when needed, and kept for further queries.

A process whose query was abandoned releases its lease, and ends. Ending processes count in `sql_processes`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from mirror.config import Settings
from mirror.serve.http.problems import Problem

HEAD_BYTES_MAX = 64 * 1024
PIECE_BYTES = 64 * 1024
ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ")
"""Environment variables that a query's process inherits. None has a password."""
SMALL_HEAPS = {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment variables that keep reserved memory small, because the memory limit counts it."""
END_S = 5.0
"""Time for a process to end by itself; then it is killed."""


class QueryChild:
    def __init__(self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.process, self.reader, self.writer = process, reader, writer
        self._unread: int | None = 0
        """Bytes of the answer that are still to come; None while they are unknown."""
        self._ends = False
        """True if the process ends after this answer."""
        self.displaced = False

    @staticmethod
    async def start(memory_bytes: int) -> QueryChild:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "mirror.serve.http.query_process", str(memory_bytes)]
        with theirs:
            kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | SMALL_HEAPS
            process = await asyncio.to_thread(
                lambda: subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=kept, start_new_session=True
                )
            )
        return QueryChild(process, *await asyncio.open_connection(sock=ours, limit=HEAD_BYTES_MAX))

    @property
    def idle(self) -> bool:
        return self._unread == 0 and not self._ends and not self.reader.at_eof()

    async def ask(self, query: dict[str, Any]) -> dict[str, Any]:
        """Return the head of the answer. Raises Problem."""
        self._unread = None
        self.writer.write(json.dumps(query).encode() + b"\n")
        with suppress(ConnectionError):
            if line := await self.reader.readline():
                head: dict[str, Any] = json.loads(line)
                self._ends = head.pop("ends")
                self._unread = head.get("bytes", 0)
                if "name" in head:
                    raise Problem(**head)
                return head
        if self.displaced:
            raise Problem("too-busy", "ended: another user waits, and this user has another query", hint="ask again")
        hint = "a query that needs too much memory ends so"
        raise Problem("unavailable", "the process of this query ended", hint=hint)

    @property
    def answers(self) -> bool:
        return self._unread is not None

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the answer's bytes. Raises ConnectionError if the process ends."""
        while self._unread:
            piece = await self.reader.read(min(PIECE_BYTES, self._unread))
            if not piece:
                raise ConnectionError("the process of this query ended")
            self._unread -= len(piece)
            yield piece

    async def end(self) -> None:
        """Ask the process to end, or kill it; wait for its end."""
        with suppress(OSError, RuntimeError):
            self.writer.write_eof()
        try:
            async with asyncio.timeout(END_S):
                # What it still sends is read: a process that waits for room would not notice the end.
                while await self.reader.read(PIECE_BYTES):
                    pass
        except (TimeoutError, ConnectionError):
            self.process.kill()
        self.writer.close()
        await asyncio.to_thread(self.process.wait)
        with suppress(OSError):  # otherwise asyncio may log the stream's error
            await self.writer.wait_closed()


class Waiting(NamedTuple):
    owner: str
    placed: asyncio.Future[None]


class Queries:
    """The places of an HTTP process. While others wait, a user holds one at most: a second query of a user is ended."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._free = settings.sql_processes
        self._held: Counter[str] = Counter()
        """Places of each user."""
        self._waiting: list[Waiting] = []
        self._running: dict[QueryChild, str] = {}
        """The processes that answer, oldest first, and whose query it is."""
        self._idle: list[QueryChild] = []
        self._ending: set[asyncio.Task[None]] = set()

    async def take(self, owner: str) -> QueryChild:
        """Wait for a place; return an idle or a new process for a query of `owner`."""
        await self._place(owner)
        while self._idle:
            child = self._idle.pop()
            if child.idle:
                self._running[child] = owner
                return child
            self._end(child)
        starting = asyncio.create_task(QueryChild.start(self.settings.sql_memory_bytes))
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:  # keep the new process for the next query
            starting.add_done_callback(partial(self._keep, owner))
            raise
        except OSError:
            self._release(owner)
            raise
        self._running[child] = owner
        return child

    async def _place(self, owner: str) -> None:
        waiting = Waiting(owner, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._distribute()
        if not waiting.placed.done() and not self._held[owner]:
            seconds = (child for child, other in self._running.items() if self._held[other] > 1)
            ended = next((child for child in reversed([*seconds]) if not (child.answers or child.displaced)), None)
            if ended is not None:
                # Another user gets its place; its query gets a problem.
                ended.displaced = True
                ended.process.kill()
        try:
            await waiting.placed
        except asyncio.CancelledError:
            if waiting.placed.cancelled():
                self._waiting.remove(waiting)
            else:
                self._release(owner)
            raise

    def _distribute(self) -> None:
        """Give free places to users that hold the fewest; among these, to the first that came."""
        while self._free and self._waiting:
            chosen = min(self._waiting, key=lambda each: self._held[each.owner])
            self._waiting.remove(chosen)
            self._free -= 1
            self._held[chosen.owner] += 1
            chosen.placed.set_result(None)

    def _release(self, owner: str) -> None:
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._distribute()

    def _keep(self, owner: str, started: asyncio.Task[QueryChild]) -> None:
        if not started.cancelled() and started.exception() is None:
            self._idle.append(started.result())
        self._release(owner)

    def give_back(self, child: QueryChild) -> None:
        """Keep the process if it is idle; else end it, and then free its place."""
        owner = self._running.pop(child)
        if child.idle:
            self._idle.append(child)
            self._release(owner)
        else:
            self._end(child).add_done_callback(lambda _: self._release(owner))

    def _end(self, child: QueryChild) -> asyncio.Task[None]:
        ending = asyncio.create_task(child.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def close(self) -> None:
        """Wait for the end of all queries, whose clients are gone; then end all processes."""
        for _ in range(self.settings.sql_processes):
            await self._place("")
        for child in self._idle:
            self._end(child)
        await asyncio.gather(*self._ending)
