"""`backup`: a consistent copy of a mirror as a folder or a tar, also while its service runs; `restore`: the reverse.

An unfinished backup has no `backup.json`. If the reader of stdout closes it early, the command fails.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import IO, Annotated

import typer

from cli import options, output, render
from cli.get import time_from
from mirror.clock import SystemClock
from mirror.errors import ConfigError, SupervisionError
from storage.admin import archive
from storage.admin import backup as store_backup
from storage.admin.backup import BackupPart

STDOUT = "-"


def backup(
    to: Annotated[
        str, options.optional("--to", metavar="DIR", help="Empty or new directory; -: stream a tar to stdout.")
    ],
    data: options.DataOption = None,
    as_of: options.AsOfTimeOption = None,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Copy the mirror, also while its service runs: each group as of one commit, each file with a checksum."""
    path = str(options.data_directory(data, config))
    moment = time_from(as_of)
    if to == STDOUT and as_json:
        raise ConfigError("--to - and --json both print to stdout", hint="leave --json out, or give --to a directory")
    if to == STDOUT and sys.stdout.isatty():
        raise ConfigError("the tar would go to the terminal", hint="redirect stdout, or give --to a directory")
    time_ms = SystemClock().wall_ms()
    as_of_ms = None if moment is None else moment.ms
    with render.ProgressLine() as screen:

        def progress(groups: int, size: int) -> None:
            screen.show(f"{groups} groups copied, {output.size(size)}")

        if to == STDOUT:
            summary = to_tar(path, sys.stdout.buffer, time_ms=time_ms, as_of_ms=as_of_ms, progress=progress)
        else:
            sink = archive.FolderSink(to)
            try:
                summary = store_backup.create(path, sink, time_ms=time_ms, as_of_ms=as_of_ms, progress=progress)
            except BaseException:
                sink.discard()
                raise
    if as_json:
        output.print_json(summary_object(summary) | {"data": path, "backup": to})
    else:
        where = "stdout" if to == STDOUT else to
        output.echo(f"{path}: copied to {where} ({in_words(summary)})", err=to == STDOUT)


def to_tar(
    path: str, file: IO[bytes], *, time_ms: int, as_of_ms: int | None, progress: store_backup.Progress
) -> store_backup.Summary:
    try:
        with closing(archive.TarSink(file, time_s=time_ms // 1000)) as sink:
            summary = store_backup.create(path, sink, time_ms=time_ms, as_of_ms=as_of_ms, progress=progress)
        file.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:  # `exits.guarded` would end with success
            raise SupervisionError("stdout was closed before the backup was complete") from error
        raise
    return summary


def summary_object(summary: store_backup.Summary) -> dict[str, object]:
    return {
        "bucket": summary.identity.bucket_name,
        "bucket_uuid": summary.identity.bucket_uuid,
        "time_ms": summary.time_ms,
        "as_of_ms": summary.as_of_ms,
        "groups": summary.identity.group_count,
        "vbuckets": len(summary.published),
        "published_seqnos": sum(summary.published.values()),
        "files": summary.parts,
        "bytes": summary.bytes,
    }


def in_words(summary: store_backup.Summary) -> str:
    when = "" if summary.as_of_ms is None else f", as of {output.moment(summary.as_of_ms)}"
    return (
        f"bucket {summary.identity.bucket_name}, {len(summary.published)} vbuckets, {summary.parts} files, "
        f"{output.size(summary.bytes)}{when}"
    )


def parts_of(source: str) -> Iterator[BackupPart]:
    try:
        if source == STDOUT:
            yield from archive.tar_parts(sys.stdin.buffer)
        elif os.path.isdir(source):
            yield from archive.folder_parts(source)
        else:
            with open(source, "rb") as file:
                yield from archive.tar_parts(file)
    except OSError as error:
        raise archive.unreadable(error, "stdin" if source == STDOUT else source) from None


def restore(
    source: Annotated[
        str,
        options.optional("--from", metavar="BACKUP", help="Directory or tar that `backup` wrote; -: a tar on stdin.")
    ],
    data: options.DataOption = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Compare every row with its checksum, and refuse a damaged mirror."
        ),
    ] = True,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:  # fmt: skip
    """Restore a backup into an empty directory. `run` then fetches only later changes."""
    path = str(options.data_directory(data, config))
    store_backup.check_target(path)
    with render.ProgressLine() as screen:
        summary = store_backup.restore(
            parts_of(source),
            path,
            clock_ms=SystemClock().wall_ms,
            progress=lambda groups, size: screen.show(f"{output.size(size)} read, {groups} groups"),
            check_rows=check,
        )
    if as_json:
        output.print_json(summary_object(summary) | {"data": path, "backup": source})
    else:
        output.echo(f"{path}: restored ({in_words(summary)}, of {output.moment(summary.time_ms)})")
