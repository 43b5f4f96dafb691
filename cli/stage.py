"""The processes of the demo: a sandbox and a service, started by the commands that a person would type.

Each process has a session of its own, so Ctrl-C reaches only the demo. If the demo is killed, the kernel ends them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from mirror import client
from mirror.errors import MirrorError, SupervisionError
from mirror.messages import GetStatus, Reply, Status
from mirror.sandbox import control
from mirror.supervise.processes.life import die_with_parent
from mirror.supervise.processes.table import exit_words

COMMAND = [sys.executable, "-P", "-m", "cli.main"]
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0
ENDING_TIMEOUT_S = 1.0


class Stage:
    def __init__(
        self,
        data: Path,
        folder: Path,
        *,
        nodes: int,
        vbuckets: int,
        documents: int,
        rate: float,
        workers: int,
        http: str = "0",
    ):
        """`folder` is for logs and the sandbox's control socket."""
        self.data = data
        self.folder = folder
        self.workers = workers
        self.http = http
        self.control = folder / "source.sock"
        self.connection_string = ""
        self._source_options = {
            "nodes": nodes,
            "vbuckets": vbuckets,
            "load": documents,
            "rate": rate,
            "keys": documents * 2,
            "control": self.control,
        }
        self._source: subprocess.Popen[bytes] | None = None
        self._service: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the source, wait for its first line, then start the service."""
        try:
            flags = [f"--{name}={value}" for name, value in self._source_options.items()]
            self._source = self._start("source", "sandbox", *flags, stdout=subprocess.PIPE)
            assert self._source.stdout is not None, "the source's stdout is a pipe"
            ready, _, _ = select.select([self._source.stdout], [], [], START_TIMEOUT_S)
            line = self._source.stdout.readline().decode().strip() if ready else ""
            if not line:
                raise SupervisionError("the sandbox did not start", hint=self._last_log_line("source"))
            self.connection_string = line
            flags = [f"--source={self.connection_string}", f"--data={self.data}"]
            flags += [f"--workers={self.workers}", f"--http={self.http}"]
            self._service = self._start("service", "run", *flags, stdout=subprocess.DEVNULL)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _start(self, name: str, *arguments: str, stdout: int) -> subprocess.Popen[bytes]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DCP_MIRROR_")}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*COMMAND, *arguments],
                env=kept | {"DCP_MIRROR_USER": "demo", "DCP_MIRROR_PASSWORD": "demo"},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,  # safe, because the demo has one thread
            )

    def _last_log_line(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "empty"

    def check(self) -> None:
        for name, process in (("source", self._source), ("service", self._service)):
            assert process is not None, "the stage was entered"
            if (code := process.poll()) is not None:
                raise SupervisionError(
                    f"the demo's {name} (process {process.pid}) has ended: {exit_words(code)}",
                    hint=f"start the demo again; its log: {self._last_log_line(name)}",
                )

    def status(self) -> Status | None:
        """Return the mirror's status; None until the service answers. Raises SupervisionError as `check` does."""
        self.check()
        answer = client.ask(self.data, GetStatus())
        status: Status | None = answer["status"] if answer else None
        return status

    def ask_source(self, command: str, **arguments: Any) -> Reply:
        assert self._source is not None, "the stage was entered"
        try:
            answer = control.ask(self.control, command, **arguments)
        except MirrorError:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a killed process may exist for a moment
                self._source.wait(ENDING_TIMEOUT_S)
            self.check()
            raise
        return answer if isinstance(answer, dict) else {}

    @staticmethod
    def kill_worker(pid: int) -> None:
        """Send SIGKILL, as the kernel does when memory runs out."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def end_service(self) -> int | None:
        return self._end(self._service)

    def end(self) -> None:
        self._end(self._service)
        self._end(self._source)
        if self._source is not None and self._source.stdout is not None:
            self._source.stdout.close()

    @staticmethod
    def _end(process: subprocess.Popen[bytes] | None) -> int | None:
        if process is None:
            return None
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        return process.wait()
