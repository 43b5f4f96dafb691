"""Offsets of a stream: where each vbucket stands, as Spark keeps it in a checkpoint, and how far the next batch goes.

Knows numbers only: no store, no connection, no Spark. Invariants: an offset names published boundaries (over a
connection: seqnos) with their branch and vbuuid, so that two offsets alone decide what is between them; what `admit`
returns lies between start and what is published, is a boundary of each vbucket, and moves on whenever there is
something to move to, however small the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mirror.errors import ConfigError

FORMAT = 2
"""1 did not say of which history of the mirror a position is."""


class At(NamedTuple):
    """Where one vbucket stands."""

    branch: int = 0
    seqno: int = 0
    vbuuid: int = 0
    fresh: int = 0
    """1: the batch that ends here begins again, with everything (a resync)."""
    since_seqno: int = 0
    """Over a connection: where the batch that ends here began."""
    history_id: int = 0
    """In a mirror's directory: which history the position is of (`storage.read.view.Token`)."""

    def follows(self, other: At) -> bool:
        """True when it lies behind another position of the same history."""
        same = (self.branch, self.vbuuid, self.history_id) == (other.branch, other.vbuuid, other.history_id)
        return same and self.seqno > other.seqno


BEGINNING = At()


@dataclass(frozen=True)
class Offset:
    """Where all vbuckets stand; those that are not named, at the beginning."""

    origin: str
    """path or connection: their numbers do not mean the same."""
    bucket_uuid: str
    at: Mapping[int, At] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    """Over a connection: the collections that were ever seen, by id. Of one that was dropped nobody else knows it."""
    selection: str = ""
    """What the stream reads of the source (`Options.selection`). Positions say nothing of what a filter left out, so an
    offset is good for this selection alone."""

    def of(self, vbid: int) -> At:
        """Where one stands."""
        return self.at.get(vbid, BEGINNING)

    def encode(self) -> dict[str, Any]:
        """As JSON, with no more numbers than are needed."""
        found = {
            "format": FORMAT,
            "origin": self.origin,
            "bucket_uuid": self.bucket_uuid,
            "vbuckets": {str(vbid): _without_zeros(at) for vbid, at in sorted(self.at.items()) if at != BEGINNING},
        }
        if self.selection:
            found["selection"] = self.selection
        if self.names:
            found["collections"] = {str(each): name for each, name in sorted(self.names.items())}
        return found


def _without_zeros(at: At) -> list[int]:
    numbers = list(at)
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def decode(given: Mapping[str, Any], origin: str, bucket_uuid: str, selection: str = "") -> Offset:
    """An offset out of a checkpoint. Raises ConfigError when it is none of this source."""
    try:
        if given["format"] != FORMAT:
            raise ConfigError(
                f"the checkpoint is of format {given['format']}; this program knows {FORMAT}",
                hint="begin with a new checkpoint",
            )
        found = Offset(
            str(given["origin"]),
            str(given["bucket_uuid"]),
            {int(vbid): At(*map(int, numbers)) for vbid, numbers in given["vbuckets"].items()},
            {int(each): str(name) for each, name in given.get("collections", {}).items()},
            str(given.get("selection", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the checkpoint cannot be read as one of this source: {error!r}") from None
    if found.origin != origin:
        raise ConfigError(
            f"the checkpoint was made with option {found.origin}, not {origin}", hint="use another checkpoint"
        )
    if found.bucket_uuid != bucket_uuid:
        raise ConfigError(
            f"the checkpoint is of the bucket with uuid {found.bucket_uuid}, this is {bucket_uuid}",
            hint="the bucket was recreated or is another one: begin with a new checkpoint",
        )
    check_selection("the checkpoint", found.selection, selection)
    return found


def check_selection(what: str, made_with: str, now: str) -> None:
    """Raise ConfigError where `what` was made with another choice of collections and vbuckets than now."""
    if made_with != now:
        raise ConfigError(
            f"{what} was made with {made_with or 'all collections and vbuckets'}, not {now or 'all of them'}",
            hint="make the same choice as before, or begin with a new checkpoint and a new target",
        )


class Lag(NamedTuple):
    """What a vbucket has to offer."""

    base_seqno: int
    """Up to here, start and front have one history."""
    published: At
    turned: bool
    """The start lies beyond the base: there is something to take back, whatever comes after."""
    weight: float
    """Of the limit, that a seqno costs."""


def admit(
    lags: Mapping[int, Lag],
    first: int,
    newest: Callable[[int, int], At | None],
    following: Callable[[int, int], At | None],
) -> tuple[dict[int, At], int]:
    """Where each vbucket is to go, all costs together about 1, and which vbucket is to be first the next time.

    `newest(vbid, seqno)` gives the newest boundary not above a seqno, `following(vbid, seqno)` the next one above.
    The turn goes round, so that none waits for ever; a vbucket whose next boundary is further away than the limit goes
    there all the same if it is the first of a batch.
    """
    order = sorted(lags)
    order = [vbid for vbid in order if vbid >= first] + [vbid for vbid in order if vbid < first]
    left = 1.0
    ends: dict[int, At] = {}
    cut = None
    for vbid in order:
        lag = lags[vbid]
        end: At | None = lag.published
        allowed = int(left / lag.weight) if left > 0 else 0
        if lag.published.seqno - lag.base_seqno > allowed:
            end = newest(vbid, lag.base_seqno + allowed)
            if end is not None and end.seqno < lag.base_seqno + (0 if lag.turned else 1):
                end = None
            if end is None and not ends:
                end = following(vbid, lag.base_seqno)
            if cut is None:
                cut = vbid
        if end is not None:
            ends[vbid] = end
            left -= (end.seqno - lag.base_seqno) * lag.weight
    return ends, first if cut is None else cut
