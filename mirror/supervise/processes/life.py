"""The life of a worker or server process, from its first message to its last.

This module imports neither workers nor servers, so that a server starts without a worker's modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from mirror.errors import MirrorError
from mirror.log import get_logger, set_up_logs
from mirror.messages import (
    Answer,
    Beat,
    ExitReport,
    GetStatus,
    NewClusterMap,
    PipeMessage,
    ProcessCommand,
    ProcessReport,
    Ready,
    Reply,
    Request,
    StartMessage,
    StartServer,
    StartWorker,
    StopWork,
)
from mirror.supervise.processes.channel import Channel
from mirror.supervise.processes.plan import BEAT_INTERVAL_MS
from storage.errors import StorageError

PR_SET_PDEATHSIG = 1

log = get_logger("worker")


class Work(Protocol):
    async def run(self) -> None: ...

    async def stop(self) -> None:
        """Commit, close, and let `run` return."""
        ...

    def status(self) -> ProcessReport: ...

    async def request(self, command: ProcessCommand) -> Reply: ...


@runtime_checkable
class FollowsMaps(Protocol):
    def follow_map(self, found: Mapping[str, Any]) -> None: ...


Send = Callable[[PipeMessage], None]
"""Sends a message to the supervisor without waiting."""
Make = Callable[[StartMessage, Send], Awaitable[Work]]


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even if this process is stopped (SIGSTOP)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class ChildProcess:
    def __init__(self, channel: Channel, make: Make) -> None:
        """`make` opens the mirror and returns the `Work` to run."""
        self._channel = channel
        self._make = make
        self._ending = asyncio.Event()
        self._requests: set[asyncio.Task[None]] = set()
        self._logged_error = ""

    def end(self) -> None:
        self._ending.set()

    async def live(self) -> int:
        """Do the work that the first message describes. Return the exit status."""
        first = await self._channel.receive()
        if first is None:
            return 0
        assert isinstance(first, StartWorker | StartServer), "the first message starts the work"
        beats = asyncio.create_task(self._beat())
        work: Work | None = None
        doing: asyncio.Task[None] | None = None
        listening: asyncio.Task[None] | None = None
        try:
            work = await self._make(first, self._channel.send)
            doing = asyncio.create_task(work.run())
            listening = asyncio.create_task(self._listen(work))
            self._channel.send(Ready())
            ending = asyncio.create_task(self._ending.wait())
            await asyncio.wait({doing, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if not doing.done():
                await work.stop()
            await doing
        except (MirrorError, StorageError) as error:
            self._report(str(error), int(error.exit_code), fatal=not error.retryable)
            return int(error.exit_code)
        except Exception as error:
            log.exception("internal error")
            self._report(f"internal error: {type(error).__name__}: {error}", 1, fatal=False)
            return 1
        finally:
            beats.cancel()
            for task in (listening, *self._requests):
                if task is not None:
                    task.cancel()
            await self._channel.flush()
            await self._channel.close()
        return 0

    def _report(self, message: str, exit_code: int, *, fatal: bool) -> None:
        self._channel.send(ExitReport(message, exit_code, fatal))

    async def _beat(self) -> None:
        while True:
            self._channel.send(Beat())
            await asyncio.sleep(BEAT_INTERVAL_MS / 1000)

    async def _listen(self, work: Work) -> None:
        while True:
            message = await self._channel.receive()
            if message is None or isinstance(message, StopWork):
                self.end()
                return
            if isinstance(message, NewClusterMap) and isinstance(work, FollowsMaps):
                work.follow_map(message.cluster_map)
            elif isinstance(message, Request):
                task = asyncio.create_task(self._answer(work, message))
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)

    async def _answer(self, work: Work, request: Request) -> None:
        try:
            if isinstance(request.command, GetStatus):
                value = dict(work.status())
            else:
                value = await work.request(request.command)
        except (MirrorError, StorageError) as error:
            self._channel.send(Answer(request.id, error=str(error)))
        except Exception as error:
            text = f"internal error: {type(error).__name__}: {error}"
            if text != self._logged_error:  # a report is requested every second
                self._logged_error = text
                log.exception("internal error")
            self._channel.send(Answer(request.id, error=text))
        else:
            self._channel.send(Answer(request.id, value))


async def work_over(end: socket.socket, make: Make) -> int:
    child = ChildProcess(await Channel.open(end), make)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, child.end)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)
    return await child.live()


def main(arguments: list[str], make: Make) -> int:
    """Entry point. The only argument is the number of the inherited descriptor."""
    die_with_parent()
    set_up_logs("info", process=f"worker {arguments[0] if arguments else '?'}")
    try:
        end = socket.socket(fileno=int(arguments[0]))
    except (IndexError, ValueError, OSError):
        print("a worker is started by its supervisor alone: use `dcp-mirror run`", file=sys.stderr)  # noqa: T201
        return 2
    return asyncio.run(work_over(end, make))
