"""One connection, either role, without I/O: bytes in, events out; messages in, bytes out.

Knows the tables of `states`, the two codecs, and which request an answer belongs to (by opcode and opaque, never by
order). Must never know sockets, clocks, or what an event means for a store.

`receive_data` only stores. `next_event` has three results: an event (a value of `events`; a Frame for a key-value
request), `Signal.NEED_DATA`, `Signal.CLOSED`; and one exception, RemoteProtocolError. After one that left the framing
whole (a wrong shape, an unknown opcode, the wrong moment) a server may answer `error.status` to `error.opaque` and go
on; `error.opaque is None` says the bytes themselves cannot be followed any more. `send` gives the bytes to write, or a
LocalProtocolError and nothing has changed. Any other exception is a defect.

Messages with the opaque of a stream that is over were under way when it ended: they are not handed out, but their bytes
count for flow control, or the window would leak shut (docs/protocol.md 2.1, 2.8).
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum

from mirror.wire import codec_dcp, codec_kv
from mirror.wire.buffer import FrameBuffer
from mirror.wire.constants import BODY_LENGTH_MAX, ControlKey, Magic, Opcode, Status
from mirror.wire.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from mirror.wire.events import (
    BufferAck,
    CloseStream,
    DcpControl,
    DcpOpen,
    Event,
    Response,
    StreamRequest,
)
from mirror.wire.flow_control import ACK_SHARE, FlowControlLedger, ProducerWindow, counted_size
from mirror.wire.frame import Frame
from mirror.wire.frame import encode as encode_frame
from tests.oracle import kv_client
from tests.oracle.states import (
    ANSWERED,
    CLOSE_TRIGGERS,
    CONNECTION_TRANSITIONS,
    SAID_BY,
    STREAM_MESSAGES,
    STREAM_TRANSITIONS,
    Answered,
    ConnectionState,
    Role,
    StreamState,
    Trigger,
    is_dcp,
)

__all__ = ["Connection", "Signal", "Stream"]

Message = Event | Frame

_PENDING_MAX = 1 << 20
"""Requests without an answer that are remembered. A peer that never answers is found out by its owner's clock long
before; this only bounds memory."""

_WINDOW_MAX = 0xFFFF_FFFF


class Signal(Enum):
    """What `next_event` says when there is no event."""

    NEED_DATA = "need data"
    CLOSED = "closed"


@dataclass(slots=True)
class Stream:
    """One stream of this connection."""

    opaque: int
    vbid: int
    stream_id: int | None
    state: StreamState = StreamState.REQUESTED


class _Pending:
    """Requests that were said and not answered, by opcode and opaque; equal ones are answered in their order."""

    __slots__ = ("_count", "_requests")

    def __init__(self) -> None:
        self._requests: dict[tuple[int, int], deque[Message]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, opcode: int, opaque: int, message: Message) -> None:
        self._requests.setdefault((opcode, opaque), deque()).append(message)
        self._count += 1

    def first(self, opcode: int, opaque: int) -> Message | None:
        waiting = self._requests.get((opcode, opaque))
        return waiting[0] if waiting else None

    def drop(self, opcode: int, opaque: int) -> None:
        waiting = self._requests[(opcode, opaque)]
        waiting.popleft()
        self._count -= 1
        if not waiting:
            del self._requests[(opcode, opaque)]


class Connection:
    """Either end of a connection. Both ends run this code; only `role` differs."""

    def __init__(self, role: Role, *, body_length_max: int = BODY_LENGTH_MAX, ack_share: float = ACK_SHARE) -> None:
        """A connection just made, PLAIN."""
        self.role = role
        self.state = ConnectionState.PLAIN
        self.streams: dict[int, Stream] = {}
        """By opaque, without those that ended."""
        self.ledger = FlowControlLedger(0, ack_share)
        """As a consumer: replaced when connection_buffer_size is accepted."""
        self.window = ProducerWindow(0)
        """As a producer: what may still be sent."""
        self.stale_count = 0
        """Messages of streams that were over, received and not handed out."""
        self._ack_share = ack_share
        self._buffer = FrameBuffer(body_length_max)
        self._ended = False
        self._requested = _Pending()
        """What we requested and the peer did not answer."""
        self._owed = _Pending()
        """What the peer requested and we did not answer."""
        self._last_opaque = 0

    # Bytes in, events out.

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes from the peer; none at all: the peer will send no more."""
        if not data:
            self._ended = True
        elif self._ended:
            raise LocalProtocolError("bytes after the end of bytes")
        self._buffer.feed(data)

    def next_event(self) -> Message | Signal:
        """The next thing the peer said."""
        while True:
            if self.state is ConnectionState.CLOSED:
                return Signal.CLOSED
            frame = self._buffer.next_frame()
            if frame is None:
                if not self._ended:
                    return Signal.NEED_DATA
                self._buffer.end()
                self._move(Trigger.LOST, RemoteProtocolError)
                return Signal.CLOSED
            self._count_received(frame)
            try:
                event = self._understand(frame, self.role.peer, RemoteProtocolError)
            except RemoteProtocolError as error:
                if not frame.is_response:
                    error.opaque = frame.opaque
                    self._remember(frame, frame, ours=False)
                raise
            if event is not None:
                return event

    @property
    def requested_count(self) -> int:
        """Requests of ours that the peer did not answer yet."""
        return len(self._requested)

    @property
    def owed_count(self) -> int:
        """Requests of the peer that we did not answer yet."""
        return len(self._owed)

    # Messages in, bytes out.

    def next_opaque(self) -> int:
        """An opaque that this side has not used; starts again after 2^32."""
        self._last_opaque = self._last_opaque % 0xFFFF_FFFF + 1
        return self._last_opaque

    def send(self, message: Message, *, opaque: int | None = None) -> bytes:
        """The bytes that say `message`. Illegal now: LocalProtocolError, and nothing has changed."""
        if isinstance(message, Frame):
            frame = message if opaque is None else replace(message, opaque=opaque)
        else:
            frame = codec_dcp.to_frame(message, opaque=opaque)
        data = encode_frame(frame)
        try:
            said = self._understand(frame, self.role, LocalProtocolError)
        except RemoteProtocolError as error:
            raise LocalProtocolError(error.detail, op=error.op, vbid=error.vbid, status=error.status) from None
        if said is None:
            raise LocalProtocolError("the stream of this opaque is over", op=frame.opcode, vbid=frame.vbucket)
        if self.role is Role.PRODUCER and self.window.window_bytes:
            self.window.sent(counted_size(frame))
        return data

    def take_ack(self, *, force: bool = False) -> bytes:
        """Bytes of a BUFFER_ACK when one is due (or, with `force`, when there is anything to say); else none."""
        count = self.ledger.due(force=force)
        return self.send(BufferAck(count), opaque=0) if count else b""

    # The one way through the tables, for both directions.

    def _understand(self, frame: Frame, speaker: Role, blame: type[ProtocolError]) -> Message | None:
        """What a frame says, checked against the tables, which move. None: of a stream that is over."""
        if self.state is ConnectionState.CLOSED:
            raise blame("the connection is closed", op=frame.opcode)
        if frame.is_response:
            return self._answer(frame, speaker, blame)
        ours = speaker is self.role
        requested = self._requested if ours else self._owed
        if len(requested) >= _PENDING_MAX:
            raise blame(f"{_PENDING_MAX} requests without an answer", op=frame.opcode, status=Status.EBUSY)
        if frame.magic == Magic.SERVER_REQUEST or not is_dcp(frame.opcode):
            return self._understand_kv(frame, speaker, blame)
        event = codec_dcp.decode(frame)
        if SAID_BY.get(frame.opcode) is not speaker:
            raise blame(f"not for the {speaker.value} to say", op=frame.opcode, vbid=frame.vbucket)
        if isinstance(event, StreamRequest) and event.opaque in self.streams:
            raise blame(f"opaque 0x{event.opaque:08x} names another stream", op=frame.opcode, vbid=frame.vbucket)
        state = self._check(_TRIGGERS.get(frame.opcode, Trigger.DCP), blame, frame.opcode)
        trigger = STREAM_MESSAGES.get(frame.opcode)
        if trigger is not None and not self._move_stream(frame, trigger, blame):
            return None
        self.state = state
        self._remember(frame, event, ours)
        self._note_request(event)
        return event

    def _understand_kv(self, frame: Frame, speaker: Role, blame: type[ProtocolError]) -> Frame:
        pushed = frame.magic == Magic.SERVER_REQUEST
        if speaker is not (Role.PRODUCER if pushed else Role.CONSUMER):
            raise blame(f"not for the {speaker.value} to say", op=frame.opcode)
        codec_kv.check_request(frame)
        self._move(Trigger.KV, blame)
        if not pushed:
            self._remember(frame, frame, speaker is self.role)
        return frame

    def _answer(self, frame: Frame, speaker: Role, blame: type[ProtocolError]) -> Response:
        pending = self._owed if speaker is self.role else self._requested
        if frame.magic == Magic.SERVER_RESPONSE:
            return kv_client.response(frame)
        response = codec_dcp.decode(frame) if is_dcp(frame.opcode) else kv_client.response(frame)
        assert isinstance(response, Response), "the codecs make responses of response frames"
        request = pending.first(frame.opcode, frame.opaque)
        if request is None:
            if ANSWERED.get(frame.opcode) is not Answered.SOMETIMES:
                raise blame(f"an answer to no question (opaque 0x{frame.opaque:08x})", op=frame.opcode)
            return response
        if isinstance(request, DcpOpen):
            accepted = frame.status == Status.SUCCESS
            self._move(Trigger.OPEN_ACCEPTED if accepted else Trigger.OPEN_REFUSED, blame, frame.opcode)
        self._note_answer(frame, request)
        if not _more_to_come(frame):
            pending.drop(frame.opcode, frame.opaque)
        return replace(response, request=request)

    def _remember(self, frame: Frame, message: Message, ours: bool) -> None:
        if ANSWERED.get(frame.opcode, Answered.ALWAYS) is Answered.ALWAYS:
            pending = self._requested if ours else self._owed
            pending.add(frame.opcode, frame.opaque, message)

    # Moves.

    def _check(self, trigger: Trigger, blame: type[ProtocolError], opcode: int | None = None) -> ConnectionState:
        state = CONNECTION_TRANSITIONS[self.state].get(trigger)
        if state is None:
            raise blame(f"not legal on a connection that is {self.state.value}", op=opcode, status=Status.EINVAL)
        return state

    def _move(self, trigger: Trigger, blame: type[ProtocolError], opcode: int | None = None) -> None:
        self.state = self._check(trigger, blame, opcode)

    def _move_stream(self, frame: Frame, trigger: Trigger, blame: type[ProtocolError]) -> bool:
        """False: the stream is over, the message was under way."""
        stream = self.streams.get(frame.opaque)
        if stream is None:
            if self.role is Role.CONSUMER:
                self.stale_count += 1
            return False
        state = STREAM_TRANSITIONS[stream.state].get(trigger)
        if state is None or stream.vbid != frame.vbucket:
            detail = f"not legal on a stream of vb {stream.vbid} that is {stream.state.value}"
            raise blame(detail, op=frame.opcode, vbid=frame.vbucket)
        self._set_stream(stream, state)
        return True

    def _set_stream(self, stream: Stream, state: StreamState) -> None:
        stream.state = state
        if state is StreamState.ENDED:
            del self.streams[stream.opaque]

    def _step_stream(self, stream: Stream, trigger: Trigger) -> None:
        """Move a stream by a trigger that may come too late to matter."""
        state = STREAM_TRANSITIONS[stream.state].get(trigger)
        if state is not None:
            self._set_stream(stream, state)

    def _streams_of(self, close: CloseStream) -> list[Stream]:
        closing = (close.vbid, close.stream_id)
        return [stream for stream in self.streams.values() if (stream.vbid, stream.stream_id) == closing]

    def _note_request(self, event: Event) -> None:
        match event:
            case StreamRequest():
                stream_id = _requested_stream_id(event)
                self.streams[event.opaque] = Stream(event.opaque, event.vbid, stream_id)
            case CloseStream():
                for stream in self._streams_of(event):
                    self._step_stream(stream, Trigger.CLOSE)
            case BufferAck() if self.role is Role.PRODUCER and self.window.window_bytes:
                self.window.acked(event.count)
            case BufferAck() if self.role is Role.CONSUMER and self.ledger.window_bytes:
                self.ledger.acked(event.count)
            case _:
                pass

    def _note_answer(self, frame: Frame, request: Message) -> None:
        accepted = frame.status == Status.SUCCESS
        match request:
            case StreamRequest() if request.opaque in self.streams:
                trigger = Trigger.ACCEPTED if accepted else Trigger.REFUSED
                self._step_stream(self.streams[request.opaque], trigger)
            case CloseStream():
                for stream in self._streams_of(request):
                    self._step_stream(stream, CLOSE_TRIGGERS.get(frame.status, Trigger.CLOSE_REFUSED))
            case DcpControl(name=ControlKey.CONNECTION_BUFFER_SIZE) if accepted:
                self._resize(request.value)
            case _:
                pass

    def _resize(self, value: bytes) -> None:
        size = int(value) if value.isdigit() and len(value) <= 10 else -1
        if not 0 <= size <= _WINDOW_MAX:
            return
        if self.role is Role.PRODUCER:
            self.window.resize(size)
        else:
            outstanding = self.ledger.unacked
            self.ledger = FlowControlLedger(size, self._ack_share)
            self.ledger.received(outstanding)

    def _count_received(self, frame: Frame) -> None:
        if self.role is Role.CONSUMER and self.ledger.window_bytes:
            self.ledger.received(counted_size(frame))


_TRIGGERS: dict[int, Trigger] = {Opcode.DCP_OPEN: Trigger.OPEN}
"""Requests of DCP that move the connection itself; any other is Trigger.DCP."""


def _more_to_come(frame: Frame) -> bool:
    """True for an answer that is one of several."""
    if frame.opcode == Opcode.STAT:
        return frame.status == Status.SUCCESS and bool(frame.key or frame.value)
    return frame.opcode == Opcode.RANGE_SCAN_CONTINUE and frame.status == Status.SUCCESS


def _requested_stream_id(request: StreamRequest) -> int | None:
    """The stream id that the JSON value of a stream request asks for."""
    if not request.value:
        return None
    try:
        found = json.loads(request.value)
    except (ValueError, RecursionError):
        return None
    stream_id = found.get("sid") if isinstance(found, dict) else None
    return stream_id if isinstance(stream_id, int) else None
