"""Groups in which workers died repeatedly: no worker opens them until the service starts again.

A damaged LMDB page can kill a worker by a signal inside LMDB, which no exception handler can catch. The next worker
would die in the same way, and none of its groups would be written. So a worker notes its current group in shared
memory, and the supervisor reads the group after the worker's death.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from storage.errors import SET_ASIDE, CorruptedError

SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""Effects of damaged LMDB pages: bad pointers, pages beyond the file's end, LMDB's own assertions."""
DEATHS = 3
"""Deaths within WINDOW_MS that quarantine a group. A single death may have another cause."""
WINDOW_MS = 3_600_000

_BYTES = 8


class GroupMark:
    """The current group of a worker, in memory shared with the supervisor."""

    def __init__(self, descriptor: int) -> None:
        try:
            self.word = memoryview(mmap.mmap(descriptor, _BYTES)).cast("q")
            """The group plus 1; 0 for none."""
        finally:
            os.close(descriptor)

    @staticmethod
    def descriptor() -> int:
        """Create the memory. Return its descriptor, which the worker inherits."""
        # Not a message to the supervisor: the signal ends the worker before it could send one.
        descriptor = os.memfd_create("dcp-mirror group")
        os.ftruncate(descriptor, _BYTES)
        return descriptor

    @property
    def group(self) -> int | None:
        return self.word[0] - 1 if self.word[0] else None

    @contextmanager
    def inside(self, group: int) -> Iterator[None]:
        before = self.word[0]
        self.word[0] = group + 1
        try:
            yield
        finally:
            self.word[0] = before


class Quarantine:
    def __init__(self) -> None:
        self._deaths: dict[int, list[tuple[int, str]]] = {}
        """Group -> time and signal of each death."""

    def note_death(self, group: int | None, status: int, now_ms: int) -> bool:
        """Count a worker's death in a group. Returns True if this death quarantines the group."""
        if group is None or -status not in SIGNALS or group in self.groups:
            return False
        recent = [each for each in self._deaths.get(group, ()) if now_ms - each[0] < WINDOW_MS]
        self._deaths[group] = [*recent, (now_ms, signal.Signals(-status).name)]
        return group in self.groups

    @property
    def groups(self) -> dict[int, str]:
        return {
            group: f"group {group} is quarantined: its worker died in it {len(deaths)} times within an hour "
            f"({', '.join(sorted({name for _, name in deaths}))})"
            for group, deaths in self._deaths.items()
            if len(deaths) >= DEATHS
        }


def quarantined(text: str, path: str) -> CorruptedError:
    return CorruptedError(
        text,
        path=path,
        hint=f"its file is probably damaged: {SET_ASIDE}; the other groups are served meanwhile",
    )
