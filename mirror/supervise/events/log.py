"""The events of the service: logged, appended to one of two files in the data directory, and read back.

The events' numbers rise, even across restarts, and a slow reader finds a gap in them. An event that cannot be written
is still logged.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from mirror.clock import Clock
from mirror.log import get_logger
from mirror.supervise.events.kinds import Event, ShownEvent, fields_of, to_json

EVENTS_FILE, OLDER_EVENTS_FILE = "events.jsonl", "events.1.jsonl"
FILE_BYTES_MAX = 1024 * 1024
"""About 4,000 events. A larger file is renamed to `OLDER_EVENTS_FILE`."""
EVENTS_KEPT = 50
"""Events kept in memory for the status."""

log = get_logger("events")


class EventLog:
    def __init__(self, clock: Clock, data: Path) -> None:
        self._clock = clock
        self._data = data
        self._kept = deque(reversed(newest_events(data)), maxlen=EVENTS_KEPT)
        self._count = int(self._kept[-1]["number"]) if self._kept else 0

    def add(self, event: Event) -> None:
        self._count += 1
        shown = to_json(event, self._count, self._clock.wall_ms())
        getattr(log, event.level)(event.name, **fields_of(event))
        self._kept.append(shown)
        try:
            self._write(json.dumps(shown).encode() + b"\n")
        except OSError as error:
            log.warning("event-not-written", path=str(self._data / EVENTS_FILE), error=error.strerror)

    def _write(self, line: bytes) -> None:
        path = self._data / EVENTS_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a crash or a full disk cut the last line
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if size + len(line) > FILE_BYTES_MAX:
            path.replace(self._data / OLDER_EVENTS_FILE)

    def newest(self) -> list[ShownEvent]:
        return list(reversed(self._kept))


def newest_events(data: Path) -> list[ShownEvent]:
    kept: deque[ShownEvent] = deque(maxlen=EVENTS_KEPT)
    with contextlib.suppress(OSError):
        kept.extend(read_events(data))
    return list(reversed(kept))


def read_events(data: Path, after: int = 0) -> Iterator[ShownEvent]:
    """Yield the stored events of a mirror with a number above `after`, oldest first. Raises OSError."""
    for name in (OLDER_EVENTS_FILE, EVENTS_FILE):
        try:
            lines = (data / name).read_bytes().splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            try:
                event = json.loads(line)
                if event["number"] > after:
                    after = event["number"]
                    yield event
            except (ValueError, TypeError, KeyError):
                continue  # cut by a crash
