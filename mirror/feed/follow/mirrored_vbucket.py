"""A mirrored vbucket: hands the messages of its stream to the host, and counts them for status.

A failure of the store stops the vbucket's group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mirror.clock import Clock
from mirror.feed.cluster.collection_watch import CollectionWatch
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.connection.node_session import NodeSession, StreamAnswer
from mirror.feed.follow.group_commits import Group
from mirror.feed.follow.store_sink import PersistenceGate, StoreSink
from mirror.feed.host import MachineEvent, VbucketHost
from mirror.ingest import events
from mirror.ingest.events import KeyRefused, Row
from mirror.ingest.instructions import VbucketStatus
from mirror.ingest.selection import StreamFilter
from mirror.wire import events as ev
from storage.errors import StorageError

ERROR_STATES = {
    VbucketStatus.REFUSED,
    VbucketStatus.DAMAGED,
    VbucketStatus.ROLLING_BACK,
    VbucketStatus.RESYNCING,
    VbucketStatus.WAITING,
}
"""The text of these states is kept as the last error."""


@dataclass(slots=True)
class Progress:
    """The state of a vbucket as people see it, and its counters, which only rise."""

    last_at: float
    """Time of the last message of the stream, of the request, or of the last stall."""
    status: str = VbucketStatus.REQUESTING
    text: str = "not connected yet"
    last_error: str | None = None
    documents: int = 0
    bytes: int = 0
    stalls: int = 0
    stalled_streams: int = 0
    """Streams that stalled in a row; 0 after a message arrives."""
    stall_text: str = ""

    def moved(self, at: float) -> None:
        self.last_at = at
        self.stalled_streams = 0

    def stalled(self, text: str, at: float) -> None:
        self.stalls += 1
        self.stalled_streams += 1
        self.stall_text = self.last_error = text
        self.last_at = at


class MirroredVbucket:
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
        self.vbid = vbid
        self.group = group
        self.writer = group.writer.vbuckets[vbid]
        self.gate = gate
        self.sink = StoreSink(self.writer, group, gate)
        self.host = VbucketHost(vbid, self.sink, self, clock)
        self.progress = Progress(clock.monotonic())
        self.apart_at = clock.monotonic()
        """Time when the last session sent its last bytes; before the first session, time when the worker began."""
        self.polled: tuple[NodeSession, int] | None = None
        """The session of the last poll, and the high seqno that it brought; None: unknown."""
        self.source_silent_ms: int | None = None
        """If the node is a mirror without contact to its own source, the time since the loss; otherwise None."""
        self._clock = clock
        self._maps = maps
        self._collections = collections
        self._filter: StreamFilter | None = None

    @property
    def source_high_seqno(self) -> int | None:
        """The source's high seqno; None if the node does not answer or has sent no high seqno. Also None if the node is
        a mirror that has lost its source, or that was behind this mirror at the last poll.
        """
        if self.polled is None or self.source_silent_ms is not None:
            return None
        session, seqno = self.polled
        return seqno if session.answers else None

    def attach(self, session: NodeSession) -> None:
        self.progress.last_at = self._clock.monotonic()
        self._guarded(partial(self.host.attach, session))

    def detach(self, event: events.Stop | events.ConnectionLost | events.NoActiveNode) -> None:
        if self.host.session is not None:
            self.apart_at = self._clock.monotonic() - self.host.session.silent_s
        self._guarded(partial(self.host.detach, event))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except StorageError as error:
            self.group.failed(error)

    def on_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        host, progress, group = self.host, self.progress, self.group
        machine, session = host.machine, host.session
        if machine is None or session is None:
            return
        progress.documents += len(rows)
        progress.bytes += byte_count
        progress.moved(session.received_at)
        if machine.shown.status is not VbucketStatus.STREAMING:
            session.backfill_at = session.received_at
        try:
            host.on_rows(opaque, rows, byte_count)
            # A group waits once for all snapshots that complete meanwhile: one commit has them all.
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
        session = self.host.session
        self.progress.moved(self._clock.monotonic() if session is None else session.received_at)
        self.enter(event)
        if isinstance(event, ev.SystemEvent):  # recount, because the event's bytes are pending, too
            self.group.commits.flush_over_budget()

    def on_answer(self, answer: StreamAnswer) -> None:
        self.enter(answer)
        if self.gate is not None and isinstance(answer, events.StreamAccepted):
            self.gate.stream_accepted()

    def on_high_seqno(self, seqno: int) -> None:
        self._guarded(partial(self.host.handle, events.HighSeqno(seqno)))
        if self.gate is not None and self.host.streaming:
            self.gate.polled(seqno, self.sink.state())

    def start_event(self, session: NodeSession) -> events.Start:
        shown = self._collections.resolved
        self._filter = shown.filter
        self.host.stream_filter = {} if shown.filter is None else shown.filter.fields
        return events.Start(
            collections=session.handshake.collections,
            sends_purge_seqno=session.sends_purge_seqno,
            by_mirror=session.handshake.by_mirror,
            filter=shown.filter,
            scope_names=shown.scope_names,
        )

    def enter(self, event: MachineEvent) -> None:
        expected, session = self._collections.resolved.filter, self.host.session
        if isinstance(event, events.RetryDue) and session and expected is not None and expected != self._filter:
            event = self.start_event(session)  # nodes refuse the old filter if a collection is gone
        self._guarded(partial(self.host.handle, event))
        if not self.group.commit_waits:
            self.group.schedule()

    def report(self, status: VbucketStatus, text: str) -> None:
        self.progress.status, self.progress.text = str(status), text
        if status in ERROR_STATES:
            self.progress.last_error = text

    def refresh_map(self, config: bytes) -> None:
        self._maps.refresh_map(config, self.vbid)

    def refresh_collections(self) -> None:
        self._collections.look(self.vbid)

    @property
    def observed_vbuuid(self) -> int | None:
        """The history to query for persisted seqnos; None while no snapshot is held or no stream is open."""
        if self.gate is None or not self.gate.waiting or not self.host.streaming:
            return None
        assert self.host.machine is not None
        return self.host.machine.stored.failover_log.newest_vbuuid or None

    def persisted(self, vbuuid: int, seqno: int) -> None:
        """Publish held snapshots: every copy has persisted the history `vbuuid` up to `seqno`."""
        if self.gate is None or vbuuid != self.observed_vbuuid:
            return
        assert self.host.machine is not None
        shown = self.host.machine.shown
        self.report(shown.status, shown.text)  # an earlier refusal is over
        released = self.gate.release(seqno, self.sink.state())
        if released is not None:
            self.writer.publish(*released)
            self.group.schedule()
