"""Decides if a write at the source is visible, not yet visible or lost, so that readers can wait for their writes.

The rules for a write with the token (vbid, vbuuid, seqno):
- if the failover log has the vbuuid, a write above the seqno at which the next newer history began is lost; any other
  write is visible once published_seqno has reached the seqno of the write;
- if this mirror rolled back from the history of the vbuuid to below the write, and a newer failover log lacks the
  vbuuid, the write is lost;
- otherwise the mirror may not have heard of a failover yet, so the reader waits.

During a resync or a deferred rollback no write counts as published.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from storage.errors import NotPublished, WriteLost
from storage.model import SEQNO_MAX, Rollback, Seqno, VbucketState, Vbuuid
from storage.read.changes import recorded_rollbacks
from storage.read.groups import Groups
from storage.read.vbucket_reader import VbucketReader

POLL_MIN_S = 0.001
POLL_MAX_S = 0.025
"""Longest pause between two looks: the default commit interval of the writer."""


@dataclass(frozen=True, slots=True)
class MutationToken:
    """A write at the source: `seqno` of the history `vbuuid` (0: any history) of a vbucket."""

    vbid: int
    vbuuid: Vbuuid
    seqno: Seqno

    def __str__(self) -> str:
        return f"{self.vbid}:{self.vbuuid}:{self.seqno}"

    @staticmethod
    def parse(text: str) -> MutationToken:
        """Parse the text of a token. Raises ValueError."""
        parts = text.split(":")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 20 for part in parts):
            raise ValueError(f"{text[:80]!r} is not a mutation token; expected vbid:vbuuid:seqno")
        vbid, vbuuid, seqno = map(int, parts)
        if vbid > 0xFFFF or max(vbuuid, seqno) > SEQNO_MAX:
            raise ValueError(f"{text!r} is not a mutation token; a number is too large")
        return MutationToken(vbid, Vbuuid(vbuuid), Seqno(seqno))

    @staticmethod
    def of(token: Any) -> MutationToken:
        """Convert a token of the official Python SDK (`result.mutation_token()`)."""
        found = token.as_dict()
        return MutationToken(found["partition_id"], Vbuuid(found["partition_uuid"]), Seqno(found["sequence_number"]))


class WriteStatus(Enum):
    PUBLISHED = "published"
    WAITING = "waiting"
    LOST = "lost"


class WriteState(NamedTuple):
    """One look at a vbucket, for any number of tokens."""

    state: VbucketState
    rollbacks: Sequence[Rollback]

    @staticmethod
    def of(reader: VbucketReader) -> WriteState:
        with reader.environment.read() as txn:
            return WriteState(reader.state(txn), recorded_rollbacks(txn, reader.vbid))


def write_status(reader: VbucketReader, token: MutationToken) -> WriteStatus:
    return status_in(WriteState.of(reader), token)


def status_in(seen: WriteState, token: MutationToken) -> WriteStatus:
    state, known = seen
    reached = state.published_seqno >= token.seqno and state.has_served_log
    here = WriteStatus.PUBLISHED if reached else WriteStatus.WAITING
    log = state.failover_log
    if not token.vbuuid:
        return here
    if state.rollback_deferred:  # the log is of the staged history; readers see another
        return WriteStatus.WAITING
    end_seqno = log.end_of(token.vbuuid, SEQNO_MAX)
    if end_seqno is not None:
        return here if token.seqno <= end_seqno else WriteStatus.LOST
    left = [each.to_seqno for each in known if each.from_vbuuid == token.vbuuid]
    if not log or not left or token.seqno <= left[-1]:  # a log forgets a history after 25 failovers
        return WriteStatus.WAITING
    is_newer = log.newest_vbuuid != known[-1].to_vbuuid or state.published_seqno > known[-1].to_seqno
    return WriteStatus.LOST if is_newer else WriteStatus.WAITING


def wait_for(
    groups: Groups,
    token: MutationToken,
    timeout_s: float,
    *,
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """See `View.wait_for`."""
    deadline = monotonic() + timeout_s
    delay = POLL_MIN_S
    while (now := write_status(groups.reader(token.vbid), token)) is not WriteStatus.PUBLISHED:
        if now is WriteStatus.LOST:
            message = f"the write {token} was lost to a failover of the source"
            raise WriteLost(message, vbid=token.vbid, hint="write it again")
        left = deadline - monotonic()
        if left <= 0:
            message = f"the write {token} is not published after {timeout_s:g} s"
            hint = "wait longer, or look at the mirror's lag: `dcp-mirror status`"
            raise NotPublished(message, vbid=token.vbid, hint=hint)
        sleep(min(delay, left))
        delay = next_delay_s(delay)


def next_delay_s(delay_s: float) -> float:
    return min(POLL_MAX_S, delay_s * 1.5)
