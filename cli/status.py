"""`status`, `top`: the state of a mirror, from its service or else from the store; `events`: its past and new events.

The JSON has the same shape with and without a service; unknown values are null.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from cli import options, output, render
from cli.exits import CommandEnded
from mirror import client
from mirror.errors import ExitCode
from mirror.messages import GetStatus, Status
from mirror.supervise.events.log import read_events
from mirror.supervise.status import VbucketRow, stored_status, summed_if_known, totals
from storage.env import directory
from storage.errors import NotAMirror, StorageError
from storage.read.view import View, open_view

READY_INTERVAL_S = 0.2
EVENTS_INTERVAL_S = 0.5
COUNT_SEQNOS_MAX = 2_000_000
"""Limit of the seqnos to walk for a count. Only `status --count` makes a longer walk."""


class DocumentCounter:
    """Counts live documents. A vbucket is counted again only if its position changed."""

    def __init__(self, data: Path, *, always: bool = False) -> None:
        """`always`: ignore COUNT_SEQNOS_MAX."""
        self._data = str(data)
        self._always = always
        self._view: View | None = None
        self._counted: dict[int, tuple[tuple[int | None, int | None], int]] = {}

    def fill(self, document: Status) -> None:
        """Set `documents` in the rows and totals of a status."""
        rows = document["vbuckets"]
        moved = sum(row["published_seqno"] or 0 for row in rows if self._position(row) != self._known(row["vbid"]))
        if not rows or (moved > COUNT_SEQNOS_MAX and not self._always):
            return
        if self._view is None:
            self._view = open_view(self._data, stale_reads=True, partial=True)
        failures: list[str] = []
        for row in rows:
            if row["state"] == "damaged":
                continue
            if self._position(row) != self._known(row["vbid"]):
                try:
                    self._counted[row["vbid"]] = (self._position(row), self._view.count(row["vbid"]))
                except StorageError as error:
                    failures.append(f"documents of vbucket {row['vbid']} cannot be counted: {error}")
                    continue
            row["documents"] = self._counted[row["vbid"]][1]
        document["warnings"] += failures[:1]
        document["totals"] |= {"documents": summed_if_known([row["documents"] for row in rows])}

    def _position(self, row: VbucketRow) -> tuple[int | None, int | None]:
        return row["branch"], row["published_seqno"]

    def _known(self, vbid: int) -> tuple[int | None, int | None] | None:
        return self._counted[vbid][0] if vbid in self._counted else None


def current_status(data: Path) -> Status:
    answer = client.ask(data, GetStatus())
    if answer is None:
        return stored_status(data)
    document: Status = answer["status"]
    known = {row["vbid"] for row in document["vbuckets"]}
    if document["vbuckets_held"] and len(known) < document["vbuckets_held"]:
        stored = stored_status(data)["vbuckets"]
        document["vbuckets"] = sorted(
            document["vbuckets"] + [row for row in stored if row["vbid"] not in known], key=lambda row: row["vbid"]
        )
        document["totals"] |= totals(document["vbuckets"])
    return document


def ready_status(data: Path, timeout_s: float | None) -> Status:
    """Return the status once the mirror is ready. After `timeout_s` return the last status, or raise NotAMirror."""
    until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(NotAMirror):  # the service has not made the mirror yet
            document = current_status(data)
            if not document["reasons"] or time.monotonic() >= until_s:
                return document
        if time.monotonic() >= until_s:
            return current_status(data)
        time.sleep(READY_INTERVAL_S)


def status(
    data: options.DataOption = None,
    config: options.ConfigOption = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Show every vbucket, not only the worst.")] = False,
    count: Annotated[bool, typer.Option("--count", help="Count the documents, however many there are.")] = False,
    ready: Annotated[
        bool, typer.Option("--ready", help="Exit code 1 if the mirror is not ready (/readyz answers 503).")
    ] = False,
    wait_ready: Annotated[bool, typer.Option("--wait-ready", help="Wait until the mirror is ready.")] = False,
    timeout: Annotated[
        float | None, options.optional("--timeout", min=0, help="Seconds to wait; then exit code 1.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show the state of the mirror: positions, lag, workers. Works with the service up or down."""
    path = options.data_directory(data, config)
    document = ready_status(path, timeout) if wait_ready else current_status(path)
    DocumentCounter(path, always=count).fill(document)
    if as_json:
        output.print_json(document)
    else:
        render.show(render.status_view(document, every_vbucket=every))
    if (ready or wait_ready) and document["reasons"]:
        raise CommandEnded(ExitCode.FAILED)


def top(
    data: options.DataOption = None,
    config: options.ConfigOption = None,
    interval: Annotated[float, typer.Option("--interval", "-i", min=0.1, max=3600, help="Seconds per refresh.")] = 1.0,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Refreshes until it ends.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show the status live until q or Ctrl-C."""
    path = options.data_directory(data, config)
    counter = DocumentCounter(path)
    looks = 0
    with contextlib.suppress(KeyboardInterrupt), render.Screen(plain_interval_s=0) as screen, keys() as key_within:
        while True:
            document = current_status(path)
            counter.fill(document)
            if as_json:
                output.print_json(document)
            else:
                screen.show(render.top_view(document), render.status_line(document))
            looks += 1
            if looks == count:
                return
            if key_within(interval) in ("q", "Q"):
                return


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for one key of the terminal and returns the key, or "" without one.

    The terminal is restored at the end. No key is read if stdin is no terminal or this process is in the background.
    """
    descriptor, before = -1, None
    with contextlib.suppress(OSError, ValueError, termios.error):
        found = sys.stdin.fileno()
        if os.isatty(found) and _in_foreground(found):
            before = termios.tcgetattr(found)
            tty.setcbreak(found, termios.TCSADRAIN)
            descriptor = found

    def within(seconds: float) -> str:
        nonlocal descriptor
        if descriptor < 0:
            time.sleep(seconds)
        elif select.select([descriptor], [], [], seconds)[0]:
            if key := os.read(descriptor, 1):
                return key.decode(errors="replace")
            descriptor = -1  # the terminal is gone
        return ""

    try:
        yield within
    finally:
        if descriptor >= 0 and before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _in_foreground(descriptor: int) -> bool:
    """Return False if changing the terminal would stop this process (SIGTTOU)."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not the controlling terminal: it sends no SIGTTOU
        return True


def events(
    data: options.DataOption = None,
    config: options.ConfigOption = None,
    since: Annotated[
        str | None,
        options.optional(
            "--since", metavar="TIME|AGE", help="Only events after this ISO 8601 time, or this age, such as 2h."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further events until Ctrl-C.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Show past events: rollbacks, resyncs, a lost source, full disks, processes that died, and so on.

    Works with the service up or down.
    """
    path = options.data_directory(data, config)
    if not follow:
        directory.load(str(path))  # raises NotAMirror instead of showing no events
    since_ms = options.moment_ms(since, "--since") if since is not None else 0
    number = 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            for event in read_events(path, number):
                number = event["number"]
                if event["time_ms"] < since_ms:
                    continue
                if as_json:
                    output.print_json(event)
                else:
                    render.print_event(event)
            sys.stdout.flush()
            if not follow:
                return
            time.sleep(EVENTS_INTERVAL_S)
