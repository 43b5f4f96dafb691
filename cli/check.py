"""`check`: the full integrity walk of the store.

Knows how to ask for it and how to say what was found; every invariant is the store's own. Exit code 3 when something
is wrong. Works beside a running service: it reads.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli import options, output
from cli.exits import Ended
from mirror.errors import ExitCode
from storage import check as storage_check


def check(
    data: options.DataOption = None,
    deep: Annotated[bool, typer.Option("--deep", help="Walk the pages of the LMDB files too; slower.")] = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Check every invariant of the stored data. Exit code 3 when one does not hold."""
    path = str(options.data_directory(data, config))
    report = storage_check.check(path, deep=deep)
    found: list[str] = [str(problem) for problem in report.problems]
    if as_json:
        shape: dict[str, Any] = {"data": path, "deep": deep, "ok": not found, "problems": found}
        output.print_json(shape)
    else:
        for problem in found:
            typer.echo(problem)
        typer.echo(f"{path}: {len(found)} problems" if found else f"{path}: sound")
    if found:
        raise Ended(ExitCode.DATA)
