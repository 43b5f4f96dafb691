"""The host of a mirrored vbucket: stores the stream, and counts for status.

Knows when a commit is due, the stream's filter, and how snapshots wait to be persisted; the machine decides about the
stream. Invariants: counters only rise; `requested_again_bytes` counts rows that the source sends although they were
published when the process began. Rows that were rolled back or resynced since do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mirror.clock import Clock
from mirror.feed.cluster.collection_watch import CollectionWatch
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.connection.session import NodeSession
from mirror.feed.follow.group_commits import Group
from mirror.feed.follow.store_sink import PersistenceGate, StoreSink
from mirror.feed.host import MachineEvent, VbucketHost
from mirror.ingest import events
from mirror.ingest.events import KeyRefused, Row
from mirror.ingest.instructions import AbandonStaged, Instruction, RetryReason, VbucketStatus
from mirror.ingest.selection import FilterFields, StreamFilter
from mirror.wire import events as ev
from storage.errors import StorageError
from storage.write.writer import RollbackResult

ERROR_STATES = {
    VbucketStatus.REFUSED,
    VbucketStatus.DAMAGED,
    VbucketStatus.ROLLING_BACK,
    VbucketStatus.RESYNCING,
    VbucketStatus.WAITING,
}
"""The text of these states is kept as the last error."""


class MirroredVbucket(VbucketHost):
    sink: StoreSink

    def __init__(
        self,
        vbid: int,
        group: Group,
        clock: Clock,
        maps: MapFollower,
        collections: CollectionWatch,
        gate: PersistenceGate | None = None,
    ) -> None:
        """`gate` holds complete snapshots until the source has persisted them; None: publish them at once."""
        writer = group.writer.vbuckets[vbid]
        super().__init__(vbid, StoreSink(writer, group.commit, gate), clock)
        self.group = group
        self.writer = writer
        self.gate = gate
        self.status: str = VbucketStatus.REQUESTING
        self.text = "not connected yet"
        self._apart_at = clock.monotonic()
        """Time when the last session sent its last bytes; before the first session, time when the worker began."""
        self.documents = 0
        self.bytes = 0
        self.requested_again_bytes = 0
        self.last_progress = clock.monotonic()
        self.last_error: str | None = None
        self.stalls = 0
        self.retries = 0
        self.stalled_streams = 0
        """Streams that stalled in a row; 0 after a message arrives."""
        self.stall_text = ""
        self.polled: tuple[NodeSession, int] | None = None
        """The session of the last poll, and the high seqno that it brought; None: unknown."""
        self.source_silent_ms: int | None = None
        """If the node is a mirror without contact to its own source, the time since the loss; otherwise None."""
        self._held_by, self._held_at = "", clock.monotonic()
        """The copy that holds snapshots up, and the time of the last release, or of the first hold since."""
        self._maps = maps
        self._collections = collections
        self._filter: StreamFilter | None = None
        self._held_seqno: int = writer.base.published_seqno
        """The published seqno when the process began, lowered by rollbacks and resyncs. Rows up to here are counted in
        `requested_again_bytes`.
        """

    # -- life -----------------------------------------------------------------------------------------------------

    def drop_machine(self) -> None:
        super().drop_machine()
        self.sink.forget()

    def attach(self, session: NodeSession) -> None:
        self.last_progress = self._clock.monotonic()
        self.guarded(partial(super().attach, session))

    def detach(self, event: events.Stop | events.ConnectionLost | events.NoActiveNode) -> None:
        if self.session is not None:
            self._apart_at = self._clock.monotonic() - self.session.silent_s
        self.guarded(partial(super().detach, event))

    def start_event(self, session: NodeSession) -> events.Start:
        shown = self._collections.resolved
        self._filter = shown.filter
        return events.Start(
            collections=session.handshake.collections,
            sends_purge_seqno=session.sends_purge_seqno,
            by_mirror=session.handshake.by_mirror,
            filter=shown.filter,
            scope_names=shown.scope_names,
        )

    @property
    def stream_filter(self) -> FilterFields:
        return {} if self._filter is None else self._filter.fields

    @property
    def source_high_seqno(self) -> int | None:
        """The source's high seqno; None if the node does not answer or has sent no high seqno. Also None if the node is
        a mirror that has lost its source, or that was behind this mirror at the last poll.
        """
        if self.polled is None or self.source_silent_ms is not None:
            return None
        session, seqno = self.polled
        return seqno if session.answers else None

    @property
    def late_s(self) -> float | None:
        """Age of `source_high_seqno` if it is too old to be compared with the published seqno."""
        return None if self.source_high_seqno is None or self.polled is None else self.polled[0].late_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last bytes from a node; before the first ones, since the worker began."""
        return self._clock.monotonic() - self._apart_at if self.session is None else self.session.silent_s

    @property
    def in_contact(self) -> bool:
        return self.session is not None and self.session.answers

    def note_rollback(self, result: RollbackResult) -> None:
        """Note an operator's rollback. Rows above the boundary do not count as requested again."""
        self._held_seqno = min(self._held_seqno, result.boundary_seqno)
        self.sink.note_rollback(result)

    def begin_resync(self, cause: str) -> events.ResyncOpened | events.ResyncRefused:
        """Open an empty branch for an operator's command, if the disk has space. Call `drop_machine` first."""
        assert self.machine is None, "the machine decides about branches"
        answer = self.sink.begin_resync(cause)
        self.answered(answer)
        return answer

    # -- events ---------------------------------------------------------------------------------------------------

    def guarded(self, work: Callable[[], None]) -> None:
        """Run `work`; if the store fails, stop the group."""
        try:
            work()
        except StorageError as error:
            self.group.failed(error)

    def enter(self, event: MachineEvent) -> None:
        self.guarded(partial(self.handle, event))
        if not self.group.commit_waits:
            self.group.schedule()

    def handle(self, event: MachineEvent) -> None:
        if self.machine is None:
            return
        if instructions := self.machine.handle(event):
            self.execute(instructions)
        if isinstance(event, events.Published):
            if self.sink.abandon_due:
                self.sink.abandon_due = False
                self.execute([AbandonStaged()])
        elif self.gate is not None and isinstance(event, events.StreamAccepted):
            self.gate.stream_accepted()
        elif self.gate is not None and isinstance(event, events.HighSeqno) and self.streaming:
            self.gate.polled(event.seqno, self.sink.state())

    def on_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        machine, session, group = self.machine, self.session, self.group
        if machine is None or session is None:
            return
        self.documents += len(rows)
        self.bytes += byte_count
        self.last_progress = session.received_at
        self.stalled_streams = 0
        if machine.shown.status is not VbucketStatus.STREAMING:
            session.backfill_at = self.last_progress
        if self._held_seqno and int.from_bytes(rows[0][0][4:12]) <= self._held_seqno:
            self.requested_again_bytes += sum(
                len(value) for key, value in rows if int.from_bytes(key[4:12]) <= self._held_seqno
            )
        try:
            self.execute(machine.handle_run(opaque, rows, byte_count))
            if not group.commit_waits and self.writer.publishable:
                group.schedule()
        except StorageError as error:
            group.failed(error)
            return
        budget = group.commits
        budget.free_bytes -= byte_count
        if budget.free_bytes <= 0:
            budget.flush_over_budget()

    def on_event(self, event: ev.Event | KeyRefused) -> None:
        self.progressed()
        self.enter(event)
        if isinstance(event, ev.SystemEvent):  # recount, because the event's bytes are pending, too
            self.group.commits.flush_over_budget()

    def progressed(self) -> None:
        self.last_progress = self._clock.monotonic() if self.session is None else self.session.received_at
        self.stalled_streams = 0

    def stalled(self, text: str) -> None:
        self.stalls += 1
        self.stalled_streams += 1
        self.stall_text = self.last_error = text
        self.last_progress = self._clock.monotonic()

    def has_published(self, seqno: int) -> bool:
        """Return True if readers see the streamed history, at least up to `seqno`."""
        state = self.writer.base
        return state.staging_branch == state.branch and state.published_seqno >= seqno

    # -- calls of the host ----------------------------------------------------------------------------------------

    def answered(self, answer: events.Answer) -> Sequence[Instruction]:
        if isinstance(answer, (events.RolledBack, events.ResyncOpened)):
            self._held_seqno = min(self._held_seqno, answer.state.staged_seqno)
        elif isinstance(answer, events.StagingRefused):
            self.last_error = answer.text
        if isinstance(answer, (events.RolledBack, events.ResyncOpened, events.Abandoned)):
            self.group.schedule()
        return super().answered(answer)

    def refresh_map(self, config: bytes) -> None:
        self._maps.refresh_map(config, self.vbid)

    def refresh_collections(self) -> None:
        self._collections.look(self.vbid)

    def reconnect(self, cause: str) -> None:
        super().reconnect(cause)
        self.last_error = cause

    def retry_after(self, reason: RetryReason, attempt: int) -> None:
        self.retries += 1
        super().retry_after(reason, attempt)

    def report(self, status: VbucketStatus, text: str) -> None:
        self.status, self.text = str(status), text
        if status in ERROR_STATES:
            self.last_error = text

    def event_after_pause(self) -> events.RetryDue | events.Start:
        expected = self._collections.resolved.filter
        if self.session is not None and expected is not None and expected != self._filter:
            return self.start_event(self.session)  # nodes refuse the old filter if a collection is gone
        return super().event_after_pause()

    # -- publish=persisted ----------------------------------------------------------------------------------------

    @property
    def observed_vbuuid(self) -> int | None:
        """The history to query for persisted seqnos; None while no snapshot is held or no stream is open."""
        if self.gate is None or not self.gate.waiting or not self.streaming:
            return None
        assert self.machine is not None
        return self.machine.stored.failover_log.newest_vbuuid or None

    @property
    def hold(self) -> tuple[str, float] | None:
        """The reason why complete snapshots are held, and for how many seconds; None if none is held."""
        if self.gate is None or not self.gate.waiting or not self._held_by:
            return None
        return self._held_by, self._clock.monotonic() - self._held_at

    def held_by(self, text: str) -> None:
        if not self._held_by:
            self._held_at = self._clock.monotonic()
        self._held_by = text

    def persisted(self, vbuuid: int, seqno: int) -> None:
        """Publish held snapshots: every copy has persisted the history `vbuuid` up to `seqno`."""
        if self.gate is None or vbuuid != self.observed_vbuuid:
            return
        assert self.machine is not None
        self.report(self.machine.shown.status, self.machine.shown.text)  # an earlier refusal is over
        released = self.gate.release(seqno, self.sink.state())
        if released is not None:
            self._held_by = ""
            self.writer.publish(*released)
            self.group.schedule()
