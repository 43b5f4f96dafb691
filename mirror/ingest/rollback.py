"""The rollback rules: how a producer (the sender) answers a stream request, and how a consumer finds common history.

Knows seqnos, failover logs and purge seqnos as plain values. Must never know rows, streams, time or the store.

`producer_answer` follows the numbered cases of docs/protocol.md 2.5. It agrees with the answers of two real servers in
tests/recordings (`rollback_answers_*`). `common_history` finds the data that a consumer need not fetch again.
"""

from __future__ import annotations

from dataclasses import dataclass

from storage.model import SEQNO_MAX, FailoverLog, Seqno, Vbuuid


@dataclass(frozen=True, slots=True)
class Accept: ...


@dataclass(frozen=True, slots=True)
class RollbackAnswer:
    """The producer lacks changes, or has purged deletions. The consumer must go back to `seqno` or below, and retry."""

    seqno: int


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """The request contradicts itself (ERANGE): not snap_start <= start <= snap_end, or start > end."""


ProducerAnswer = Accept | RollbackAnswer | OutOfRange


def producer_answer(
    start_seqno: int,
    snap_start_seqno: int,
    snap_end_seqno: int,
    vbuuid: int,
    failover_log: FailoverLog,
    high_seqno: int,
    purge_seqno: int,
    *,
    end_seqno: int = SEQNO_MAX,
    strict_vbuuid: bool = False,
    ignore_purged_tombstones: bool = False,
    client_purge_seqno: int | None = None,
    holds_whole_filter: bool = False,
) -> ProducerAnswer:
    """Answer a stream request as kv_engine does; case numbers are those of docs/protocol.md 2.5.

    `failover_log` is the producer's, newest first. `strict_vbuuid` and `ignore_purged_tombstones` are the stream
    request flags 0x20 and 0x80; `client_purge_seqno` is the request's `purge_seqno` (8.0); `holds_whole_filter` is True
    if the client of a filtered stream already holds every change that passes the filter.
    """
    if start_seqno > end_seqno or not snap_start_seqno <= start_seqno <= snap_end_seqno:  # case 0
        return OutOfRange()
    if start_seqno == 0 and (not strict_vbuuid or vbuuid == 0):  # case 1
        return Accept()
    purge_matters = not ignore_purged_tombstones and not holds_whole_filter and client_purge_seqno != purge_seqno
    if start_seqno != 0 and start_seqno < purge_seqno and purge_matters:  # case 2: deletions after start were purged
        return RollbackAnswer(0)
    upper_seqno = failover_log.end_of(vbuuid, high_seqno)
    if upper_seqno is None:  # case 3: an unknown history
        return RollbackAnswer(0)
    # Case 4. At a snapshot's start the consumer has none of it, at the end all of it: the range shrinks to that seqno.
    if start_seqno == snap_start_seqno:
        snap_end_seqno = start_seqno
    if snap_end_seqno <= upper_seqno:
        return Accept()
    if start_seqno == snap_end_seqno:
        snap_start_seqno = start_seqno
    return RollbackAnswer(min(upper_seqno, snap_start_seqno))


# --- consumer ---


@dataclass(frozen=True, slots=True)
class CommonHistory:
    """The newest history that consumer and producer share, and the seqno up to which they share it."""

    vbuuid: Vbuuid
    seqno: Seqno
    failover_log: FailoverLog
    """The consumer's log without the newer entries, which the source does not share."""


def common_history(own_log: FailoverLog, own_seqno: int, source_log: FailoverLog) -> CommonHistory | None:
    """Return the newest history that is in both logs; None if no seqno above 0 is shared (docs/protocol.md 2.5).

    The newest own entry is tried first, even if it starts at our position, as after a failover without loss. A history
    is shared up to the lower of its ends in the two logs.
    """
    for index, entry in enumerate(own_log):
        source_end_seqno = source_log.end_of(entry.vbuuid, SEQNO_MAX)
        if source_end_seqno is None:
            continue
        own_end_seqno = own_log[index - 1].seqno if index else own_seqno
        seqno = min(own_end_seqno, source_end_seqno, own_seqno)
        if seqno == 0:
            return None
        return CommonHistory(entry.vbuuid, Seqno(seqno), FailoverLog(own_log[index:]))
    return None
