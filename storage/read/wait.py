"""Reading one's own writes: whether a write made at the source can be seen here, cannot yet, or never will.

Knows mutation tokens as SDKs give them, failover logs and published seqnos; must never know who waits, nor how else
than by asking again. Why asking is enough: publishing, a rollback and the failover log that goes with it are each one
transaction, so every answer is true of one moment. The rule, for a token (vbid, vbuuid, seqno):
- its history stands in the failover log: writes above the seqno at which the next newer history began are lost; else
  the write can be seen once published_seqno has reached it;
- its history was rolled back here, and a newer log has come since without it: lost;
- its history is unknown: a failover that this mirror has yet to hear of, so waiting is right.
While a vbucket is resynced, or a rollback is deferred, nothing counts as published. Invariant: a token that is
`LOST` was never acknowledged as `PUBLISHED` by the history that is served now. Thread-safe as the view is; a wait holds
no transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from storage.errors import NotPublished, WriteLost
from storage.model import SEQNO_MAX, Seqno, Vbid, VbucketState, Vbuuid

POLL_MIN_S = 0.001
POLL_MAX_S = 0.025
"""The writer's own interval of commits: asking more often would only burn a processor."""


@dataclass(frozen=True, slots=True)
class MutationToken:
    """A write at the source: seqno `seqno` of the history `vbuuid` of a vbucket. vbuuid 0: of whichever history."""

    vbid: Vbid
    vbuuid: Vbuuid
    seqno: Seqno

    def __str__(self) -> str:
        """`vbid:vbuuid:seqno`."""
        return f"{self.vbid}:{self.vbuuid}:{self.seqno}"

    @staticmethod
    def parse(text: str) -> MutationToken:
        """The inverse of str(); ValueError says what is wrong."""
        parts = text.split(":")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 20 for part in parts):
            raise ValueError(f"{text[:80]!r} is not a mutation token; expected vbid:vbuuid:seqno")
        vbid, vbuuid, seqno = map(int, parts)
        if vbid > 0xFFFF or max(vbuuid, seqno) > SEQNO_MAX:
            raise ValueError(f"{text!r} is not a mutation token; a number is too large")
        return MutationToken(Vbid(vbid), Vbuuid(vbuuid), Seqno(seqno))

    @staticmethod
    def of(token: Any) -> MutationToken:
        """The token of a result of the official Python SDK (`result.mutation_token()`)."""
        found = token.as_dict()
        return MutationToken(
            Vbid(found["partition_id"]), Vbuuid(found["partition_uuid"]), Seqno(found["sequence_number"])
        )


class RollbackRecord(Protocol):
    """A rollback that readers went through."""

    @property
    def from_vbuuid(self) -> Vbuuid:
        """The history that was left."""

    @property
    def to_vbuuid(self) -> Vbuuid:
        """The history gone on with."""

    @property
    def to_seqno(self) -> Seqno:
        """Where."""


class Histories(Protocol):
    """What must be known of vbuckets: a view knows it."""

    def state(self, vbid: int) -> VbucketState:
        """The stored state."""

    def rollbacks(self, vbid: int) -> Sequence[RollbackRecord]:
        """All rollbacks that are kept, oldest first."""


class WriteStatus(Enum):
    """How a write stands."""

    PUBLISHED = "published"
    WAITING = "waiting"
    LOST = "lost"


def write_status(view: Histories, token: MutationToken) -> WriteStatus:
    """How the write stands now. Raises StorageError for a vbucket that does not exist."""
    state = view.state(token.vbid)
    found = write_status_in(state, token)
    if found is None:
        return WriteStatus.LOST if _was_rolled_back(view, state, token) else WriteStatus.WAITING
    return found


def write_status_in(state: VbucketState, token: MutationToken) -> WriteStatus | None:
    """How the write stands by one state of its vbucket; None: its history is not in the failover log."""
    resyncing = state.staging_branch != state.branch
    here = WriteStatus.PUBLISHED if state.published_seqno >= token.seqno and not resyncing else WriteStatus.WAITING
    if not token.vbuuid:
        return here
    if state.rollback_deferred:  # the log is of the history that is staged: whether it has the write is not known yet
        return WriteStatus.WAITING
    end_seqno = state.failover_log.end_of(token.vbuuid, SEQNO_MAX)
    if end_seqno is None:
        return None
    return here if token.seqno <= end_seqno else WriteStatus.LOST


def _was_rolled_back(view: Histories, state: VbucketState, token: MutationToken) -> bool:
    """True when the token's history was left by a rollback, and the source has sent its new one since."""
    rollbacks = view.rollbacks(token.vbid)
    if not any(each.from_vbuuid == token.vbuuid for each in rollbacks) or not state.failover_log:
        return False
    last = rollbacks[-1]
    return state.failover_log.newest_vbuuid != last.to_vbuuid or state.published_seqno > last.to_seqno


def wait_for(
    view: Histories,
    token: MutationToken,
    timeout_s: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """Return once the write can be read. Raises WriteLost as soon as it is known that it never will, and NotPublished
    after `timeout_s`.
    """
    deadline = monotonic() + timeout_s
    delay = POLL_MIN_S
    while (now := write_status(view, token)) is not WriteStatus.PUBLISHED:
        if now is WriteStatus.LOST:
            raise lost(token)
        left = deadline - monotonic()
        if left <= 0:
            raise late(token, timeout_s)
        sleep(min(delay, left))
        delay = next_delay_s(delay)


def next_delay_s(delay_s: float) -> float:
    """The pause after this one, for anyone who waits in another way; the first is `POLL_MIN_S`."""
    return min(POLL_MAX_S, delay_s * 1.5)


def lost(token: MutationToken) -> WriteLost:
    """The error of a write that was rolled back."""
    return WriteLost(f"the write {token} was lost to a failover of the source", vbid=token.vbid, hint="write it again")


def late(token: MutationToken, timeout_s: float) -> NotPublished:
    """The error of a write that did not come in time."""
    return NotPublished(
        f"the write {token} is not published after {timeout_s:g} s",
        vbid=token.vbid,
        hint="wait longer, or look at the mirror's lag: `dcp-mirror status`",
    )
