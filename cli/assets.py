"""`assets`: the alert rules and the dashboard that belong to this version's metrics, as files.

Knows where the package keeps them; what they say, they say themselves. Invariant: a file that is there already is never
overwritten with other content.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from mirror.errors import ConfigError

ASSETS = {"alerts.yml": "dcp-mirror-alerts.yml", "dashboard.json": "dcp-mirror-dashboard.json"}


def assets(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Directory for the files; made where it is missing.")],
) -> None:
    """Write Prometheus alert rules and a Grafana dashboard for this version's metrics."""
    try:
        to.mkdir(parents=True, exist_ok=True)
        texts = {to / name: (files("mirror.serve") / "assets" / own).read_text() for own, name in ASSETS.items()}
        for path, text in texts.items():
            if path.exists() and path.read_text() != text:
                raise ConfigError(
                    f"{path} is there already, with other content", hint="move it away, or name another directory"
                )
        for path, text in texts.items():
            path.write_text(text)
            typer.echo(path)
    except OSError as error:
        raise ConfigError(f"{to}: {error.strerror}", hint="name a directory that this user may write to") from None
