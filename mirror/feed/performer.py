"""Instructions to deeds: what a vbucket's machine decided is done here, in the order it was decided.

Knows the writer of a group and the session of a node, and which call each instruction means; decides nothing.
Invariants (`ingest.instructions`): a list is performed in list order; an instruction that is answered is answered at
once, before the next of its list (only AbandonStaged may be answered later: while a complete snapshot is published);
rows that the store refuses end their list, and the machine is told. Errors of the store itself pass through: the
group's owner drops its machines and starts them again from what is stored.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mirror.ingest import events as happenings
from mirror.ingest import instructions as deeds
from mirror.ingest.events import Row
from mirror.ingest.instructions import Instruction
from storage.errors import SeqnoOrder
from storage.model import SnapshotRange
from storage.writer import GroupWriter, RollbackResult

FREE_BYTES_MIN = 64 * 1024 * 1024
"""Room that a refill leaves on the disk: less, and the commits of the other vbuckets would be the next to fail."""


class Actor(Protocol):
    """A vbucket as the performer sees it: its store, its way to the source, and its machine's ear."""

    vbid: int
    writer: GroupWriter

    def tell(self, event: Any) -> list[Instruction]:
        """Hand an event to the machine."""
        ...

    def request_stream(self, asked: deeds.RequestStream) -> int | None:
        """Send a stream request; the opaque, or None without a connection."""
        ...

    def close_stream(self, opaque: int | None) -> None:
        """Send CLOSE_STREAM."""
        ...

    def get_failover_log(self) -> bool:
        """Ask for the failover log; False without a connection."""
        ...

    def answer_marker(self, opaque: int) -> None:
        """Answer a marker."""
        ...

    def holds(self, seqno: int, snap_start_seqno: int, purge_seqno: int | None) -> bool:
        """True when a complete snapshot is to stay invisible for now: the actor publishes it later."""
        ...

    @property
    def defers_rollbacks(self) -> bool:
        """Readers go over to the history after a rollback only when it has reached what they see."""
        ...

    def drop_held(self) -> bool:
        """Complete snapshots that were held back will never be published as they are; were there any?"""
        ...

    def abandon_later(self) -> None:
        """A complete snapshot waits for its key rows: perform AbandonStaged again when it is published."""
        ...

    def commit(self) -> None:
        """Commit what the group has pending, and tell the machines what was published."""
        ...

    def reroute(self) -> None:
        """The staging branch is another: rows of the live stream are to be made for it."""
        ...

    def note_rollback(self, result: RollbackResult) -> None:
        """The store went back, for the status."""
        ...

    def note_resync(self, why: str) -> None:
        """A resync began, for the status."""
        ...

    def refresh_map(self, config: bytes) -> None:
        """Get a new map, or take this one."""
        ...

    def refresh_collections(self) -> None:
        """Ask which collections there are now."""
        ...

    def reconnect(self, cause: str) -> None:
        """Close the connection and log in again."""
        ...

    def retry_after(self, reason: deeds.RetryReason, attempt: int) -> None:
        """Hand in RetryDue later."""
        ...

    def report(self, status: deeds.Status, text: str) -> None:
        """Say what the vbucket does."""
        ...


def perform(actor: Actor, instructions: Sequence[Instruction]) -> None:
    """Do what a machine wants done. Raises StorageError (but SeqnoOrder of a stage) as the store raised it."""
    for instruction in instructions:
        answer = _DEEDS[type(instruction)](actor, instruction)
        if answer is None:
            continue
        perform(actor, actor.tell(answer))
        if isinstance(answer, (happenings.StagingRefused, happenings.PrepareMissing)):
            return  # the rest of the list stood on what was refused


def _request_stream(actor: Actor, asked: Any) -> Any:
    opaque = actor.request_stream(asked)
    if opaque is None:
        return happenings.ConnectionLost("there is no connection to the node")
    return happenings.StreamRequested(opaque)


def _close_stream(actor: Actor, asked: Any) -> None:
    actor.close_stream(asked.opaque)


def _get_failover_log(actor: Actor, _asked: Any) -> Any:
    return None if actor.get_failover_log() else happenings.ConnectionLost("there is no connection to the node")


def _answer_marker(actor: Actor, asked: Any) -> None:
    actor.answer_marker(asked.opaque)


def _refresh_map(actor: Actor, asked: Any) -> None:
    actor.refresh_map(asked.config)


def _refresh_collections(actor: Actor, _asked: Any) -> None:
    actor.refresh_collections()


def _reconnect(actor: Actor, asked: Any) -> None:
    actor.reconnect(asked.cause)


def _stage_rows(actor: Actor, asked: Any) -> Any:
    writer = actor.writer
    rows: list[Row] = asked.rows
    prefix = writer.row_prefix(actor.vbid)
    if rows[0][0][:4] != prefix:
        rows = [(prefix + key[4:], value) for key, value in rows]
    try:
        writer.stage(actor.vbid, rows, asked.byte_count, asked.open_snapshot, asked.unordered)
    except SeqnoOrder as error:
        return happenings.StagingRefused(writer.state(actor.vbid), str(error))
    return None


def _advance(actor: Actor, asked: Any) -> Any:
    writer = actor.writer
    try:
        writer.advance(actor.vbid, asked.seqno)
    except SeqnoOrder as error:
        return happenings.StagingRefused(writer.state(actor.vbid), str(error))
    snapshot: SnapshotRange | None = asked.open_snapshot
    if snapshot != writer.state(actor.vbid).open_snapshot:
        writer.set_open_snapshot(actor.vbid, snapshot)
    return None


def _stage_system_event(actor: Actor, asked: Any) -> Any:
    writer = actor.writer
    try:
        writer.system_event(
            actor.vbid, asked.seqno, asked.row_value, asked.manifest, asked.open_snapshot, asked.unordered, asked.change
        )
    except SeqnoOrder as error:
        return happenings.StagingRefused(writer.state(actor.vbid), str(error))
    return None


def _stage_prepare(actor: Actor, asked: Any) -> Any:
    writer = actor.writer
    try:
        writer.prepare(actor.vbid, asked.seqno, asked.frame, asked.open_snapshot)
    except SeqnoOrder as error:
        return happenings.StagingRefused(writer.state(actor.vbid), str(error))
    return None


def _commit_prepare(actor: Actor, asked: Any) -> Any:
    writer = actor.writer
    try:
        if writer.commit_prepare(actor.vbid, asked.seqno, asked.key, asked.open_snapshot):
            return None
    except SeqnoOrder as error:
        return happenings.StagingRefused(writer.state(actor.vbid), str(error))
    return happenings.PrepareMissing(writer.state(actor.vbid), asked.seqno)


def _abort_prepare(actor: Actor, asked: Any) -> Any:
    writer = actor.writer
    try:
        writer.abort_prepare(actor.vbid, asked.seqno, asked.key, asked.open_snapshot)
    except SeqnoOrder as error:
        return happenings.StagingRefused(writer.state(actor.vbid), str(error))
    return None


def _publish(actor: Actor, asked: Any) -> None:
    if not actor.holds(asked.seqno, asked.snap_start_seqno, asked.source_purge_seqno):
        actor.writer.publish(actor.vbid, asked.seqno, asked.snap_start_seqno, asked.source_purge_seqno)


def _save_failover_log(actor: Actor, asked: Any) -> None:
    actor.writer.save_failover_log(actor.vbid, asked.failover_log, asked.source_purge_seqno)


def _save_filter(actor: Actor, asked: Any) -> None:
    actor.writer.save_filter(actor.vbid, asked.text)


def _roll_back(actor: Actor, asked: Any) -> Any:
    actor.commit()  # else the writer would, and the machines would not learn what was published
    held = actor.drop_held()
    state = actor.writer.state(actor.vbid)
    if state.staging_branch != state.branch and not state.rollback_deferred:
        # What the machine goes back in is a refill, complete perhaps, of which nothing is published: it has no
        # boundary. Those of the copy that is still served are of another history.
        return happenings.NoBoundary()
    if (
        held and state.published_seqno <= asked.seqno and not state.rollback_deferred
    ):  # all that was lost is what no reader has seen
        actor.writer.abandon(actor.vbid, keep_complete=False)
        actor.reroute()
        return happenings.RolledBack(actor.writer.state(actor.vbid))
    result = actor.writer.rollback(actor.vbid, asked.seqno, deferred=actor.defers_rollbacks)
    if result.boundary_seqno == 0:
        return happenings.NoBoundary()
    actor.note_rollback(result)
    actor.reroute()
    return happenings.RolledBack(actor.writer.state(actor.vbid))


def _abandon(actor: Actor, _asked: Any) -> Any:
    actor.commit()
    actor.drop_held()
    if not actor.writer.abandon(actor.vbid):
        actor.abandon_later()
        return None
    actor.reroute()
    return happenings.Abandoned(actor.writer.state(actor.vbid))


def _begin_refill(actor: Actor, asked: Any) -> Any:
    writer = actor.writer
    state = writer.state(actor.vbid)
    if state.published_seqno:  # there is a copy to keep: the new one stands beside it for a while
        share_bytes = writer.figures()["file_bytes"] // max(1, len(writer.vbids))
        free_bytes = shutil.disk_usage(writer.path).free
        if free_bytes < share_bytes + FREE_BYTES_MIN:
            return happenings.RefillRefused(
                f"a refill needs about {(share_bytes + FREE_BYTES_MIN) >> 20} MiB beside the old copy, "
                f"{free_bytes >> 20} MiB are free"
            )
    actor.commit()
    actor.drop_held()
    writer.begin_refill(actor.vbid)
    actor.note_resync(asked.cause)
    actor.reroute()
    return happenings.RefillBegun(writer.state(actor.vbid))


def _begin_oso(actor: Actor, _asked: Any) -> None:
    actor.commit()
    actor.writer.begin_oso(actor.vbid)
    actor.reroute()


def _retry_after(actor: Actor, asked: Any) -> None:
    actor.retry_after(asked.reason, asked.attempt)


def _report(actor: Actor, asked: Any) -> None:
    actor.report(asked.status, asked.text)


_DEEDS: dict[type[Instruction], Callable[[Actor, Any], Any]] = {
    deeds.RequestStream: _request_stream,
    deeds.CloseStream: _close_stream,
    deeds.GetFailoverLog: _get_failover_log,
    deeds.AnswerMarker: _answer_marker,
    deeds.RefreshMap: _refresh_map,
    deeds.RefreshCollections: _refresh_collections,
    deeds.Reconnect: _reconnect,
    deeds.StageRows: _stage_rows,
    deeds.Advance: _advance,
    deeds.StageSystemEvent: _stage_system_event,
    deeds.StagePrepare: _stage_prepare,
    deeds.CommitPrepare: _commit_prepare,
    deeds.AbortPrepare: _abort_prepare,
    deeds.PublishSnapshot: _publish,
    deeds.SaveFailoverLog: _save_failover_log,
    deeds.SaveFilter: _save_filter,
    deeds.RollbackTo: _roll_back,
    deeds.AbandonStaged: _abandon,
    deeds.BeginRefill: _begin_refill,
    deeds.BeginOso: _begin_oso,
    deeds.RetryAfter: _retry_after,
    deeds.Report: _report,
}
"""Every instruction and its deed; a deed returns the event that answers it, if there is one."""
