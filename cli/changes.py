"""`changes`: prints the published events after a position, and with `--follow` also new events; cursor files.

A cursor file has a token for each vbucket, one a line. The reader of a pipe has taken the events before a cursor file
with their tokens replaces the old one (fsync, rename), so a kill, or a reader that hangs up, may repeat events but
loses none.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from cli import options, output
from cli.get import check_filled
from mirror.errors import ConfigError, SupervisionError
from mirror.ownership import private_file
from mirror.serve.objects import CollectionNames, change_parts, collection_of
from storage.errors import ViewInvalidated
from storage.read.view import Change, Token, View, open_view

POLL_INTERVAL_S = 0.1
"""Pause of --follow between searches for new events."""
CURSOR_INTERVAL_S = 1.0
"""Shortest time between two writes of the cursor file. Each write syncs it to disk."""
NOW = "now"


def tokens_from(texts: Iterable[str]) -> dict[int, Token]:
    tokens: dict[int, Token] = {}
    for text in texts:
        try:
            token = Token.parse(text)
        except ValueError as error:
            hint = "take it from a line that `changes` printed, or give `now` or a cursor file that exists"
            raise ConfigError(str(error), hint=hint) from None
        tokens[int(token.vbid)] = token
    return tokens


def start(view: View, vbid: int | None, since: list[str], file: Path | None) -> tuple[list[int], dict[int, Token]]:
    """Return the vbuckets to print and the tokens after which to begin. Raises ConfigError, StorageError."""
    every = list(view.vbids) if vbid is None else [vbid]
    if file is not None and file.exists():
        if not file.is_file():
            raise ConfigError(f"the cursor file {file} is no regular file", hint="give --cursor a file, or a new name")
        return every, {each: token for each, token in load_cursor(file).items() if each in every}
    if since == [NOW]:
        return every, {each: view.token(each) for each in every}
    if len(since) == 1 and Path(since[0]).is_file():
        return every, {each: token for each, token in load_cursor(Path(since[0])).items() if each in every}
    tokens = tokens_from(since)
    if vbid is not None and any(token != vbid for token in tokens):
        raise ConfigError("a token belongs to another vbucket than --vbid", hint="give tokens of that vbucket only")
    return (every if vbid is not None or file is not None or not tokens else sorted(tokens)), tokens


def print_change(change: Change, *, as_json: bool) -> None:
    if as_json:
        output.print_parts(change_parts(change))
        return
    if change.rollback is not None:
        rollback = change.rollback
        what = f"from seqno {rollback.from_seqno} to seqno {rollback.to_seqno} on branch {rollback.to_branch}"
    elif change.document is not None:
        what = output.for_people(change.document.key)
    else:
        what = ""
    output.echo(f"{change.token}\t{change.kind}\t{what}")


class Pump:
    """Prints the changes of vbuckets after their tokens, and moves the tokens forward."""

    def __init__(
        self,
        view: View,
        tokens: dict[int, Token],
        *,
        as_json: bool = False,
        collection: str | int | None = None,
        limit: int | None = None,
        file: Path | None = None,
    ) -> None:
        """`collection` selects documents; rollbacks are always printed. `file` is the cursor file to update."""
        self.tokens = tokens
        self._view = view
        self._as_json = as_json
        self._collection = collection
        self._names = CollectionNames()
        self._left = limit
        self._file = file
        self._saved: dict[int, Token] | None = None
        self._saved_s = time.monotonic()

    @property
    def done(self) -> bool:
        return self._left is not None and self._left <= 0

    def pump(self, vbid: int) -> None:
        before = self.tokens.get(vbid)
        while True:
            try:
                in_step = False
                for change in self._view.changes(vbid, since=self.tokens.get(vbid)):
                    if self.done and not in_step:
                        return
                    in_step = change.token == self.tokens.get(vbid)  # inside a rollback: this token resumes before it
                    if self._is_selected(change):
                        print_change(change, as_json=self._as_json)
                        if self._left is not None:
                            self._left -= 1
                    self.tokens[vbid] = change.token
            except ViewInvalidated:
                if self.tokens.get(vbid) == before:
                    raise
                before = self.tokens[vbid]  # a rollback during the walk: continue after the last line
            else:
                return

    def _is_selected(self, change: Change) -> bool:
        """Return True for documents of the collection, and for events that begin or end it."""
        if self._collection is None or change.document is None:
            return True
        if isinstance(self._collection, int):
            return collection_of(change.document) == self._collection
        return self._names.of(self._view, change.document) == self._collection

    def flush(self, *, at_once: bool = False) -> None:
        """Flush the output. Then write the cursor file, at most once a second unless `at_once`. Raises BrokenPipeError
        and leaves the cursor where it was if the reader of the output hangs up before it has taken everything.
        """
        sys.stdout.flush()
        if self._file is None or self._saved == self.tokens:
            return
        if at_once or time.monotonic() - self._saved_s >= CURSOR_INTERVAL_S:
            output.deliver()
            save_cursor(self._file, self.tokens.values())
            self._saved, self._saved_s = dict(self.tokens), time.monotonic()


def changes(
    data: options.DataOption = None,
    vbid: options.VbidOption = None,
    since: Annotated[
        list[str] | None,
        options.optional(
            "--since",
            metavar="now|FILE|TOKEN",
            help="Begin after now, the positions of a cursor file, or a token; can be repeated for tokens.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        options.optional(
            "--cursor",
            metavar="FILE",
            help="Resume from this file and keep it up to date; if missing, begin as --since says.",
        ),
    ] = None,
    collection: options.CollectionOption = None,
    limit: Annotated[
        int | None,
        options.optional("--limit", "-n", min=1, help="End after this many events. A rollback is printed whole."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more until Ctrl-C.")] = False,
    partial: options.PartialOption = False,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print published events in the order of each vbucket, each with its token."""
    with open_view(str(options.data_directory(data, config)), partial=partial) as view:
        vbids, tokens = start(view, vbid, since or [], file)
        check_filled(view, vbids, partial=partial, as_json=as_json)
        chosen = options.collection_from(collection)
        if chosen is not None:
            view.check_followed(chosen, vbids, tokens.values())
        pump = Pump(view, tokens, as_json=as_json, collection=chosen, limit=limit, file=file)
        with contextlib.suppress(KeyboardInterrupt):
            run(view, vbids, pump, follow=follow)
        pump.flush(at_once=True)


def run(view: View, vbids: list[int], pump: Pump, *, follow: bool) -> None:
    seen: dict[int, Token] = {}
    while True:
        for each in vbids:
            if follow:
                position = view.token(each)
                if seen.get(each) == position:
                    continue
                seen[each] = position
            pump.pump(each)
            pump.flush()
            if pump.done:
                return
        if not follow:
            return
        time.sleep(POLL_INTERVAL_S)


FILE_BYTES_MAX = 16 << 20
"""Bytes of the largest accepted cursor file: three times the tokens of 65,536 vbuckets."""
_HEAD = "# dcp-mirror: a token of each vbucket; `changes --since` this file goes on after them\n"


def load_cursor(path: Path) -> dict[int, Token]:
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_size > FILE_BYTES_MAX:
                raise ValueError("too large")
            lines = [line.strip() for line in file.read(FILE_BYTES_MAX).splitlines()]
        tokens = [Token.parse(line) for line in lines if line and not line.startswith("#")]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="give a file that `--cursor` or `export` wrote") from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is not a cursor file: {error}", hint="give one that `--cursor` or `export` wrote"
        ) from None
    return {int(token.vbid): token for token in tokens}


def save_cursor(path: Path, tokens: Iterable[Token]) -> None:
    """Replace a cursor file and sync it to disk. Raises SupervisionError."""
    text = _HEAD + "".join(f"{token}\n" for token in sorted(tokens, key=lambda token: token.vbid))
    try:
        with private_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        hint = "the next call prints again the events since the file was last written"
        raise SupervisionError(f"the cursor file {path} cannot be written: {error.strerror}", hint=hint) from None
