"""Finds long read transactions on a group's file: the process, the age, and the file's growth meanwhile.

LMDB reuses a page only if no reader can see it, so during a long read transaction the file grows with every commit.
This program's read transactions last milliseconds. A long transaction belongs to a process that was stopped during a
read, or to another program. LMDB does not record when a transaction began, so the age counts from the first `look` that
found it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mirror.log import get_logger
from mirror.messages import Rows

SHOWN_S = 5.0
LOGGED_S = 60.0
"""Age of a read transaction that the log names."""

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class _Seen:
    at_s: float
    file_bytes: int


class PinnedPages:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._seen: dict[tuple[int, int, int], _Seen] = {}
        """(group, process, transaction) -> first look, for each reader behind the newest commit."""
        self._sizes: dict[int, int] = {}
        self._warned: set[tuple[int, int, int]] = set()

    def look(self, group: int, readers: Iterable[tuple[int, int]], file_bytes: int) -> None:
        """Note the readers behind a group's newest commit as (process, transaction). Log those above the limit."""
        self._sizes[group] = file_bytes
        now = {}
        for process, transaction in readers:
            key = (group, process, transaction)
            now[key] = self._seen.get(key) or _Seen(self._now_s(), file_bytes)
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] != group} | now
        self._warned &= self._seen.keys()
        for key, seen in now.items():
            if self._now_s() - seen.at_s > LOGGED_S and key not in self._warned:
                self._warned.add(key)
                log.warning("reader-pins-pages", group=group, reader_pid=key[1], limit_s=LOGGED_S)

    def rows(self) -> Rows:
        now_s = self._now_s()
        return [
            {
                "group": group,
                "pid": process,
                "age_s": round(now_s - seen.at_s, 1),
                "grown_bytes": max(0, self._sizes[group] - seen.file_bytes),
            }
            for (group, process, _), seen in sorted(self._seen.items())
            if now_s - seen.at_s >= SHOWN_S
        ]

    def warnings(self) -> list[str]:
        return [
            f"process {process} has read from group {group} within one transaction for more than {LOGGED_S:g} s, "
            "and the file grows meanwhile: end that process, or continue it if it is stopped"
            for group, process, _ in sorted(self._warned)
        ]
