"""The command `dcp-mirror`: mounts the commands and turns errors into exit codes.

Only the module of the named command is imported, because importing all takes half a second.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cli import exits
from mirror import __version__

COMMANDS = {
    "Mirror a bucket": {
        "demo": "Show a mirror at work, with a killed worker and a failover.",
        "run": "Mirror a bucket until stopped.",
        "stop": "Stop the service of a mirror.",
        "rollback": "Return one vbucket to a kept boundary.",
        "backup": "Copy the mirror, also while its service runs.",
        "restore": "Make a mirror from a backup.",
        "sandbox": "Run the embedded source.",
        "user": "Manage the users that may read over the network.",
    },
    "Look at a mirror": {
        "status": "Show state, lag, positions and workers.",
        "events": "Show past events: rollbacks, resyncs, full disks.",
        "get": "Print one document.",
        "scan": "Print documents by prefix.",
        "sql": "Answer SQL, once or in a shell.",
        "schema": "Show the columns that documents have.",
        "changes": "Print changes, each with its token.",
        "export": "Write every document: JSON lines, Parquet, Delta.",
        "sync": "Keep Delta tables current, on Spark.",
        "state": "Show the stored positions of each vbucket.",
        "check": "Check the stored data.",
        "verify": "Compare the mirror with its source.",
        "doctor": "Examine a source, step by step.",
        "assets": "Write alert rules and a dashboard.",
        "config": "Show and explain settings.",
    },
}
"""The commands with their help lines, in the order of the help."""
EXAMPLES = {
    "demo": "dcp-mirror demo --seconds 30",
    "run": "dcp-mirror run --source couchbases://reader@db1,db2/orders --data /var/lib/orders --kv 11410 --http 8080",
    "stop": "dcp-mirror stop --data /var/lib/orders --timeout 30",
    "rollback": "dcp-mirror rollback --data /var/lib/orders --vbid 7 --to 1000 --dry-run",
    "backup": "dcp-mirror backup --data /var/lib/orders --to /backup/orders-monday",
    "restore": "dcp-mirror restore --from /backup/orders-monday --data /var/lib/orders",
    "sandbox": "dcp-mirror sandbox --port 11310 --bucket orders --load 10000 --rate 500",
    "user": "dcp-mirror user add reports --file /etc/dcp-mirror/users.json",
    "status": "dcp-mirror status --data /var/lib/orders --wait-ready --timeout 60",
    "events": "dcp-mirror events --data /var/lib/orders --since 2h",
    "get": "dcp-mirror get order::4711 --data /var/lib/orders --as-of 2026-01-31T12:00:00",
    "scan": "dcp-mirror scan --data /var/lib/orders --prefix order::47 --limit 10 --json",
    "sql": "dcp-mirror sql 'SELECT city, count(*) FROM orders GROUP BY city' --data /var/lib/orders",
    "schema": "dcp-mirror schema shop.orders --data /var/lib/orders",
    "changes": "dcp-mirror changes --data /var/lib/orders --follow --json",
    "export": "dcp-mirror export --data /var/lib/orders --to orders --format parquet --schema 'total double'",
    "sync": "dcp-mirror sync --data /var/lib/orders --to /lake/orders --available-now",
    "state": "dcp-mirror state --data /var/lib/orders --vbid 7",
    "check": "dcp-mirror check --data /var/lib/orders",
    "verify": "dcp-mirror verify --data /var/lib/orders",
    "doctor": "dcp-mirror doctor --source couchbases://reader@db1/orders",
    "assets": "dcp-mirror assets --to /tmp/monitoring",
    "config": "dcp-mirror config explain history_s",
}
MODULES = {
    "events": "status",
    "schema": "sql",
    "stop": "service",
    "assets": "service",
    "scan": "get",
} | {
    "restore": "backup",
    "check": "state",
}
"""The module of each command whose module has another name."""


class CommandGroup(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, lines in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl(list(lines.items()))


def show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"dcp-mirror {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A local, durable read replica of a Couchbase bucket, fed by DCP and kept in LMDB."""


def application(named: str) -> typer.Typer:
    """Return the application. Only the command `named` is imported; the others have only a line of help. If `named` is
    "", all are imported, for a process that forks a child for each command.
    """
    app = typer.Typer(
        name="dcp-mirror",
        cls=CommandGroup,
        help="A local, durable read replica of a Couchbase bucket, fed by DCP and kept in LMDB.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # Rich takes 0.15 s to import
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    for lines in COMMANDS.values():
        for name, line in lines.items():
            if named in (name, ""):
                _mount(app, name)
            else:
                app.command(name, help=line)(_not_imported)
    gc.freeze()  # prevents a garbage collection at exit, which takes a tenth of a second
    return app


def _not_imported() -> None:
    raise AssertionError("the command that is called is imported")


def _mount(app: typer.Typer, name: str) -> None:
    module = import_module(f"cli.{MODULES.get(name, name)}")
    example = f"Example: {EXAMPLES[name]}"
    if isinstance(group := getattr(module, "app", None), typer.Typer):
        app.add_typer(group, name=name, epilog=example)
    else:
        app.command(name, epilog=example)(getattr(module, name))


def named_command(arguments: Sequence[str]) -> str:
    """Return the command in the arguments, or in the line that a shell completes; "--help" if there is none."""
    completed = os.environ.get("COMP_WORDS", "").split() or os.environ.get("_TYPER_COMPLETE_ARGS", "").split()
    return next((each for each in (*completed[1:], *arguments) if not each.startswith("-")), "--help")


def main() -> None:
    warnings.formatwarning = lambda message, *_: f"dcp-mirror: warning: {message}\n"
    sys.exit(
        exits.guarded(lambda: application(named_command(sys.argv[1:]))(prog_name="dcp-mirror", standalone_mode=False))
    )


if __name__ == "__main__":
    main()
