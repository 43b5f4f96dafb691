"""Collects the reports of all processes, at intervals or on a command, and makes the status from them.

If a worker does not answer, its vbuckets' rows stay, except for age and lag.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from mirror.errors import ExitCode, MirrorError, SupervisionError
from mirror.health import HEARD_S, SILENT_S, STARTING, Health, assess, heard, of_mirror
from mirror.log import get_logger
from mirror.messages import GetStatus, NoteContact, ProcessReport, Status
from mirror.supervise.context import ServiceContext
from mirror.supervise.events.log import EventLog
from mirror.supervise.listeners.addresses import Listeners, kind_of, process_name
from mirror.supervise.processes.child import UNKNOWN, Child, Gauge
from mirror.supervise.processes.plan import ProcessPhase
from mirror.supervise.processes.table import Processes, ProcessSlot
from mirror.supervise.reports.observer import Observer
from mirror.supervise.reports.progress import CatchUp, Trend
from mirror.supervise.reports.systemd import Notifier
from mirror.supervise.status import VbucketRow, reported_row, status_document, totals

REPORT_INTERVAL_S = 1.0
"""Interval between collections, if no worker has news (`Turned`)."""
VBUCKETS_PER_REPORT_S = 256
"""With more vbuckets the interval is longer: each costs the supervisor 0.1 ms per collection."""
TURN_PAUSE_S = 0.1
"""Pause between a worker's news and the collection, because other workers mostly have the same news soon."""
VBUCKETS_PER_NEWS_S = 1000
"""News leads to at most one collection in `vbuckets / VBUCKETS_PER_NEWS_S` seconds."""
REPORT_TIMEOUT_S = 10.0
REPORTS_AWAITED_S = 2.0
"""A collection waits this long for reports; later reports count in the next collection."""

log = get_logger("supervisor")


class ReportedFailure(MirrorError):
    def __init__(self, message: str, exit_code: int | None) -> None:
        super().__init__(message or "a worker failed")
        self.exit_code = ExitCode(exit_code or ExitCode.FAILED)


class Reports:
    def __init__(
        self,
        context: ServiceContext,
        processes: Processes,
        listeners: Listeners,
        event_log: EventLog,
        notifier: Notifier,
        *,
        until_caught_up: bool,
        stop: Callable[[MirrorError | None], None],
    ) -> None:
        """With `until_caught_up`, call `stop` once every vbucket has caught up, or if a group cannot be opened."""
        self._context = context
        self._processes = processes
        self._listeners = listeners
        self._event_log = event_log
        self._notifier = notifier
        self._stop = stop
        self._until_caught_up = until_caught_up
        self._catch_up: CatchUp | None = None
        self._rows: dict[int, VbucketRow] = {}
        self._pending: set[asyncio.Task[None]] = set()
        """Unanswered requests to processes."""
        self._turned = asyncio.Event()
        """Set when a worker has news."""
        self._looked_s = float("-inf")
        self._trend = Trend()
        self.observer = Observer()
        self._health = of_mirror(STARTING, "no vbucket reported")
        self._message = ""
        self._since_ms = context.clock.wall_ms()
        self._source_error: str | None = None
        self._started = context.clock.monotonic()
        self._gauge = Gauge(os.getpid())
        self.was_ready = False
        """True once all planned processes have run at the same time."""

    def set_health(self, health: Health, figures: str = "") -> None:
        """Show this health in the status and to systemd; `figures` is the message if there is no trouble."""
        if health.state != self._health.state:
            self._since_ms = self._context.clock.wall_ms()
        message = health.message or figures
        if (health.state, message) != (self._health.state, self._message):
            self._notifier.status(f"{health.state}: {message}" if message else health.state)
        self._health, self._message = health, message

    def work_begins(self) -> None:
        if self._until_caught_up and self._context.vbucket_count is not None:
            self._catch_up = CatchUp(self._context.vbucket_count)

    def source_answered(self, error: str | None) -> None:
        """Note the error of a look-up of the source; None if the source has answered the look-up or a worker."""
        if any(row["node"] is not None or row["state"] == "refused" for row in self._rows.values()):
            error = None
        self._source_error = error
        for event in self.observer.source_answers(error, self._context.now_ms()):
            self._event_log.add(event)
        if error is not None:
            self._judge([], [])

    def add_due_events(self, *, at_once: bool = False) -> None:
        """Log the events that were collected for long enough; with `at_once`, all."""
        for event in self.observer.due(self._context.now_ms(), at_once=at_once):
            self._event_log.add(event)

    def worker_exited(self, child: Child) -> None:
        error = self._processes.end_of(child.slot)
        self.observer.forget(child.groups, self._rows.values())
        for row in self._rows.values():
            if row["group"] in child.groups:
                row |= {"state": "starting", "node": None, "worker": None, "report_age_s": None}
                row |= {"detail": None, "last_error": error}
                _forget_lag(row)
                self._trend.observe_lag(row, self._context.now_ms())  # its successor may report before the next look

    # collecting

    async def run(self, progress: Callable[[Status], None] | None) -> None:
        """Collect reports until cancelled; `progress` gets each new status."""
        requested_s = float("-inf")
        while True:
            now_s = self._context.clock.monotonic()
            if now_s >= requested_s + max(REPORT_INTERVAL_S, len(self._rows) / VBUCKETS_PER_REPORT_S):
                requested_s = now_s
                await self.collect()
            else:
                self._take_stock()
            if progress is not None:
                progress(self.document())
            if self._context.maps is not None:
                self._context.maps.retry()
            if await self._news():
                requested_s = float("-inf")

    async def _news(self) -> bool:
        """Return True soon after a worker has news, or False after the interval."""
        try:
            async with asyncio.timeout(REPORT_INTERVAL_S):
                await self._turned.wait()
                since_s = self._context.clock.monotonic() - self._looked_s
                await asyncio.sleep(max(TURN_PAUSE_S, len(self._rows) / VBUCKETS_PER_NEWS_S - since_s))
        except TimeoutError:
            return False
        self._turned.clear()
        self._looked_s = self._context.clock.monotonic()
        return True

    def look_soon(self) -> None:
        self._turned.set()

    async def collect(self) -> None:
        """Collect a report from every running process, except silent ones, and assess the result."""
        now_ms = self._context.now_ms()
        # A silent process would use up the whole wait, each time.
        children = [each for each in self._processes.running() if each.heartbeat.age_ms(now_ms) <= HEARD_S * 1000]
        requests = [asyncio.create_task(self._ask_for_report(child)) for child in children]
        for task in requests:
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
        if requests:
            await asyncio.wait(requests, timeout=REPORTS_AWAITED_S)
        self._take_stock()

    def _take_stock(self) -> None:
        alive = self._processes.alive()
        counters: dict[str, int] = {}
        for child in alive:
            for name, value in (child.status.get("counters") or {}).items():
                counters[name] = counters.get(name, 0) + value
        self._note_ages()
        rows = self._sorted_rows()
        now_ms = self._context.now_ms()
        self._trend.observe(rows, counters, now_ms)
        self._trend.fill(rows, now_ms)
        groups = [row for child in alive for row in child.status.get("groups") or ()]
        if self._source_error is not None:
            self.source_answered(self._source_error)
        self._judge(rows, groups)
        self._note_contact()
        for event in self.observer.observe(rows, groups, self._context.vbucket_count, now_ms):
            self._event_log.add(event)

    def _note_ages(self) -> None:
        """Write the silence of the worker into each row. Forget the lag in the rows of a silent worker."""
        owners = {group: child for child in self._processes.running() for group in child.groups}
        now_ms = self._context.now_ms()
        for row in self._rows.values():
            owner = owners.get(row["group"])
            if owner is None:
                continue
            row |= {"worker": owner.slot, "report_age_s": round(owner.silence_ms(now_ms) / 1000, 1)}
            if not heard(row):
                _forget_lag(row)

    async def _ask_for_report(self, child: Child) -> None:
        try:
            found = cast(ProcessReport, await child.request(GetStatus(), REPORT_TIMEOUT_S))
        except SupervisionError as error:
            child.report_error = str(error)
            return
        child.reported(found, self._context.now_ms())
        identity = self._context.identity
        for report in child.status.get("vbuckets") or ():
            assert identity is not None, "workers run only when the directory is known"
            row = reported_row(report, report["vbid"] % identity.group_count)
            self._rows[row["vbid"]] = row

    def _sorted_rows(self) -> list[VbucketRow]:
        return sorted(self._rows.values(), key=lambda row: row["vbid"])

    # judging

    def _judge(self, rows: list[VbucketRow], groups: Sequence[Mapping[str, Any]]) -> None:
        """Set the state; with `until_caught_up`, stop the service once it has caught up."""
        if self._context.stopping:
            return
        running = len(self._processes.running())
        if self._processes.working and running == len(self._processes.desired) and not self.was_ready:
            self.was_ready = True
            self._notifier.ready()
            log.info("workers-ready", workers=sum(kind_of(each.slot) is None for each in self._processes.running()))
        limit_s = self._context.settings.ready_lag_limit_s
        health = assess(
            rows,
            self._context.vbucket_count,
            lag_limit_s=limit_s,
            groups=groups,
            source_error=self._source_error,
            servers=silent_servers(self._processes, self._context.now_ms()),
            closed=closed_listeners(self._processes),
            process_errors=process_errors(self._processes),
        )
        for event in self.observer.troubles(health.troubles, self._context.now_ms()):
            self._event_log.add(event)
        sums = totals(rows)
        figures = f"{sums['published_seqnos'] or 0:,} seqnos published, lag {sums['lag_s'] or 0:.1f} s"
        self.set_health(health, figures)
        if self._source_error is None and self._catch_up is not None:
            self._judge_catch_up(self._catch_up, rows)

    def _judge_catch_up(self, catch_up: CatchUp, rows: list[VbucketRow]) -> None:
        failed = [group for child in self._processes.alive() for group in child.status.get("failed_groups") or ()]
        if failed:
            self._stop(ReportedFailure(failed[0]["message"], failed[0]["exit_code"]))
        catch_up.observe(rows)
        if catch_up.done:
            log.info("caught-up", **catch_up.progress())
            self._stop(None)

    def _note_contact(self) -> None:
        """Tell the DCP processes which vbuckets have no contact with the source."""
        identity = self._context.identity
        servers = [child for child in self._processes.running() if kind_of(child.slot) == "dcp"]
        if identity is None or not servers:
            return
        lost = []
        for vbid in identity.vbids:
            row = self._rows.get(vbid)
            if row is None or row["lag_seqnos"] is None:
                silent_s = row["lag_s"] if row is not None else None
                lost.append([vbid, round((silent_s or 0) * 1000)])
        for child in servers:
            task = asyncio.create_task(self._send_contact(child, NoteContact(lost)))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def _send_contact(self, child: Child, note: NoteContact) -> None:
        try:
            await child.request(note, REPORT_TIMEOUT_S)
        except SupervisionError as error:
            log.debug("contact-not-taken", process=process_name(child.slot), error=str(error))

    # showing

    def document(self) -> Status:
        context, clock = self._context, self._context.clock
        rows = self._sorted_rows()
        slots = sorted(self._processes.slots.items())
        desired, now_ms = self._processes.desired, context.now_ms()
        leases = context.leases.active(clock.wall_ms()) if context.leases is not None else ()
        found = status_document(context.data, context.identity, self._health, rows, clock.wall_ms())
        found["totals"] |= {
            "documents_per_s": self._trend.counter_rate("received_documents"),
            "bytes_per_s": self._trend.counter_rate("received_bytes"),
        }
        return found | {
            "service": "up",
            "message": self._message,
            "since_ms": self._since_ms,
            "pid": os.getpid(),
            "uptime_s": round(clock.monotonic() - self._started, 1),
            "source": context.settings.source,
            "source_error": self._source_error,
            "sync": context.settings.sync,
            "warnings": self._warnings(),
            "supervisor": self._gauge.read(),
            "workers": [
                process_row(number, slot, desired.get(number, ()), now_ms)
                for number, slot in slots
                if kind_of(number) is None
            ],
            "servers": [
                {"kind": kind_of(number)} | process_row(number, slot, desired.get(number, ()), now_ms)
                for number, slot in slots
                if kind_of(number) is not None and (slot.child is not None or number in desired)
            ],
            "listeners": self._listeners.urls(),
            "leases": [
                {"id": lease.id, "name": lease.name, "until_ms": lease.until_ms, "vbuckets": len(lease.positions)}
                for lease in leases
            ],
            "readers": [row for child in self._processes.alive() for row in child.status.get("readers") or ()],
            "catch_up": self._catch_up.progress() if self._catch_up is not None else None,
            "events": self._event_log.newest(),
        }

    def _warnings(self) -> list[str]:
        found = [text for child in self._processes.alive() for text in child.status.get("warnings") or ()]
        return list(dict.fromkeys([*self._processes.quarantine.groups.values(), *found]))


def _forget_lag(row: VbucketRow) -> None:
    row["source_high_seqno"] = row["lag_seqnos"] = row["lag_s"] = None


def closed_listeners(processes: Processes) -> dict[str, str | None]:
    """Return each kind of listener that no process serves, with the last end of its processes if one failed."""
    open_kinds = {kind_of(child.slot) for child in processes.running()}
    found: dict[str, str | None] = {}
    for number in processes.desired:
        kind = kind_of(number)
        if kind is not None and kind not in open_kinds:
            found[kind] = found.get(kind) or processes.failure_of(number)
    return found


def process_errors(processes: Processes) -> dict[int, str]:
    found = {each.slot: each.report_error for each in processes.running() if each.report_error is not None}
    for number in processes.desired:
        if kind_of(number) is None and (error := processes.failure_of(number)) is not None:
            found.setdefault(number, error)
    return found


def silent_servers(processes: Processes, now_ms: int) -> list[str]:
    servers = [child for child in processes.running() if kind_of(child.slot) is not None]
    return [
        f"{process_name(child.slot)}, silent for {silence_s:.0f} s"
        + (f" ({child.report_error})" if child.report_error else "")
        for child in servers
        if (silence_s := child.silence_ms(now_ms) / 1000) > SILENT_S
    ]


def process_row(number: int, slot: ProcessSlot, desired: Sequence[int], now_ms: int) -> dict[str, object]:
    child = slot.child
    return {
        "slot": number,
        "pid": child.pid if child else None,
        "phase": child.phase.value if child else ProcessPhase.ABSENT.value,
        "groups": list(child.groups if child else desired),
        "uptime_s": round((now_ms - child.heartbeat.started_ms) / 1000, 1) if child else None,
        "heartbeat_age_s": round(child.heartbeat.age_ms(now_ms) / 1000, 2) if child else None,
        "restarts": slot.restarts,
        "last_exit": slot.last_exit,
        "last_exit_ms": slot.last_exit_ms,
        "last_error": slot.last_error,
        "counters": dict(child.status.get("counters") or {}) if child else {},
        "request_seconds": child.status.get("request_seconds") if child else None,
        **(child.gauge.read() if child else UNKNOWN),
    }
