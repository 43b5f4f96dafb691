"""Positions, times and collections as readers name them: `Token`, `Pin`, `Time`, `CollectionName`."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from storage import model
from storage.errors import SeveralVbuckets, UnknownCollection
from storage.model import DEFAULT_COLLECTION, SEQNO_MAX, Branch, Manifest, Seqno

TOKEN_LENGTH_MAX = 80
"""Most characters of a token: 5, 10, 20 and 16 digits, 3 colons, and a reserve. `parse` refuses a longer text."""

CollectionName = str | int
"""`scope.collection`, `collection` of the scope `_default`, or a collection id."""


def collection_of(manifest: Manifest, name: CollectionName | None, path: str) -> model.Collection:
    """Return a collection of `manifest`, by default the default one. Raises UnknownCollection with `path`."""
    name = DEFAULT_COLLECTION if name is None else name
    found = manifest.collection(name)
    if found is None:
        raise unknown_collection(name, manifest.ids, path)
    return found


def unknown_collection(name: CollectionName, known: Iterable[str], path: str) -> UnknownCollection:
    hint = f"known here: {', '.join(sorted(known)[:20]) or 'none'}"
    return UnknownCollection(f"no collection {name!r}", path=path, hint=hint)


@dataclass(frozen=True, slots=True)
class Time:
    """An `as_of` by wall clock: the newest kept boundary published at or before `ms` milliseconds since 1970."""

    ms: int

    def __str__(self) -> str:
        try:
            return datetime.fromtimestamp(self.ms / 1000, UTC).isoformat(timespec="milliseconds")
        except (OverflowError, ValueError):
            return f"{self.ms} ms"


AsOf = int | Time | None


def check_as_of(as_of: AsOf, vbids: Collection[int]) -> None:
    """Raise SeveralVbuckets for a seqno and several vbuckets."""
    if isinstance(as_of, int) and len(vbids) > 1:
        hint = "seqnos count in one vbucket: name it, or give a time"
        raise SeveralVbuckets(f"as of seqno {as_of} of {len(vbids)} vbuckets", hint=hint)


def has_expired(expiry: int, now: float | None = None) -> bool:
    """Return True if a document with this `expiry` is gone at `now`, in seconds since 1970 (None: at present)."""
    return 0 < expiry <= (time.time() if now is None else now)


@dataclass(frozen=True, slots=True)
class Token:
    """A position in the changes of a vbucket: the reader has everything up to `seqno` on `branch`.

    `str(token)` is the text for a file or a URL; `Token.parse` reads it.
    """

    vbid: int
    branch: Branch
    seqno: Seqno
    history_id: int
    """64 random bits. The other three numbers can occur again with other data: after a group was set aside and filled
    again, after a power cut undid a commit, or in a new mirror at the same path.
    """

    def __str__(self) -> str:
        return f"{self.vbid}:{self.branch}:{self.seqno}:{self.history_id:016x}"

    @staticmethod
    def parse(text: str) -> Token:
        """Parse the text of a token. Raises ValueError."""
        *parts, history = text.split(":") if len(text) <= TOKEN_LENGTH_MAX else ("",)
        if len(parts) == 2 and all(part.isascii() and part.isdigit() for part in (*parts, history)):
            raise ValueError(f"{text!r} is a token of an earlier version: it has no history id (begin without a token)")
        is_history = len(history) == 16 and set(history) <= set("0123456789abcdef")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts) or not is_history:
            raise ValueError(f"{text[:TOKEN_LENGTH_MAX]!r} is not a token; expected vbid:branch:seqno:history")
        vbid, branch, seqno = map(int, parts)
        if vbid > 0xFFFF or branch >= 2**32 or seqno > SEQNO_MAX:
            raise ValueError(f"{text!r} is not a token; a number is too large")
        return Token(vbid, Branch(branch), Seqno(seqno), int(history, 16))


@dataclass(frozen=True, slots=True)
class Pin:
    """The position at which a read sees a vbucket, and the read's time. All pages of results of a scan share a pin."""

    vbid: int
    branch: Branch
    seqno: Seqno
    history_id: int
    now_ms: int
    """The time that decides expiry, milliseconds since 1970."""

    def __str__(self) -> str:
        return str(Token(self.vbid, self.branch, self.seqno, self.history_id))


def positions_of(pins: Iterable[Pin]) -> dict[int, tuple[int, int]]:
    """Return (branch, seqno) by vbid, for a lease. An empty vbucket has no position."""
    return {int(pin.vbid): (int(pin.branch), int(pin.seqno)) for pin in pins if pin.seqno}
