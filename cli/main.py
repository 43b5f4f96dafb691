"""The command `dcp-mirror`: mounts the commands and turns whatever ends them into an exit code.

Knows which commands there are; what they do is their own. A command's module is imported when that command is named,
because all of them together take twice as long to import as one. Invariant: asserts are on, or nothing runs: they
guard the data.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Annotated

import typer

from cli import exits
from mirror import __version__

MIRROR, LOOK = "Mirror", "Look"
PANELS = {
    "init": MIRROR,
    "demo": MIRROR,
    "run": MIRROR,
    "status": LOOK,
    "top": LOOK,
    "events": LOOK,
    "get": LOOK,
    "scan": LOOK,
    "changes": LOOK,
    "export": LOOK,
    "state": LOOK,
    "check": LOOK,
    "verify": LOOK,
    "doctor": LOOK,
    "rollback": MIRROR,
    "backup": MIRROR,
    "restore": MIRROR,
    "record": MIRROR,
    "replay": MIRROR,
    "sandbox": MIRROR,
    "user": MIRROR,
    "pipeline": LOOK,
    "assets": LOOK,
    "bench": LOOK,
    "config": LOOK,
}
"""Every command, in the order of the help, and the panel that it stands in."""
MODULES = {"top": "status"}
"""Modules that are not called as their command."""


def show_version(requested: bool) -> None:
    """Print the version and end."""
    if requested:
        typer.echo(f"dcp-mirror {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A local, durable read replica of a Couchbase bucket, fed by DCP and kept in LMDB."""


def application(arguments: list[str]) -> typer.Typer:
    """Return the application with the command that the arguments name, or with all where they name none."""
    app = typer.Typer(
        name="dcp-mirror",
        help="A local, durable read replica of a Couchbase bucket, fed by DCP and kept in LMDB.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    named = next((each for each in arguments if not each.startswith("-")), "")
    for name in [named] if named in PANELS else PANELS:
        module = import_module(f"cli.{MODULES.get(name, name)}")
        if isinstance(group := getattr(module, "app", None), typer.Typer):
            app.add_typer(group, name=name, rich_help_panel=PANELS[name])
        else:
            app.command(rich_help_panel=PANELS[name])(getattr(module, name))
    gc.freeze()  # all that was imported stays: to look at it again when the process ends takes a tenth of a second
    return app


def main() -> None:
    """Entry of the installed command."""
    if not __debug__:
        exits.complain("asserts are switched off (python -O, PYTHONOPTIMIZE): they guard the data, so nothing runs")
        sys.exit(2)
    sys.exit(exits.guarded(lambda: application(sys.argv[1:])(prog_name="dcp-mirror", standalone_mode=False)))


if __name__ == "__main__":
    main()
