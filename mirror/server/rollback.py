"""The rollback rule of a producer: its answer to a stream request (docs/protocol.md 2.5).

It agrees with 7,680 recorded answers of two real servers (tests/recordings, `rollback_answers_*`).
"""

from __future__ import annotations

from dataclasses import dataclass

from mirror.server.errors import Refused
from mirror.wire.constants import Status, StreamRequestFlag
from mirror.wire.events import StreamRequest
from storage.model import FailoverLog


@dataclass(frozen=True, slots=True)
class StreamHistory:
    failover_log: FailoverLog
    """The producer's, newest first."""
    high_seqno: int
    purge_seqno: int
    holds_whole_filter: bool = False
    """True if all changes that pass the filter are at or below the requested start."""
    answered_log: FailoverLog | None = None
    """The failover log for the answer, if it differs from `failover_log`."""


def judge(request: StreamRequest, history: StreamHistory, client_purge_seqno: int | None = None) -> int | None:
    """Return None to accept a stream request, or the seqno at or below which the client must continue.

    `client_purge_seqno` is from the request's filter. Raises Refused (ERANGE) if the request contradicts itself.
    """
    start_seqno, snap_start_seqno, snap_end_seqno = (
        request.start_seqno,
        request.snap_start_seqno,
        request.snap_end_seqno,
    )
    if start_seqno > request.end_seqno or not snap_start_seqno <= start_seqno <= snap_end_seqno:  # case 0
        raise Refused(Status.ERANGE)
    if start_seqno == 0 and (not request.flags & StreamRequestFlag.STRICT_VBUUID or request.vbuuid == 0):  # case 1
        return None
    purge_matters = not (history.holds_whole_filter or request.flags & StreamRequestFlag.IGNORE_PURGED_TOMBSTONES)
    if 0 < start_seqno < history.purge_seqno != client_purge_seqno and purge_matters:  # case 2: deletions were purged
        return 0
    upper_seqno = history.failover_log.end_of(request.vbuuid, history.high_seqno)
    if upper_seqno is None:  # case 3: an unknown history
        return 0
    # Case 4. At a snapshot's start the consumer has none of it, at the end all of it: the range shrinks to that seqno.
    if start_seqno == snap_start_seqno:
        snap_end_seqno = start_seqno
    if snap_end_seqno <= upper_seqno:
        return None
    if start_seqno == snap_end_seqno:
        snap_start_seqno = start_seqno
    return min(upper_seqno, snap_start_seqno)
