"""`stop`: acts on a service as SIGTERM does, without its process id; `assets`: files to monitor it.

`stop` exits with 0 only if no service runs on the directory any more.
"""

from __future__ import annotations

import time
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from cli import options, output
from mirror import client
from mirror.errors import ConfigError, SupervisionError
from mirror.messages import StopService
from mirror.supervise.lock import is_served
from storage.env.directory import replace_file

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


ASSETS = {"alerts.yml": "dcp-mirror-alerts.yml", "dashboard.json": "dcp-mirror-dashboard.json"}


def assets(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Directory for the files, created if missing.")],
) -> None:
    """Write Prometheus alert rules and a Grafana dashboard for this version's metrics."""
    try:
        to.mkdir(parents=True, exist_ok=True)
        texts = {to / name: (files("mirror.serve") / "assets" / own).read_text() for own, name in ASSETS.items()}
        for path, text in texts.items():
            if path.exists() and path.read_text() != text:
                raise ConfigError(f"{path} exists with other content", hint="move it away, or name another directory")
        for path, text in texts.items():
            replace_file(path, text.encode(), mode=0o666)
            output.echo(str(path))
    except OSError as error:
        raise ConfigError(f"{to}: {error.strerror}", hint="name a directory that this user may write to") from None
