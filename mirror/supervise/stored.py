"""The status of a mirror without its service: what the store alone says, in the same shape.

Knows the store and the shape of a status; never a process or a socket. Invariant: what only a service knows is None.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mirror.supervise.status import bucket_fields, stored_row, totals
from storage import directory
from storage.view import open_view


def stored_status(data: Path) -> dict[str, Any]:
    """The status as the store alone knows it."""
    identity = directory.load(str(data))
    with open_view(str(data)) as view:
        rows = [
            stored_row(state, int(state.vbid) % identity.group_count, view.history(state.vbid))
            for state in view.states()
        ]
    return {
        "service": "down",
        "state": "stored",
        "message": "",
        "reasons": ["no service runs: nothing follows the source"],
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
        "events": [],
        "vbuckets": rows,
    }
