"""`changes`: published events in order, from a token on, and on as they come.

Knows tokens as text and how to wait for more; what happened, the store tells. Invariants: the token of the last line
printed resumes exactly after it; with --follow nothing is printed twice and nothing left out, rollbacks included.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from cli import options, output
from mirror.errors import ConfigError
from storage.errors import ViewInvalidated
from storage.view import Change, Token, View, open_view

POLL_INTERVAL_S = 0.1
"""How soon a new event is seen with --follow; a look at all vbuckets costs well below a millisecond a hundred."""


def tokens_from(texts: list[str] | None) -> dict[int, Token]:
    """Tokens by vbucket. Raises ConfigError."""
    tokens: dict[int, Token] = {}
    for text in texts or ():
        try:
            token = Token.parse(text)
        except ValueError as error:
            raise ConfigError(str(error), hint="take it from a line that `changes` printed") from None
        tokens[int(token.vbid)] = token
    return tokens


def print_change(change: Change, *, as_json: bool) -> None:
    """One event, one line."""
    if as_json:
        output.print_json(output.change_object(change))
        return
    if change.rollback is not None:
        rollback = change.rollback
        what = f"from seqno {rollback.from_seqno} to seqno {rollback.to_seqno} on branch {rollback.to_branch}"
    elif change.document is not None:
        what = output.for_people(change.document.key)
    else:
        what = ""
    typer.echo(f"{change.token}\t{change.kind}\t{what}")


def pump(view: View, vbid: int, tokens: dict[int, Token], *, as_json: bool) -> bool:
    """Print what a vbucket has after its token and move the token; true when there was something."""
    before = tokens.get(vbid)
    while True:
        try:
            for change in view.changes(vbid, since=tokens.get(vbid)):
                print_change(change, as_json=as_json)
                tokens[vbid] = change.token
        except ViewInvalidated:
            if tokens.get(vbid) == before:
                raise
            before = tokens[vbid]  # a rollback in mid-walk: go on from the last line, which tells of it
        else:
            return tokens.get(vbid) != before


def changes(
    data: options.DataOption = None,
    vbid: Annotated[
        int | None, typer.Option("--vbid", min=0, max=65535, help="Only this vbucket.", show_default=False)
    ] = None,
    since: Annotated[
        list[str] | None,
        typer.Option(
            "--since",
            metavar="TOKEN",
            help="Only what came after this token, in its vbucket; may be repeated.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until Ctrl-C.")] = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print published events in order of each vbucket, every one with its token."""
    tokens = tokens_from(since)
    if vbid is not None and any(token != vbid for token in tokens):
        raise ConfigError("a token of another vbucket than --vbid", hint="give tokens of that vbucket only")
    with open_view(str(options.data_directory(data, config))) as view, contextlib.suppress(KeyboardInterrupt):
        if vbid is not None:
            vbids = [vbid]
        elif tokens:
            vbids = sorted(tokens)
        else:
            vbids = list(view.vbids)
        seen: dict[int, Token] = {}
        while True:
            for each in vbids:
                if follow:
                    position = view.token(each)
                    if seen.get(each) == position:
                        continue
                    seen[each] = position
                pump(view, each, tokens, as_json=as_json)
            sys.stdout.flush()
            if not follow:
                return
            time.sleep(POLL_INTERVAL_S)
