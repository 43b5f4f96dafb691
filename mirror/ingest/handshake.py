"""The handshake: how a mirror and its source find the point from which a stream continues.

**The problem.** A vbucket has three documents: a (seqno 1), b (2) and c (3). The mirror has all three, in snapshots
that ended at 2 and at 3. Then the node fails. The replica that takes over never received c, and gives seqno 3 to a
document d. Both sides now have a seqno 3. If the mirror asked only for "everything after 3", it would keep c for ever
and never get d. So a seqno counts only within a history, which has an id (vbuuid). Each side has a failover log: its
histories, newest first, each with the seqno at which it began.

    seqno          1     2     3     4
    mirror         a     b     c              log: (A, 0)
    source   A     a     b                    log: (B, 2), (A, 0)
             B           +---- d     e

    request        A, start 3            answer: ROLLBACK to 2, the last seqno of A at the source
    mirror         goes back to its boundary 2, without c
    request        A, start 2            answer: accepted, with the source's log
    stream         d (3), e (4)          rows of B, published with the new log

**The rule.** A request names exactly the stored position (`offset`). The source's answer decides:

1. Accepted: save the source's failover log, then stage rows.
2. ROLLBACK to R: go back to the newest kept boundary at or below R, and request again. R falls from answer to answer.
3. ROLLBACK inside a snapshot, to its start or above: drop the received part, and request again from its start.
4. R is 0 or not below the request's start, no boundary at or below R is kept, or the answers do not end: get the
   source's failover log, go back to the end of the newest common history (`common_history`), and request with that
   history's vbuuid. One handshake does this once.
5. No history is common, or rule 4 applies again: read the vbucket again from 0, next to the old copy (a resync).

A mirror without data only repeats its request. The producer's side of the rule is `mirror/server/rollback.py`; both
follow docs/protocol.md 2.5. Two orders matter. The log is cut after the rollback, and a stream's log is saved before
its first row is staged: rows must never lie under a history that they are not from.

**Rejected.** *To go back to R itself*: R may be inside a snapshot. A snapshot has only the newest version of each key,
so up to R an older version may be missing that the source has again after the failover. *To resync at once after
ROLLBACK to 0*: a source answers 0 if it does not know the newest history, as after two failovers of which the second
node missed the first. All older histories may be common, and a large bucket would be copied for nothing. *To go back to
the source's polled high seqno*: it may be minutes old, and newer rows would be dropped.

**What would break.** Without the vbuuid: c stays, d never comes, and nothing reports it. If a request inside a snapshot
gave its start as that of the snapshot: the source would assume that the mirror has nothing of the snapshot, accept it
on a history that forked inside, and a document would be lost (`offset`). If the log were cut before the rollback: after
a crash between the two, the rows of the lost history would lie under the common one. The source may have continued that
history beyond them. Then it accepts the request, and c stays for ever. Without the limit of rounds
(ROLLBACK_ROUNDS_MAX): a source whose R falls by one would keep the vbucket in requests for hours.

The functions in `machine.TRANSITIONS` take the machine's state and an event, append instructions, and return the next
phase.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mirror.ingest import events as ev
from mirror.ingest.instructions import (
    BeginResync,
    GetFailoverLog,
    Instruction,
    RequestStream,
    RetryReason,
    RollbackTo,
    VbucketStatus,
)
from mirror.ingest.offset import StreamOffset, resume_offset
from mirror.ingest.reactions import Action, Reaction, on_refusal
from mirror.ingest.state import HandshakeState, MachineState, Phase
from storage.model import SEQNO_MAX, FailoverLog, Seqno, SourceFacts, Vbuuid

ROLLBACK_ROUNDS_MAX = 64
"""Limit of ROLLBACK answers in one handshake. After more, the machine gets the failover log."""


def begin(machine: MachineState, out: list[Instruction]) -> Phase:
    """Abandon staged rows that no stream can continue, request a stream from the stored position, or begin a resync."""
    if not machine.connected:
        return machine.idle(out)
    continues = _filter_continues(machine)
    if machine.assembler.holds_part and not (machine.assembler.resumable and continues):
        return machine.abandon(None, out)
    if continues:
        return _request(machine, out)
    return resync(machine, "the requested collections are not those of the stored data", out)


def _filter_continues(machine: MachineState) -> bool:
    requested, stored = machine.features.filter, machine.stored.stream_filter
    if not machine.assembler.position_seqno:
        return True
    if requested is None:
        return stored is None
    if machine.assembler.holds_part:  # only an equal filter will do: the manifest may lack collections of staged rows
        return requested.text == stored
    return requested.continues(stored, machine.assembler.manifest.collections)


def _request(machine: MachineState, out: list[Instruction]) -> Phase:
    assembler = machine.assembler
    end_seqno = machine.features.end_seqno
    if assembler.boundary_seqno >= end_seqno:
        return finish(machine, out)
    if machine.handshake.next_vbuuid is not None and not assembler.holds_part:
        offset = StreamOffset.between_snapshots(assembler.boundary_seqno, machine.handshake.next_vbuuid)
    else:
        offset = resume_offset(
            assembler.boundary_seqno, assembler.position_seqno, assembler.open_snapshot, machine.stored.failover_log
        )
    purge_seqno = None
    if offset.inside_snapshot:
        end_seqno = max(end_seqno, offset.snap_end_seqno)
        # Between snapshots, name no purge seqno: a mirror whose position is below the source's purge seqno lacks
        # deletions, and needs the ROLLBACK.
        if machine.features.sends_purge_seqno:
            purge_seqno = int(machine.stored.source_purge_seqno) or None
    machine.offset = offset
    machine.report(VbucketStatus.REQUESTING, f"requesting the seqnos after {offset.start_seqno}", out)
    out.append(RequestStream(offset, end_seqno, purge_seqno))
    return Phase.REQUESTING


def finish(machine: MachineState, out: list[Instruction]) -> Phase:
    machine.report(VbucketStatus.FINISHED, f"complete up to {machine.assembler.boundary_seqno}", out)
    return Phase.FINISHED


# --- the source's answers ---


def requested(machine: MachineState, event: ev.StreamRequested, _out: list[Instruction]) -> Phase:
    machine.opaque = event.opaque
    return Phase.REQUESTING


def accepted(machine: MachineState, event: ev.StreamAccepted, out: list[Instruction]) -> Phase:
    if event.opaque != machine.opaque:
        return machine.phase
    machine.handshake = HandshakeState()
    features, stored = machine.features, machine.stored
    facts = SourceFacts(failover_log=event.failover_log or stored.failover_log)
    if not machine.offset.start_seqno:
        facts["missing_seqno"] = SEQNO_MAX  # unknown until a marker reports the purge seqno
    if features.filter is not None:
        facts["stream_filter"] = features.filter.text
    machine.save(out, **facts)
    machine.assembler.begin_stream(
        inside_snapshot=machine.offset.inside_snapshot,
        collections_granted=features.collections,
        stream_filter=features.filter,
        scope_names=features.scope_names,
    )
    machine.report_streaming(out)
    return Phase.STREAMING


def refused(machine: MachineState, event: ev.StreamRefused, out: list[Instruction]) -> Phase:
    if event.opaque != machine.opaque:
        return machine.phase
    machine.opaque = None
    reaction = on_refusal(event.status, filtered=machine.features.filter is not None)
    if reaction.action is Action.GO_BACK:
        return _go_back(machine, 0, reaction.text, out)
    if reaction.action is Action.REFRESH_MAP and machine.features.by_mirror:
        held = machine.offset.start_seqno
        text = f"the source, a mirror, is being filled or has not published {held} yet; asking again"
        reaction = replace(reaction, text=text)
    return machine.react(reaction, event.context, out)


def rolled_back_by_source(machine: MachineState, event: ev.StreamRollback, out: list[Instruction]) -> Phase:
    if event.opaque != machine.opaque:
        return machine.phase
    machine.opaque = None
    return _go_back(machine, event.seqno, f"the source answered ROLLBACK to {event.seqno}", out)


def _go_back(machine: MachineState, seqno: int, why: str, out: list[Instruction]) -> Phase:
    """Choose the rollback target (docs/protocol.md 2.5)."""
    machine.handshake.rollback_rounds += 1
    boundary_seqno = machine.assembler.boundary_seqno
    if machine.offset.inside_snapshot and seqno >= boundary_seqno:
        text = f"{why}: dropping the open snapshot, back to {boundary_seqno}"
        machine.report(VbucketStatus.ROLLING_BACK, text, out)
        return machine.abandon(None, out)
    if boundary_seqno == 0:
        text = f"{why} although this mirror holds no data; asking again. If it repeats, look at the source's log"
        return machine.retry(Reaction(Action.RETRY, text), out)
    too_many = machine.handshake.rollback_rounds > ROLLBACK_ROUNDS_MAX
    # Not below the start: the same request would get the same answer for ever.
    if seqno == 0 or too_many or seqno >= machine.offset.start_seqno:
        return _before_zero(machine, why, out)
    machine.handshake.next_vbuuid = None
    return _roll_back(machine, seqno, why, out)


def _roll_back(machine: MachineState, seqno: int, why: str, out: list[Instruction]) -> Phase:
    machine.report(VbucketStatus.ROLLING_BACK, f"{why}: going back to the newest kept boundary", out)
    out.append(RollbackTo(Seqno(seqno)))
    return Phase.ROLLING_BACK


def _before_zero(machine: MachineState, why: str, out: list[Instruction]) -> Phase:
    machine.handshake.next_vbuuid = None
    if machine.handshake.common_tried:
        return resync(machine, why, out)
    if not machine.connected:
        return machine.idle(out)
    text = f"{why}: looking for common history in the source's failover log"
    machine.report(VbucketStatus.ROLLING_BACK, text, out)
    out.append(GetFailoverLog())
    return Phase.ASKING_LOG


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


def log_received(machine: MachineState, event: ev.FailoverLogReceived, out: list[Instruction]) -> Phase:
    newest = event.failover_log.newest_vbuuid
    if machine.features.by_mirror and newest in [entry.vbuuid for entry in machine.stored.failover_log[1:]]:
        # The source is behind: this mirror already has a newer history.
        text = "the source, a mirror, has not heard of the newest failover yet; asking again"
        return machine.retry(Reaction(Action.RETRY, text), out)
    machine.handshake.common_tried = True
    boundary_seqno = machine.assembler.boundary_seqno
    # Do not use the source's high seqno, which is polled and may be old: a rollback to that seqno would drop newer
    # rows. If the source really has less, it answers the next request with ROLLBACK and the true seqno.
    common = common_history(machine.stored.failover_log, boundary_seqno, event.failover_log)
    if common is None:
        return resync(machine, "no common history with the source", out)
    machine.handshake.next_vbuuid = common.vbuuid
    # Roll back first, then cut the failover log ("What would break", above).
    if common.seqno < boundary_seqno:
        return _roll_back(machine, common.seqno, f"common history {common.vbuuid:#x} up to {common.seqno}", out)
    if machine.assembler.holds_part:
        return machine.abandon(None, out)
    machine.save(out, failover_log=common.failover_log)
    return _request(machine, out)


def log_refused(machine: MachineState, event: ev.FailoverLogRefused, out: list[Instruction]) -> Phase:
    reaction = on_refusal(event.status)
    if reaction.action is Action.GO_BACK:  # a refused failover log is no reason for a rollback
        reaction = Reaction(Action.RETRY, reaction.text)
    return machine.react(reaction, b"", out)


def resync(machine: MachineState, why: str, out: list[Instruction]) -> Phase:
    if machine.assembler.boundary_seqno == 0:  # no old copy to keep
        return begin(machine, out)
    text = f"{why}: fetching the vbucket again next to the old copy"
    machine.report(VbucketStatus.RESYNCING, text, out)
    out.append(BeginResync(why))
    return Phase.OPENING_RESYNC


# --- the store's answers ---


def rolled_back(machine: MachineState, event: ev.RolledBack, out: list[Instruction]) -> Phase:
    machine.load(event.state)
    # Newer entries are histories that the vbucket has left (docs/protocol.md 2.5).
    log = machine.stored.failover_log.pruned(machine.assembler.boundary_seqno, machine.handshake.next_vbuuid)
    machine.save(out, failover_log=log)
    return begin(machine, out)


def no_boundary(machine: MachineState, _event: ev.NoBoundary, out: list[Instruction]) -> Phase:
    return _before_zero(machine, "no boundary is kept that far back", out)


def abandoned(machine: MachineState, event: ev.Abandoned, out: list[Instruction]) -> Phase:
    machine.load(event.state)
    reason, machine.retry_reason = machine.retry_reason, None
    if reason is not None and machine.connected:
        return machine.wait(reason, out)
    return begin(machine, out)


def resync_opened(machine: MachineState, event: ev.ResyncOpened, out: list[Instruction]) -> Phase:
    machine.load(event.state)
    return begin(machine, out)


def resync_refused(machine: MachineState, event: ev.ResyncRefused, out: list[Instruction]) -> Phase:
    """Keep the old copy and retry later, when there may be more free space."""
    if not machine.connected:
        return machine.idle(out)
    machine.handshake = HandshakeState()
    machine.report(VbucketStatus.REFUSED, event.text, out)
    return machine.wait(RetryReason.REFUSED_FOR_NOW, out)
