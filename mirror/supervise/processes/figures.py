"""Figures of a process: processor share, private memory, threads, open files.

Private memory is RssAnon: without the pages of the mapped store, which the kernel can take back. The figures of a
process that is gone, or of a system without /proc, are None; no decision depends on them.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from mirror.supervise.status import ProcessFigures

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
        except (psutil.Error, OSError):  # no descriptor may be left to look with
            return UNKNOWN


def private_bytes(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    return None
