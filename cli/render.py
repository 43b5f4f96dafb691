"""Tables, progress, and plain lines for output that is no terminal. The only module that uses rich.

Everything fits a terminal of 80 columns, and colours only repeat the words.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from cli.output import DASH, duration, lag_text, moment, number, size
from mirror.config_reader import Description
from mirror.units import printable

GOOD_STATES = {"streaming", "following", "running", "up"}
BUSY_STATES = {
    "catching up",
    "backfilling",
    "requesting",
    "starting",
    "stopping",
    "stored",
    "waiting",
    "resyncing",
    "rolling-back",
}
PROGRESS_INTERVAL_S = 2.0
TROUBLES_MAX = 8
"""Limit of the errors that a status shows, worst first."""


class DataConsole(Console):
    """A console whose text may come from data."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


stdout = DataConsole(highlight=False)
stderr = DataConsole(stderr=True, highlight=False)

LEASES_SHOWN = 3


def state_text(state: str) -> Text:
    style = "green" if state in GOOD_STATES else "yellow" if state in BUSY_STATES else "bold red"
    return Text(state, style=style)


def vbuckets_text(document: Mapping[str, Any]) -> str:
    count, held = document["vbucket_count"], document["vbuckets_held"]
    return f"{held} of {count} vbuckets" if held != count else f"{count or DASH} vbuckets"


def fact_table(facts: Mapping[str, RenderableType | None]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(name, value)
    return table


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str | Text]], right: Sequence[int] = ()) -> Table:
    """Return a table without frames; `right` are the columns to align right."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in right else "left", no_wrap=index in right)
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def settings_view(settings: Sequence[tuple[Description, Mapping[str, str]]]) -> RenderableType:
    parts: list[RenderableType] = []
    for setting, facts in settings:
        parts += [Text(setting.name, style="bold"), Padding(Text(setting.meaning), (0, 0, 0, 2))]
        parts += [Padding(fact_table({name: escape(text) for name, text in facts.items()}), (0, 0, 1, 2))]
    return Group(*parts)


# -- status -----------------------------------------------------------------------------------------------------------


def history_text(sums: Mapping[str, Any]) -> str | None:
    if sums.get("versions") is None:
        return None
    text = f"{number(sums['versions'])} versions"
    if sums["documents"] is not None:
        text += f" of {number(sums['documents'])} documents"
    if sums["boundaries"] is not None:
        text += f", {number(sums['boundaries'])} boundaries"
    text += f", {size(sums['row_bytes'] + sums['key_bytes'])}"
    return text + (f", back to {moment(sums['history_floor_ms'])}" if sums["history_floor_ms"] else "")


def summary(document: Mapping[str, Any]) -> Table:
    sums = document["totals"]
    state: Text = state_text(document["state"])
    if document.get("since_ms") is not None and document["state"] not in GOOD_STATES:
        state = Text.assemble(state, f" since {moment(document['since_ms'])}")
    if document.get("message"):
        state = Text.assemble(state, Text(f"  {document['message']}", style="dim"))
    rate = None
    if sums.get("documents_per_s") is not None:
        rate = f"{number(sums['documents_per_s'])} docs/s, {size(sums.get('bytes_per_s'))}/s"
    rollbacks, resyncs = (
        number(sums[f"{name}_count"]) + (f", the last at {moment(last_ms)}" if last_ms is not None else "")
        for name in ("rollback", "resync")
        for last_ms in [sums[f"last_{name}_ms"]]
    )
    running = (
        f"up {duration(document['uptime_s'])}, process {document['pid']}"
        if document["service"] == "up"
        else "not running"
    )
    facts: dict[str, RenderableType | None] = {
        "state": state,
        "service": running,
        "bucket": f"{document['bucket'] or DASH} ({vbuckets_text(document)})",
        "mirrored": escape(document["selection"]) if document.get("selection") else None,
        "source": escape(document["source"]) if document.get("source") else None,
        "data": escape(document["data"]),
        "documents": number(sums["documents"]),
        "published": f"{number(sums['published_seqnos'])} seqnos",
        "lag": lag_text(sums),
        "rate": rate,
        "rollbacks": rollbacks,
        "resyncs": resyncs,
        "history": history_text(sums),
        "held": leases_text(document.get("leases") or ()),
        "warning": escape("; ".join(document.get("warnings") or ())) or None,
    }
    return fact_table(facts)


def print_event(event: Mapping[str, Any]) -> None:
    style = {"error": "bold red", "warning": "yellow"}.get(event["level"], "green")
    line = Text(f"{moment(event['time_ms'])}  ").append(event["event"], style=style).append(f"  {event['text']}")
    stdout.print(line, soft_wrap=True)


def leases_text(leases: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a line on the readers whose leases hold history; None without leases."""
    shown = [
        f"{escape(lease['name'])} ({lease['vbuckets']} vbuckets, until {moment(lease['until_ms'])})" for lease in leases
    ]
    return "history for " + "; ".join(shown[:LEASES_SHOWN] + ["..."] * (len(shown) > LEASES_SHOWN)) if shown else None


Cell = Callable[[Mapping[str, Any]], str | Text]
"""Function that makes the cell of a column from a row of the status."""

RUNS: Mapping[str, Cell] = {"state": lambda row: state_text(row["phase"]), "pid": lambda row: str(row["pid"] or DASH)}
USES: Mapping[str, Cell] = {
    "cpu": lambda row: DASH if row["cpu_percent"] is None else f"{row['cpu_percent']:.0f} %",
    "memory": lambda row: size(row["private_bytes"]),
}
ENDED: Mapping[str, Cell] = {
    "restarts": lambda row: str(row["restarts"]),
    "last end": lambda row: str(row["last_error"] or row["last_exit"] or ""),
}
WORKER_COLUMNS: Mapping[str, Cell] = {
    "worker": lambda row: str(row["slot"]),
    **RUNS,
    "groups": lambda row: groups_text(row["groups"]),
    **USES,
    "up": lambda row: duration(row["uptime_s"]),
    **ENDED,
}
SERVER_COLUMNS: Mapping[str, Cell] = {
    "server": lambda row: str(row["kind"]),
    **RUNS,
    "clients": lambda row: number(row["counters"].get(f"{row['kind']}_connections")),
    "requests": lambda row: number(row["counters"].get(f"{row['kind']}_requests")),
    **USES,
    **ENDED,
}
VBUCKET_COLUMNS: Mapping[str, Cell] = {
    "vbid": lambda row: str(row["vbid"]),
    "state": lambda row: state_text(row["state"]),
    "vbuuid": lambda row: row["vbuuid"] or DASH,
    "published": lambda row: number(row["published_seqno"]),
    "staged": lambda row: number(row["staged_seqno"]),
    "source": lambda row: number(row["source_high_seqno"]),
    "lag": lambda row: number(row["lag_seqnos"]),
    "for": lambda row: duration(row["lag_s"]),
    "documents": lambda row: number(row["documents"]),
    "rollbacks": lambda row: number(row["rollback_count"]),
    "": lambda row: str(row["detail"] or ""),
}


def groups_text(groups: Sequence[int]) -> str:
    text = ",".join(map(str, groups))
    return text if len(text) <= 16 else f"{len(groups)} groups"


def row_table(columns: Mapping[str, Cell], rows: Sequence[Mapping[str, Any]], right: Sequence[int]) -> Table:
    return plain_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows], right=right)


def trouble_table(troubles: Sequence[Mapping[str, Any]]) -> Table:
    lines = [[trouble["where"] or "all", duration(trouble["lag_s"]), str(trouble["error"])] for trouble in troubles]
    return plain_table(["vbuckets", "lag", "error"], lines, right=(1,))


def status_view(document: Mapping[str, Any], *, every_vbucket: bool = False) -> RenderableType:
    parts: list[RenderableType] = [summary(document)]
    if document["workers"]:
        parts += ["", row_table(WORKER_COLUMNS, document["workers"], right=(0, 2, 4, 5, 6, 7))]
    if document["servers"]:
        parts += ["", row_table(SERVER_COLUMNS, document["servers"], right=(2, 3, 4, 5, 6, 7))]
    rows = document["vbuckets"]
    if every_vbucket:
        parts += ["", row_table(VBUCKET_COLUMNS, rows, right=(0, 3, 4, 5, 6, 7, 8, 9))]
    elif rows:
        states = ", ".join(f"{count} {state}" for state, count in sorted(document["totals"]["states"].items()))
        parts += ["", f"[dim]vbuckets[/dim]  {escape(states)}"]
        troubles = [trouble for trouble in document["troubles"] if trouble["vbuckets"] and trouble["error"]]
        if troubles:
            parts += ["", trouble_table(troubles[:TROUBLES_MAX])]
        if len(troubles) > TROUBLES_MAX:
            parts.append(f"[dim]... and {len(troubles) - TROUBLES_MAX} more errors (status --all)[/dim]")
    return Group(*parts)


# -- progress ---------------------------------------------------------------------------------------------------------


def progress_line(document: Mapping[str, Any]) -> str:
    done = document.get("catch_up")
    if not done:
        return f"{document['state']}: {document.get('message') or ''}".rstrip(": ")
    rate = number(document["totals"].get("documents_per_s"))
    return (
        f"{number(done['seqnos_received'])} of {number(done['seqnos_target'])} "
        f"seqnos received, {number(done['seqnos_published'])} published | "
        f"{done['vbuckets_done']} of {done['vbuckets']} vbuckets | {rate}/s"
    )


def command_name() -> str:
    """Return the name by which the program was called, so that printed commands can be copied."""
    called = sys.argv[0]
    if os.path.basename(called) != "dcp-mirror" or shutil.which("dcp-mirror") == called:
        return "dcp-mirror"
    return min(called, os.path.relpath(called), key=len)


class ProgressLine:
    """Shows the newest line of a task's progress on stderr: redrawn on a terminal, elsewhere every few seconds."""

    def __init__(self) -> None:
        self._last_line = ""
        self._last_s = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if stderr.is_terminal:
            self._live = Live(console=stderr, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last line on the screen."""
        if self._live is not None:
            self._live.stop()

    def show(self, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        elif line != self._last_line and time.monotonic() - self._last_s >= PROGRESS_INTERVAL_S:
            self._last_line, self._last_s = line, time.monotonic()
            stderr.print(Text(line), soft_wrap=True)


def show(view: RenderableType) -> None:
    """Print `view` on stdout. A pipe gets no padding, and COLUMNS (default: 160) columns."""
    if stdout.is_terminal:
        stdout.print(view)
        return
    width = int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else 160
    console = DataConsole(highlight=False, width=width, file=sys.stdout)
    with console.capture() as drawn:
        console.print(view)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))
