"""The processes that answer SQL for an HTTP process: started when needed, and kept for further queries.

Knows processes and sockets; never a query. Invariants: there are at most `sql_processes` processes, ending ones
included; a process whose query was abandoned releases its lease, and ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

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
        return self._unread == 0 and not self.reader.at_eof()

    async def ask(self, query: dict[str, Any]) -> dict[str, Any]:
        """Return the head of the answer. Raises Problem."""
        self._unread = None
        self.writer.write(json.dumps(query).encode() + b"\n")
        with suppress(ConnectionError):
            if line := await self.reader.readline():
                head: dict[str, Any] = json.loads(line)
                self._unread = head.get("bytes", 0)
                if "name" in head:
                    raise Problem(**head)
                return head
        hint = "a query that needs too much memory ends so"
        raise Problem("unavailable", "the process of this query ended", hint=hint)

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
                while await self.reader.read(PIECE_BYTES):
                    pass
        except (TimeoutError, ConnectionError):
            self.process.kill()
        self.writer.close()
        await asyncio.to_thread(self.process.wait)
        with suppress(OSError):  # otherwise asyncio may log the stream's error
            await self.writer.wait_closed()


class Queries:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._places = asyncio.Semaphore(settings.sql_processes)
        self._idle: list[QueryChild] = []
        self._ending: set[asyncio.Task[None]] = set()

    async def take(self) -> QueryChild:
        """Wait for a free place among `sql_processes`; return an idle or a new process."""
        await self._places.acquire()
        while self._idle:
            child = self._idle.pop()
            if child.idle:
                return child
            self._end(child)
        starting = asyncio.create_task(QueryChild.start(self.settings.sql_memory_bytes))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # keep the new process for the next query
            starting.add_done_callback(self._keep)
            raise
        except OSError:
            self._places.release()
            raise

    def _keep(self, started: asyncio.Task[QueryChild]) -> None:
        if started.cancelled() or started.exception() is not None:
            self._places.release()
        else:
            self.give_back(started.result())

    def give_back(self, child: QueryChild) -> None:
        """Keep the process if it is idle; else end it, and then free its place."""
        if child.idle:
            self._idle.append(child)
            self._places.release()
        else:
            self._end(child).add_done_callback(lambda _: self._places.release())

    def _end(self, child: QueryChild) -> asyncio.Task[None]:
        ending = asyncio.create_task(child.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def close(self) -> None:
        """Wait for the end of all queries, whose clients are gone; then end all processes."""
        for _ in range(self.settings.sql_processes):
            await self._places.acquire()
        for child in self._idle:
            self._end(child)
        await asyncio.gather(*self._ending)
