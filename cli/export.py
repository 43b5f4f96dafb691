"""`export`: every document as JSON lines, on stdout or in files, without Spark.

Invariants:
- each vbucket is read as of its position at the start (or at `--as-of`), despite later writes and rollbacks;
- memory does not grow with the mirror;
- a new file gets its name once it is complete; the cursor file is written last;
- a pipe, device or link is never replaced.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from cli import options, output, render
from cli.changes import save_cursor
from cli.get import check_filled, time_from
from mirror.document import values
from mirror.errors import ConfigError
from mirror.lease import of_reading
from mirror.ownership import behind_links, private_file
from mirror.serve.objects import document_json, dumps, one_line
from storage.format import records, seal
from storage.model import Document
from storage.read.reading import BoundaryRead
from storage.read.view import Token, open_view

STDOUT = "-"

Collections = tuple[str | int, ...] | None
"""Names or ids; None: all."""


def export(
    to: Annotated[
        str, typer.Option("--to", metavar="FILE", help="-: stdout; a directory: one file for each vbucket.")
    ] = STDOUT,
    file_format: Annotated[str, typer.Option("--format", metavar="jsonl", help="One JSON object a line.")] = "jsonl",
    data: options.DataOption = None,
    vbid: options.VbidOption = None,
    collection: options.CollectionOption = None,
    as_of: options.AsOfTimeOption = None,
    xattrs: Annotated[bool, typer.Option("--xattrs", help="Include extended attributes as `xattrs`.")] = False,
    file: Annotated[
        Path | None,
        options.optional("--cursor", metavar="FILE", help="Write the exported positions, for `changes --since FILE`."),
    ] = None,
    partial: options.PartialOption = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Write every document with its metadata, each vbucket at one boundary.

    A line is that of `scan --json`, with the name of the collection.
    """
    if file_format != "jsonl":
        raise ConfigError(f"--format {file_format!r} is not known", hint="give jsonl; `pipeline export` makes Parquet")
    moment = time_from(as_of)
    if to == STDOUT and as_json:
        raise ConfigError("--to - and --json both print to stdout", hint="leave --json out, or give --to a file")
    if file is not None and file.exists():
        raise ConfigError(
            f"the cursor file {file} exists: if overwritten, its reader could miss changes",
            hint="give --cursor a new file",
        )
    path = options.data_directory(data, config)
    with open_view(str(path), partial=partial) as view:
        vbids, chosen = view.vbids if vbid is None else (vbid,), options.collection_from(collection)
        missing = check_filled(view, vbids, partial=partial)
        with view.reading(vbids, as_of=moment, lease=of_reading(path, "export")) as reading:
            collections = None if chosen is None else (chosen,)
            reading.check_collections(collections or ())
            pins = reading.hold()
            count = write(reading, collections, to, xattrs=xattrs)
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


def write(reading: BoundaryRead, collections: Collections, to: str, *, xattrs: bool) -> int:
    count = 0
    with render.task_screen() as screen, contextlib.ExitStack() as stack:
        split = to != STDOUT and (to.endswith("/") or os.path.isdir(to))
        whole = None if split else stack.enter_context(opened(to))
        for number, vbid in enumerate(reading.vbids):
            with (
                contextlib.nullcontext(whole) if whole else opened(os.path.join(to, f"vbucket-{vbid:05}.jsonl")) as file
            ):
                for line in lines(reading, vbid, collections, xattrs=xattrs):
                    file.write(line)
                    count += 1
            screen.show_line(f"{number + 1} of {len(reading.vbids)} vbuckets exported, {count:,} documents")
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
            if not document.expiry or document.expiry * 1000 > rows.pin.now_ms:
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
