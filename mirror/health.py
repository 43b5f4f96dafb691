"""How a mirror stands, judged from the rows of its status: one state, the reasons, readiness. Pure.

The only judgement: `status`, `top`, `/readyz`, the status page, the metrics and systemd's STATUS show what it says
(docs/operations.md has the table). Invariants: what is not known is never taken for good; `caught up` only without a
reason against it; ready only while every vbucket is published, followed, and no further behind than the limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VBIDS_NAMED = 10
"""Vbuckets that a reason names; it counts the others."""

STARTING, UNREACHABLE, DEGRADED, DISK_FULL = "starting", "source unreachable", "degraded", "disk full"
CATCHING_UP, CAUGHT_UP = "catching up", "caught up"
STATES = (STARTING, UNREACHABLE, DEGRADED, DISK_FULL, CATCHING_UP, CAUGHT_UP, "stopping", "stored")
"""Every state of a mirror: those judged here, and two that the service knows by itself."""

BROKEN = {
    "damaged": "damaged",
    "refused": "refused",
    "no-active-node": "without a node at the source",
    "finished": "finished: their streams have ended",
    "stalled": "stalled: the source has more and sends nothing",
    "failing": "failing: the source breaks the protocol in them",
}
"""States of vbuckets that do not go on by themselves, in words."""

HELD_UP_S = 1.0
"""A vbucket that waits after an error for longer than this is named; shorter waits are retries."""

HEARD_S = 2.0
"""A worker beats every 0.5 s; after this long without a beat the lag of its vbuckets is unknown."""

SILENT_S = 5.0
"""A worker that has sent nothing for this long is named."""


@dataclass(frozen=True, slots=True)
class Health:
    """The judgement."""

    state: str
    reasons: tuple[str, ...]
    """What keeps the mirror from being ready, worst first; empty: it is ready."""

    @property
    def ready(self) -> bool:
        """True if readers may be sent here."""
        return not self.reasons


def heard(row: Mapping[str, Any]) -> bool:
    """True if the worker of this vbucket was heard recently enough for its figures to count."""
    return (row["report_age_s"] or 0) <= HEARD_S


def assess(
    rows: Sequence[Mapping[str, Any]],
    held_count: int | None,
    *,
    lag_limit_s: float,
    groups: Sequence[Mapping[str, Any]] = (),
    source_error: str | None = None,
) -> Health:
    """Judge a mirror by the rows of its vbuckets (cli/JSON.md), and what workers say of their groups.

    `held_count` vbuckets belong to it; None: not known yet. `source_error`: why the source could not be queried which
    bucket it has.
    """
    if source_error is not None:
        return Health(UNREACHABLE, (f"the source cannot be reached: {source_error}",))
    if held_count is None:
        return Health(STARTING, ("the source has not answered yet",))
    if len(rows) < held_count:
        return Health(STARTING, (f"{len(rows)} of {held_count} vbuckets reported",))
    failed = {row["group"]: bool(row.get("full")) for row in groups if row.get("error")}
    """Groups whose store failed; True: because the disk is full. Their vbuckets have no streams meanwhile."""
    unwritten = [row for row in rows if row["state"] not in BROKEN and row["group"] in failed]
    going = [row for row in rows if row["state"] not in BROKEN and row["group"] not in failed]
    away = [row for row in going if row["node"] is None and heard(row)]
    if away and len(away) == len(going):
        error = next((row["last_error"] for row in away if row["last_error"]), None)
        if error is None and all(row["lag_s"] is None for row in away):
            return Health(STARTING, ("no contact with the source yet",))
        return Health(UNREACHABLE, (f"no contact with the source{f': {error}' if error else ''}",))
    degraded = _silent_workers(rows)
    degraded += [_named(rows, [row for row in rows if row["state"] == state], what) for state, what in BROKEN.items()]
    degraded.append(_named(rows, [row for row in unwritten if not failed[row["group"]]], "whose store failed"))
    degraded.append(_named(rows, away, "without contact to the source"))
    held_up = [row for row in going if row["state"] == "waiting" and row["last_error"] and _late(row, HELD_UP_S)]
    degraded.append(_named(rows, [row for row in held_up if row["node"] is not None], "waiting after an error"))
    disk_full = _named(rows, [row for row in unwritten if failed[row["group"]]], "cannot be written, the disk is full")
    behind = [
        _named(rows, [row for row in (*going, *unwritten) if not _published(row)], "not published"),
        _named(rows, [row for row in rows if _late(row, lag_limit_s)], f"more than {lag_limit_s:g} s behind"),
        _named(
            rows, [row for row in going if row["node"] and not _lag_known(row) and not _silent(row)], "of unknown lag"
        ),
    ]
    reasons = tuple(each for each in (*degraded, disk_full, *behind) if each)
    if any(degraded) or disk_full:
        return Health(DEGRADED if any(degraded) else DISK_FULL, reasons)
    caught_up = not reasons and all(row["lag_seqnos"] == 0 for row in rows)
    return Health(CAUGHT_UP if caught_up else CATCHING_UP, reasons)


def _lag_known(row: Mapping[str, Any]) -> bool:
    return row["lag_seqnos"] is not None and heard(row)


def _silent(row: Mapping[str, Any]) -> bool:
    return (row["report_age_s"] or 0) > SILENT_S


def _silent_workers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A reason for each worker that has sent nothing for longer than SILENT_S."""
    counts = Counter((row["worker"], row["report_age_s"]) for row in rows if _silent(row))
    return [
        f"worker {worker} has sent nothing for {age_s:.0f} s ({count} of {len(rows)} vbuckets)"
        for (worker, age_s), count in sorted(counts.items())
    ]


def _published(row: Mapping[str, Any]) -> bool:
    return bool(row["published_seqno"]) or row["lag_seqnos"] == 0


def _late(row: Mapping[str, Any], limit_s: float) -> bool:
    return row["lag_s"] is not None and row["lag_s"] > limit_s


def _named(rows: Sequence[Any], found: Sequence[Mapping[str, Any]], what: str) -> str:
    """A reason, with the error of the first vbucket that has one; empty where there is none."""
    if not found:
        return ""
    vbids = ", ".join(str(row["vbid"]) for row in found[:VBIDS_NAMED]) + (", ..." if len(found) > VBIDS_NAMED else "")
    text = f"{len(found)} of {len(rows)} vbuckets {what}: {vbids}"
    error = next((row["detail"] or row["last_error"] for row in found if row["state"] in (*BROKEN, "waiting")), None)
    return f"{text} ({error})" if error else text
