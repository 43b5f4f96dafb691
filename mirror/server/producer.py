"""The server's side of one DCP connection after DCP_OPEN: controls (settings), stream requests, flow control and noops
(docs/protocol.md 2.3 to 2.5 and 2.8 to 2.10).

The two subclasses, of the sandbox and the mirror, check requests, open streams and choose the order of sending (the
abstract methods). A message of a stream is sent only while the window is open, so at most one message exceeds the
window; stream ends and noops do not wait for the window.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from mirror.server.controls import Controls
from mirror.server.errors import Refused, rolled_back, unknown_collection
from mirror.server.rollback import StreamHistory, judge
from mirror.wire import codec_dcp
from mirror.wire.constants import Status, StreamEndReason
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.events import (
    CollectionDropped,
    DcpNoop,
    ScopeCreated,
    ScopeDropped,
    StreamRequest,
    SystemEventContent,
)
from mirror.wire.flow_control import ProducerWindow
from mirror.wire.stream_filter import KEYS, parse_filter
from storage.model import FailoverLog

NOOP_OPAQUE_FIRST = 10_000_000
IDLE_TIMEOUT_S = 360.0
"""Silence after which a client that enabled noops is disconnected (kv_engine: dcp_idle_timeout)."""


class ProducerPort(Protocol):
    def write(self, data: bytes) -> None:
        """Send now, or when the client takes data."""

    async def writable(self) -> None:
        """Return as soon as the client takes data."""

    def hang_up(self) -> None: ...

    @property
    def silence_s(self) -> float:
        """Seconds since the client last sent data."""


class Stream(Protocol):
    vbid: int
    stream_id: int | None

    def end(self, reason: StreamEndReason) -> bytes:
        """End the stream; return its STREAM_END message."""


@dataclass(kw_only=True)
class ProducerFilter:
    """The filter of one stream. Without `collections` and `scope_id`, everything passes."""

    collections: frozenset[int] | None = None
    scope_id: int | None = None
    stream_id: int | None = None
    purge_seqno: int | None = None
    legacy: bool = False
    """True if the client did not negotiate collections; it gets no system events."""
    _ended: set[int] = field(default_factory=set, init=False)
    _scope_ended: bool = field(default=False, init=False)

    @property
    def all(self) -> bool:
        return self.collections is None and self.scope_id is None

    @property
    def empty(self) -> bool:
        """True if no change can pass any more, because the filter's scope or all its collections were dropped."""
        if self.scope_id is not None:
            return self._scope_ended
        return self.collections is not None and self.collections <= self._ended

    def shows(self, content: SystemEventContent) -> bool:
        """Return True if a system event passes. Remember the drop of a selected collection or scope."""
        if self.all:
            return True
        if self.legacy:
            return False
        if isinstance(content, (ScopeCreated, ScopeDropped)):
            shown = content.scope_id == self.scope_id
            self._scope_ended |= shown and isinstance(content, ScopeDropped)
            return shown
        if self.collections is None:
            return content.scope_id == self.scope_id
        if isinstance(content, CollectionDropped):
            self._ended.add(content.collection_id)
        return content.collection_id in self.collections


FilterT = TypeVar("FilterT", bound=ProducerFilter)


def requested_filter(
    kind: type[FilterT],
    value: bytes,
    *,
    has_collections: bool,
    has_stream_ids: bool,
    scopes: Container[int],
    collections: Container[int],
    manifest_uid: int,
    known_keys: frozenset[str] = KEYS,
    may_be_empty: bool = False,
) -> FilterT:
    """Parse a stream request's filter. `scopes` and `collections` are the ids that exist for the client. A client that
    did not negotiate collections gets the default collection, and cannot send a filter (docs/protocol.md 2.4). Raises
    Refused. If `value` is not a filter, the context of Refused is empty, as in recordings of real servers.
    """
    if not has_collections:
        if value:
            raise Refused(Status.EINVAL)
        return kind(collections=frozenset({0}), legacy=True)
    try:
        found = parse_filter(value, has_stream_ids=has_stream_ids, known=known_keys, may_be_empty=may_be_empty)
    except RemoteProtocolError as error:
        raise Refused(error.status) from None
    if found.scope_id is not None and found.scope_id not in scopes:
        raise unknown_collection(manifest_uid, Status.UNKNOWN_SCOPE)
    if not all(number in collections for number in found.collections or ()):
        raise unknown_collection(manifest_uid)
    return kind(**asdict(found))


StreamT = TypeVar("StreamT", bound=Stream)


class Producer(ABC, Generic[StreamT, FilterT]):
    def __init__(self, port: ProducerPort, name: str, controls: Controls) -> None:
        """`controls` has the settings of HELLO and DCP_OPEN."""
        self.name = name
        self.controls = controls
        self.streams: dict[tuple[int, int | None], StreamT] = {}
        self.window = ProducerWindow()
        self.idle_timeout_s = IDLE_TIMEOUT_S
        self._port = port
        self._wake = asyncio.Event()
        self._stream_ends: deque[bytes] = deque()
        """STREAM_ENDs to send after the answer to the current request."""
        self._noop_opaque = NOOP_OPAQUE_FIRST
        self._noop_task: asyncio.Task[None] | None = None
        self._pump_task: asyncio.Task[None] | None = None

    def start(self, report: Callable[[BaseException], None] | None = None) -> None:
        """Start sending. If sending fails, `report` is called with the error."""

        def done(task: asyncio.Task[None]) -> None:
            if report is not None and not task.cancelled() and (error := task.exception()) is not None:
                report(error)

        self._pump_task = asyncio.create_task(self._pump(), name="dcp producer")
        self._pump_task.add_done_callback(done)

    def stop(self) -> None:
        """Stop sending and forget all streams. Call this when the connection is closed."""
        for task in (self._pump_task, self._noop_task):
            if task is not None:
                task.cancel()
        for stream in list(self.streams.values()):
            self._forget(stream)

    def wake(self) -> None:
        self._wake.set()

    # -- requests

    def control(self, name: bytes, value: bytes) -> Status:
        controls = self.controls
        noops = (controls.noop_enabled, controls.noop_interval_s)
        status = controls.set(name, value)
        if controls.buffer_bytes != self.window.window_bytes:
            self.window.window_bytes = controls.buffer_bytes
            self.wake()
        if noops != (controls.noop_enabled, controls.noop_interval_s):
            if self._noop_task is not None:
                self._noop_task.cancel()
            self._noop_task = asyncio.create_task(self._send_noops()) if controls.noop_enabled else None
        return status

    def request_stream(self, request: StreamRequest) -> FailoverLog:
        """Open a stream and return the vbucket's failover log. The stream sends no message before the caller returns to
        the event loop. Raises Refused.
        """
        request = self._check_request(self._with_known_flags(request))
        if (self.controls.xattrs or request.value) and not self.controls.noop_enabled:
            raise Refused(Status.NOT_SUPPORTED)  # xattrs and filters require enable_noop
        stream_filter = self._parse_filter(request)
        if (request.vbid, stream_filter.stream_id) in self.streams:
            raise Refused(Status.KEY_EEXISTS)
        history = self._history(request, stream_filter)
        back_to_seqno = judge(request, history, stream_filter.purge_seqno)
        if back_to_seqno is not None:
            raise rolled_back(self._rollback_seqno(request, history, back_to_seqno))
        stream = self._open_stream(request, stream_filter, history)
        self.streams[stream.vbid, stream.stream_id] = stream
        self._opened(stream)
        return history.failover_log if history.answered_log is None else history.answered_log

    def close_stream(self, vbid: int, stream_id: int | None) -> None:
        """Close a stream; a STREAM_END, if negotiated, follows the answer. Raises Refused."""
        if (stream_id is not None) != self.controls.stream_ids:
            raise Refused(Status.DCP_STREAM_ID_INVALID)
        stream = self.streams.get((vbid, stream_id))
        if stream is None:
            raise Refused(Status.DCP_STREAM_NOT_FOUND if self.controls.v7_status_codes else Status.KEY_ENOENT)
        end = stream.end(StreamEndReason.CLOSED)
        self._forget(stream)
        if self.controls.end_on_close:
            self._stream_ends.append(end)
            self.wake()

    def end_stream(self, stream: StreamT, reason: StreamEndReason) -> None:
        """End a stream and send its STREAM_END, even if the window is closed."""
        end = stream.end(reason)
        self._forget(stream)
        self._send(end)

    def acked(self, count: int) -> None:
        """Handle a DCP_BUFFER_ACK. Raises RemoteProtocolError if the client acknowledges more than was sent."""
        self.window.acked(count)
        self.wake()

    def marker_answered(self, opaque: int) -> None:
        """Handle the client's answer to a snapshot marker."""

    def statistics(self) -> dict[str, str]:
        return {}

    # -- checks of a stream request

    def _with_known_flags(self, request: StreamRequest) -> StreamRequest:
        abilities = self.controls.abilities
        unknown = request.flags & ~abilities.stream_flags
        if unknown and abilities.refuses_unknown_stream_flags:
            raise Refused(Status.EINVAL, "Request contains invalid flags")
        return replace(request, flags=request.flags & ~unknown)

    @abstractmethod
    def _check_request(self, request: StreamRequest) -> StreamRequest:
        """Return the request, or a changed one, for the checks that follow. Raises Refused for a vbucket that is not
        served here, an unsupported flag, or a missing privilege.
        """

    @abstractmethod
    def _parse_filter(self, request: StreamRequest) -> FilterT: ...

    @abstractmethod
    def _history(self, request: StreamRequest, stream_filter: FilterT) -> StreamHistory: ...

    def _rollback_seqno(self, request: StreamRequest, history: StreamHistory, seqno: int) -> int:
        """Return the seqno to which the client must roll back. `seqno` is the one that `judge` found."""
        return seqno

    @abstractmethod
    def _open_stream(self, request: StreamRequest, stream_filter: FilterT, history: StreamHistory) -> StreamT: ...

    def _opened(self, stream: StreamT) -> None:
        """Called when a new stream is in `streams`."""

    def _forget(self, stream: StreamT) -> None:
        del self.streams[stream.vbid, stream.stream_id]

    # -- sending

    @abstractmethod
    async def _pump(self) -> None: ...

    def _send(self, data: bytes) -> None:
        """Send messages of streams, whose bytes flow control counts (docs/protocol.md 2.8)."""
        self.window.sent(len(data))
        self._port.write(data)

    def _send_stream_ends(self) -> None:
        while self._stream_ends:
            self._send(self._stream_ends.popleft())

    @property
    def _noops_withheld(self) -> bool:
        """True to send no noops: a fault that the sandbox simulates."""
        return False

    async def _send_noops(self) -> None:
        while True:
            await asyncio.sleep(self.controls.noop_interval_s)
            if self._port.silence_s > self.idle_timeout_s:
                self._port.hang_up()
                return
            if self.streams and not self._noops_withheld:
                self._noop_opaque += 1
                self._port.write(codec_dcp.encode(DcpNoop(opaque=self._noop_opaque)))
