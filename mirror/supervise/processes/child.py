"""A child process from the supervisor's side: spawns it, sends it messages, kills and reaps it.

The child opens the store itself, because an LMDB environment must not cross a fork. The child's messages, and then its
exit, become events in one queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mirror.errors import SupervisionError
from mirror.messages import Answer, ExitReport, PipeMessage, ProcessCommand, ProcessReport, Reply, Request
from mirror.supervise.listeners.addresses import process_name
from mirror.supervise.processes.channel import Channel
from mirror.supervise.processes.plan import Heartbeat, ProcessPhase, WorkerFacts
from mirror.supervise.processes.quarantine import GroupMark
from mirror.supervise.status import ProcessFigures

WAITING_BYTES_MAX = 8 * 1024 * 1024
"""A child with more bytes of queued commands gets no further requests, because it is stuck."""


class WorkerRefused(SupervisionError):
    pass


@dataclass(frozen=True, slots=True)
class ChildMessage:
    child: Child
    message: PipeMessage


@dataclass(frozen=True, slots=True)
class ChildExited:
    child: Child
    status: int
    """Exit status, negative for a signal."""


def worker_command(descriptor: int) -> list[str]:
    return [sys.executable, "-P", "-m", "mirror.supervise.processes.worker", str(descriptor)]


def server_command(descriptor: int) -> list[str]:
    return [sys.executable, "-P", "-m", "mirror.supervise.processes.server", str(descriptor)]


class Child:
    def __init__(
        self,
        slot: int,
        groups: tuple[int, ...],
        process: asyncio.subprocess.Process,
        channel: Channel,
        heartbeat: Heartbeat,
    ) -> None:
        self.slot = slot
        self.groups = groups
        self.pid = process.pid
        self.heartbeat = heartbeat
        self.phase = ProcessPhase.STARTING
        self.stopping_since_ms = 0
        self.exit_report: ExitReport | None = None
        """The reason of the child's exit, from the child or from the supervisor that kills it."""
        self.status: ProcessReport = {}
        """The child's last report."""
        self.report_error: str | None = None
        """The error of the last request for a report, if it failed."""
        self._reported_ms = heartbeat.started_ms
        self.gauge = Gauge(process.pid)
        self.mark: GroupMark | None = None
        """Shows the group that a worker works in; None for a server."""
        self._process = process
        self._channel = channel
        self._answers: dict[int, asyncio.Future[Reply]] = {}
        self._request_count = 0
        self._watch: asyncio.Task[None] | None = None

    def facts(self, now_ms: int, deadline_ms: int) -> WorkerFacts:
        """`deadline_ms` is the longest time without a heartbeat."""
        return WorkerFacts(
            self.slot,
            self.phase,
            overdue=self.heartbeat.overdue(now_ms, deadline_ms),
            stopping_since_ms=self.stopping_since_ms,
        )

    def reported(self, status: ProcessReport, now_ms: int) -> None:
        self.status, self.report_error, self._reported_ms = status, None, now_ms

    def silence_ms(self, now_ms: int) -> int:
        """Return the age of the last heartbeat or, after a failed report, of the last report."""
        return self.heartbeat.age_ms(now_ms) if self.report_error is None else now_ms - self._reported_ms

    def watch(self, post: Callable[[ChildMessage | ChildExited], None]) -> None:
        self._watch = asyncio.create_task(self._follow(post), name=f"child {self.slot}")

    def send(self, message: PipeMessage) -> None:
        self._channel.send(message)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def send_command(self, command: ProcessCommand) -> int:
        """Send a command without waiting for its answer. Return its number."""
        self._request_count += 1
        self.send(Request(self._request_count, command))
        return self._request_count

    async def request(self, command: ProcessCommand, timeout_s: float) -> Reply:
        """Return the answer to a command. Raises WorkerRefused if the answer is an error, SupervisionError if the
        process dies, hangs, or takes no commands.
        """
        if self._channel.waiting_bytes > WAITING_BYTES_MAX:
            raise SupervisionError(f"{process_name(self.slot)} takes no commands", retryable=True)
        number = self.send_command(command)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            what = f"{process_name(self.slot)} did not answer within {timeout_s:g} s"
            raise SupervisionError(what, retryable=True) from None
        finally:
            self._answers.pop(number, None)

    def answered(self, message: Answer) -> None:
        waiting = self._answers.get(message.id)
        if waiting is None or waiting.done():
            return
        if message.error is not None:
            waiting.set_exception(WorkerRefused(message.error))
        else:
            waiting.set_result(message.value or {})

    async def _follow(self, post: Callable[[ChildMessage | ChildExited], None]) -> None:
        try:
            while (message := await self._channel.receive()) is not None:
                post(ChildMessage(self, message))
        except SupervisionError as error:
            self.exit_report = ExitReport(str(error))
            self.kill()
        await self._channel.close()
        status = await self._process.wait()
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(SupervisionError(f"{process_name(self.slot)} is gone"))
        post(ChildExited(self, status))


async def spawn(
    slot: int,
    groups: tuple[int, ...],
    heartbeat: Heartbeat,
    command: Callable[[int], Sequence[str]] = worker_command,
    inherited: Sequence[int] = (),
) -> Child:
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command(theirs.fileno()), stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno(), *inherited]
            )
    except BaseException:
        ours.close()
        raise
    return Child(slot, groups, process, await Channel.open(ours), heartbeat)


UNKNOWN = ProcessFigures(cpu_percent=None, private_bytes=None, resident_bytes=None, threads=None, open_files=None)


class Gauge:
    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
            self._process.cpu_percent()
        except psutil.Error:
            self._process = None

    def read(self) -> ProcessFigures:
        if self._process is None:
            return UNKNOWN
        try:
            with self._process.oneshot():
                return ProcessFigures(
                    cpu_percent=round(self._process.cpu_percent(), 1),
                    private_bytes=private_bytes(self._pid),
                    resident_bytes=self._process.memory_info().rss,
                    threads=self._process.num_threads(),
                    open_files=self._process.num_fds(),
                )
        except (psutil.Error, OSError):  # e.g. no file descriptor is free
            return UNKNOWN


def private_bytes(pid: int) -> int | None:
    """Return RssAnon: memory without the mapped store, whose pages the kernel can take back."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
