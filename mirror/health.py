"""Compute a mirror's state, troubles and readiness from the rows of its status (table: docs/troubleshooting.md). Pure.

An unknown lag is a trouble, in seqnos or in seconds. A ready mirror is `following`: every vbucket is published, has
contact with the source, and lags by at most `lag_limit_s`. A vbucket has at most one trouble, its worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

RANGES_NAMED = 10
"""Limit of the vbucket ranges that a text lists."""

STARTING, UNREACHABLE, DEGRADED, DISK_FULL = "starting", "source unreachable", "degraded", "disk full"
CATCHING_UP, FOLLOWING, STOPPING, STORED = "catching up", "following", "stopping", "stored"
STATES = (STARTING, UNREACHABLE, DEGRADED, DISK_FULL, CATCHING_UP, FOLLOWING, STOPPING, STORED)
"""Every state of a mirror. The service sets `stopping`, this module the others."""

BROKEN = {
    "damaged": "damaged",
    "refused": "refused",
    "no-active-node": "without a node at the source",
    "finished": "finished: their streams have ended",
    "stalled": "stalled: the source has more and sends nothing",
    "failing": "failing: the source breaks the protocol in them",
}
"""States of a vbucket that make the mirror `degraded` -> the words for the vbucket in texts."""

WITHOUT_CONTACT = "without contact to the source"
WITHOUT_WORKER = "without a worker"
REPORTED = (BROKEN["damaged"], WITHOUT_CONTACT, WITHOUT_WORKER)
"""Troubles without a `Degraded` event, because other events report them."""
UNHEARD = "servers do not report"
UNCONNECTED = "being connected to their node"

HELD = "held until every copy has persisted them"

CONNECTING = ("starting", "requesting", "no-active-node")
"""States of a vbucket that moves to another node, or whose first connection is being opened, if it has no node."""
CONNECTING_S = 10.0
"""A vbucket without a node is a trouble after this time in such a state. An ordinary move takes less."""

HELD_UP_S = 1.0
"""A vbucket that waits after an error is a trouble if its lag is above this; shorter waits are normal retries."""

HEARD_S = 2.0
"""If a worker is silent for longer, the lag of its vbuckets is unknown. Workers send a heartbeat every 0.5 s."""

SILENT_S = 3.0
"""A process that is silent for this long is a trouble."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Trouble:
    """A reason why the mirror is not ready. It concerns `rows`, or the whole mirror if `rows` is empty."""

    state: str
    """The state that this trouble gives the mirror."""
    what: str
    error: str | None = None
    rows: tuple[Row, ...] = ()
    held_count: int = 0
    where: str = ""
    """The vbuckets as `group 3` or `0-31, 40`; empty for all."""

    @property
    def text(self) -> str:
        """The trouble in a sentence. The error is included if the trouble concerns the whole mirror."""
        if not self.rows:
            return f"{self.what}: {self.error}" if self.error else self.what
        text = f"{len(self.rows)} of {self.held_count} vbuckets {self.what}"
        return f"{text}: {self.where}" if self.where else text

    @property
    def reason(self) -> str:
        return f"{self.text} ({self.error})" if self.rows and self.error else self.text

    @property
    def procedure(self) -> str:
        if self.what == BROKEN["damaged"]:
            return "operations.md#a-corrupt-group"
        if self.what == HELD:
            return "troubleshooting.md#symptoms"
        if self.state == DISK_FULL:
            return "operations.md#the-disk-is-full"
        return f"troubleshooting.md#states-of-{'a-vbucket' if self.what in BROKEN.values() else 'the-service'}"

    def row(self) -> dict[str, object]:
        lags = [row["lag_s"] for row in self.rows]
        return {
            "what": self.what,
            "vbuckets": len(self.rows),
            "where": self.where,
            "error": self.error,
            "procedure": self.procedure,
            "lag_s": max(lags) if lags and None not in lags else None,
        }


@dataclass(frozen=True, slots=True)
class Health:
    state: str
    troubles: tuple[Trouble, ...] = ()
    """The reasons why the mirror is not ready, worst state first."""

    @property
    def message(self) -> str:
        return "; ".join(trouble.text for trouble in self.troubles)

    @property
    def reasons(self) -> list[str]:
        return [trouble.reason for trouble in self.troubles]


def heard(row: Row) -> bool:
    """Return True if the vbucket's worker is silent for at most `HEARD_S`, or the vbucket has no worker."""
    return (row["report_age_s"] or 0) <= HEARD_S


def assess(
    rows: Sequence[Row],
    held_count: int | None,
    *,
    lag_limit_s: float,
    groups: Sequence[Row] = (),
    source_error: str | None = None,
    servers: Sequence[str] = (),
    closed: Mapping[str, str | None] | None = None,
    process_errors: Mapping[int, str] | None = None,
) -> Health:
    """Compute the health from the vbuckets' rows (cli/JSON.md) and `groups`, the workers' reports of their groups.

    `held_count` is the number of vbuckets that the mirror holds, None while unknown. `source_error` is the error of
    the last look-up of the source; None if the source answered, or before the first look-up. `servers` names the server
    processes that are silent for `SILENT_S`. `closed` has the kind of each listener that no process serves, with the
    error that ended the last process, or None while the first one starts. `process_errors` has the error of each worker
    that could not start or report.
    """
    errors = process_errors or {}
    if source_error is not None:
        return of_mirror(UNREACHABLE, "the source cannot be reached", source_error)
    if held_count is None:
        return of_mirror(STARTING, "the source has not answered yet")
    if len(rows) < held_count:
        state = DEGRADED if errors else STARTING
        return of_mirror(state, f"{len(rows)} of {held_count} vbuckets reported", next(iter(errors.values()), None))
    failed = {row["group"]: bool(row.get("full")) for row in groups if row.get("error")}
    """Groups whose store failed -> True if the disk is full. Their vbuckets have no streams."""
    worked = [row for row in rows if row["worker"] is not None]
    going = [row for row in worked if row["state"] not in BROKEN and row["group"] not in failed]
    away = [row for row in going if row["node"] is None and heard(row)]
    if away and len(away) == len(going):
        lost = [row for row in away if not connects(row)]
        if lost:
            return of_mirror(UNREACHABLE, "no contact with the source", _error_away(lost))
        if all(row["lag_s"] is None for row in away):
            return of_mirror(STARTING, "no contact with the source yet")
    found = [(row, _trouble(row, failed, lag_limit_s)) for row in rows]
    own = [Trouble(DEGRADED, UNHEARD, ", ".join(servers))] if servers else []
    for kind, error in (closed or {}).items():
        own.append(Trouble(STARTING if error is None else DEGRADED, f"{kind} does not listen", error))
    troubles = _sorted([*own, *_collected(rows, found, errors)])
    return Health(troubles[0].state if troubles else FOLLOWING, troubles)


def assess_stored(rows: Sequence[Row]) -> Health:
    damage = (DEGRADED, "damaged")
    damaged = _collected(rows, ((row, damage if row["state"] == "damaged" else None) for row in rows), {})
    return Health(STORED, (Trouble(STORED, "no service runs: nothing follows the source"), *damaged))


def of_mirror(state: str, what: str, error: str | None = None) -> Health:
    return Health(state, (Trouble(state, what, error),))


def connects(row: Row) -> bool:
    """Return True while a vbucket without a node moves to another one, or its first connection is being opened."""
    return row["state"] in CONNECTING and (row["silent_ms"] or 0) <= CONNECTING_S * 1000


def _error_away(rows: Sequence[Row]) -> str | None:
    return next((error for row in rows if (error := row["last_error"] or row["detail"])), None)


def _trouble(row: Row, failed: Mapping[int, bool], lag_limit_s: float) -> tuple[str, str] | None:
    """Return the worst trouble of a vbucket as (mirror's state, text)."""
    if row["worker"] is None:
        return DEGRADED, WITHOUT_WORKER
    if _silent(row):
        return DEGRADED, f"of worker {row['worker']}, silent for {row['report_age_s']:.0f} s"
    is_away = row["node"] is None and heard(row)
    if row["state"] in BROKEN and not (is_away and connects(row)):
        return DEGRADED, BROKEN[row["state"]]
    if row["group"] in failed:
        full = failed[row["group"]]
        return (DISK_FULL, "cannot be written, the disk is full") if full else (DEGRADED, "whose store failed")
    if is_away:
        return (CATCHING_UP, UNCONNECTED) if connects(row) else (DEGRADED, WITHOUT_CONTACT)
    if row["state"] == "waiting" and row["last_error"] and _late(row, HELD_UP_S):
        return DEGRADED, "waiting after an error"
    if (row.get("held_s") or 0) > lag_limit_s:
        return DEGRADED, HELD
    if not row["published_seqno"] and row["lag_seqnos"] != 0:
        return CATCHING_UP, "not published"
    if _late(row, lag_limit_s):
        return CATCHING_UP, f"more than {lag_limit_s:g} s behind"
    if row["lag_seqnos"] and row["lag_s"] is None:
        return CATCHING_UP, "behind since before the service started"
    if row["lag_seqnos"] is None or not heard(row):
        return CATCHING_UP, "of unknown lag"
    return None


def _silent(row: Row) -> bool:
    return (row["report_age_s"] or 0) > SILENT_S


def _late(row: Row, limit_s: float) -> bool:
    return row["lag_s"] is not None and row["lag_s"] > limit_s


def _sorted(troubles: Sequence[Trouble]) -> tuple[Trouble, ...]:
    """Sort troubles by state, worst first; in a state those of the whole mirror come first, then most vbuckets."""
    rank = (DEGRADED, DISK_FULL, STARTING, CATCHING_UP).index
    return tuple(sorted(troubles, key=lambda each: (rank(each.state), bool(each.rows), -len(each.rows))))


def _collected(
    rows: Sequence[Row], found: Iterable[tuple[Row, tuple[str, str] | None]], process_errors: Mapping[int, str]
) -> list[Trouble]:
    together: dict[tuple[str, str], list[Row]] = {}
    for row, trouble in found:
        if trouble is not None:
            together.setdefault(trouble, []).append(row)
    return [
        Trouble(
            state, what, _error_of(concerned, process_errors), tuple(concerned), len(rows), _places(rows, concerned)
        )
        for (state, what), concerned in together.items()
    ]


def _error_of(rows: Sequence[Row], process_errors: Mapping[int, str]) -> str | None:
    if _silent(rows[0]):
        return process_errors.get(rows[0]["worker"])
    with_error = (*BROKEN, "waiting", "starting")
    found = (row for row in rows if row["state"] in with_error or row.get("held_s"))
    return next((row["detail"] or row["last_error"] for row in found), None)


def _places(rows: Sequence[Row], concerned: Sequence[Row]) -> str:
    if len(concerned) == len(rows):
        return ""
    groups = sorted({row["group"] for row in concerned})
    if len(groups) < len(concerned) == sum(row["group"] in groups for row in rows):
        return f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
    named = list(ranges(sorted(row["vbid"] for row in concerned)))
    return ", ".join(named[:RANGES_NAMED]) + (", ..." if len(named) > RANGES_NAMED else "")


def ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Yield rising numbers as ranges: `0-31`, `40`."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in run]
        yield f"{first}-{rest[-1]}" if rest else str(first)
