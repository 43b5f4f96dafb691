"""`schema`: the columns that documents have, inferred from a sample, as text that `pipeline` and Spark take."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from cli import options, output, render
from cli.sql import cell_text, need
from mirror.errors import ConfigError
from storage.read.view import View, open_view

HEADERS = ("column", "type", "share", "example")


def schema(
    collection: Annotated[
        str | None, typer.Argument(metavar="[COLLECTION]", help="SCOPE.NAME; default: every collection.")
    ] = None,
    data: options.DataOption = None,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents in the sample.")] = 10_000,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print the columns of a sample of documents with types, shares and examples, and the --schema that names them."""
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
                shown = [dict(zip(HEADERS, row, strict=True)) for row in rows]
                output.print_json({"collection": name, "columns": shown, "schema": text})
                continue
            lines = [[cell_text(f"{cell:.1%}" if isinstance(cell, float) else cell) for cell in row] for row in rows]
            typer.echo(f"{name}: {render.counted(len(columns), 'column')}")
            if columns:
                render.show(render.plain_table(HEADERS, lines, right=(2,)))
                typer.echo(f"--collection {name} --schema {shlex.quote(text)}")


def collections_of(view: View) -> list[str]:
    """Return the names of all collections, the default one first."""
    from mirror.sql.read import DEFAULT_COLLECTION, Boundaries

    return sorted(Boundaries(view, None, "schema").collections(), key=lambda name: (name != DEFAULT_COLLECTION, name))
