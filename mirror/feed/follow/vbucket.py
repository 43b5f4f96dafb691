"""A vbucket of a mirror: the host of its stream, over the store, and the figures that status shows of it.

Knows when a commit is to be made, what of the bucket its stream requests, and how snapshots wait to be persisted;
decides nothing about the stream. Invariants: counters only rise; what was published when the process began, or after a
rollback, is counted when it is sent again (`requested_again_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mirror.clock import Clock
from mirror.feed.cluster.persistence import PersistenceGate
from mirror.feed.connection.session import NodeSession
from mirror.feed.follow.store_sink import StoreSink
from mirror.feed.stream.host import MachineEvent, VbucketHost
from mirror.ingest import events
from mirror.ingest.events import Row
from mirror.ingest.instructions import AbandonStaged, Instruction, RetryReason, VbucketStatus
from mirror.ingest.selection import Resolved, StreamFilter
from mirror.ingest.state import Phase
from storage.history.extent import History
from storage.model import Vbid, VbucketState
from storage.write.writer import GroupWriter, RollbackResult

ERROR_STATES = frozenset(
    (
        VbucketStatus.REFUSED,
        VbucketStatus.DAMAGED,
        VbucketStatus.ROLLING_BACK,
        VbucketStatus.RESYNCING,
        VbucketStatus.WAITING,
    )
)
"""The text of these states is kept as the last error."""

POLLS_MIN = 2
"""The first high seqno after a stream was accepted may have been requested before."""


class VbucketServices(Protocol):
    """What a vbucket may ask of the consumer."""

    clock: Clock

    def commit_group(self, vbid: int) -> None:
        """Commit the vbucket's group now."""
        ...

    def schedule_commit(self, vbid: int) -> None:
        """The group has something to commit before long."""
        ...

    @property
    def shown(self) -> Resolved:
        """What of the bucket streams request."""
        ...

    def refresh_collections(self, vbid: int) -> None:
        """Find out which collections there are now; the vbucket waits for it."""
        ...

    def refresh_map(self, config: bytes, vbid: int) -> None:
        """Get a new cluster map, or read this one."""
        ...

    def enter(self, vbid: int, event: MachineEvent) -> None:
        """Hand in an event of a timer or of an answer, and handle the group's errors."""
        ...


class MirroredVbucket(VbucketHost):
    """One vbucket of a worker."""

    sink: StoreSink

    def __init__(
        self, vbid: int, writer: GroupWriter, services: VbucketServices, gate: PersistenceGate | None = None
    ) -> None:
        """At rest: `start_machine` gives it a machine, `attach` a session.

        `gate` holds complete snapshots back until the source has persisted them; None: nothing is held back.
        """
        super().__init__(vbid, StoreSink(vbid, writer, self, gate), services.clock)
        self.writer = writer
        self.gate = gate
        self.status: str = VbucketStatus.WAITING
        self.text = "not connected yet"
        self.documents = 0
        self.bytes = 0
        self.requested_again_bytes = 0
        self.last_progress = services.clock.monotonic()
        self.last_error: str | None = None
        self.stalls = 0
        self.retries = 0
        self.stalled_streams = 0
        """How many streams in a row stalled, though the source is ahead; 0 when the last one brought something."""
        self.stall_text = ""
        self.violations = 0
        self._services = services
        self._high_seqno: tuple[NodeSession, int] | None = None
        self.source_silent_ms: int | None = None
        """For how long the node, a mirror, has had no contact with its own source, as it said last; None: it has."""
        """The source's high seqno, and the session over which it was queried."""
        self._highs: list[int] = []
        """The source's high seqnos that were polled since the stream was accepted, the last ones."""
        self._filter: StreamFilter | None = None
        """Of the machine's last Start."""
        self._held_seqno: int = writer.state(vbid).published_seqno
        """Published when the process began, or after a rollback: at or below it nothing needs to be sent again."""

    # -- life -----------------------------------------------------------------------------------------------------

    def drop_machine(self) -> None:
        """Close the stream and forget the machine: the store failed, or the vbucket is stopped."""
        super().drop_machine()
        self.sink.forget()

    def attach(self, session: NodeSession) -> None:
        """The session of its node is ready: ask for a stream."""
        self.last_progress = self._clock.monotonic()
        super().attach(session)

    def start_event(self, session: NodeSession) -> events.Start:
        """Ask for what of the bucket is shown now."""
        shown = self._services.shown
        self._filter = shown.filter
        return events.Start(
            collections=session.handshake.collections,
            sends_purge_seqno=session.sends_purge_seqno,
            by_mirror=session.handshake.by_mirror,
            filter=shown.filter,
            scope_names=shown.scope_names,
        )

    @property
    def stream_filter(self) -> dict[str, Any]:
        """The fields of the filter that the machine was started with."""
        return {} if self._filter is None else self._filter.fields

    @property
    def source_high_seqno(self) -> int | None:
        """The source's high seqno; None if unknown: its node sent none yet, is away, or does not answer; or the node is
        a mirror that has no contact with its own source, or is behind this one.
        """
        if self._high_seqno is None or self.source_silent_ms is not None:
            return None
        session, seqno = self._high_seqno
        behind = session.handshake.by_mirror and seqno < self.writer.state(self.vbid).staging_published_seqno
        return seqno if session.answers and not behind else None

    def note_high_seqno(self, session: NodeSession, seqno: int | None) -> None:
        """The vbucket's node was queried for its high seqno; None: it does not count the vbucket as its own."""
        self._high_seqno = None if seqno is None else (session, seqno)

    def forget_high_seqno(self) -> None:
        """The vbucket has another node, or none: the high seqno of the old one is no longer valid."""
        self._high_seqno = None

    @staticmethod
    def _lag(high_seqno: int, state: VbucketState) -> int:
        """Seqnos that readers lack. What is served of another history than the one that is streamed counts for nothing.
        What has come counts: the high seqno of a filtered mirror knows nothing of the end of a collection.
        """
        return max(0, max(high_seqno, int(state.staged_seqno)) - int(state.staging_published_seqno))

    @property
    def refused(self) -> bool:
        """True while the vbucket waits for people, or for collections."""
        return self.machine is not None and self.machine.phase is Phase.REFUSED

    def note_rollback(self, result: RollbackResult) -> None:
        """The store was rolled back by a command: what lies above may come again without a new request."""
        self._held_seqno = min(self._held_seqno, result.boundary_seqno)
        self.sink.note_rollback(result)

    def begin_resync(self, cause: str) -> None:
        """Open an empty branch by a command, while there is no machine."""
        assert self.machine is None, "the machine decides about branches"
        self.answered(self.sink.begin_resync(cause))

    # -- events ---------------------------------------------------------------------------------------------------

    def enter(self, event: MachineEvent) -> None:
        """Hand in an event, with the group's errors handled."""
        self._services.enter(self.vbid, event)

    def handle(self, event: MachineEvent) -> None:
        """Hand an event to the machine and execute what it returns."""
        super().handle(event)
        if isinstance(event, events.StreamAccepted):
            self._highs = []
        elif isinstance(event, events.HighSeqno) and self.streaming:
            self._note_polled(event.seqno)

    def published(self, seqno: int) -> None:
        """A commit made everything up to `seqno` visible."""
        self.handle(events.Published(seqno))
        if self.sink.abandon_due:
            self.sink.abandon_due = False
            self.execute([AbandonStaged(Vbid(self.vbid), "the snapshot before it is published")])

    def handle_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        """Hand data to the machine, execute what it returns, and have the group committed where that is due."""
        if self.machine is None:
            return
        self.documents += len(rows)
        self.bytes += byte_count
        self.progressed()
        if self.session is not None and self.machine.shown.status is not VbucketStatus.STREAMING:
            self.session.backfill_at = self.last_progress
        if self._held_seqno and int.from_bytes(rows[0][0][4:12]) <= self._held_seqno:
            self.requested_again_bytes += sum(
                len(value) for key, value in rows if int.from_bytes(key[4:12]) <= self._held_seqno
            )
        self.execute(self.machine.handle_run(opaque, rows, byte_count))
        if self.writer.publishable(self.vbid):
            self._services.schedule_commit(self.vbid)

    @property
    def waits_for_end(self) -> bool:
        """True while the end of a snapshot that the source has in memory is yet to come."""
        return self.machine is not None and self.machine.waits_for_end

    def progressed(self) -> None:
        """The stream is well: something of it came with what was received last."""
        self.last_progress = self._clock.monotonic() if self.session is None else self.session.received_at
        self.stalled_streams = 0

    def stalled(self, text: str) -> None:
        """The stream brings nothing though the source is ahead."""
        self.stalls += 1
        self.stalled_streams += 1
        self.stall_text = self.last_error = text
        self.last_progress = self._clock.monotonic()

    def has_published(self, seqno: int) -> bool:
        """True once readers see everything up to `seqno`, on the history that is streamed."""
        state = self.writer.served(self.vbid)
        return state.staging_branch == state.branch and state.published_seqno >= seqno

    # -- what the executor and the sink ask for -------------------------------------------------------------------

    def answered(self, answer: events.Answer) -> Sequence[Instruction]:
        """Hand the answer of an instruction to the machine; returns what follows from it."""
        if isinstance(answer, (events.RolledBack, events.ResyncOpened)):
            self._held_seqno = min(self._held_seqno, answer.state.staged_seqno)
        elif isinstance(answer, events.StagingRefused):
            self.last_error = answer.text
        return super().answered(answer)

    def commit(self) -> None:
        """Commit the group now."""
        self._services.commit_group(self.vbid)

    def branch_changed(self) -> None:
        """Rows of the live stream are to be made for the staging branch as it is now."""
        self._services.schedule_commit(self.vbid)
        if self.session is not None and self.opaque is not None:
            self.session.set_row_prefix(self.opaque, self.sink.row_prefix())

    def refresh_map(self, config: bytes) -> None:
        """Get a new cluster map, or read this one."""
        self._services.refresh_map(config, self.vbid)

    def refresh_collections(self) -> None:
        """Ask which collections there are now."""
        self._services.refresh_collections(self.vbid)

    def reconnect(self, cause: str) -> None:
        """Close the connection and log in again."""
        super().reconnect(cause)
        self.last_error = cause

    def retry_after(self, reason: RetryReason, attempt: int) -> None:
        """Hand in RetryDue after a pause."""
        self.retries += 1
        super().retry_after(reason, attempt)

    def report(self, status: VbucketStatus, text: str) -> None:
        """Show what the vbucket does."""
        self.status, self.text = str(status), text
        if status in ERROR_STATES:
            self.last_error = text

    def _after_pause(self) -> events.RetryDue | events.Start:
        expected = self._services.shown.filter
        if self.session is not None and expected is not None and expected != self._filter:
            return self.start_event(self.session)  # what was requested no longer exists: no node would stream it
        return super()._after_pause()

    # -- publish=persisted ----------------------------------------------------------------------------------------

    @property
    def observed_vbuuid(self) -> int | None:
        """The history to ask the source's persistence of, while something waits for it and a stream is open."""
        if self.gate is None or not self.gate.waiting or not self.streaming:
            return None
        assert self.machine is not None
        return self.machine.failover_log.newest_vbuuid or None

    def persisted(self, vbuuid: int, seqno: int) -> None:
        """Everything up to `seqno` of the history `vbuuid` is persisted on every copy: publish what waited for it."""
        if self.gate is None or vbuuid != self.observed_vbuuid:
            return
        released = self.gate.release(seqno, self._release_min())
        if released is not None:
            self.writer.publish(self.vbid, *released)
            self._services.schedule_commit(self.vbid)

    def _release_min(self) -> int:
        """The least end that readers may go over to: what they see, or the end of a history that is shorter."""
        state = self.sink.state()
        if not state.rollback_deferred:
            return 0
        high = None if len(self._highs) < POLLS_MIN else self._highs[-1]
        return state.published_seqno if high is None else min(state.published_seqno, high)

    def _note_polled(self, seqno: int) -> None:
        """The history of the open stream goes as far as `seqno`. Nothing more may come of a shorter one."""
        self._highs = [*self._highs, seqno][-POLLS_MIN:]
        if self.gate is None or self.gate.waiting or len(self._highs) < POLLS_MIN:
            return
        state = self.sink.state()
        if state.rollback_deferred and seqno <= state.staging_published_seqno:
            self.gate.hold(state.staging_published_seqno, state.staging_published_seqno, None)

    # -- status ---------------------------------------------------------------------------------------------------

    def row(self, history: History | None = None) -> dict[str, Any]:
        """What status says of the vbucket; `history` of the last commit, where the store can be read."""
        state = self.sink.state()
        high = self.source_high_seqno
        published = int(state.published_seqno)
        failing = self.machine.shown.failing_text if self.machine is not None else None
        contact, status, text = self._contact(), self.status, self.text
        if self.streaming and not self.in_contact:
            status, text = VbucketStatus.WAITING, contact["last_error"]
        return {
            "vbid": self.vbid,
            "state": "stalled" if self.stalled_streams else "failing" if failing else str(status),
            "text": self.stall_text if self.stalled_streams else failing or text,
            "branch": int(state.branch),
            "vbuuid": int(state.failover_log.newest_vbuuid),
            "failover_log": [list(entry) for entry in state.failover_log],
            "published_seqno": published,
            "staged_seqno": int(state.staged_seqno),
            "source_high_seqno": high,
            "lag_seqnos": None if high is None else self._lag(high, state),
            "received_documents": self.documents,
            "received_bytes": self.bytes,
            "requested_again_bytes": self.requested_again_bytes,
            "stalls": self.stalls,
            "open_prepares": len(self.writer.open_prepares(self.vbid)),
            "rollback_count": state.rollback_count,
            "last_rollback_ms": state.last_rollback_ms,
            "last_rollback": self.sink.last_rollback,
            "resync_count": history.resync_count if history is not None else None,
            "last_resync_ms": history.last_resync_ms if history is not None else None,
            "resyncs_begun": self.sink.resyncs_begun,
            "resync_why": self.sink.resync_why,
            "persisted_seqno": self.gate.persisted_seqno if self.gate is not None else None,
            "held_snapshots": self.gate.waiting if self.gate is not None else 0,
            "stale": state.staging_branch != state.branch and published > 0,
            "history_floor_seqno": int(state.history_floor_seqno),
            "local_purge_seqno": int(state.local_purge_seqno),
            "history_floor_ms": history.floor_ms if history is not None else None,
            "boundaries": history.boundaries if history is not None else None,
            "versions": history.versions if history is not None else None,
            "row_bytes": history.row_bytes if history is not None else None,
            "key_bytes": history.key_bytes if history is not None else None,
        } | contact

    @property
    def in_contact(self) -> bool:
        """True while the vbucket's node answers."""
        return self.session is not None and self.session.answers

    @property
    def caught_up(self) -> bool:
        """True if readers have all that the source is known to have."""
        high = self.source_high_seqno
        return high is not None and self._lag(high, self.sink.state()) == 0

    def _contact(self) -> dict[str, Any]:
        """What status says of the contact with the vbucket's node: none while that answers nothing."""
        session = self.session
        if session is None or not session.ready:
            return {"node": None, "silent_ms": None, "last_error": self.last_error}
        silent_ms = round(session.silent_s * 1000)
        if self.source_silent_ms is not None:
            silent_ms += self.source_silent_ms
            error = f"{session.address}, a mirror, has no contact with its source"
            return {"node": None, "silent_ms": silent_ms, "last_error": error}
        if session.answers:
            return {"node": str(session.address), "silent_ms": silent_ms, "last_error": self.last_error}
        return {"node": None, "silent_ms": silent_ms, "last_error": f"{session.address} does not answer"}
