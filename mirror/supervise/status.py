"""The rows and sums of a status in the shape of cli/JSON.md, from workers' reports or from the store alone.

An unknown figure is None, never 0; a total of documents, lag, rollbacks or source seqnos is unknown if any row's is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from mirror.feed.follow.group_commits import unusable
from mirror.feed.follow.status import state_fields
from mirror.health import Health, assess_stored
from mirror.ingest.selection import Selection
from mirror.messages import Status
from mirror.supervise.events.log import newest_events
from storage.env import directory
from storage.errors import StorageError
from storage.history.extent import History
from storage.model import Identity, VbucketState
from storage.read.view import View, open_view


class VbucketRow(TypedDict):
    persisted_seqno: int | None
    held_snapshots: int | None
    held_s: float | None
    stale: bool | None
    history_floor_seqno: int | None
    history_floor_ms: int | None
    boundaries: int | None
    versions: int | None
    row_bytes: int | None
    key_bytes: int | None
    local_purge_seqno: int | None
    resync_count: int | None
    last_resync_ms: int | None
    vbid: int
    group: int
    worker: int | None
    report_age_s: float | None
    state: str
    detail: str | None
    branch: int | None
    vbuuid: str | None
    published_seqno: int | None
    staged_seqno: int | None
    source_high_seqno: int | None
    lag_seqnos: int | None
    lag_s: float | None
    documents: int | None
    rollback_count: int | None
    last_rollback_ms: int | None
    last_rollback: tuple[int, int] | None
    resyncs_begun: int | None
    resync_why: str | None
    seqnos_per_s: float | None
    requested_again_bytes: int | None
    stalls: int | None
    node: str | None
    silent_ms: int | None
    last_error: str | None


class ProcessFigures(TypedDict):
    cpu_percent: float | None
    """Percent of one core since the previous measurement."""
    private_bytes: int | None
    resident_bytes: int | None
    """Includes shared memory, so also LMDB pages in memory."""
    threads: int | None
    open_files: int | None


def stored_row(state: VbucketState, group: int, history: History | None = None) -> VbucketRow:
    return reported_row({"state": "stored"} | state_fields(state, history), group)


def reported_row(report: Mapping[str, Any], group: int) -> VbucketRow:
    """Return a worker's report of a vbucket in the shape of cli/JSON.md."""
    vbuuid = report.get("vbuuid")
    row = {name: report.get(name) for name in VbucketRow.__annotations__}
    row |= {
        "group": group,
        "state": report.get("state") or "starting",
        "detail": report.get("text") or report.get("detail") or None,
        "vbuuid": f"{vbuuid:012x}" if isinstance(vbuuid, int) and vbuuid else None,
    }
    return cast(VbucketRow, row)


def summed_if_known(values: Sequence[int | float | None]) -> int | float | None:
    return sum(value for value in values if value is not None) if values and None not in values else None


def summed(values: Iterable[int | float | None]) -> int | float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def totals(rows: Sequence[VbucketRow]) -> Status:
    states: dict[str, int] = {}
    for row in rows:
        states[row["state"]] = states.get(row["state"], 0) + 1
    lags = [row["lag_s"] for row in rows]
    return {
        "vbuckets": len(rows),
        "states": states,
        "documents": summed_if_known([row["documents"] for row in rows]),
        "published_seqnos": summed(row["published_seqno"] for row in rows),
        "staged_seqnos": summed(row["staged_seqno"] for row in rows),
        "source_high_seqnos": summed_if_known([row["source_high_seqno"] for row in rows]),
        "lag_seqnos": summed_if_known([row["lag_seqnos"] for row in rows]),
        "lag_s": max((lag for lag in lags if lag is not None), default=None) if None not in lags else None,
        "rollback_count": summed_if_known([row["rollback_count"] for row in rows]),
        "last_rollback_ms": _newest(rows, "last_rollback_ms"),
        "resync_count": summed(row["resync_count"] for row in rows),
        "last_resync_ms": _newest(rows, "last_resync_ms"),
        "requested_again_bytes": summed(row["requested_again_bytes"] for row in rows),
        "stale": summed(row["stale"] for row in rows),
        "boundaries": summed(row["boundaries"] for row in rows),
        "versions": summed(row["versions"] for row in rows),
        "row_bytes": summed(row["row_bytes"] for row in rows),
        "key_bytes": summed(row["key_bytes"] for row in rows),
        "history_floor_ms": min(
            (row["history_floor_ms"] for row in rows if row["history_floor_ms"] is not None), default=None
        ),
    }


def _newest(rows: Sequence[VbucketRow], name: Literal["last_rollback_ms", "last_resync_ms"]) -> int | None:
    return max((moment for row in rows if (moment := row[name]) is not None), default=None)


def status_document(
    data: Path, identity: Identity | None, health: Health, rows: Sequence[VbucketRow], time_ms: int
) -> Status:
    """Return a status in the shape of cli/JSON.md. Fields that only a service knows are None or empty."""
    return {
        "service": "down",
        "state": health.state,
        "message": health.message,
        "reasons": health.reasons,
        "troubles": [trouble.row() for trouble in health.troubles],
        "since_ms": None,
        "pid": None,
        "uptime_s": None,
        "time_ms": time_ms,
        "data": str(data),
        "source": None,
        "source_error": None,
        "bucket": identity.bucket_name if identity else None,
        "bucket_uuid": identity.bucket_uuid if identity else None,
        "cluster_uuid": identity.cluster_uuid if identity else None,
        "vbucket_count": identity.vbucket_count if identity else None,
        "vbuckets_held": len(identity.vbids) if identity else None,
        "group_count": identity.group_count if identity else None,
        "selection": str(Selection.parse(identity.selection)) if identity else None,
        "sync": None,
        "warnings": [],
        "supervisor": dict.fromkeys(ProcessFigures.__annotations__),
        "workers": [],
        "servers": [],
        "listeners": {},
        "leases": [],
        "readers": [],
        "totals": totals(rows) | {"documents_per_s": None, "bytes_per_s": None},
        "catch_up": None,
        "events": [],
        "vbuckets": rows,
    }


def stored_status(data: Path) -> Status:
    identity = directory.load(str(data))
    with open_view(str(data)) as view:
        rows = [_row(view, vbid, vbid % identity.group_count) for vbid in map(int, view.vbids)]
    found = status_document(data, identity, assess_stored(rows), rows, time.time_ns() // 1_000_000)
    return found | {"events": newest_events(data)}


def _row(view: View, vbid: int, group: int) -> VbucketRow:
    try:
        return stored_row(view.state(vbid), group, view.history(vbid))
    except StorageError as error:
        return reported_row({"vbid": vbid, "state": unusable(error), "detail": str(error)}, group)
