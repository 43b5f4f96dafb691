"""`events`: what happened to the mirror lately, and what happens next, from the service that runs.

Knows the service's command `events`; how an event looks is `render`'s matter. Invariant: with `--follow` each event of
a service is printed once, also after another service has taken its place.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from cli import exits, options, output, render
from mirror import client
from mirror.errors import SupervisionError
from mirror.messages import GetEvents

WAIT_S = 20.0
"""How long the service waits for the next event before it answers without one."""
AWAY_INTERVAL_S = 1.0
"""How often a service that has ended is looked for."""


def events(
    data: options.DataOption = None,
    config: options.ConfigOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for further events until Ctrl-C.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Show what happened: rollbacks, resyncs, the source lost and back, full disks, processes that died, and so on."""
    path = options.data_directory(data, config)
    pid, number, away = None, 0, False
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            answer = client.ask(path, GetEvents(number, WAIT_S if pid is not None else 0))
            if answer is None and (pid is None or not follow):
                raise SupervisionError(
                    f"no service runs for {path}", hint="events are kept by the service; older ones are in its log"
                )
            if answer is None:
                if not away:
                    exits.complain(f"the service of {path} has ended; waiting for the next one")
                away = True
                time.sleep(AWAY_INTERVAL_S)
                continue
            if answer["pid"] != pid:
                restarted, pid, number, away = pid is not None, answer["pid"], 0, False
                if restarted:
                    continue
            for event in answer["events"]:
                number = event["number"]
                if as_json:
                    output.print_json(event)
                else:
                    render.print_event(event)
            sys.stdout.flush()
            if not follow:
                return
