"""The command `dcp-mirror`: mounts the commands and turns whatever ends them into an exit code.

Knows which commands there are; what they do is their own. Invariant: asserts are on, or nothing runs: they guard the
data.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cli import bench, config, exits, pipeline, sandbox, user
from cli.changes import changes
from cli.check import check
from cli.demo import demo
from cli.doctor import doctor
from cli.get import get
from cli.record import record
from cli.replay import replay
from cli.rollback import rollback
from cli.run import run
from cli.scan import scan
from cli.state import state
from cli.status import status, top
from cli.verify import verify
from mirror import __version__

app = typer.Typer(
    name="dcp-mirror",
    help="A local, durable read replica of a Couchbase bucket, fed by DCP and kept in LMDB.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        typer.echo(f"dcp-mirror {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A local, durable read replica of a Couchbase bucket, fed by DCP and kept in LMDB."""


MIRROR, LOOK = "Mirror", "Look"
app.command(rich_help_panel=MIRROR)(demo)
app.command(rich_help_panel=MIRROR)(run)
app.command(rich_help_panel=LOOK)(status)
app.command(rich_help_panel=LOOK)(top)
app.command(rich_help_panel=LOOK)(get)
app.command(rich_help_panel=LOOK)(scan)
app.command(rich_help_panel=LOOK)(changes)
app.command(rich_help_panel=LOOK)(state)
app.command(rich_help_panel=LOOK)(check)
app.command(rich_help_panel=LOOK)(verify)
app.command(rich_help_panel=LOOK)(doctor)
app.command(rich_help_panel=MIRROR)(rollback)
app.command(rich_help_panel=MIRROR)(record)
app.command(rich_help_panel=MIRROR)(replay)
app.add_typer(sandbox.app, name="sandbox", rich_help_panel=MIRROR)
app.add_typer(user.app, name="user", rich_help_panel=MIRROR)
app.add_typer(pipeline.app, name="pipeline", rich_help_panel=LOOK)
app.add_typer(bench.app, name="bench", rich_help_panel=LOOK)
app.add_typer(config.app, name="config", rich_help_panel=LOOK)


def main() -> None:
    """Entry of the installed command."""
    if not __debug__:
        exits.complain("asserts are switched off (python -O, PYTHONOPTIMIZE): they guard the data, so nothing runs")
        sys.exit(2)
    sys.exit(exits.guarded(lambda: app(prog_name="dcp-mirror", standalone_mode=False)))


if __name__ == "__main__":
    main()
