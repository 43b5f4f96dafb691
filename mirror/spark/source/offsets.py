"""Offsets of a stream: a position in each vbucket. `admit` chooses the end of the next batch.

Spark keeps offsets in a checkpoint, `sync` beside its tables. An offset names published boundaries (over a connection:
seqnos) with branch and vbuuid. So two offsets alone decide which changes are between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mirror.errors import ConfigError

FORMAT = 2
"""Format of encoded offsets."""
RESTART = "begin with a new checkpoint and target (sync: a new folder)"


class At(NamedTuple):
    branch: int = 0
    seqno: int = 0
    vbuuid: int = 0
    fresh: int = 0
    """1 if the batch that ends here sends the whole vbucket again (a resync), else 0."""
    since_seqno: int = 0
    """Over a connection: the seqno at which the batch that ends here began."""
    history_id: int = 0
    """In a mirror's directory: the history of the position (`storage.read.view.Token`)."""
    filter_sum: int = 0
    """Over a connection: a checksum of the ids of the selected collections; 0 without a selection."""

    def follows(self, other: At) -> bool:
        """Return True if this position is after `other`, in the same history."""
        same = (self.branch, self.vbuuid, self.history_id) == (other.branch, other.vbuuid, other.history_id)
        return same and self.seqno > other.seqno


BEGINNING = At()


Encoded = dict[str, Any]
"""An offset as it is kept: JSON."""


@dataclass(frozen=True)
class Offset:
    """The position of each vbucket. A vbucket that `at` lacks is at the beginning."""

    origin: str
    """`path` or `connection`. Positions of one mean nothing to the other."""
    bucket_uuid: str
    at: Mapping[int, At] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    """Over a connection: collection id -> name. Dropped collections stay here: the source forgets their names."""
    selection: str = ""
    """`Options.selection`. The offset is valid only for this selection."""

    def of(self, vbid: int) -> At:
        return self.at.get(vbid, BEGINNING)

    def encode(self) -> Encoded:
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
    try:
        if given["format"] != FORMAT:
            raise ConfigError(
                f"the position is of format {given['format']}; this program knows {FORMAT}",
                hint=RESTART,
            )
        found = Offset(
            str(given["origin"]),
            str(given["bucket_uuid"]),
            {int(vbid): At(*map(int, numbers)) for vbid, numbers in given["vbuckets"].items()},
            {int(each): str(name) for each, name in given.get("collections", {}).items()},
            str(given.get("selection", "")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the position cannot be read: {error!r}", hint=RESTART) from None
    if found.origin != origin:
        raise ConfigError(f"the position was made with option {found.origin}, not {origin}", hint=RESTART)
    if found.bucket_uuid != bucket_uuid:
        raise ConfigError(
            f"the position is of the bucket with uuid {found.bucket_uuid}, this is {bucket_uuid}",
            hint=f"the bucket was recreated or is another one: {RESTART}",
        )
    if found.selection != selection:
        raise ConfigError(
            f"the position was made with {found.selection or 'all collections and vbuckets'}, not "
            f"{selection or 'all of them'}",
            hint=f"make the same choice as before, or {RESTART}",
        )
    return found


class Lag(NamedTuple):
    base_seqno: int
    """The start and the published position have the same history up to this seqno."""
    published: At
    turned: bool
    """True if the batch sends retractions (because the start is above `base_seqno`) or the whole vbucket again."""
    weight: float
    """The share of a batch's limit that one seqno takes."""


def admit(
    lags: Mapping[int, Lag],
    first: int,
    newest: Callable[[int, int], At | None],
    following: Callable[[int, int], At | None],
) -> tuple[dict[int, At], int]:
    """Return the end of the next batch in each vbucket, and `first` for the batch after it.

    The batch begins with vbucket `first`. Its limit is 1, of which each seqno takes `Lag.weight`. `newest(vbid, seqno)`
    returns the newest boundary up to a seqno, `following(vbid, seqno)` the next boundary above it. The batch after
    begins with the first vbucket that the limit stopped, so that no vbucket waits for ever. The first vbucket that
    moves reaches its next boundary even if the limit is exceeded.
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
