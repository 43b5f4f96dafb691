"""The mirror's status for HTTP readers: the service's report, disk and history, readiness.

The report comes from the running service, or from the store if no service runs. It has the reasons against readiness
(`reasons`). The service is queried once a second at most, for any number of readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
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
REFRESH_S = 5.0
ROLLBACKS_SHOWN = 50
PAST_SHOWN = 20
TOGETHER_MS = 5_000
"""Rollbacks this close to each other form one entry of `past`, and so do resyncs."""

Report = dict[str, Any]


async def ask_service(data: Path) -> Report | None:
    try:
        answer = await asyncio.to_thread(ask, data, GetStatus(), timeout_s=ASK_TIMEOUT_S)
    except MirrorError:
        return None
    found = answer and answer.get("status")
    return found if isinstance(found, dict) else None


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

    async def run(self) -> None:
        """Notice recreated groups, until cancelled."""
        while True:
            self._mirror.refresh()
            await self._clock.sleep(REFRESH_S)
