"""The mirror's status for HTTP readers: the service's report, recent samples, disk and history, readiness.

The report comes from the running service, or from the store if no service runs. It has the reasons against readiness
(`reasons`). The service is queried once a second at most, for any number of readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mirror.client import ask
from mirror.clock import Clock
from mirror.errors import MirrorError
from mirror.messages import GetStatus
from mirror.serve.http.view import Mirror
from storage.errors import StorageError

ASK_TIMEOUT_S = 10.0
FRESH_S = 1.0
HISTORY_FRESH_S = 5.0
SAMPLE_INTERVAL_S = 5.0
SAMPLES_MAX = 180
"""Samples of a quarter of an hour."""
ROLLBACKS_SHOWN = 50
PAST_SHOWN = 20
TOGETHER_MS = 5_000
"""Rollbacks this close to each other form one entry of `past`, and so do resyncs."""

SHOWN_TO_ALL = frozenset((
    "service", "state", "since_ms", "uptime_s", "time_ms", "bucket", "bucket_uuid", "cluster_uuid",
    "vbucket_count", "vbuckets_held", "group_count", "sync", "totals", "catch_up", "disk", "history", "lag_limit_s",
))  # fmt: skip
"""Members for readers of some collections. Paths, processes, the source's user, names of collections and of other
readers, and the texts of errors, events and warnings are for readers of everything."""
PROCESS_SHOWN_TO_ALL = frozenset(
    ("kind", "slot", "phase", "groups", "uptime_s", "heartbeat_age_s", "restarts", "last_exit_ms")
)
ROW_HIDDEN: dict[str, None] = dict.fromkeys(("detail", "last_error", "resync_why"))

READ_COUNTERS = ("http_documents", "kv_hits", "dcp_documents")

Report = dict[str, Any]


async def ask_service(data: Path) -> Report | None:
    """Return the service's status; None if no service answers."""
    try:
        answer = await asyncio.to_thread(ask, data, GetStatus(), timeout_s=ASK_TIMEOUT_S)
    except MirrorError:
        return None
    found = answer and answer.get("status")
    return found if isinstance(found, dict) else None


def partly_shown_rows(rows: list[Report]) -> list[Report]:
    """Return rows for readers of some collections. A row shows whether a node is in contact, but not its address."""
    return [row | ROW_HIDDEN | {"node": None if row["node"] is None else "hidden"} for row in rows]


def partly_shown_reasons(report: Report) -> list[str]:
    return [report["state"]] if report["reasons"] else []


def partly_shown(report: Report) -> Report:
    found = {name: value if name in SHOWN_TO_ALL else _hidden(value) for name, value in report.items()}
    for kind in ("workers", "servers"):
        found[kind] = [
            {name: value if name in PROCESS_SHOWN_TO_ALL else _hidden(value) for name, value in row.items()}
            for row in report[kind]
        ]
    return found | {"reasons": partly_shown_reasons(report), "vbuckets": partly_shown_rows(report["vbuckets"])}


def _hidden(value: object) -> object:
    if isinstance(value, dict):
        return {name: _hidden(each) for name, each in value.items()}
    return [] if isinstance(value, list) else "" if isinstance(value, str) else None


def reads_of(report: Report) -> dict[str, int]:
    found = {}
    for server in report.get("servers") or ():
        counters = server.get("counters") or {}
        found[f"{server.get('slot')}-{server.get('pid')}"] = sum(int(counters.get(name) or 0) for name in READ_COUNTERS)
    return found


def _together(event: str, found: list[Report]) -> list[Report]:
    """Group events, sorted from the newest: an event within `TOGETHER_MS` of the previous one joins its group."""
    entries: list[Report] = []
    vbids: set[int] = set()
    before_ms = float("inf")
    for each in found:
        seqnos = each["from_seqno"] - each["to_seqno"] if "from_seqno" in each else 0
        if before_ms - each["time_ms"] > TOGETHER_MS or not entries:
            entries.append({"event": event, "time_ms": each["time_ms"], "vbuckets": 0, "seqnos": 0, "first": each})
            vbids = set()
        vbids.add(each["vbid"])
        entries[-1]["vbuckets"] = len(vbids)
        entries[-1]["seqnos"] += seqnos
        before_ms = each["time_ms"]
    return entries


class StatusReporter:
    def __init__(
        self,
        mirror: Mirror,
        stored: Callable[[Path], Report],
        clock: Clock,
        *,
        lag_limit_s: float,
    ) -> None:
        """`stored` makes the report from the store alone."""
        self._mirror = mirror
        self._stored = stored
        self._clock = clock
        self.lag_limit_s = lag_limit_s
        self._reading, self._rendering = asyncio.Lock(), asyncio.Lock()
        self._report: Report | None = None
        self._report_s = float("-inf")
        self._disk_and_history: Report = {}
        self._disk_and_history_s = float("-inf")
        self._rendered_of: Report | None = None
        self._rendered: dict[Callable[[Report], bytes], bytes] = {}
        self.samples: deque[Report] = deque(maxlen=SAMPLES_MAX)
        self._reads: tuple[float, dict[str, int]] | None = None

    async def report(self) -> Report:
        """Return the status, a second old at most. Raises StorageError if neither service nor store has one."""
        async with self._reading:
            kept = self._report
            if kept is None or self._clock.monotonic() - self._report_s >= FRESH_S:
                data = self._mirror.data
                kept = await ask_service(data)
                if kept is None:
                    kept = await asyncio.to_thread(self._stored, data)
                self._report, self._report_s = kept, self._clock.monotonic()
            return kept

    async def rendered(self, render: Callable[[Report], bytes]) -> bytes:
        """Render the report with disk, history and lag limit, in a thread and once for each report."""
        report = await self.report()
        async with self._rendering:
            if self._clock.monotonic() - self._disk_and_history_s >= HISTORY_FRESH_S:
                self._disk_and_history = await asyncio.to_thread(self._read_disk_and_history, report)
                self._disk_and_history_s = self._clock.monotonic()
                self._rendered_of = None
            if self._rendered_of is not report:
                self._rendered_of, self._rendered = report, {}
            if render not in self._rendered:
                whole = report | self._disk_and_history | {"lag_limit_s": self.lag_limit_s}
                self._rendered[render] = await asyncio.to_thread(render, whole)
            return self._rendered[render]

    def _read_disk_and_history(self, report: Report) -> Report:
        data = self._mirror.data
        usage = shutil.disk_usage(data)
        mirror_bytes = 0
        for path in data.glob("group-*/data.mdb"):
            with contextlib.suppress(OSError):
                mirror_bytes += path.stat().st_blocks * 512
        disk = {"mirror_bytes": mirror_bytes, "free_bytes": usage.free, "total_bytes": usage.total}
        floors: dict[int, int] = {}
        reaches_back_ms: list[int] = []
        resync_count = 0
        resyncs: list[Report] = []
        rollbacks: list[Report] = []
        for row in report["vbuckets"]:
            vbid = row["vbid"]
            try:
                past = self._mirror.view.history(vbid)
                found = self._mirror.view.rollbacks(vbid) if row["rollback_count"] else []
            except StorageError:
                continue
            if past.floor_ms is not None:
                floors[vbid] = past.floor_seqno
                reaches_back_ms.append(past.floor_ms)
            resyncs += [{"vbid": vbid, "time_ms": moment} for moment in past.resyncs_ms]
            resync_count += past.resync_count
            rollbacks += [
                {"vbid": vbid, "from_seqno": each.from_seqno, "to_seqno": each.to_seqno, "time_ms": each.time_ms}
                for each in found
            ]
        for events in (resyncs, rollbacks):
            events.sort(key=lambda event: -event["time_ms"])
        return {
            "disk": disk,
            "history": {
                "floor_seqnos": floors,
                "floor_oldest_ms": min(reaches_back_ms, default=None),
                "floor_newest_ms": max(reaches_back_ms, default=None),
                "resync_count": resync_count,
                "resyncs": resyncs[:ROLLBACKS_SHOWN],
                "rollbacks": rollbacks[:ROLLBACKS_SHOWN],
                "past": sorted(
                    [*_together("rollback", rollbacks), *_together("resync-done", resyncs)],
                    key=lambda entry: -entry["time_ms"],
                )[:PAST_SHOWN],
            },
        }

    async def sample(self) -> None:
        try:
            report = await self.report()
        except (StorageError, MirrorError, OSError):
            return
        sums = report["totals"]
        self.samples.append(
            {
                "time_ms": self._clock.wall_ms(),
                "documents_per_s": sums["documents_per_s"],
                "bytes_per_s": sums["bytes_per_s"],
                "reads_per_s": self._read_rate(report),
                "lag_seqnos": sums["lag_seqnos"],
                "lag_s": sums["lag_s"],
            }
        )

    def _read_rate(self, report: Report) -> float | None:
        now = self._clock.monotonic()
        reads = reads_of(report)
        before, self._reads = self._reads, (now, reads)
        if before is None or now <= before[0] or not reads:
            return None
        risen = sum(max(0, count - before[1][name]) for name, count in reads.items() if name in before[1])
        return round(risen / (now - before[0]), 1)

    async def run(self) -> None:
        """Take samples, and notice recreated groups, until cancelled."""
        while True:
            self._mirror.refresh()
            await self.sample()
            await self._clock.sleep(SAMPLE_INTERVAL_S)
