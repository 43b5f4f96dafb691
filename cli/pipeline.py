"""`pipeline`: the ready-made data pipelines: `export`, `sync`, `compare`, `backfill`.

Knows the command line, the progress, and where tasks run: on this machine's cores or in Spark. Invariants:
- packages of the extra `spark` are imported only when a command runs; the error about a missing package has a remedy;
- progress goes to stderr;
- after Ctrl-C or an error no incomplete target looks complete.

`spark-submit .../cli/pipeline.py export ...` runs the same command in the session of spark-submit.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import exits, options, output, render
from cli.get import time_from
from mirror.errors import ConfigError, ExitCode
from storage.format.tokens import full_name

if TYPE_CHECKING:
    from mirror.spark.pipeline.metrics import SyncMetrics
    from mirror.spark.pipeline.progress import BatchFigures, MergeFigures
    from mirror.spark.pipeline.runner import Runner
    from mirror.spark.pipeline.sync import Synced
    from mirror.spark.tables.documents import Layouts
    from mirror.typed.bodies import Reading


def private() -> None:
    """Make new files private by the umask, because libraries create them."""
    os.umask(0o077)


app = typer.Typer(
    name="pipeline",
    callback=private,
    help="Export, sync, compare and backfill in many tasks, on this machine or on Spark.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AUTO = "auto"
"""Value of --schema: infer the schema from a sample."""
KEYS_SHOWN = 20
"""Limit of the differing keys that `compare` prints."""
NAMED_SCHEMA = re.compile(r"\s*(?:([\w%-]+)\.)?([\w%-]+)\s*=(.*)", re.DOTALL)
"""A collection with its columns: `shop.orders=total double`."""

ToOption = Annotated[
    str,
    options.optional(
        "--to", metavar="DIR|URL", help="Destination: a path, file:///path, s3://bucket/prefix, gs:// or abfss://."
    ),
]
MasterOption = Annotated[
    str | None,
    options.optional(
        "--master",
        metavar="URL",
        help="Run on Spark: spark://host:port, local[4], yarn, ... Default: this machine's cores.",
    ),
]
SparkOption = Annotated[
    bool, typer.Option("--spark", help="Run on Spark with the master of its own configuration, as under spark-submit.")
]
CollectionsOption = Annotated[
    str | None,
    options.optional("--collection", "-c", metavar="SCOPE.NAME,...", help="Only these collections; default: all."),
]
SourceOption = Annotated[
    str | None,
    options.optional(
        "--source",
        "-s",
        metavar="URL",
        help="Read from here instead of --data: couchbase://user@host/bucket, or a mirror's DCP port.",
    ),
]
ModeOption = Annotated[
    str | None,
    options.optional(
        "--mode",
        metavar="failfast|permissive|dropmalformed",
        help="A document that does not fit --schema gives an error (default), nulls, or no row.",
    ),
]
TimeZoneOption = Annotated[
    str | None,
    options.optional("--time-zone", metavar="ZONE", help="Zone of times in documents that name none; default: UTC."),
]
EpochOption = Annotated[
    str | None,
    options.optional(
        "--epoch",
        metavar="seconds|millis|micros",
        help="Unit of numeric times in documents since 1970. Default: text, or seconds.",
    ),
]
MisfitsOption = Annotated[
    float,
    typer.Option(
        "--max-misfits",
        min=0,
        max=1,
        help="Largest share of documents that do not fit --schema (sync: in the first batch). Above it: exit code 3.",
    ),
]
ProcessesOption = Annotated[
    int | None, typer.Option("--processes", min=1, max=1024, help="Processes of this machine; default: its cores.")
]


need = partial(options.need, "pipelines need", "spark")


def path_from(text: str | Path) -> Path:
    need("pyarrow", "deltalake")
    from mirror.spark.places import local_path

    return local_path(text)


def data_from(data: Path | None, config: Path | None) -> Path:
    return path_from(options.data_directory(data, config))


def rewrite_rate_from(text: str) -> int:
    from mirror.spark.source.options import byte_count

    try:
        return 0 if text == "0" else byte_count(text)
    except ValueError as error:
        raise ConfigError(f"--rewrite-rate {text!r}: {error}") from None


def layouts_from(
    schemas: Sequence[str], per_collection: bool, reading: Reading, misfits_max: float, overwrite_schema: bool
) -> Layouts:
    from mirror.spark.tables.documents import Layout, Layouts
    from mirror.typed.ddl import fields_of

    found: dict[str | None, Layout] = {}
    for text in schemas:
        named = NAMED_SCHEMA.fullmatch(text)
        name = None if named is None else f"{named[1] or '_default'}.{named[2]}"
        if name is not None and not per_collection:
            raise ConfigError(f"--schema {text!r}: one table has one schema", hint="give --table-per-collection")
        if name in found:
            raise ConfigError(f"--schema is given twice for {name or 'all tables'}", hint="put all columns into one")
        fields = fields_of(text if named is None else named[3])
        found[name] = Layout(fields, reading, misfits_max, overwrite_schema)
    own = {name: layout for name, layout in found.items() if name is not None}
    return Layouts(per_collection, found.get(None, Layout()), own)


def schemas_from(
    schemas: Sequence[str], path: str | None, collections: Sequence[str] | None, per_collection: bool
) -> list[str]:
    """Return the schemas of `sync`; `auto` is replaced by the schema of a sample. Raises ConfigError."""
    if AUTO not in schemas:
        return list(schemas)
    from mirror.spark.tables.documents import is_column
    from mirror.sql.schema import joint_columns
    from storage.read.view import open_view

    if path is None:
        raise ConfigError("--schema auto takes a sample of a mirror", hint="give --data, or name the columns")
    with open_view(path) as view:
        names = collections or sorted(view.reading().collections())
        tables = [joint_columns(view, each) for each in ([[name] for name in names] if per_collection else [names])]
    texts = [", ".join(each.ddl for each in columns if is_column(each.field)) for columns in tables]
    if left_out := sorted({each.name for columns in tables for each in columns if not is_column(each.field)}):
        shown = ", ".join(map(repr, left_out[:KEYS_SHOWN])) + (" ..." if len(left_out) > KEYS_SHOWN else "")
        output.echo(
            f"warning: --schema auto leaves out {output.counted(len(left_out), 'field')} with a name that the tables "
            f"cannot have (_value has them): {shown}",
            err=True,
        )
    if not any(texts):
        raise ConfigError("--schema auto: the sample has no JSON object", hint="name the columns")
    named = [f"{name}={text}" for name, text in zip(names, texts, strict=True) if text] if per_collection else texts
    return [*(each for each in schemas if each != AUTO), *named]


def check_destination(text: str) -> None:
    """Raise ConfigError if a destination cannot be written; call this before any work."""
    need("pyarrow", "deltalake")
    from mirror.spark.places import folder_at

    folder_at(text).check_access()


def reading_from(mode: str | None, time_zone: str | None, epoch: str | None) -> Reading:
    from mirror.spark.source.options import reading_of

    given = {"mode": mode, "timeZone": time_zone, "epoch": epoch}
    return reading_of({name: text for name, text in given.items() if text is not None})


def collections_from(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(full_name(name) for name in text.replace(" ", "").split(","))


def spark_session(name: str, master: str | None) -> AbstractContextManager[Any]:
    need("pyspark", "pyarrow", "deltalake")
    from mirror.spark.session import lasting

    return lasting(f"dcp-mirror {name}", master)


@contextmanager
def running(
    name: str, master: str | None, spark: bool, processes: int | None, as_json: bool
) -> Iterator[tuple[Runner, Callable[[int, int], None]]]:
    """Yield the runner of a command's tasks, and a function that shows the number of finished tasks on stderr."""
    need("pyarrow", "deltalake")
    from mirror.spark.pipeline.runner import LocalRunner, SparkRunner
    from mirror.supervise.processes.life import die_with_parent

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    local = master is None and not spark and not submitted
    if not local and processes is not None:
        raise ConfigError("--processes is for a run without Spark", hint="Spark's master says how many cores there are")
    with nullcontext() if local else spark_session(name, master) as session:
        runner = LocalRunner(processes, die_with_parent) if local else SparkRunner(session)
        if as_json and submitted:  # spark-submit joins stderr and stdout
            yield runner, lambda _done, _of: None
            return
        with render.task_screen() as screen:
            yield runner, lambda done, of: screen.show_line(f"{name}: {done} of {of} tasks")


@app.command()
def export(
    to: ToOption,
    data: options.DataOption = None,
    form: Annotated[
        str, options.optional("--format", metavar="parquet|delta", help="Format.", show_default=True)
    ] = "parquet",
    collection: CollectionsOption = None,
    as_of: options.AsOfTimeOption = None,
    schema: Annotated[
        str | None,
        options.optional(
            "--schema",
            metavar="COLUMNS",
            help="Parse JSON documents into columns: 'total double, items array<struct<sku:string>>'.",
        ),
    ] = None,
    mode: ModeOption = None,
    max_misfits: MisfitsOption = 0.01,
    time_zone: TimeZoneOption = None,
    epoch: EpochOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing export (Delta: as its next version).")
    ] = False,
    overwrite_schema: Annotated[
        bool, typer.Option("--overwrite-schema", help="With --overwrite: allow other columns in a Delta table.")
    ] = False,
    processes: ProcessesOption = None,
    master: MasterOption = None,
    spark: SparkOption = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Write the mirror's documents as Parquet files or a Delta table, each vbucket at one boundary."""
    if form not in ("parquet", "delta"):
        raise ConfigError(f"--format {form!r}: must be parquet or delta", hint="any tool reads parquet files")
    moment = time_from(as_of)
    path = data_from(data, config)
    check_destination(to)
    with running("export", master, spark, processes, as_json) as (runner, progress):
        from mirror.spark.pipeline.export import export as run
        from mirror.typed.ddl import fields_of

        done = run(
            path,
            to,
            runner,
            delta_table=form == "delta",
            collections=collections_from(collection),
            as_of_ms=moment.ms if moment is not None else None,
            fields=None if schema is None else fields_of(schema),
            reading=reading_from(mode, time_zone, epoch),
            misfits_max=max_misfits,
            overwrite=overwrite,
            overwrite_schema=overwrite_schema,
            progress=progress,
        )
    if as_json:
        output.print_json(asdict(done))
        return
    version = "" if done.version is None else f", version {done.version}"
    misfits = f"; {done.misfits:,} do not fit the schema" if done.misfits else ""
    output.echo(
        f"{done.target}: {output.counted(done.documents, 'document')} of {output.counted(done.vbuckets, 'vbucket')} in "
        f"{output.counted(done.files, 'file')} "
        f"({output.size(done.bytes)}{version}), {output.duration(done.elapsed_s)}{misfits}"
    )


@app.command()
def sync(
    to: ToOption,
    data: options.DataOption = None,
    source: SourceOption = None,
    collection: CollectionsOption = None,
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
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="DIR", help="Local directory. Default: _checkpoint in --to, if that is a path."
        ),
    ] = None,
    keep_hours: Annotated[
        int, typer.Option("--keep-hours", min=0, help="Time to keep files of older versions of changes.")
    ] = 168,
    keep_documents_hours: Annotated[
        int,
        typer.Option("--keep-documents-hours", min=0, help="The same for documents."),
    ] = 1,
    rewrite_rate: Annotated[
        str,
        typer.Option(
            "--rewrite-rate",
            metavar="BYTES",
            help="Average bytes a second that merges may write into documents; 0: merge each batch. Units k, m, g.",
        ),
    ] = "1m",
    table_per_collection: Annotated[
        bool, typer.Option("--table-per-collection", help="Write TO/collections/SCOPE.NAME, not TO/documents.")
    ] = False,
    schema: Annotated[
        list[str] | None,
        options.optional(
            "--schema",
            metavar="[SCOPE.NAME=]COLUMNS",
            help="Columns of JSON documents: 'total double, state string'; auto: those of a sample; repeat it for each "
            "collection.",
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
    max_misfits: MisfitsOption = 0.01,
    time_zone: TimeZoneOption = None,
    epoch: EpochOption = None,
    overwrite_schema: Annotated[
        bool, typer.Option("--overwrite-schema", help="Allow columns to go or to change their types.")
    ] = False,
    metrics: Annotated[
        str | None, options.optional("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus here.")
    ] = None,
    master: MasterOption = None,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Keep two Delta tables: TO/documents with current documents, TO/changes with each event once. Resumes where it
    ended.

    With --schema, TO/documents has columns from the body. Columns added later are filled in all rows.
    """
    need("pyspark", "pyarrow", "deltalake")
    source_options = {
        "maxRowsPerBatch": str(max_rows),
        **({"maxBytesPerBatch": max_bytes} if max_bytes is not None else {}),
        "onLostHistory": on_lost_history,
        **({"collection": collection} if collection else {}),
        **({"connection": source} if source else {"path": str(data_from(data, config))}),
    }
    from mirror.spark.pipeline.metrics import SyncMetrics
    from mirror.spark.pipeline.sync import How, check_source, checkpoint_for
    from mirror.spark.pipeline.sync import sync as run
    from mirror.spark.places import folder_at
    from mirror.spark.tables.lake import Costs

    how = How(
        checkpoint=None if checkpoint is None else path_from(checkpoint),
        trigger_s=trigger_s,
        available_now=available_now,
        keep_hours=keep_hours,
        costs=Costs(rewrite_rate_from(rewrite_rate), keep_documents_hours),
        layouts=layouts_from(
            schemas_from(schema or [], source_options.get("path"), collections_from(collection), table_per_collection),
            table_per_collection,
            reading_from(mode, time_zone, epoch),
            max_misfits,
            overwrite_schema,
        ),
    )
    place = folder_at(to)
    place.check_access()
    checkpoint_for(place, how)
    counted = SyncMetrics()
    check_source(source_options, options.settings_from({"source": source}, config=config).settings)
    with (
        serving_metrics(counted, metrics),
        spark_session("sync", master) as spark,
        render.Screen(to_stderr=True) as screen,
        ending() as stop,
    ):
        done = run(
            spark,
            source_options,
            to,
            how,
            on_figures=partial(show_figures, counted, screen, as_json),
            on_warning=lambda line: output.echo(f"warning: {line}", err=True),
            stop=stop,
        )
    if as_json:
        output.print_json(asdict(done))
        return
    batches = output.counted(done.batches, "batch", "batches")
    output.echo(f"{to}: {output.counted(done.events, 'event')} in {batches}, {changed_rows(done)}")


def show_figures(
    counted: SyncMetrics, screen: render.Screen, as_json: bool, figures: BatchFigures | MergeFigures
) -> None:
    from mirror.spark.pipeline.progress import BatchFigures

    counted.add(figures)
    is_batch = isinstance(figures, BatchFigures)
    if as_json:
        output.print_json({"event": "batch" if is_batch else "merge"} | asdict(figures))
        sys.stdout.flush()
    screen.show_line(batch_line(figures) if isinstance(figures, BatchFigures) else merge_line(figures))


def serving_metrics(metrics: SyncMetrics, address: str | None) -> AbstractContextManager[Any]:
    if address is None:
        return nullcontext()
    from mirror.serve.listener import parse_addresses
    from mirror.spark.pipeline.metrics import serving

    parsed, *more = parse_addresses(address, "--metrics")
    if more or parsed.tls or parsed.path is not None:
        raise ConfigError(f"--metrics {address!r}: give one HOST:PORT", hint="for example 127.0.0.1:9100")
    return serving(metrics, parsed.host, parsed.port)


def changed_rows(figures: BatchFigures | MergeFigures | Synced) -> str:
    return ", ".join(
        f"{value:,} {name}"
        for name, value in (
            ("inserted", figures.inserted),
            ("updated", figures.updated),
            ("deleted", figures.deleted),
            ("not fitting the schema", figures.misfits or None),
        )
        if value is not None
    )


def merge_line(figures: MergeFigures) -> str:
    cost = f"{output.size(figures.rewritten_bytes)} rewritten, {output.duration(figures.duration_ms / 1000)}"
    return f"merge up to batch {figures.batch} | {changed_rows(figures)} | {cost}"


def batch_line(figures: BatchFigures) -> str:
    changed = changed_rows(figures)
    lag = "" if figures.lag_seqnos is None else f" | {figures.lag_seqnos:,} seqnos behind"
    rate = f"{output.number(figures.events_per_s)}/s, {output.duration(figures.duration_ms / 1000)}"
    return f"batch {figures.batch} | {output.counted(figures.events, 'event')} ({changed}) | {rate}{lag}"


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


@app.command()
def compare(
    source: Annotated[str, typer.Option("--source", "-s", metavar="URL", help="couchbase://user@host/bucket")],
    data: options.DataOption = None,
    vbuckets: Annotated[
        str | None, typer.Option("--vbuckets", metavar="0-511,600", help="Only these; default: all.")
    ] = None,
    processes: ProcessesOption = None,
    master: MasterOption = None,
    spark: SparkOption = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Compare the mirror with its source key by key, in many tasks. Exit code 3 if they differ, 1 if unsure."""
    loaded = options.settings_from({"data": data, "source": source}, config=config).settings
    path = data_from(data, config)
    with running("compare", master, spark, processes, as_json) as (runner, progress):
        from mirror.spark.pipeline.compare import compare as run
        from mirror.spark.source.options import ranges

        try:
            vbids = None if vbuckets is None else sorted(ranges(vbuckets))
        except ValueError as error:
            raise ConfigError(f"--vbuckets {vbuckets!r}: {error}") from None
        done = run(path, source, loaded, runner, vbids=vbids, progress=progress)
    from cli.verify import say, totals, vbucket_object

    sums, elapsed_s = totals(done.vbuckets), round(done.elapsed_s, 3)
    equal = not done.different and not done.unfinished
    if as_json:
        rows = [vbucket_object(each) for each in done.vbuckets]
        unsure = {name: sums[name] for name in ("behind_seqnos", "not_compared")}
        output.print_json({"equal": equal, "elapsed_s": elapsed_s, **unsure, "vbuckets": rows})
    else:
        facts = {"data": str(path), "ok": equal, "repaired": [], "elapsed_s": elapsed_s, "totals": sums}
        say(facts, done.vbuckets, KEYS_SHOWN)
    if done.different:
        raise exits.CommandEnded(ExitCode.DATA)
    if done.unfinished:
        raise exits.CommandEnded(ExitCode.FAILED)


@app.command()
def backfill(
    source: Annotated[str, typer.Option("--source", "-s", metavar="URL", help="couchbase://user@host/bucket")],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="New data directory.")],
    groups: Annotated[
        int | None, typer.Option("--groups", help="Groups of vbuckets, a task each. Fixed once DIR exists.")
    ] = None,
    scratch: Annotated[
        str | None, typer.Option("--scratch", metavar="DIR", help="Local directory; default: the temporary folder.")
    ] = None,
    processes: ProcessesOption = None,
    master: MasterOption = None,
    spark: SparkOption = False,
    config: options.ConfigOption = None,
    pairs: options.SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Copy a bucket in many tasks into a new data directory, from which `run` continues. Can be repeated.

    The selection (`collections`, `scope`, `vbuckets`) and the kept history are settings, as for `run`.
    """
    settings = options.settings_from({"source": source, "groups": groups}, config=config, pairs=pairs).settings
    target, place = path_from(to), None if scratch is None else str(path_from(scratch))
    with running("backfill", master, spark, processes, as_json) as (runner, progress):
        from mirror.spark.pipeline.backfill import backfill as run

        done = run(target, settings, runner, scratch=place, progress=progress)
    if as_json:
        output.print_json(asdict(done))
        return
    again = f", {done.groups_done_before} of them by an earlier run" if done.groups_done_before else ""
    output.echo(
        f"{done.target}: {done.vbuckets} vbuckets of {done.bucket} in {done.groups} groups{again}; "
        f"{done.received_documents:,} documents received, {output.size(done.file_bytes)}, "
        f"{output.duration(done.elapsed_s)}"
    )


def main() -> None:
    sys.exit(exits.guarded(lambda: app(prog_name="pipeline", standalone_mode=False)))


if __name__ == "__main__":
    main()
