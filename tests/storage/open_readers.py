"""Readers that stay open: each takes a little at a time, while the store is written, purged, rolled back and merged.

At its end each has what the model had at the boundary that it named when it began, or it was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Set
from dataclasses import dataclass
from random import Random
from typing import Any

from storage.errors import AnswerTooLarge, Closed, Unavailable, ViewInvalidated
from storage.format import keys
from storage.format.records import decode_row
from storage.model import Branch, Document
from storage.read import bulk
from storage.read.view import Pieces, Pin, Token, View
from tests.storage.model import events
from tests.storage.rig import manifest_of, scan_page

Contents = dict[bytes, tuple[int, bytes]]
"""The documents of a vbucket: key with its collection id -> seqno and value as it is stored."""
Read = Generator[None, None, Contents]

BYTES_MAX = 1
"""Of a page or a piece of changes: one document each."""
REFUSALS = (ViewInvalidated, Unavailable, Closed)


@dataclass
class Position:
    """A boundary that was served once, and what was there."""

    pin: Pin
    contents: Contents

    @property
    def token(self) -> Token:
        return Token(self.pin.vbid, self.pin.branch, self.pin.seqno, self.pin.history_id)


@dataclass
class OpenReader:
    """A read that is under way, and what it has to end with."""

    kind: str
    end: Position
    read: Read
    refused: Exception | None = None
    ignored: Callable[[], Set[int]] = frozenset
    """Collections that may hold anything."""

    def goes_on(self, steps: int = 1) -> bool:
        """True while there is more to come; at the end it has what it should, or it was refused."""
        for _ in range(steps):
            found: Contents | None = None
            try:
                next(self.read)
            except StopIteration as stop:
                found = stop.value
            except REFUSALS as error:
                self.refused = error
                return False
            if found is not None:
                self._compare(found)
                return False
        return True

    def _compare(self, found: Contents) -> None:
        ignored, expected = self.ignored(), self.end.contents
        wrong = [
            f"{key!r} is {found.get(key)}, not {expected.get(key)}"
            for key in sorted(found.keys() | expected.keys())
            if found.get(key) != expected.get(key) and keys.split_key(key)[0] not in ignored
        ]
        assert not wrong, f"{self.kind} to {self.end.pin}:\n" + "\n".join(wrong)


def wire_key(document: Document) -> bytes:
    return keys.encode_collection_id(document.collection_id) + document.key


def apply(contents: Contents, kind: str, document: Document | None) -> None:
    """Apply an event to a copy, as a reader that keeps one does."""
    if kind == "rollback":
        return
    assert document is not None, kind
    if kind in ("mutation", "restoration"):
        contents[wire_key(document)] = (document.seqno, document.value)
    elif kind != "system_event":
        contents.pop(wire_key(document), None)
    elif len(document.value) >= 16:  # of a collection; its documents before it are gone
        prefix = keys.encode_collection_id(int.from_bytes(document.value[12:16]))
        for key in [key for key in contents if key.startswith(prefix)]:
            del contents[key]


def scanned(view: View, pin: Pin) -> Read:
    found: Contents = {}
    for document in view.scan(pin.vbid, now=0, raw=True):
        found[wire_key(document)] = (document.seqno, document.value)
        yield
    return found


def in_pages(get_view: Callable[[], View], pin: Pin) -> Read:
    found: Contents = {}
    for collection_id in list(manifest_of(get_view(), pin).collections):
        start, more = b"", True
        while more:
            page, start = scan_page(get_view(), pin, collection_id, start=start, limit=2, bytes_max=BYTES_MAX, raw=True)
            found |= {wire_key(document): (document.seqno, document.value) for document in page}
            more = bool(start)
            yield
    return found


def in_pages_within(get_view: Callable[[], View], pin: Pin) -> Read:
    """Each document is refused first, and then read."""
    found: Contents = {}
    for collection_id in list(manifest_of(get_view(), pin).collections):
        start, more, bytes_max = b"", True, 0
        while more:
            limits: dict[str, Any] = {"limit": 2, "bytes_max": BYTES_MAX, "document_bytes_max": bytes_max}
            try:
                page, start = scan_page(get_view(), pin, collection_id, start=start, raw=True, **limits)
            except AnswerTooLarge as error:
                bytes_max = error.byte_count
                yield
                continue
            found |= {wire_key(document): (document.seqno, document.value) for document in page}
            more, bytes_max = bool(start), 0
            yield
    return found


def in_bulk(view: View, pin: Pin, rng: Random) -> Read:
    found: Contents = {}
    key_range = rng.choice((bulk.EVERY_KEY, bulk.KeyRange(end=b"\xff")))
    for chunk in bulk.documents(view.reader(pin.vbid), pin, None, key_range, rows_max=rng.choice((1, 2, 5))):
        for frame in chunk.frames:
            document = decode_row(pin.vbid, Branch(0), frame, raw=True)
            assert wire_key(document) not in found, f"{document} came twice"
            found[wire_key(document)] = (document.seqno, document.value)
        yield
    return found


def in_order_of_seqnos(view: View, pin: Pin) -> Read:
    found: Contents = {}
    for document in events(view, pin.vbid, raw=True):
        apply(found, document.kind.name.lower(), document)
        yield
    return found


def changed(view: View, pin: Pin, since: Position | None) -> Read:
    found = dict(since.contents) if since is not None else {}
    token = since.token if since is not None else None
    for change in view.changes(pin.vbid, since=token, raw=True, pieces=Pieces(BYTES_MAX)):
        apply(found, change.kind, change.document)
        yield
    return found


def changed_between(view: View, since: Position | None, end: Position) -> Read:
    found = dict(since.contents) if since is not None else {}
    for change in view.changes_between(since.token if since is not None else None, end.token, raw=True):
        apply(found, change.kind, change.document)
        yield
    return found


def begin(get_view: Callable[[], View], now: Position, known: list[Position], rng: Random) -> OpenReader:
    """Begin some read of a vbucket that takes several steps. `now` is what is served, `known` what was served before,
    oldest first.
    """
    view = get_view()
    number = rng.randint(0, len(known))
    end = [*known, now][number]
    since = rng.choice([None, *known[: number + 1]])
    kind, end, read = rng.choice(
        (
            ("scan", now, scanned(view, now.pin)),
            ("pages", end, in_pages(get_view, end.pin)),
            ("pages within", end, in_pages_within(get_view, end.pin)),
            ("bulk", end, in_bulk(view, end.pin, rng)),
            ("seqnos", now, in_order_of_seqnos(view, now.pin)),
            ("changes", now, changed(view, now.pin, None)),
            ("changes since", now, changed(view, now.pin, since)),
            ("changes between", end, changed_between(view, since, end)),
            ("changes between", end, changed_between(view, since, end)),
        )
    )
    return OpenReader(kind, end, read)
