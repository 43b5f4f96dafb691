"""A standalone Spark cluster on this machine: a master and two workers, started as the pip package starts them.

Knows Spark's classes, how to find and kill an executor, and how to run commands in one application; nothing of what
they do. Invariant: leaving a context leaves none of its processes behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import psutil
import pyspark

from tests.cli.conftest import environment
from tests.crash.service import until
from tests.spark.sessions import java_environment

HOME = Path(pyspark.__file__).parent
LIMIT_S = 180.0
MASTER = re.compile(r"Starting Spark master at (spark://\S+)")


def spark_environment(**more: str) -> dict[str, str]:
    return environment(SPARK_LOCAL_IP="127.0.0.1", **java_environment(), **more)


class Standalone:
    def __init__(self, folder: Path, workers: int = 2) -> None:
        self._folder = folder
        self._count = workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def __enter__(self) -> Self:
        try:
            self._start("master", "master.Master", "--port", "0")
            log = self._folder / "master.log"
            found = until("the master", lambda: MASTER.search(log.read_text()), limit_s=LIMIT_S, poll_s=0.1)
            self.url = found[1]
            for number in range(self._count):
                place = self._folder / f"worker-{number}"
                arguments = ["--cores", "1", "--memory", "1g", "--work-dir", str(place), self.url]
                self._start(f"worker-{number}", "worker.Worker", *arguments)
            until("the workers", self._workers_are_there, limit_s=LIMIT_S, poll_s=0.1)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _start(self, name: str, which: str, *arguments: str) -> None:
        here = ["--host", "127.0.0.1", "--webui-port", "0"]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{which}", *here, *arguments],
                    env=spark_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _workers_are_there(self) -> bool:
        log = (self._folder / "master.log").read_text()
        return log.count("Registering worker") >= self._count

    def end(self) -> None:
        """Kill everything that was started, children included."""
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            process.kill()
            process.wait()
        self._processes.clear()

    def executors(self) -> list[int]:
        """Process ids of the executors that run."""
        found = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if any("CoarseGrainedExecutorBackend" in word for word in child.cmdline()):
                            found.append(child.pid)
        return sorted(found)

    def kill_executor(self) -> None:
        os.kill(until("an executor", self.executors, limit_s=LIMIT_S, poll_s=0.01)[0], signal.SIGKILL)


class Application:
    """A driver on the cluster, which runs commands (application.py), started again when it was killed."""

    def __init__(self, cluster: Standalone, folder: Path) -> None:
        self.log = folder / "driver.log"
        self._cluster = cluster
        self._commands = folder / "commands"
        self._begun = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._line: TextIO | None = None
        os.mkfifo(self._commands)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._process is not None:
            self.kill()
        if error is not None and self.log.exists():
            error.add_note("the driver's last words:\n" + "\n".join(self.log.read_text().splitlines()[-30:]))

    def begin(self, *words: object) -> None:
        """Begin a command once the one before has ended."""
        self._begun = self.log.stat().st_size if self.log.exists() else 0
        if self._process is None:
            script = Path(__file__).with_name("application.py")
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [HOME / "bin" / "spark-submit", "--master", self._cluster.url, script, self._commands],
                    env=spark_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._line = os.fdopen(os.open(self._commands, os.O_RDWR), "w")  # for reading too: it need not wait then
        assert self._line is not None
        self._line.write(json.dumps([str(word) for word in words]) + "\n")
        self._line.flush()

    @property
    def output(self) -> str:
        """The driver's output since the last command began."""
        return self.log.read_bytes()[self._begun :].decode(errors="replace")

    def running(self) -> bool:
        """Return True while the command runs."""
        return self._process is not None and self._process.poll() is None and "\nended: " not in self.output

    def run(self, *words: object, meanwhile: Callable[[], None]) -> str:
        """Run a command to its end, and `meanwhile`, which ends an executor; return its output."""
        self.begin(*words)
        meanwhile()
        until("the command's end", lambda: not self.running(), limit_s=LIMIT_S, poll_s=0.1)
        assert "\nended: 0\n" in self.output, self.output[-4000:]
        assert "Lost executor" in self.output, "the kill came too late to hurt"
        return self.output

    def send(self, number: signal.Signals) -> None:
        """Send a signal to Java and Python."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        assert self._process is not None
        assert self._line is not None
        self.send(signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._line.close()
