"""A standalone Spark cluster on this machine: a master and two workers, started as the pip package starts them.

Knows Spark's classes and how to find and kill an executor; nothing of pipelines. Invariant: leaving the context leaves
no process of the cluster behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

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

    def kill_executor(self) -> int:
        """SIGKILL one; its process id."""
        pid = until("an executor", self.executors, limit_s=LIMIT_S, poll_s=0.01)[0]
        os.kill(pid, signal.SIGKILL)
        return pid
