"""`stop` and `reload`: what SIGTERM and SIGHUP do to a service, without its process id.

Knows the control socket and the service's lock; never a process. Invariant: `stop` ends with 0 only once no service
runs on the directory.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from cli import options
from mirror import client
from mirror.errors import SupervisionError
from mirror.messages import ReloadSettings, StopService
from mirror.supervise.lock import is_served

LOOK_INTERVAL_S = 0.05


def stop(
    data: options.DataOption = None,
    config: options.ConfigOption = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for its end.")] = 60.0,
) -> None:
    """Stop the service of a data directory cleanly and wait for its end."""
    path = options.data_directory(data, config)
    if client.ask(path, StopService()) is None:
        raise SupervisionError(f"no service runs for {path}", hint="nothing is to be stopped")
    until_s = time.monotonic() + timeout
    while is_served(path):
        if time.monotonic() >= until_s:
            raise SupervisionError(
                f"the service of {path} has not ended within {timeout:g} s", hint="look at its log, or wait longer"
            )
        time.sleep(LOOK_INTERVAL_S)


def reload(data: options.DataOption = None, config: options.ConfigOption = None) -> None:
    """Have the service of a data directory read its settings again, as SIGHUP does. `events` shows the changes."""
    path = options.data_directory(data, config)
    if client.ask(path, ReloadSettings()) is None:
        raise SupervisionError(f"no service runs for {path}", hint="start it with `dcp-mirror run`")
