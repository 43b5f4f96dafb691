"""`sql`: queries of a mirror, one as an argument or many in a shell; `schema`: the columns of its documents.

A query runs in a thread of its own, so in the shell Ctrl-C cancels only the query. Outside the shell stdout has only
the answer.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import exits, options, output, render
from cli.export import opened
from cli.get import time_from
from mirror.errors import ConfigError, MirrorError, QueryFailed
from storage.errors import StorageError
from storage.read.view import View, open_view

if TYPE_CHECKING:
    from mirror.sql import Session

SHOWN_ROWS = 1_000
"""Limit of the rows of a table on a terminal; other formats have all rows."""
CELL_LENGTH = 200
LOOK_S = 0.1
HELP = "\\d: tables   \\d TABLE: its columns   Ctrl-C: cancel   Ctrl-D: end"
WORD = re.compile(r"[\w.]+")
AHEAD = 2
"""Limit of the batches that the query's thread reads ahead of the output."""
SCHEMA_HEADERS = ("column", "type", "share", "example")

Write = Callable[[Any], object]


need = partial(options.need, "sql needs", "sql")


class Running:
    """A query in a thread of its own; `batches` starts the thread."""

    def __init__(self, session: Session, query: str) -> None:
        self._session = session
        self._query = query
        self._found: queue.Queue[Any] = queue.Queue(AHEAD)
        self._thread = threading.Thread(target=self._run, name="query", daemon=True)

    def _run(self) -> None:
        try:
            with closing(self._session.run(self._query)) as result:
                self._found.put(result.reader.schema)
                for batch in result.reader:
                    self._found.put(batch)
            self._found.put(None)
        except BaseException as error:
            self._found.put(error)

    def batches(self) -> Generator[Any]:
        """Yield the schema, then the batches. Closing the generator cancels the query."""
        self._thread.start()
        try:
            while (found := self._found.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            while self._thread.is_alive():
                self._session.interrupt()
                with contextlib.suppress(queue.Empty, KeyboardInterrupt):
                    self._found.get(timeout=LOOK_S)


def cell_text(cell: Any) -> str:
    from mirror.sql.answers import json_text

    text = "" if cell is None else cell if isinstance(cell, str) else json_text(cell)
    return output.for_people(text.encode(errors="replace"), CELL_LENGTH)


def print_table(found: Iterator[Any]) -> int:
    from mirror.sql.answers import numeric, rows, up_to

    schema = next(found)
    lines: list[list[str]] = []
    for batch in up_to(found, SHOWN_ROWS):
        lines += [[cell_text(cell) for cell in row] for row in rows(batch)]
    right = [number for number, field in enumerate(schema) if numeric(field.type)]
    names = [output.for_people(name.encode(errors="replace")) for name in schema.names]
    render.show(render.plain_table(names, lines[:SHOWN_ROWS], right=right))
    if len(lines) > SHOWN_ROWS:
        output.echo(f"the first {SHOWN_ROWS:,} rows; a pipe (as CSV), --json and --to give all", err=True)
    return min(len(lines), SHOWN_ROWS)


def write_rows(found: Iterator[Any], write: Write) -> int:
    count = 0
    for batch in found:
        write(batch)
        count += batch.num_rows
    return count


def with_own_names(schema: Any) -> Any:
    """Return the schema. Raises QueryFailed if two columns have the same name."""
    for number, name in enumerate(schema.names):
        if name in schema.names[:number]:
            raise QueryFailed(f"two columns are named {name}", hint="name one of them with AS")
    return schema


def write_json(found: Iterator[Any]) -> int:
    from mirror.sql.answers import rows

    names = with_own_names(next(found)).names

    def write(batch: Any) -> None:
        for row in rows(batch):
            output.print_json(dict(zip(names, row, strict=True)))

    return write_rows(found, write)


def write_csv(found: Iterator[Any]) -> int:
    from mirror.sql.answers import csv_writer

    return write_rows(found, csv_writer(sys.stdout, next(found)))


def write_file(found: Iterator[Any], to: str) -> int:
    from mirror.sql.answers import parquet_writer

    schema = with_own_names(next(found))
    with opened(to) as file, parquet_writer(file, schema) as write:
        return write_rows(found, write)


def sql(
    query: Annotated[str | None, typer.Argument(metavar="[QUERY]", help="Without one: a shell, or stdin.")] = None,
    data: options.DataOption = None,
    as_of: options.AsOfTimeOption = None,
    to: Annotated[
        str | None, options.optional("--to", metavar="FILE.parquet", help="Write the answer into a Parquet file.")
    ] = None,
    config: options.ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Answer SQL (DuckDB's) from one boundary of each vbucket. Each collection is a table: `documents` is the
    default one, `SCOPE.NAME` another.
    """
    if as_json and to is not None:
        raise ConfigError("--json and --to exclude each other", hint="give one of them")
    if to is not None and not to.endswith(".parquet"):
        raise ConfigError(f"--to {to!r} is no Parquet file", hint="name it FILE.parquet")
    need("duckdb", "pyarrow")
    from mirror.sql import Session

    if query is None and not sys.stdin.isatty():
        query = sys.stdin.read()
    with (
        open_view(str(options.data_directory(data, config))) as view,
        Session(view, as_of=time_from(as_of)) as session,
    ):
        if query is None:
            need("prompt_toolkit")
            shell(session)
            return
        with closing(Running(session, query).batches()) as found:
            if to is not None:
                output.echo(f"{output.counted(write_file(found, to), 'row')} written to {to}", err=True)
            elif as_json:
                write_json(found)
            elif not sys.stdout.isatty():
                write_csv(found)
            else:
                print_table(found)


# The shell.


def shell(session: Session) -> None:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory

    @cache
    def words() -> list[str]:
        tables = session.tables()
        return sorted({*tables, *(each.name for columns in tables.values() for each in columns)})

    prompts: PromptSession[str] = PromptSession(
        history=FileHistory(str(history_file())),
        completer=WordCompleter(words, ignore_case=True, pattern=WORD),
        complete_while_typing=False,
    )
    output.echo(HELP)
    while True:
        try:
            line = prompts.prompt("sql> ").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line in ("exit", "quit", "\\q"):
            return
        with contextlib.suppress(exits.CommandEnded):
            if line:
                answer(session, line)


def answer(session: Session, line: str) -> None:
    """Answer a line of the shell. Print an error as one line."""
    began_s = time.monotonic()
    command, _, table = line.partition(" ")
    try:
        if command != "\\d":
            with closing(Running(session, line).batches()) as found:
                count = print_table(found)
            output.echo(f"{output.counted(count, 'row')}, {time.monotonic() - began_s:.2f} s")
        elif table:
            with closing(Running(session, f"SELECT * FROM {table} LIMIT 0").batches()) as found:
                print_pairs("column", "type", [(field.name, str(field.type)) for field in next(found)])
        else:
            tables = session.tables().items()
            print_pairs("table", "columns", [(name, ", ".join(each.name for each in found)) for name, found in tables])
    except (MirrorError, StorageError) as error:
        exits.complain(str(error))
    except KeyboardInterrupt:
        output.echo("cancelled", err=True)


def print_pairs(left: str, right: str, pairs: list[tuple[str, str]]) -> None:
    lines = [[cell_text(each) for each in pair] for pair in pairs]
    render.show(render.plain_table([left, right], lines))


def history_file() -> Path:
    """Return the shell's history file, which only its user can read."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "dcp-mirror"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "sql_history"
    path.touch(mode=0o600)
    return path


# The schema.


def schema(
    collection: Annotated[
        str | None, typer.Argument(metavar="[COLLECTION]", help="SCOPE.NAME; default: every collection.")
    ] = None,
    data: options.DataOption = None,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents in the sample.")] = 10_000,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print the columns of a sample of documents: type, share of documents that have it, example.

    Also print these columns as the --schema of `dcp-mirror export` and `sync`.
    """
    need("pyarrow")
    from mirror.sql.schema import sample, type_ddl

    chosen = options.collection_from(collection)
    if isinstance(chosen, int):
        raise ConfigError("a collection's number has no schema", hint="give its name, SCOPE.NAME")
    with open_view(str(options.data_directory(data, config))) as view:
        for name in [chosen] if chosen else collections_of(view):
            columns = sample(view, name, documents)
            rows = [(each.name, type_ddl(each.type), each.share, each.example) for each in columns]
            text = ", ".join(each.ddl for each in columns)
            if as_json:
                shown = [dict(zip(SCHEMA_HEADERS, row, strict=True)) for row in rows]
                output.print_json({"collection": name, "columns": shown, "schema": text})
                continue
            lines = [[cell_text(f"{cell:.1%}" if isinstance(cell, float) else cell) for cell in row] for row in rows]
            output.echo(f"{name}: {output.counted(len(columns), 'column')}")
            if columns:
                render.show(render.plain_table(SCHEMA_HEADERS, lines, right=(2,)))
                output.echo(f"--collection {name} --schema {shlex.quote(text)}")


def collections_of(view: View) -> list[str]:
    from mirror.sql.read import DEFAULT_COLLECTION

    return sorted(view.reading().collections(), key=lambda name: (name != DEFAULT_COLLECTION, name))
