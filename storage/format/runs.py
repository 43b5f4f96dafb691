"""Sorts more rows than memory holds, by sorted runs in files without a name.

Knows tuples and files; never what a row means. Memory holds one run and a chunk of each file. The files vanish with the
process.
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
    """Sorts tuples. Rows that went through a file come back as plain tuples."""

    def __init__(self, folder: str | None, run_rows: int, key: Callable[[Row], Any] | None = None) -> None:
        """Runs of `run_rows` go to files in `folder` (None: the system's). `key` makes the sort of a run faster, and
        must give the order of the tuples.
        """
        self._folder = folder
        self._run_rows = run_rows
        self._key = key
        self._run: list[Row] = []
        self._files: list[IO[bytes]] = []

    def add(self, row: Row) -> None:
        """Raises OSError if the folder takes no more."""
        self._run.append(row)
        if len(self._run) >= self._run_rows:
            self._spill()

    def extend(self, rows: list[Row]) -> None:
        """Raises OSError if the folder takes no more."""
        self._run += rows
        if len(self._run) >= self._run_rows:
            self._spill()

    def sorted(self) -> Iterator[Row]:
        """Yield all rows in order. Add none meanwhile."""
        self._run.sort(key=self._key)
        return heapq.merge(self._run, *map(_read, self._files)) if self._files else iter(self._run)

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._files, self._run = [], []

    def _spill(self) -> None:
        self._run.sort(key=self._key)
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - lives as long as the runs
        self._files.append(file)
        for start in range(0, len(self._run), _CHUNK_ROWS):
            file.write(msgpack.packb(self._run[start : start + _CHUNK_ROWS]))
        self._run = []


def _read(file: IO[bytes]) -> Iterator[Any]:
    file.seek(0)
    for chunk in msgpack.Unpacker(file, use_list=False, max_buffer_size=1 << 30):
        yield from chunk
