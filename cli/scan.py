"""`scan`: documents in key order, all or by vbucket, prefix and collection.

Knows the command line; order, visibility and boundaries are the store's. Invariant: rows are printed as they are read,
so the memory used does not grow with the bucket.
"""

from __future__ import annotations

from typing import Annotated

import typer

from cli import options, output
from cli.get import announce, as_of_from, boundary_of
from mirror.errors import ConfigError
from storage.read.view import open_view


def scan(
    data: options.DataOption = None,
    vbid: Annotated[
        int | None, typer.Option("--vbid", min=0, max=65535, help="Only this vbucket.", show_default=False)
    ] = None,
    prefix: Annotated[str, typer.Option("--prefix", "-p", help="Only keys that begin so.")] = "",
    collection: options.CollectionOption = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=0, help="At most so many.", show_default=False)
    ] = None,
    as_of: options.AsOfOption = None,
    deletions: Annotated[bool, typer.Option("--deletions", help="Tombstones and expired documents too.")] = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print documents: vbid, seqno, key and value, or with --json one object a line."""
    moment = as_of_from(as_of)
    if isinstance(moment, int) and vbid is None:
        raise ConfigError("a seqno means something in one vbucket only", hint="give --vbid, or a time to --as-of")
    with open_view(str(options.data_directory(data, config))) as view:
        if moment is not None:
            for each in view.vbids if vbid is None else (vbid,):
                announce(boundary_of(view, each, moment), each)
        for document in view.scan(
            vbid,
            prefix=prefix.encode(errors="surrogateescape"),
            collection=options.collection_from(collection),
            limit=limit,
            as_of=moment,
            deletions=deletions,
        ):
            if as_json:
                output.print_json(output.document_object(document))
            else:
                value = "(deleted)" if document.deleted else output.for_people(document.value)
                key = output.for_people(document.key)
                typer.echo(f"{document.vbid}\t{document.seqno}\t{key}\t{value}")
