"""`status`: the state of a mirror, from its service or else from the store; `events`: its past and new events.

The JSON has the same shape with and without a service; unknown values are null.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from cli import options, output, render
from cli.exits import CommandEnded
from mirror import client
from mirror.errors import ExitCode
from mirror.messages import GetStatus, Status
from mirror.supervise.events.log import read_events
from mirror.supervise.status import stored_status, summed_if_known, totals
from storage.env import directory
from storage.errors import NotAMirror, StorageError
from storage.read.view import open_view

READY_INTERVAL_S = 0.2
EVENTS_INTERVAL_S = 0.5
COUNT_SEQNOS_MAX = 500_000
"""Limit of the seqnos to walk for a count: a second or two. Only `status --count` makes a longer walk."""


def count_documents(data: Path, document: Status, *, always: bool = False) -> None:
    """Set `documents` in the rows and totals of a status, unless that takes long. `always`: ignore COUNT_SEQNOS_MAX."""
    rows = document["vbuckets"]
    if not rows or (sum(row["published_seqno"] or 0 for row in rows) > COUNT_SEQNOS_MAX and not always):
        return
    failures: list[str] = []
    with open_view(str(data), stale_reads=True, partial=True) as view:
        for row in rows:
            if row["state"] == "damaged":
                continue
            try:
                row["documents"] = view.count(row["vbid"])
            except StorageError as error:
                failures.append(f"documents of vbucket {row['vbid']} cannot be counted: {error}")
    document["warnings"] += failures[:1]
    document["totals"] |= {"documents": summed_if_known([row["documents"] for row in rows])}


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
    count_documents(path, document, always=count)
    if as_json:
        output.print_json(document)
    else:
        render.show(render.status_view(document, every_vbucket=every))
    if (ready or wait_ready) and document["reasons"]:
        raise CommandEnded(ExitCode.FAILED)


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
