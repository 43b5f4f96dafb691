"""`check`: the full integrity walk of the store.

Knows how to ask for it and how to say what was found; every invariant is the store's own. Exit code 3 when something
is wrong. Works next to a running service: it reads.
"""

from __future__ import annotations

from typing import Any

import typer

from cli import options, output, render
from cli.exits import CommandEnded
from mirror.errors import ExitCode
from storage.admin import check as storage_check

PLAIN_INTERVAL_S = 5.0


def check(
    data: options.DataOption = None,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Check every invariant of the stored data. Exit code 3 if one is broken."""
    path = str(options.data_directory(data, config))
    with render.Screen(to_stderr=True, plain_interval_s=PLAIN_INTERVAL_S) as screen:

        def progress(done: int, of: int) -> None:
            line = f"checked {done} of {of} vbuckets"
            screen.show(line, line)

        report = storage_check.check(path, progress=progress)
    found: list[str] = [str(problem) for problem in report.problems]
    if as_json:
        shape: dict[str, Any] = {"data": path, "ok": not found, "problems": found}
        looked_at = {name: getattr(report, name) for name in ("vbuckets", "rows", "key_rows", "boundaries")}
        output.print_json(shape | looked_at)
    else:
        for problem in found:
            typer.echo(problem)
        looked = f"{report.vbuckets} vbuckets, {report.rows:,} rows, {report.boundaries:,} boundaries"
        typer.echo(f"{path}: {f'{len(found)} problems' if found else 'sound'} ({looked})")
    if found:
        raise CommandEnded(ExitCode.DATA)
