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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from cli import options, output, render
from cli.changes import save_cursor
from cli.get import check_filled, time_from
from mirror.document import values
from mirror.errors import ConfigError
from mirror.lease import hold
from mirror.ownership import behind_links, private_file
from mirror.serve.objects import document_json, dumps, one_line
from storage.errors import StorageError, UnknownCollection, ViewInvalidated
from storage.format import records
from storage.format.tokens import positions_of
from storage.model import Document
from storage.read import bulk
from storage.read.view import Pin, Token, View, open_view

STDOUT = "-"


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
        missing = check_filled(view, view.vbids if vbid is None else (vbid,), partial=partial)
        now = time.time() if moment is None else None
        pins = [view.pin(each, moment, now=now) for each in (view.vbids if vbid is None else [vbid])]
        chosen = collection_ids(view, pins, options.collection_from(collection))
        with hold(path, positions_of(pins), name="export"):
            count = write(view, pins, chosen, to, xattrs=xattrs)
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


def collection_ids(view: View, pins: list[Pin], collection: str | int | None) -> dict[int, dict[int, str]]:
    found = {}
    for pin in pins:
        names = bulk.collection_names(view, pin)
        found[int(pin.vbid)] = {
            each: name for each, name in names.items() if collection is None or collection in (each, name)
        }
    if collection is not None and not any(found.values()):
        raise UnknownCollection(
            f"no collection {collection!r}", path=view.path, hint="give it as scope.name, or its id"
        )
    return found


def write(view: View, pins: list[Pin], chosen: dict[int, dict[int, str]], to: str, *, xattrs: bool) -> int:
    count = 0
    with render.task_screen() as screen, contextlib.ExitStack() as stack:
        split = to != STDOUT and (to.endswith("/") or os.path.isdir(to))
        whole = None if split else stack.enter_context(opened(to))
        for number, pin in enumerate(pins):
            with (
                contextlib.nullcontext(whole)
                if whole
                else opened(os.path.join(to, f"vbucket-{pin.vbid:05}.jsonl")) as file
            ):
                for line in lines(view, pin, chosen[int(pin.vbid)], xattrs=xattrs):
                    file.write(line)
                    count += 1
            screen.show_line(f"{number + 1} of {len(pins)} vbuckets exported, {count:,} documents")
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


def lines(view: View, pin: Pin, names: dict[int, str], *, xattrs: bool) -> Iterator[bytes]:
    try:
        for chunk in bulk.documents(view, pin, names):
            head = b'{"collection":' + dumps(names[chunk.collection_id]) + b","
            for frame in chunk.frames:
                document = records.decode_row(pin.vbid, pin.branch, frame, raw=xattrs, lenient=True)
                if document.expiry and document.expiry * 1000 <= pin.now_ms:
                    continue
                yield head + (with_xattrs(document) if xattrs else document_json(document))[1:] + b"\n"
    except ViewInvalidated as error:
        raise StorageError(
            f"the exported boundary is no longer kept: {error.message}",
            vbid=int(pin.vbid),
            hint="run it again, with a longer history_s if this comes again",
        ) from error


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
