"""Sorts more rows than memory holds: spills sorted runs (parts of the rows) to unnamed files, and merges the runs.

Memory holds one run and a chunk of each file. The files vanish with the process.
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, Generic, TypeVar

import msgpack

_CHUNK_ROWS = 2_000

Row = TypeVar("Row", bound=tuple[Any, ...])


class SortedRuns(Generic[Row]):
    """Sorts tuples. Spilled rows come back as plain tuples."""

    def __init__(self, folder: str | None, run_rows: int, key: Callable[[Row], Any] | None = None) -> None:
        """Spill runs of `run_rows` rows to `folder` (None: the system's). If given, `key` sorts the runs. This stable
        sort is faster than comparing whole tuples, and must give the same order.
        """
        self._folder = folder
        self._run_rows = run_rows
        self._key = key
        self._run: list[Row] = []
        self._files: list[IO[bytes]] = []

    def add(self, row: Row) -> None:
        """Raises OSError if a temporary file cannot be written."""
        self._run.append(row)
        if len(self._run) >= self._run_rows:
            self._spill()

    def extend(self, rows: list[Row]) -> None:
        """Raises OSError if a temporary file cannot be written."""
        self._run += rows
        if len(self._run) >= self._run_rows:
            self._spill()

    def sorted(self) -> Iterator[Row]:
        """Yield all rows in order. Add no rows during the iteration."""
        self._run.sort(key=self._key)
        return heapq.merge(self._run, *map(_read, self._files)) if self._files else iter(self._run)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files, self._run = [], []

    def _spill(self) -> None:
        self._run.sort(key=self._key)
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed by `close`
        self._files.append(file)
        for start in range(0, len(self._run), _CHUNK_ROWS):
            file.write(msgpack.packb(self._run[start : start + _CHUNK_ROWS]))
        self._run = []


def _read(file: IO[bytes]) -> Iterator[Any]:
    file.seek(0)
    for chunk in msgpack.Unpacker(file, use_list=False, max_buffer_size=1 << 30):
        yield from chunk
