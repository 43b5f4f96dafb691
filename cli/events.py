"""`events`: past and new events of a mirror, from the files that its service writes.

Invariant: with `--follow` each event is printed once, also after another service took over.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from cli import options, output, render
from mirror.supervise.events.log import read_events
from storage.env import directory

LOOK_INTERVAL_S = 0.5


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
        directory.load(str(path))  # raises NotAMirror: nothing is not "no events"
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
            time.sleep(LOOK_INTERVAL_S)
