"""`sync`: keeps Delta tables current. Everything that can be refused is refused before a task starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from cli import options, output, render, tasks
from mirror.errors import ConfigError

if TYPE_CHECKING:
    from mirror.spark.pipeline.sync import BatchFigures, MergeFigures, Synced

AUTO = "auto"
"""Value of --schema: infer the schema from a sample."""
NAMES_SHOWN = 20
"""Limit of the names that `--schema auto` says it leaves out."""


def sync(
    to: Annotated[
        str,
        options.optional(
            "--to", metavar="DIR|URL", help="Destination: a path, file:///path, s3://bucket/prefix, gs:// or abfss://."
        ),
    ],
    data: options.DataOption = None,
    source: Annotated[
        str | None,
        options.optional(
            "--source",
            "-s",
            metavar="URL",
            help="Read from here instead of --data: couchbase://user@host/bucket, or a mirror's DCP port.",
        ),
    ] = None,
    collection: tasks.CollectionsOption = None,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="End once the tables have everything the source had at the start.")
    ] = False,
    trigger_s: Annotated[float, typer.Option("--trigger", min=0, help="Seconds from one batch to the next.")] = 10.0,
    max_rows: Annotated[int, typer.Option("--max-rows", min=1, help="Approximate events of a batch.")] = 1_000_000,
    max_bytes: Annotated[
        str | None,
        options.optional(
            "--max-bytes", metavar="BYTES", help="Approximate stored bytes of a batch; not with --source. Default: 1g."
        ),
    ] = None,
    on_lost_history: Annotated[
        str,
        options.optional(
            "--on-lost-history",
            metavar="fail|resync",
            help="Reaction if the history to resume from is gone.",
            show_default=True,
        ),
    ] = "fail",
    max_age_s: Annotated[
        float, typer.Option("--max-age", min=0, help="Seconds that TO/documents may be older than TO/changes.")
    ] = 600.0,
    keep_hours: Annotated[
        int, typer.Option("--keep-hours", min=0, help="Time for readers of an older version of TO/documents.")
    ] = 1,
    schema: Annotated[
        str | None,
        options.optional(
            "--schema",
            metavar="COLUMNS",
            help="Columns of JSON documents: 'total double, state string'; auto: those of a sample.",
        ),
    ] = None,
    mode: Annotated[
        str,
        options.optional(
            "--mode",
            metavar="permissive|failfast",
            help="A document that does not fit --schema gives nulls, or an error.",
            show_default=True,
        ),
    ] = "permissive",
    max_misfits: tasks.MisfitsOption = 0.01,
    time_zone: tasks.TimeZoneOption = None,
    epoch: tasks.EpochOption = None,
    overwrite_schema: tasks.OverwriteSchemaOption = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Keep two Delta tables: TO/documents with current documents, TO/changes with each event once. Resumes where it
    ended.

    With --schema, TO/documents has columns from the body. Columns added later are filled in all rows.
    """
    tasks.need("pyarrow", "deltalake")
    os.umask(0o077)  # libraries make the files
    source_options = {
        "maxRowsPerBatch": str(max_rows),
        **({"maxBytesPerBatch": max_bytes} if max_bytes is not None else {}),
        "onLostHistory": on_lost_history,
        **({"collection": collection} if collection else {}),
        **({"connection": source} if source else {"path": str(tasks.path_from(options.data_directory(data, config)))}),
    }
    from mirror.spark.pipeline.sync import How, look_at
    from mirror.spark.pipeline.sync import sync as run
    from mirror.spark.tables.documents import Layout
    from mirror.typed.ddl import fields_of

    columns = (
        None if schema is None else schema_of(schema, source_options.get("path"), tasks.collections_from(collection))
    )
    how = How(
        trigger_s=trigger_s,
        available_now=available_now,
        max_age_s=max_age_s,
        keep_hours=keep_hours,
        layout=Layout(
            None if columns is None else fields_of(columns),
            tasks.reading_from(mode, time_zone, epoch),
            max_misfits,
            overwrite_schema,
        ),
    )
    tasks.check_destination(to)
    found = look_at(source_options, options.settings_from({"source": source}, config=config).settings)
    with (
        tasks.runner("sync") as runner,
        render.ProgressLine() as screen,
        ending() as stop,
    ):
        done = run(
            source_options,
            to,
            runner,
            how,
            part_vbuckets=found.part_vbuckets,
            on_figures=partial(show_figures, screen, as_json),
            stop=stop,
        )
    if as_json:
        output.print_json(asdict(done))
        return
    batches = output.counted(done.batches, "batch", "batches")
    output.echo(f"{to}: {output.counted(done.events, 'event')} in {batches}, {changed_rows(done)}")


def show_figures(screen: render.ProgressLine, as_json: bool, figures: BatchFigures | MergeFigures) -> None:
    from mirror.spark.pipeline.sync import BatchFigures

    is_batch = isinstance(figures, BatchFigures)
    if as_json:
        output.print_json({"event": "batch" if is_batch else "merge"} | asdict(figures))
        sys.stdout.flush()
    screen.show(batch_line(figures) if isinstance(figures, BatchFigures) else merge_line(figures))


def changed_rows(figures: MergeFigures | Synced) -> str:
    misfits = f", {figures.misfits:,} not fitting the schema" if figures.misfits else ""
    return f"{figures.inserted:,} inserted, {figures.updated:,} updated, {figures.deleted:,} deleted{misfits}"


def merge_line(figures: MergeFigures) -> str:
    cost = f"{output.size(figures.rewritten_bytes)} rewritten, {output.duration(figures.duration_ms / 1000)}"
    return f"merge up to batch {figures.batch} | {changed_rows(figures)} | {cost}"


def batch_line(figures: BatchFigures) -> str:
    rate = f"{output.number(figures.events_per_s)}/s, {output.duration(figures.duration_ms / 1000)}"
    events = output.counted(figures.events, "event")
    return f"batch {figures.batch} | {events} | {rate} | {figures.lag_seqnos:,} seqnos behind"


def schema_of(text: str, path: str | None, collections: Sequence[str | int] | None) -> str:
    """Return the columns of `--schema`; for `auto` those of a sample. Raises ConfigError."""
    if text != AUTO:
        return text
    from mirror.spark.tables.documents import is_column
    from mirror.sql.schema import joint_columns
    from storage.read.view import open_view

    if path is None:
        raise ConfigError("--schema auto takes a sample of a mirror", hint="give --data, or name the columns")
    with open_view(path) as view:
        names = collections or sorted(view.reading().collections())
        columns = joint_columns(view, names)
    found = ", ".join(each.ddl for each in columns if is_column(each.field))
    if left_out := sorted({each.name for each in columns if not is_column(each.field)}):
        shown = ", ".join(map(repr, left_out[:NAMES_SHOWN])) + (" ..." if len(left_out) > NAMES_SHOWN else "")
        output.echo(
            f"warning: --schema auto leaves out {output.counted(len(left_out), 'field')} with a name that the table "
            f"cannot have (_value has them): {shown}",
            err=True,
        )
    if not found:
        raise ConfigError("--schema auto: the sample has no JSON object", hint="name the columns")
    return found


@contextmanager
def ending() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C or SIGTERM sets, to end after the current work. A second Ctrl-C ends at once."""
    stop = threading.Event()

    def ask(number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    kept = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
