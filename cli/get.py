"""`get`: one document; `scan`: those of a vbucket, collection or key prefix; both at the newest or an older boundary.

Without --json and --meta, stdout of `get` holds only the value, byte for byte if it is no terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Annotated

import typer

from cli import options, output, render
from cli.exits import Absent
from mirror import units
from mirror.errors import ConfigError
from mirror.serve.objects import document_parts
from storage.format.tokens import check_as_of
from storage.model import JSON_FIELDS, Boundary, Document, Kind
from storage.read.view import AsOf, Time, View, open_view


def as_of_from(text: str | None) -> AsOf:
    """Parse digits as a seqno, other text as a time in ISO 8601 (local time if it has no zone). Raises ConfigError."""
    if text is None:
        return None
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return Time(units.moment_ms(text))
    except ValueError:
        raise ConfigError(
            f"--as-of {text!r} is neither a seqno nor a time", hint="write 1234 or 2026-01-31T12:00:00"
        ) from None


def time_from(text: str | None) -> Time | None:
    moment = as_of_from(text)
    if isinstance(moment, int):
        raise ConfigError("--as-of takes a time here: a seqno belongs to one vbucket", hint="write 2026-05-01T12:00Z")
    return moment


def boundary_of(view: View, vbid: int, as_of: AsOf) -> Boundary | None:
    for boundary in view.boundaries(vbid):
        if (boundary.time_ms <= as_of.ms) if isinstance(as_of, Time) else (as_of is None or boundary.seqno <= as_of):
            return boundary
    return None


def announce(boundary: Boundary | None, vbid: int) -> None:
    if boundary is not None:
        when = output.moment(boundary.time_ms)
        output.echo(f"as of vbucket {vbid}, seqno {boundary.seqno}, published {when}", err=True)


def check_filled(view: View, vbids: Collection[int], *, partial: bool, as_json: bool = False) -> int:
    """Print how many vbuckets are not filled, and return the number. Without `partial` raise Unavailable for them."""
    if not partial:
        view.check_readable(vbids)
        return 0
    missing = len(view.unfilled(vbids))
    if missing:
        output.echo(f"{missing} of {len(vbids)} vbuckets are missing: they are not filled yet", err=True)
    if as_json:
        output.print_json({"missing_vbuckets": missing, "vbuckets": len(vbids)})
    return missing


def meta_facts(document: Document) -> dict[str, str]:
    datatypes = [name for bit, name in ((1, "json"), (2, "snappy"), (4, "xattr")) if document.datatype & bit]
    texts = {
        "expiry": output.moment(document.expiry * 1000) if document.expiry else "never",
        "datatype": ", ".join(datatypes) or "raw",
    }
    facts = {name.replace("_", " "): texts.get(name, str(getattr(document, name))) for name in JSON_FIELDS}
    return facts | {"value": f"{len(document.value):,} bytes"}


def get(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The document's key.")],
    data: options.DataOption = None,
    collection: options.CollectionOption = None,
    as_of: options.AsOfOption = None,
    meta: Annotated[bool, typer.Option("--meta", help="Print its metadata instead of its value.")] = False,
    partial: options.PartialOption = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print one document. Exit code 5 if it does not exist."""
    moment = as_of_from(as_of)
    key_bytes = key.encode(errors="surrogateescape")
    with open_view(str(options.data_directory(data, config)), partial=partial) as view:
        check_filled(view, (view.vbid_of(key_bytes),), partial=partial, as_json=as_json)
        document = view.get(key_bytes, options.collection_from(collection), as_of=moment)
        if moment is not None:
            vbid = view.vbid_of(key_bytes)
            announce(boundary_of(view, vbid, moment), vbid)
    if document is None or document.kind is not Kind.MUTATION:
        raise Absent(f"no document {output.for_people(key_bytes)!r}" + (f" in {collection}" if collection else ""))
    if as_json:
        output.print_parts(document_parts(document))
    elif meta:
        render.show(render.fact_table(meta_facts(document)))
    elif sys.stdout.isatty():
        output.echo(document.value.decode(errors="backslashreplace"))
    else:
        sys.stdout.buffer.write(document.value)
        sys.stdout.buffer.flush()


def scan(
    data: options.DataOption = None,
    vbid: options.VbidOption = None,
    prefix: Annotated[str, typer.Option("--prefix", "-p", help="Only keys with this prefix.")] = "",
    collection: options.CollectionOption = None,
    limit: Annotated[int | None, options.optional("--limit", "-n", min=0, help="Print at most this many.")] = None,
    as_of: options.AsOfOption = None,
    deletions: Annotated[bool, typer.Option("--deletions", help="Include tombstones and expired documents.")] = False,
    partial: options.PartialOption = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print documents: vbid, seqno, key and value, or with --json one object a line."""
    moment = as_of_from(as_of)
    with open_view(str(options.data_directory(data, config)), partial=partial) as view:
        vbids = view.vbids if vbid is None else (vbid,)
        check_as_of(moment, vbids)
        check_filled(view, vbids, partial=partial, as_json=as_json)
        if moment is not None:
            for each in vbids:
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
                output.print_parts(document_parts(document))
            else:
                value = "(deleted)" if document.deleted else output.for_people(document.value)
                key = output.for_people(document.key)
                output.echo(f"{document.vbid}\t{document.seqno}\t{key}\t{value}")
