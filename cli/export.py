"""`export`: every document as JSON lines, Parquet files or a Delta table, as of its vbucket's position at the
start.

JSON lines need no package beyond the program's own. A new file gets its name once it is complete; the cursor file is
written last. A pipe, device or link is never replaced.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from cli import options, output, render, tasks
from cli.changes import save_cursor
from cli.get import check_filled, time_from
from mirror.document import values
from mirror.errors import ConfigError
from mirror.lease import of_reading
from mirror.ownership import behind_links, private_file
from mirror.serve.objects import document_json, dumps, one_line
from storage.format import records, seal
from storage.format.tokens import has_expired
from storage.model import Document
from storage.read.reading import BoundaryRead
from storage.read.view import Token, open_view

STDOUT = "-"
FORMATS = ("jsonl", "parquet", "delta")


Collections = tuple[str | int, ...] | None
"""Names or ids; None: all."""


def export(
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FILE|DIR|URL",
            help="-: stdout; a directory gets a file for each vbucket. parquet, delta: a directory or URL.",
        ),
    ] = STDOUT,
    form: Annotated[
        str, options.optional("--format", metavar="|".join(FORMATS), help="Format.", show_default=True)
    ] = "jsonl",
    data: options.DataOption = None,
    vbid: options.VbidOption = None,
    collection: tasks.CollectionsOption = None,
    as_of: options.AsOfTimeOption = None,
    schema: Annotated[
        str | None,
        options.optional(
            "--schema",
            metavar="COLUMNS",
            help="Parse JSON documents into columns: 'total double, items array<struct<sku:string>>'. Not for jsonl.",
        ),
    ] = None,
    mode: tasks.ModeOption = None,
    max_misfits: tasks.MisfitsOption = 0.01,
    time_zone: tasks.TimeZoneOption = None,
    epoch: tasks.EpochOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an export of parquet or delta (delta: as its next version).")
    ] = False,
    overwrite_schema: tasks.OverwriteSchemaOption = False,
    xattrs: Annotated[bool, typer.Option("--xattrs", help="jsonl: include extended attributes as `xattrs`.")] = False,
    file: Annotated[
        Path | None,
        options.optional(
            "--cursor", metavar="FILE", help="jsonl: write the exported positions, for `changes --since FILE`."
        ),
    ] = None,
    partial: options.PartialOption = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Write every document with its metadata, each vbucket at one boundary. parquet and delta: by all cores, or on
    Spark's executors under spark-submit.

    A line of jsonl is that of `scan --json`, with the name of the collection.
    """
    check_options(
        form,
        {
            "--schema": ("parquet delta", schema is not None),
            "--mode": ("parquet delta", mode is not None),
            "--time-zone": ("parquet delta", time_zone is not None),
            "--epoch": ("parquet delta", epoch is not None),
            "--overwrite": ("parquet delta", overwrite),
            "--overwrite-schema": ("delta", overwrite_schema),
            "--xattrs": ("jsonl", xattrs),
            "--cursor": ("jsonl", file is not None),
            "--partial": ("jsonl", partial),
        },
    )
    moment = time_from(as_of)
    if to == STDOUT and (as_json or form != "jsonl"):
        why = "--json prints to stdout too" if form == "jsonl" else "it makes files"
        raise ConfigError(f"--format {form} --to -: {why}", hint="give --to a place")
    if file is not None and file.exists():
        raise ConfigError(
            f"the cursor file {file} exists: if overwritten, its reader could miss changes",
            hint="give --cursor a new file",
        )
    names = tasks.collections_from(collection)
    path = options.data_directory(data, config)
    if to != STDOUT:
        check_place(path, "--to", Path(to))
    if form != "jsonl":
        tasks.need("pyarrow", "deltalake")
        from mirror.typed.ddl import fields_of

        how = {
            "fields": None if schema is None else fields_of(schema),
            "reading": tasks.reading_from(mode, time_zone, epoch),
            "misfits_max": max_misfits,
            "collections": names,
            "vbuckets": None if vbid is None else frozenset((vbid,)),
            "as_of_ms": None if moment is None else moment.ms,
            "delta_table": form == "delta",
            "overwrite": overwrite,
            "overwrite_schema": overwrite_schema,
        }
        export_files(path, to, how, as_json)
        return
    if file is not None:
        check_place(path, "--cursor", file)
        if not file.resolve().parent.is_dir():
            raise ConfigError(f"--cursor {file}: there is no such folder", hint="make it first")
        if Path(to).resolve() in (file.resolve(), *file.resolve().parents):
            raise ConfigError(f"--cursor {file} is in the export", hint="give it another place")
    with open_view(str(path), partial=partial) as view:
        vbids = view.vbids if vbid is None else (vbid,)
        missing = check_filled(view, vbids, partial=partial)
        with view.reading(vbids, as_of=moment, lease=of_reading(path, "export")) as reading:
            for name in names or ():
                reading.collection_id(name)
            pins = reading.hold()
            count = write(reading, names, to, xattrs=xattrs)
    if file is not None:
        if to == STDOUT:
            output.deliver()
        save_cursor(file, (Token(pin.vbid, pin.branch, pin.seqno, pin.history_id) for pin in pins))
    facts = {
        "data": str(path),
        "to": to,
        "vbuckets": len(pins),
        "missing_vbuckets": missing,
        "documents": count,
        "as_of_ms": None if moment is None else moment.ms,
    }
    if as_json:
        output.print_json(facts)
    else:
        output.echo(f"{path}: {count:,} documents of {len(pins)} vbuckets exported", err=True)


def check_place(data: Path, option: str, place: Path) -> None:
    """Raise ConfigError if a place to write to is in the data directory."""
    if data.resolve() in (place.resolve(), *place.resolve().parents):
        raise ConfigError(f"{option} {place} is in the data directory", hint="give a place outside of it")


def check_options(form: str, given: dict[str, tuple[str, bool]]) -> None:
    """Raise ConfigError for an unknown format, or an option that the format does not have."""
    if form not in FORMATS:
        raise ConfigError(f"--format {form!r} is not known", hint=f"give {', '.join(FORMATS)}")
    for name, (forms, is_given) in given.items():
        if is_given and form not in forms.split():
            raise ConfigError(f"{name} is not for --format {form}", hint=f"it is for {' and '.join(forms.split())}")


def export_files(path: Path, to: str, how: dict[str, Any], as_json: bool) -> None:
    """Export Parquet files or a Delta table in tasks. `how` are arguments of `mirror.spark.pipeline.export`."""
    from mirror.spark.pipeline.export import export as run

    os.umask(0o077)  # libraries make the files
    tasks.check_destination(to)
    with tasks.running("export", quiet=as_json) as (runner, progress):
        done = run(path, to, runner, progress=progress, **how)
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


def write(reading: BoundaryRead, collections: Collections, to: str, *, xattrs: bool) -> int:
    count, vbids = 0, reading.vbids
    with render.ProgressLine() as screen, contextlib.ExitStack() as stack:
        split = to != STDOUT and (to.endswith("/") or os.path.isdir(to))
        whole = None if split else stack.enter_context(opened(to))
        for number, vbid in enumerate(vbids):
            place = os.path.join(to, f"vbucket-{vbid:05}.jsonl")
            with contextlib.nullcontext(whole) if whole else opened(place) as file:
                for line in lines(reading, vbid, collections, xattrs=xattrs):
                    file.write(line)
                    count += 1
            screen.show(f"{number + 1} of {len(vbids)} vbuckets exported, {count:,} documents")
    return count


@contextlib.contextmanager
def opened(to: str) -> Iterator[IO[bytes]]:
    """Open stdout, a pipe or device, or a file that gets its name once it is complete. Raises OSError."""
    if to == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    there = behind_links(to)  # a link stays
    if os.path.exists(to) and not os.path.isfile(to):  # not `there`: a link in /proc leads to no name
        with open(to, "wb") as file:
            yield file
        return
    to = there
    os.makedirs(os.path.dirname(to) or ".", mode=0o700, exist_ok=True)
    with private_file(to) as file:
        yield file


def lines(reading: BoundaryRead, vbid: int, collections: Collections, *, xattrs: bool) -> Iterator[bytes]:
    for rows in reading.rows(vbid, collections):
        head = b'{"collection":' + dumps(rows.collection) + b","
        for stored in rows.stored:
            document = records.decode_row(vbid, rows.pin.branch, stored, raw=xattrs, lenient=True, tail_bytes=seal.SIZE)
            if not has_expired(document.expiry, rows.pin.now_ms / 1000):
                yield head + (with_xattrs(document) if xattrs else document_json(document))[1:] + b"\n"


def with_xattrs(raw: Document) -> bytes:
    """Return a document as JSON with the member `xattrs`, or without it if the stored value cannot be decoded."""
    try:
        value, datatype = values.inflate(raw.value, raw.datatype)
        found, body = values.split(value, datatype)
    except ValueError:
        return document_json(raw)
    document = document_json(raw._replace(value=body, datatype=datatype & ~values.XATTR))
    members: list[bytes] = []
    for name, content in found.items():
        shown: Any = values.is_json(content)
        text = one_line(content) if shown else dumps(content.decode(errors="replace"))
        members.append(dumps(name.decode(errors="replace")) + b":" + text)
    return document[:-1] + b',"xattrs":{' + b",".join(members) + b"}}"
