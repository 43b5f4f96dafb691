"""A DCP connection to one node and all our streams over it, from login to the end.

Every byte that flow control counts is acked once, even if its message is dropped, so the window never stays full. A
connection that is silent for twice the noop interval is closed. If the source sends no noops in time, we send noops,
and their answers end the silence. We request no stream ids, but messages may carry one (docs/protocol.md 2.1, 2.8).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from mirror.clock import Clock
from mirror.errors import ClusterError, HandshakeFailed, SourceTimeout
from mirror.feed.connection.bootstrap import Access, Handshake
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.negotiation import open_dcp
from mirror.feed.connection.transport import Link, OnAnswer, Opaques
from mirror.ingest.events import KeyRefused, StreamAccepted, StreamRefused, StreamRollback
from mirror.ingest.instructions import RequestStream
from mirror.ingest.selection import FilterFields
from mirror.wire import events as ev
from mirror.wire.codec_dcp import DECODED, decode, encode, to_frame
from mirror.wire.constants import (
    ControlKey,
    Magic,
    Opcode,
    Status,
    StreamRequestFlag,
)
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.flow_control import FlowControlLedger, counted_size
from mirror.wire.frame import Frame, request, response
from mirror.wire.frame import encode as encode_frame
from mirror.wire.keys import key_problem
from mirror.wire.scan import Row, Run, is_data, row_of
from storage.model import FailoverLog

SILENCE_MAX_S = 3.0
"""A node that sends nothing for longer while a request waits is out of contact. Its connection is closed later."""
ACK_INTERVAL_S = 5.0
"""After this time we ack received bytes even below the ledger's threshold, as the server's own consumer does."""
STREAM_FLAGS = int(StreamRequestFlag.ACTIVE_VB_ONLY)
"""Active vbuckets only, because a replica's snapshots may overlap, and mix disk and memory."""
DEFAULT_COLLECTION_PREFIX = b"\0"
"""The first byte of a stored key in the default collection; connections without collections leave it out."""

StreamAnswer = StreamAccepted | StreamRollback | StreamRefused


class StreamOwner(Protocol):
    vbid: int

    def on_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        """Stage rows in stored form, or drop them, before returning: the session then acks their bytes."""
        ...

    def on_event(self, event: ev.Event | KeyRefused) -> None:
        """Take any other message of the stream. No message follows StreamEnd."""
        ...

    def on_answer(self, answer: StreamAnswer) -> None: ...


class SessionOwner(Protocol):
    def on_closed(self, session: NodeSession, error: ClusterError) -> None: ...


CheckNode = Callable[[Link], Awaitable[None]]
"""Checks a node's cluster map before any stream is requested. Raises MirrorError for an unusable map."""


class StreamRequests:
    """The requests about streams. The connection is closed if the oldest one gets no answer in time.

    Its time begins with the answer before: a node that answers 25 requests a second needs 41 s for those of 1,024
    vbuckets. With 30 s for each from the start, all began again and again.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.unanswered: dict[int, str] = {}
        """Opaque -> words for an error, oldest first."""
        self._overdue: asyncio.TimerHandle | None = None

    def ask(self, link: Link, frame: Frame, on_answer: OnAnswer, what: str) -> None:
        opaque = frame.opaque
        self.unanswered[opaque] = what
        if len(self.unanswered) == 1:
            self._await_oldest(link)

        def settle(outcome: Frame | ClusterError) -> None:
            # The time begins anew for the next one: a node opens a thousand streams one after the other.
            is_oldest = opaque == next(iter(self.unanswered))
            del self.unanswered[opaque]
            if is_oldest:
                self._await_oldest(link)
            on_answer(outcome)

        link.ask(frame, settle)

    def _await_oldest(self, link: Link) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
        self._overdue = None
        if self.unanswered:
            error = SourceTimeout(f"{link.address} did not answer {next(iter(self.unanswered.values()))}")
            self._overdue = asyncio.get_running_loop().call_later(self._timeout_s, link.close, error)


class NodeSession:
    def __init__(
        self,
        access: Access,
        address: NodeAddress,
        owner: SessionOwner,
        clock: Clock,
        *,
        name: str,
        opaques: Opaques,
        check: CheckNode | None = None,
    ) -> None:
        """`name` is the DCP name. The node closes any older connection of the same name."""
        self.address = address
        self.name = name
        self.dropped_bytes = 0
        """Bytes of messages that were dropped and acked, because their stream is not open."""
        self.ledger = FlowControlLedger(access.settings.connection_buffer_size)
        self.noop_interval_s = access.settings.noop_interval_s
        self.controls: dict[str, bool] = {}
        """The controls (connection options) that were sent, by name: True if the server accepted the control."""
        self.handshake = Handshake(frozenset())
        self.ready = False
        self.streams: dict[int, StreamOwner] = {}  # by opaque
        self.acks_held = False
        """While True, nothing is acked, and the source pauses once the window is full. See `release_acks`."""
        self.requests = StreamRequests(access.settings.request_timeout_s)
        self.seqnos_at = self.seqnos_until = clock.monotonic()
        """Time of the request that brought the last high seqnos, and the time until which they count as known."""
        self._access = access
        self._check = check
        self._owner = owner
        self._clock = clock
        self._opaques = opaques
        self._link: Link | None = None
        self._watch: asyncio.Task[None] | None = None
        self._acked_at = clock.monotonic()
        self.backfill_at = self.received_at = self._acked_at
        """The times of the last rows of a disk snapshot or a resync (`backfill_at`), and of the last batch."""
        self.closed: asyncio.Future[ClusterError] = asyncio.get_running_loop().create_future()

    # -- opening --------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Log in, open DCP and negotiate. Raises ClusterError or ConfigError, and leaves nothing open."""
        opened = await open_dcp(self._access, self.address, self._clock, name=self.name, opaques=self._opaques)
        link = opened.link
        self.handshake, self.controls, self.noop_interval_s = opened.handshake, opened.controls, opened.noop_interval_s
        if self._check is not None:
            try:
                await self._check(link)
            except BaseException:
                link.close()
                raise
        self._link = link
        link.on_batch, link.on_lost = self.on_batch, self.on_lost
        if link.closed:
            # The loss came while nobody listened: `on_lost` was set only above.
            raise HandshakeFailed(f"{self.address} hung up after the negotiation")
        self.ready = True
        self._watch = asyncio.create_task(self._keep_watch(link))

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def link(self) -> Link:
        """The connection; only while `ready`."""
        assert self._link is not None, "the session is not open"
        return self._link

    @property
    def answers(self) -> bool:
        """True while the connection is ready and the node answers."""
        return self.ready and self.link.silence_s <= SILENCE_MAX_S

    @property
    def silent_s(self) -> float:
        """Seconds since the last byte from the node; only while `ready`."""
        return self._clock.monotonic() - self.link.last_received

    @property
    def sends_purge_seqno(self) -> bool:
        return self.controls.get(ControlKey.MAX_MARKER_VERSION.decode(), False)

    def request_stream(
        self,
        vbid: int,
        request: RequestStream,
        row_prefix: bytes,
        owner: StreamOwner,
        stream_filter: FilterFields | None = None,
    ) -> int:
        link = self.link
        opaque = link.next_opaque()
        fields = dict(stream_filter or {})
        if request.purge_seqno is not None:
            fields["purge_seqno"] = str(request.purge_seqno)
        value = json.dumps(fields, separators=(",", ":")).encode() if fields else b""
        offset = request.offset
        frame = to_frame(
            ev.StreamRequest(
                vbid,
                STREAM_FLAGS,
                offset.start_seqno,
                request.end_seqno,
                offset.vbuuid,
                offset.snap_start_seqno,
                offset.snap_end_seqno,
                value,
                opaque=opaque,
            )
        )
        self.streams[opaque] = owner
        link.routes[opaque] = row_prefix
        self.requests.ask(
            link, frame, partial(self._stream_answered, owner, opaque), f"the stream request of vb {vbid}"
        )
        return opaque

    def close_stream(self, vbid: int, opaque: int | None) -> None:
        """Send CLOSE_STREAM; later messages with the opaque are dropped and acked. Without an opaque, close any stream
        of the vbucket that the node has open on this connection.
        """
        if opaque is not None:
            if opaque not in self.streams:
                return  # the stream has ended
            self._forget(opaque)
        if self.ready:
            link = self.link
            frame = request(Opcode.DCP_CLOSE_STREAM, vbucket=vbid, opaque=link.next_opaque())
            self.requests.ask(link, frame, lambda _outcome: None, f"the closing of vb {vbid}'s stream")

    def get_failover_log(self, vbid: int, on_answer: OnAnswer) -> None:
        frame = request(Opcode.DCP_GET_FAILOVER_LOG, vbucket=vbid, opaque=self.link.next_opaque())
        self.requests.ask(self.link, frame, on_answer, f"the request for the failover log of vb {vbid}")

    def answer_marker(self, vbid: int, opaque: int) -> None:
        marker = request(Opcode.DCP_SNAPSHOT_MARKER, vbucket=vbid, opaque=opaque)
        self.link.send(encode_frame(response(marker)))

    def release_acks(self) -> None:
        self.acks_held = False
        self._ack(force=False)

    def close(self, error: ClusterError | None = None) -> None:
        if self._link is not None:
            self._link.close(error)

    # -- messages -------------------------------------------------------------------------------------------------

    def on_batch(self, items: list[Run | Frame]) -> None:
        """Handle the items of one read: noops first, then all others in order; then send a due ack."""
        link = self.link
        byte_count = 0
        for item in items:
            if isinstance(item, Run):
                byte_count += item.byte_count
            # At once: staging the rest may take longer than the source waits for an answer.
            elif item.opcode == Opcode.DCP_NOOP and item.magic == Magic.REQUEST:
                link.send(encode_frame(response(item)))
            else:
                byte_count += counted_size(item)
        self.received_at = link.last_received
        try:
            for item in items:
                if link.error is not None:
                    return
                if not isinstance(item, Run):
                    self._on_frame(item)
                    continue
                stream = self.streams.get(item.opaque)
                if stream is None or stream.vbid != item.vbid:
                    self.dropped_bytes += item.byte_count
                    continue
                rows = item.rows if self.handshake.collections else [_with_collection(row) for row in item.rows]
                stream.on_rows(item.opaque, rows, item.byte_count)
        except RemoteProtocolError as error:
            self.close(HandshakeFailed(f"{self.address} broke the protocol: {error}"))
            return
        # Also the bytes of dropped messages, or the window would leak shut (docs/protocol.md 3).
        self.ledger.received(byte_count)
        self._ack(force=False)

    def on_lost(self, error: ClusterError) -> None:
        self.ready = False
        self.streams = {}
        if self._watch is not None:
            self._watch.cancel()
        if not self.closed.done():
            self.closed.set_result(error)
            self._owner.on_closed(self, error)

    def _on_frame(self, frame: Frame) -> None:
        if frame.magic not in (Magic.REQUEST, Magic.FLEX_REQUEST) or frame.opcode == Opcode.DCP_NOOP:
            return
        stream = self.streams.get(frame.opaque)
        if stream is None or stream.vbid != frame.vbucket:
            self.dropped_bytes += counted_size(frame)
        elif is_data(frame):
            self._on_data(stream, frame)
        elif frame.opcode in DECODED:
            event = decode(frame)
            if frame.opcode == Opcode.DCP_STREAM_END:
                self._forget(frame.opaque)
            stream.on_event(event)

    def _on_data(self, stream: StreamOwner, frame: Frame) -> None:
        """Make a row of a data message that the scanner left as a frame."""
        collections = self.handshake.collections
        problem = key_problem(frame.key, prefixed=collections)
        if problem is not None:
            seqno = int.from_bytes(frame.extras[:8])
            stream.on_event(KeyRefused(frame.opaque, f"at seqno {seqno} {problem}"))
            return
        row = row_of(frame, self.link.routes[frame.opaque], b"" if collections else DEFAULT_COLLECTION_PREFIX)
        stream.on_rows(frame.opaque, [row], counted_size(frame))

    def _stream_answered(self, stream: StreamOwner, opaque: int, outcome: Frame | ClusterError) -> None:
        if not isinstance(outcome, Frame) or opaque not in self.streams:
            return  # the connection is lost, or we have closed the stream
        try:
            event = decode(outcome)
        except RemoteProtocolError as error:
            self.close(HandshakeFailed(f"{self.address} broke the protocol: {error}"))
            return
        assert isinstance(event, ev.StreamResponse)
        if event.status == Status.SUCCESS:
            stream.on_answer(StreamAccepted(opaque, FailoverLog.of(event.failover_log)))
            return
        self._forget(opaque)
        if event.rollback_seqno is not None:
            stream.on_answer(StreamRollback(opaque, event.rollback_seqno))
        else:
            stream.on_answer(StreamRefused(opaque, event.status, event.value))

    def _forget(self, opaque: int) -> None:
        self.streams.pop(opaque, None)
        self.link.routes.pop(opaque, None)

    # -- signs of life --------------------------------------------------------------------------------------------

    def _ack(self, *, force: bool) -> None:
        if self.acks_held:
            return
        count = self.ledger.take_ack(force=force)
        if count and self.ready:
            self.link.send(encode(ev.BufferAck(count, opaque=self.link.next_opaque())))
            self._acked_at = self._clock.monotonic()

    async def _keep_watch(self, link: Link) -> None:
        """Close the connection after a silence of twice the noop interval. Send our own noops if no stream is open or
        the server refused our interval: the server then sends no noops in time.
        """
        interval_s = self.noop_interval_s
        while not link.closed:
            limit = link.last_received + 2 * interval_s
            now = self._clock.monotonic()
            if now >= limit:
                silence_s = now - link.last_received
                link.close(SourceTimeout(f"{self.address} was silent for {silence_s:.1f} s"))
                return
            noops_come = self.streams and self.controls.get(ControlKey.SET_NOOP_INTERVAL.decode())
            if now - link.last_received >= interval_s / 2 and not noops_come:
                link.ask(request(Opcode.NOOP, opaque=link.next_opaque()), lambda _outcome: None)
            if now - self._acked_at >= ACK_INTERVAL_S:
                self._ack(force=True)
            await self._clock.sleep(min(interval_s / 4, 1.0, max(limit - now, 0.001)))


def _with_collection(row: Row) -> Row:
    """Return the row with the default collection's id in its key, as on connections with collections."""
    key, frame = row
    key_pos = 24 + frame[4]
    key_length = int.from_bytes(frame[2:4]) + 1
    body_length = int.from_bytes(frame[8:12]) + 1
    stored = b"".join(
        (
            frame[:2],
            key_length.to_bytes(2),
            frame[4:8],
            body_length.to_bytes(4),
            frame[12:key_pos],
            DEFAULT_COLLECTION_PREFIX,
            frame[key_pos:],
        )
    )
    return key, stored
