"""The mirror as a real process, to be killed: started as a person would, watched from outside, ended for good.

Knows the command, process ids, the control socket and the log; nothing of the source. Every wait has an end and says
what it waited for. Invariant: leaving the context leaves no process of the service behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from mirror import client
from mirror.errors import MirrorError
from mirror.messages import GetStatus
from tests.cli.conftest import COMMAND, environment
from tests.processes import end_group

LIMIT_S = 90.0
"""No single wait is longer. All that is waited for takes a second or two; on a busy machine many times that."""
POLL_S = 0.02

T = TypeVar("T")


def until(what: str, look: Callable[[], T | None], *, limit_s: float = LIMIT_S, poll_s: float = POLL_S) -> T:
    """The first answer of `look` that is true. Fails with the name of what never came."""
    end = time.monotonic() + limit_s
    while True:
        if answer := look():
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit_s:g} s in vain for: {what}")
        time.sleep(poll_s)


def gone(pid: int) -> bool:
    """Return True if a process no longer runs; one that only waits to be reaped does not run."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


class Service:
    """`dcp-mirror run` over one data directory, started again and again."""

    def __init__(self, source: str, data: Path, *flags: str, log: Path | None = None, **more: Any) -> None:
        """`more` goes to Popen, which `start` calls."""
        self.data = data
        self.log = log or data.parent / "service.log"
        self.starts = 0
        self._arguments = ["run", "--source", source, "--data", str(data), *flags]
        self._more = more
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: list[int] = []
        """Process groups, one for each start; its processes are in it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._groups:
            end_group(number)
        if self._process is not None:
            self._process.wait()
        if error is not None:
            error.add_note(f"the service's last words ({self.log}):\n{self.tail()}")

    # -- the process ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, without waiting for anything."""
        assert self._process is None or self._process.poll() is not None, "one at a time"
        self.starts += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*COMMAND, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                **{"env": environment(), **self._more},
            )
        self._groups.append(self._process.pid)

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was started"
        return self._process.pid

    def ended(self) -> int | None:
        """The exit code, once it has ended."""
        assert self._process is not None, "it was started"
        return self._process.poll()

    def workers_alive(self) -> list[int]:
        """Process ids of the workers, by the system's own books."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self._process.pid).children() if not gone(child.pid)]
        return []

    def kill(self, *pids: int) -> None:
        """SIGKILL the processes in this order, and wait until they run no more.

        A worker may end by itself after its supervisor's death, so only the first process must still run.
        """
        os.kill(pids[0], signal.SIGKILL)
        for pid in pids[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            if self._process is not None and pid == self._process.pid:
                self._process.wait(LIMIT_S)
            else:
                until(f"process {pid} to die of SIGKILL", partial(gone, pid), poll_s=0.002)

    def kill_supervisor(self, *more: int) -> None:
        """SIGKILL the supervisor, and all others that are named; its workers must go with it."""
        workers = self.workers_alive()
        self.kill(self.pid, *more)
        for pid in workers:
            until(f"worker {pid} to go when its supervisor was killed", partial(gone, pid), poll_s=0.002)

    def terminate(self) -> int:
        """Ask it to stop; its exit code."""
        assert self._process is not None, "it was started"
        self._process.terminate()
        return self._process.wait(LIMIT_S)

    # -- what it says ---------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any] | None:
        """The status document; None while the service does not answer. Fails if the service has ended by itself."""
        assert self.ended() is None, f"the service ended by itself with {self.ended()}"
        try:
            answer = client.ask(self.data, GetStatus())
        except MirrorError:
            return None
        status: dict[str, Any] | None = answer["status"] if answer else None
        return status if status is not None and status["pid"] == self.pid else None

    def workers(self) -> dict[int, dict[str, Any]]:
        """Slot -> row of `status`, of those that run."""
        status = self.status()
        rows = status["workers"] if status else []
        return {row["slot"]: row for row in rows if row["phase"] == "running"}

    def wait_workers(self, count: int) -> dict[int, dict[str, Any]]:
        """The rows of all workers, once `count` of them run."""
        return until(f"{count} workers to run", lambda: found if len(found := self.workers()) == count else None)

    def tracebacks(self) -> str:
        """Return each traceback in the log, with the lines around it."""
        lines = self.log.read_text(errors="replace").splitlines()
        marks = [number for number, line in enumerate(lines) if "Traceback" in line]
        return "\n...\n".join("\n".join(lines[max(0, mark - 3) : mark + 60]) for mark in marks[:3])

    def tail(self, lines: int = 25) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""
