"""The status of a mirror without its service: what the store alone says, in the same shape.

Knows the store and the shape of a status; never a process or a socket. Invariant: what only a service knows is None.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mirror.health import assess_stored
from mirror.supervise.events.log import newest_events
from mirror.supervise.status import Row, bucket_fields, stored_row, totals, unreadable_row
from storage.env import directory
from storage.errors import StorageError
from storage.read.view import View, open_view


def stored_status(data: Path) -> dict[str, Any]:
    """The status as the store alone knows it."""
    identity = directory.load(str(data))
    with open_view(str(data)) as view:
        rows = [_row(view, vbid, vbid % identity.group_count) for vbid in map(int, view.vbids)]
    health = assess_stored(rows)
    return {
        "service": "down",
        "state": health.state,
        "message": health.message,
        "reasons": health.reasons,
        "troubles": [trouble.row() for trouble in health.troubles],
        "since_ms": None,
        "pid": None,
        "uptime_s": None,
        "time_ms": time.time_ns() // 1_000_000,
        "data": str(data),
        "source": None,
        "source_error": None,
        **bucket_fields(identity),
        "sync": None,
        "warnings": [],
        "supervisor": dict.fromkeys(("cpu_percent", "private_bytes", "resident_bytes", "threads", "open_files")),
        "workers": [],
        "servers": [],
        "listeners": {},
        "leases": [],
        "readers": [],
        "totals": totals(rows) | {"documents_per_s": None, "bytes_per_s": None},
        "catch_up": None,
        "events": newest_events(data),
        "vbuckets": rows,
    }


def _row(view: View, vbid: int, group: int) -> Row:
    try:
        return stored_row(view.state(vbid), group, view.history(vbid))
    except StorageError as error:
        return unreadable_row(vbid, group, str(error))
