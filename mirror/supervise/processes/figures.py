"""What the machine says about a child: processor share, private memory, age.

Knows /proc through psutil; never why a process runs. Memory is RssAnon: what the process itself holds, without the
pages of the mapped store, which the kernel gives back whenever it likes. A process that is gone, or a system without
/proc, gives None: figures are for people and never decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Figures:
    cpu_percent: float
    """Share of one core since the previous look."""
    private_bytes: int | None
    resident_bytes: int
    """Includes shared pages, so also the part of the store that is in memory."""
    thread_count: int
    open_files_count: int


class Gauge:
    def __init__(self, pid: int) -> None:
        """Begin the first interval of `cpu_percent`."""
        self._pid = pid
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
            self._process.cpu_percent()
        except psutil.Error:
            self._process = None

    def read(self) -> Figures | None:
        if self._process is None:
            return None
        try:
            with self._process.oneshot():
                return Figures(
                    cpu_percent=round(self._process.cpu_percent(), 1),
                    private_bytes=private_bytes(self._pid),
                    resident_bytes=self._process.memory_info().rss,
                    thread_count=self._process.num_threads(),
                    open_files_count=self._process.num_fds(),
                )
        except (psutil.Error, OSError):  # no descriptor may be left to look with
            return None


def private_bytes(pid: int) -> int | None:
    """RssAnon of a process; None if unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    return None
