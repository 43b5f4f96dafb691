"""`restore`: a mirror made of a backup, in a directory that is empty.

Knows where a backup comes from; what is verified, and how it becomes a mirror, the store knows. Invariant: exit code 0
means that every checksum matched (with --no-check: those of the files); after any other one there is no mirror at the
target.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from cli import options, output, render
from cli.backup import PLAIN_INTERVAL_S, STDOUT, in_words, summary_object
from mirror.clock import SystemClock
from storage.admin import archive, backup
from storage.admin.backup import BackupPart
from storage.errors import StorageError


def parts_of(source: str) -> Iterator[BackupPart]:
    """Open the parts of a backup: a folder, a tar, or a tar on stdin. Raises CorruptedError, OSError."""
    if source == STDOUT:
        yield from archive.tar_parts(sys.stdin.buffer)
    elif os.path.isdir(source):
        yield from archive.folder_parts(source)
    else:
        try:
            with open(source, "rb") as file:
                yield from archive.tar_parts(file)
        except OSError as error:
            hint = "give --from what `backup` wrote"
            raise StorageError(f"cannot be read: {error.strerror}", path=source, hint=hint) from None


def restore(
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="BACKUP", help="Directory or tar that `backup` wrote; -: a tar on stdin.",
            show_default=False,
        ),
    ],
    data: options.DataOption = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Compare every row with its checksum: refuses a mirror that was damaged already."
        ),
    ] = True,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:  # fmt: skip
    """Restore a backup into an empty directory. `run` continues from there without fetching anything again."""
    path = str(options.data_directory(data, config))
    backup.check_target(path)
    with render.Screen(to_stderr=True, plain_interval_s=PLAIN_INTERVAL_S) as screen:

        def progress(groups: int, size: int) -> None:
            line = f"{render.size(size)} read, {groups} groups"
            screen.show(line, line)

        summary = backup.restore(
            parts_of(source), path, clock_ms=SystemClock().wall_ms, progress=progress, check_rows=check
        )
    if as_json:
        output.print_json(summary_object(summary) | {"data": path, "backup": source})
    else:
        typer.echo(f"{path}: restored ({in_words(summary)}, of {render.moment(summary.time_ms)})")
