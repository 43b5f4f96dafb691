"""Positions and moments that a reader names: `Token`, `Pin` and `Time`, and how they are written as text.

Knows values only: no LMDB, no clock. Invariant: `parse` accepts exactly what `str` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from storage.model import SEQNO_MAX, Branch, Seqno, Vbid

TOKEN_LENGTH_MAX = 80
"""Characters of a token: 5 digits, 10, 20 and 16, including leading zeros."""


@dataclass(frozen=True, slots=True)
class Time:
    """An `as_of` by wall clock: the newest kept boundary published at or before `ms` milliseconds since 1970."""

    ms: int

    def __str__(self) -> str:
        """In ISO 8601, or as the number if no date is so far away."""
        try:
            return datetime.fromtimestamp(self.ms / 1000, UTC).isoformat(timespec="milliseconds")
        except (OverflowError, ValueError):
            return f"{self.ms} ms"


AsOf = int | Time | None


@dataclass(frozen=True, slots=True)
class Token:
    """A position in the changes of a vbucket: everything up to `seqno` on `branch` was seen.

    `str(token)` is its text, for a file or a URL, and `Token.parse` the inverse.
    """

    vbid: Vbid
    branch: Branch
    seqno: Seqno
    history_id: int
    """64 random bits: the other numbers can occur twice where a group is filled again after its folder was set aside,
    where a power cut undoes a commit, and where another mirror is made at the same path. `View.token` fills it in.
    """

    def __str__(self) -> str:
        """`vbid:branch:seqno:history`, the last in hexadecimal."""
        return f"{self.vbid}:{self.branch}:{self.seqno}:{self.history_id:016x}"

    @staticmethod
    def parse(text: str) -> Token:
        """The inverse of str(); ValueError says what is wrong."""
        *parts, history = text.split(":") if len(text) <= TOKEN_LENGTH_MAX else ("",)
        if len(parts) == 2 and all(part.isascii() and part.isdigit() for part in (*parts, history)):
            raise ValueError(
                f"{text!r} is a token of an earlier version, which does not say of which history it is; begin again "
                "without it"
            )
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts) or not _is_hex16(history):
            raise ValueError(f"{text[:TOKEN_LENGTH_MAX]!r} is not a token; expected vbid:branch:seqno:history")
        vbid, branch, seqno = map(int, parts)
        if vbid > 0xFFFF or branch >= 2**32 or seqno > SEQNO_MAX:
            raise ValueError(f"{text!r} is not a token; a number is too large")
        return Token(Vbid(vbid), Branch(branch), Seqno(seqno), int(history, 16))


def _is_hex16(text: str) -> bool:
    return len(text) == 16 and set(text) <= set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Pin:
    """One vbucket as it was served at one published seqno: what the pages of one scan have in common."""

    vbid: Vbid
    branch: Branch
    seqno: Seqno
    history_id: int
    """As in a `Token`."""
    now_ms: int
    """The moment that decides expiry, milliseconds since 1970."""

    def __str__(self) -> str:
        """As a `Token`."""
        return str(Token(self.vbid, self.branch, self.seqno, self.history_id))
