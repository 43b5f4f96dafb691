"""The book of leases: each reader's positions in history, and the end of its lease.

The book is written to `<data>/leases.json` before a grant is answered, so leases survive a restart. An unreadable book
counts as empty: leases are lost, but no data.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from mirror.errors import ConfigError
from mirror.log import get_logger
from mirror.messages import GrantLease, HoldPositions

BOOK_NAME = "leases.json"
NAME_LENGTH_MAX = 200
SECONDS_MIN = 1.0

Position = tuple[int, int, int]

log = get_logger("supervisor")


@dataclass(slots=True)
class LeaseRecord:
    """One lease. Times are milliseconds since 1970."""

    id: str
    name: str
    granted_ms: int
    until_ms: int
    positions: list[Position]

    def order(self, groups: tuple[int, ...], group_count: int) -> HoldPositions | None:
        """Return the command for the worker of `groups`; None if the lease has no position in these groups."""
        theirs = [list(position) for position in self.positions if position[0] % group_count in groups]
        return HoldPositions(self.id, self.until_ms, theirs) if theirs else None


class LeaseBook:
    def __init__(self, directory: Path, *, seconds_max: float, age_max_s: float) -> None:
        self._path = directory / BOOK_NAME
        self._seconds_max = seconds_max
        self._age_max_ms = int(age_max_s * 1000)
        self._records: dict[str, LeaseRecord] = {}
        if not self._path.exists():
            return
        try:
            for each in json.loads(self._path.read_text()):
                positions = [(int(vbid), int(branch), int(seqno)) for vbid, branch, seqno in each.pop("positions")]
                record = LeaseRecord(**each, positions=positions)
                self._records[record.id] = record
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            log.warning("leases-unreadable", path=str(self._path), error=str(error))
            self._records.clear()

    def active(self, now_ms: int) -> list[LeaseRecord]:
        return [record for record in self._records.values() if record.until_ms > now_ms]

    def orders(self, groups: tuple[int, ...], group_count: int, now_ms: int) -> list[HoldPositions]:
        """Return the commands for the leases that a starting worker of `groups` must hold."""
        found = (record.order(groups, group_count) for record in self.active(now_ms))
        return [order for order in found if order is not None]

    def expire(self, now_ms: int) -> list[LeaseRecord]:
        found = [record for record in self._records.values() if record.until_ms <= now_ms]
        for record in found:
            del self._records[record.id]
        if found:
            self._write()
        return found

    def requested(self, request: GrantLease, vbucket_count: int, now_ms: int) -> LeaseRecord:
        """Return the record of the requested lease, new or renewed. `enter` adds it to the book. Raises ConfigError."""
        seconds, name = request.seconds, request.name
        if not SECONDS_MIN <= seconds <= self._seconds_max:
            raise ConfigError(
                f"a lease cannot last {seconds!r} s", hint=f"ask for {SECONDS_MIN:g} to {self._seconds_max:g} s"
            )
        if not 0 < len(name) <= NAME_LENGTH_MAX:
            raise ConfigError("a lease needs a name", hint=f"a name has 1 to {NAME_LENGTH_MAX} characters")
        positions = _positions(request.positions, vbucket_count)
        granted_ms = now_ms
        if (known := self._records.get(request.id)) is not None:
            granted_ms = known.granted_ms
            if known.until_ms > now_ms and known.positions != positions:
                raise ConfigError(f"the lease {name!r} has other positions", hint="release it, or use another id")
        until_ms = min(now_ms + int(seconds * 1000), granted_ms + self._age_max_ms)
        if until_ms <= now_ms:
            raise ConfigError(
                f"the lease {name!r} is older than lease_age_max_s allows",
                hint="begin again from the published position",
            )
        return LeaseRecord(request.id, name, granted_ms, until_ms, positions)

    def known(self, record: LeaseRecord, now_ms: int) -> bool:
        known = self._records.get(record.id)
        return known is not None and known.until_ms > now_ms

    def enter(self, record: LeaseRecord) -> None:
        self._records[record.id] = record
        self._write()

    def remove(self, lease_id: str) -> LeaseRecord | None:
        record = self._records.pop(lease_id, None)
        if record is not None:
            self._write()
        return record

    def _write(self) -> None:
        """Write the book. A failure is only logged: a full disk must not stop a reader."""
        unfinished = self._path.with_suffix(".new")
        try:
            with open(unfinished, "w", opener=partial(os.open, mode=0o600)) as file:
                json.dump([asdict(record) for record in self._records.values()], file)
            # Without fsync: a power cut may empty the book, which costs leases, but no data.
            os.replace(unfinished, self._path)
        except OSError as error:
            log.warning("leases-not-written", path=str(self._path), error=error.strerror)


def _positions(value: list[list[int]], vbucket_count: int) -> list[Position]:
    if 0 < len(value) <= vbucket_count:
        with contextlib.suppress(ValueError, TypeError):
            found = [(vbid, branch, seqno) for vbid, branch, seqno in value]
            numbers = all(type(number) is int and 0 <= number < 2**64 for each in found for number in each)
            if numbers and len({each[0] for each in found}) == len(found) and max(found)[0] < vbucket_count:
                return found
    raise ConfigError(
        "the positions of a lease are invalid",
        hint=f"positions: [[vbid, branch, seqno], ...], each vbid below {vbucket_count} once",
    )
