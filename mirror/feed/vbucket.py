"""A vbucket at work: its machine, its store, the session that carries its stream, and what status says of it.

Knows how to hand events to the machine and perform what comes back; decides nothing itself. Invariants: the machine
sees events one at a time and in order; an opaque of another session, or of a stream that was closed, never reaches it;
counters only rise.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from mirror.clock import Clock
from mirror.errors import ConnectFailed
from mirror.feed.performer import perform
from mirror.feed.persistence import PersistenceGate
from mirror.feed.session import NodeSession
from mirror.ingest import events as happenings
from mirror.ingest.backoff import delay_s
from mirror.ingest.events import Row
from mirror.ingest.instructions import AbandonStaged, Instruction, RequestStream, RetryReason, Status
from mirror.ingest.machine import Phase, VbucketMachine
from mirror.ingest.selection import Resolved, StreamFilter
from mirror.wire.codec_dcp import decode_failover_log
from mirror.wire.constants import Status as WireStatus
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame
from storage.history import History
from storage.model import FailoverEntry, Seqno, Vbid, Vbuuid
from storage.writer import GroupWriter, RollbackResult

TROUBLES = frozenset((Status.REFUSED, Status.ROLLING_BACK, Status.REFILLING, Status.WAITING))
"""What is told in these states is remembered as the last error."""


HIGHS_HEARD = 2
"""The first high seqno after a stream was accepted may have been asked for before."""


class Surroundings(Protocol):
    """What a vbucket may ask of those around it."""

    clock: Clock

    def commit_group(self, vbid: int) -> None:
        """Commit the vbucket's group now."""
        ...

    def touch_group(self, vbid: int) -> None:
        """The group has something to commit before long."""
        ...

    @property
    def shown(self) -> Resolved:
        """What of the bucket streams are asked for."""
        ...

    def refresh_collections(self, vbid: int) -> None:
        """Find out which collections there are now; the vbucket waits for it."""
        ...

    def refresh_map(self, config: bytes, vbid: int) -> None:
        """Get a new cluster map, or read this one."""
        ...

    def enter(self, vbid: int, event: Any) -> None:
        """Hand an event in from a timer or an answer, with the group's errors looked after."""
        ...


class VbucketActor:
    """One vbucket of a worker."""

    def __init__(self, vbid: int, writer: GroupWriter, around: Surroundings) -> None:
        """At rest: `revive` gives it a machine, `attach` a session."""
        self.vbid = vbid
        self.writer = writer
        self.session: NodeSession | None = None
        self.machine: VbucketMachine | None = None
        self.opaque: int | None = None
        self.status: str = Status.WAITING
        self.text = "not connected yet"
        self._high_seqno: tuple[NodeSession, int] | None = None
        """The source's high seqno, and the session over which it was asked."""
        self.documents = 0
        self.bytes = 0
        self.requested_again_bytes = 0
        self._last_data: float | None = None
        self.last_progress = around.clock.monotonic()
        self.last_error: str | None = None
        self.stalls = 0
        self.retries = 0
        self.stalled_streams = 0
        """How many streams in a row stood still, though the source is ahead; 0 when the last one brought something."""
        self.stall_text = ""
        self.violations = 0
        self.last_rollback: tuple[int, int] | None = None
        """What the last rollback led from and to; None: there was none since the worker began."""
        self.resyncs_begun = 0
        """Since the worker began."""
        self.resync_why: str | None = None
        """Of the last one."""
        self.gate: PersistenceGate | None = None
        """Holds complete snapshots back until the source has persisted them; None: nothing is held back."""
        self._around = around
        self._abandon_due = False
        self._highs: list[int] = []  # the source's high seqno, as said since the stream was accepted
        self._retry: asyncio.TimerHandle | None = None
        self._filter: StreamFilter | None = None  # of the machine's last Start
        # What was published when the process started, or after a rollback: at or below it nothing may be sent again.
        self._held_seqno: int = writer.state(vbid).published_seqno

    # -- life -----------------------------------------------------------------------------------------------------

    def revive(self) -> None:
        """Make a machine from the stored state; whatever the old one knew is forgotten."""
        self.drop_machine()
        self.machine = VbucketMachine(Vbid(self.vbid), self.writer.state(self.vbid))

    def drop_machine(self) -> None:
        """Close the stream and forget the machine: the store failed, or the vbucket is stopped."""
        if self.session is not None and self.opaque is not None:
            self.session.close_stream(self.vbid, self.opaque)
        self.opaque = None
        self.machine = None
        self._abandon_due = False
        self.drop_held()
        self._cancel_retry()

    def attach(self, session: NodeSession) -> None:
        """The session of its node is ready."""
        self.session = session
        self.opaque = None
        self.last_progress = self._around.clock.monotonic()
        self.handle(self._started(session))

    def _started(self, session: NodeSession) -> happenings.Start:
        """Whatever is asked for from now on is what of the bucket is shown now."""
        shown = self._around.shown
        self._filter = shown.filter
        return happenings.Start(
            collections=session.handshake.collections,
            sends_purge_seqno=session.sends_purge_seqno,
            filter=shown.filter,
            scope_names=shown.scope_names,
        )

    def detach(self, event: happenings.Stop | happenings.ConnectionLost | happenings.NoActiveNode) -> None:
        """The session is gone, or no longer the right one."""
        if self.session is None and not isinstance(event, happenings.NoActiveNode):
            return
        self._cancel_retry()
        self.handle(event)
        self.session = None
        self.opaque = None

    @property
    def source_high_seqno(self) -> int | None:
        """The source's high seqno; None where nobody can say: its node was not asked yet, or is away."""
        return self._high_seqno[1] if self._high_seqno is not None and self._high_seqno[0].ready else None

    def note_high_seqno(self, session: NodeSession, seqno: int | None) -> None:
        """The vbucket's node was asked for its high seqno; None: it does not count the vbucket as its own."""
        self._high_seqno = None if seqno is None else (session, seqno)

    def forget_high_seqno(self) -> None:
        """The vbucket has another node, or none: what the old one said holds no more."""
        self._high_seqno = None

    @property
    def streaming(self) -> bool:
        """True while a stream is open."""
        return self.machine is not None and self.machine.phase is Phase.STREAMING

    @property
    def refused(self) -> bool:
        """True while the vbucket waits for people, or for collections."""
        return self.machine is not None and self.machine.phase is Phase.REFUSED

    def went_back(self, seqno: int) -> None:
        """The store was rolled back by hand: what lies above may come again without being asked for again."""
        self._held_seqno = min(self._held_seqno, seqno)

    def note_rollback(self, result: RollbackResult) -> None:
        """Remember what a rollback led from and to."""
        self.last_rollback = (int(result.from_seqno), int(result.boundary_seqno))

    def note_resync(self, why: str) -> None:
        """Remember that a resync began, and why."""
        self.resyncs_begun += 1
        self.resync_why = why

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: Any) -> None:
        """Hand an event to the machine and do what it wants."""
        if self.machine is not None:
            perform(self, self.machine.handle(event))
        if isinstance(event, happenings.StreamAccepted):
            self._highs = []
        elif isinstance(event, happenings.HighSeqno) and self.streaming:
            self._heard_high(event.seqno)

    def published(self, seqno: int) -> None:
        """A commit made everything up to `seqno` visible."""
        self.handle(happenings.Published(seqno))
        if self._abandon_due:
            self._abandon_due = False
            perform(self, [AbandonStaged(Vbid(self.vbid), "the snapshot before it is published")])

    def handle_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        """Hand data to the machine and do what it wants."""
        if self.machine is None:
            return
        self.documents += len(rows)
        self.bytes += byte_count
        self.progressed()
        if self.session is not None and self.machine.status is not Status.STREAMING:
            self.session.backfill_at = self.last_progress
        self._last_data = self.last_progress
        if self._held_seqno and int.from_bytes(rows[0][0][4:12]) <= self._held_seqno:
            self.requested_again_bytes += sum(
                len(value) for key, value in rows if int.from_bytes(key[4:12]) <= self._held_seqno
            )
        perform(self, self.machine.handle_run(opaque, rows, byte_count))
        if self.writer.publishable(self.vbid):
            self._around.touch_group(self.vbid)

    def progressed(self) -> None:
        """The stream is well: something of it came with what was received last."""
        self.last_progress = self._around.clock.monotonic() if self.session is None else self.session.received_at
        self.stalled_streams = 0

    def stalled(self, text: str) -> None:
        """The stream stands still though the source is ahead."""
        self.stalls += 1
        self.stalled_streams += 1
        self.stall_text = self.last_error = text
        self.last_progress = self._around.clock.monotonic()

    # -- what the performer asks for ------------------------------------------------------------------------------

    def tell(self, event: Any) -> list[Instruction]:
        """Hand the machine the answer to an instruction."""
        if isinstance(event, (happenings.RolledBack, happenings.RefillBegun)):
            self._held_seqno = min(self._held_seqno, event.state.staged_seqno)
        if isinstance(event, happenings.StagingRefused):
            self.last_error = event.text
        return self.machine.handle(event) if self.machine is not None else []

    def request_stream(self, asked: RequestStream) -> int | None:
        """Send a stream request."""
        if self.session is None or not self.session.ready:
            return None
        self.session.stream_filter = {} if self._filter is None else self._filter.fields  # other vbuckets' may differ
        self.opaque = self.session.request_stream(asked, self.writer.row_prefix(self.vbid))
        return self.opaque

    def close_stream(self, opaque: int | None) -> None:
        """Send CLOSE_STREAM."""
        if self.session is not None:
            self.session.close_stream(self.vbid, opaque)
        self.opaque = None

    def get_failover_log(self) -> bool:
        """Ask for the failover log."""
        session = self.session
        if session is None or not session.ready:
            return False

        def settle(outcome: Frame | Exception) -> None:
            if self.session is session and isinstance(outcome, Frame):
                self._around.enter(self.vbid, failover_log_event(outcome, self.source_high_seqno))

        session.get_failover_log(self.vbid, settle)
        return True

    def answer_marker(self, opaque: int) -> None:
        """Answer a marker, unless its stream is gone."""
        if self.session is not None and self.session.ready and opaque == self.opaque:
            self.session.answer_marker(self.vbid, opaque)

    def holds(self, seqno: int, snap_start_seqno: int, purge_seqno: int | None) -> bool:
        """Keep a complete snapshot back until it is persisted, where that is asked for."""
        if self.gate is not None:
            self.gate.hold(seqno, snap_start_seqno, purge_seqno)
        return self.gate is not None

    @property
    def defers_rollbacks(self) -> bool:
        """With `publish=persisted` (see `persistence`)."""
        return self.gate is not None

    def drop_held(self) -> bool:
        """Forget what was held back."""
        return self.gate is not None and self.gate.drop()

    @property
    def observed_vbuuid(self) -> int | None:
        """The history to ask the source's persistence of, while something waits for it and a stream is open."""
        if self.gate is None or not self.gate.waiting or not self.streaming:
            return None
        assert self.machine is not None
        return self.machine.failover_log[0].vbuuid if self.machine.failover_log else None

    def persisted(self, vbuuid: int, seqno: int) -> None:
        """Everything up to `seqno` of the history `vbuuid` is persisted on every copy: publish what waited for it."""
        if self.gate is None or vbuuid != self.observed_vbuuid:
            return
        released = self.gate.release(seqno, self._release_min())
        if released is not None:
            self.writer.publish(self.vbid, *released)
            self._around.touch_group(self.vbid)

    def abandon_later(self) -> None:
        """Wait for the complete snapshot that is being published."""
        self._abandon_due = True

    def _release_min(self) -> int:
        """The least end that readers may go over to: what they see, or the end of a history that is shorter."""
        state = self.writer.state(self.vbid)
        if not state.rollback_deferred:
            return 0
        high = None if len(self._highs) < HIGHS_HEARD else self._highs[-1]
        return state.published_seqno if high is None else min(state.published_seqno, high)

    def _heard_high(self, seqno: int) -> None:
        """The source says how far the history of the open stream goes. Nothing more may come of a shorter one."""
        self._highs = [*self._highs, seqno][-HIGHS_HEARD:]
        if self.gate is None or self.gate.waiting or len(self._highs) < HIGHS_HEARD:
            return
        state = self.writer.state(self.vbid)
        if state.rollback_deferred and seqno <= state.staging_published_seqno:
            self.gate.hold(state.staging_published_seqno, state.staging_published_seqno, None)

    def commit(self) -> None:
        """Commit the group now."""
        self._around.commit_group(self.vbid)

    def reroute(self) -> None:
        """Rows of the live stream are to be made for the staging branch as it is now."""
        self._around.touch_group(self.vbid)
        if self.session is not None and self.opaque is not None:
            self.session.set_row_prefix(self.opaque, self.writer.row_prefix(self.vbid))

    def refresh_map(self, config: bytes) -> None:
        """Get a new cluster map, or read this one."""
        self._around.refresh_map(config, self.vbid)

    def refresh_collections(self) -> None:
        """Ask which collections there are now."""
        self._around.refresh_collections(self.vbid)

    def reconnect(self, cause: str) -> None:
        """Close the connection and log in again."""
        if self.session is not None:
            asyncio.get_running_loop().call_soon(self.session.close, ConnectFailed(cause, hint=""))
        self.last_error = cause

    def retry_after(self, reason: RetryReason, attempt: int) -> None:
        """Hand in RetryDue later."""
        self.retries += 1
        self._cancel_retry()
        delay = delay_s(reason, attempt, self._around.clock.jitter())
        self._retry = asyncio.get_running_loop().call_later(delay, self._retry_due)

    def report(self, status: Status, text: str) -> None:
        """Say what the vbucket does."""
        self.status, self.text = str(status), text
        if status in TROUBLES:
            self.last_error = text

    def _retry_due(self) -> None:
        self._retry = None
        event: Any = happenings.RetryDue()
        wanted = self._around.shown.filter
        if self.session is not None and wanted is not None and wanted != self._filter:
            event = self._started(self.session)  # what was asked for is not there any more: no node would stream it
        self._around.enter(self.vbid, event)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    # -- status ---------------------------------------------------------------------------------------------------

    def row(self, history: History | None = None) -> dict[str, Any]:
        """What status says of the vbucket; `history` of the last commit, where the store can be read."""
        state = self.writer.state(self.vbid)
        high = self.source_high_seqno
        published = int(state.published_seqno)
        failing = self.machine.failing_text if self.machine is not None else None
        return {
            "vbid": self.vbid,
            "state": "stalled" if self.stalled_streams else "failing" if failing else str(self.status),
            "text": self.stall_text if self.stalled_streams else failing or self.text,
            "branch": int(state.branch),
            "vbuuid": int(state.failover_log[0].vbuuid) if state.failover_log else 0,
            "failover_log": [[int(entry.vbuuid), int(entry.seqno)] for entry in state.failover_log],
            "published_seqno": published,
            "staged_seqno": int(state.staged_seqno),
            "source_high_seqno": high,
            "lag_seqnos": None if high is None else max(0, high - published),
            "received_documents": self.documents,
            "received_bytes": self.bytes,
            "requested_again_bytes": self.requested_again_bytes,
            "last_data_ms": self._last_data_ms(),
            "last_error": self.last_error,
            "stalls": self.stalls,
            "open_prepares": len(self.writer.open_prepares(self.vbid)),
            "rollback_count": state.rollback_count,
            "last_rollback_ms": state.last_rollback_ms,
            "last_rollback": self.last_rollback,
            "resync_count": history.resync_count if history is not None else None,
            "last_resync_ms": history.last_resync_ms if history is not None else None,
            "resyncs_begun": self.resyncs_begun,
            "resync_why": self.resync_why,
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
            "node": str(self.session.address) if self.session is not None else None,
        }

    def _last_data_ms(self) -> int | None:
        """When data came last, by the wall clock as it is now."""
        if self._last_data is None:
            return None
        clock = self._around.clock
        return clock.wall_ms() - int((clock.monotonic() - self._last_data) * 1000)


def failover_log_event(answer: Frame, high_seqno: int | None = None) -> Any:
    """What an answer to GET_FAILOVER_LOG means to a vbucket's machine."""
    if answer.status != WireStatus.SUCCESS:
        return happenings.FailoverLogRefused(answer.status)
    try:
        log = [FailoverEntry(Vbuuid(uuid), Seqno(at)) for uuid, at in decode_failover_log(answer.value)]
    except RemoteProtocolError:
        return happenings.FailoverLogRefused(WireStatus.EINTERNAL)
    return happenings.FailoverLogReceived(log, high_seqno)
