"""One KV or DCP client's connection: answers requests in order, within limits.

The connection is given its session, which speaks KV or DCP: it has the operations, the login and, after DCP_OPEN, the
producer that sends streams (`ProducerPort`). Requests are answered as they are read. If an answer takes time, the
client's further requests wait.
- While the client takes no answers, its requests wait: at most one answer is unsent (`Outgoing`). Requests of a DCP
  client are answered on, because acknowledgements and close requests must arrive, up to `ANSWERS_BYTES_MAX`.
- A client's turn ends after `TURN_REQUESTS` answers or `TURN_S`. Its further requests then wait in the queue of
  `turns`. So a small request of another client waits for one entry of the queue.
- A request that needs more than `LARGE_BYTES` runs in the worker thread, once there is memory for it.
- An answer that takes time ends with the connection, and is refused if the rights of the reader changed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

from mirror.log import get_logger
from mirror.server import dcp_requests, dispatch
from mirror.server.admission import Slot
from mirror.server.document_requests import DocumentSession
from mirror.server.errors import RIGHTS_CHANGED, NeedsMemory
from mirror.server.latency import Latencies
from mirror.server.management import Management, is_http
from mirror.server.outgoing import Outgoing
from mirror.server.session import Later, Operation, Reply
from mirror.server.turns import LARGE_BYTES, Turns, Worker
from mirror.wire import frame as fr
from mirror.wire.constants import HEADER_SIZE, Magic, Opcode, Status
from mirror.wire.errors import ProtocolError, RemoteProtocolError
from mirror.wire.frame import HEADER, Frame

BYTES_MAX = 64 * 1024
"""Answers are gathered up to this size, and then written together."""

ANSWERS_BYTES_MAX = 1024 * 1024
"""Bytes of answers held for a DCP client that takes none; above this, the connection stops reading."""

TURN_S = 0.001
"""A client's turn ends with the request that reaches this time, or `TURN_REQUESTS`."""
TURN_REQUESTS = 128
REQUEST_BYTES_MAX = 64 * 1024
"""Larger requests are refused: a read is small, and writes are refused anyway."""

_REQUEST, _FLEX_REQUEST = int(Magic.REQUEST), int(Magic.FLEX_REQUEST)
_RESPONSES = (int(Magic.RESPONSE), int(Magic.FLEX_RESPONSE))
_GET = int(Opcode.GET)
_GOOD = frozenset({int(Status.SUCCESS), int(Status.RANGE_SCAN_MORE), int(Status.RANGE_SCAN_COMPLETE)})
_QUITQ = int(Opcode.QUITQ)

T = TypeVar("T")

log = get_logger("port")


class Counters:
    __slots__ = ("bytes_sent", "errors", "hits", "latencies", "misses", "refused", "requests")

    def __init__(self) -> None:
        self.requests = self.hits = self.misses = self.refused = self.errors = self.bytes_sent = 0
        self.latencies = Latencies()


class Host(Protocol):
    """The process's endpoint, as its connections see it."""

    counters: Counters
    now_s: float
    turns: Turns
    worker: Worker

    def opened(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...

    def paused(self, connection: Connection) -> None: ...


class ServedSession(DocumentSession):
    """A client's session on a connection, in KV or DCP."""

    operations: Mapping[int, Operation[Any]]
    changes: frozenset[int]
    """Requests that are refused whatever they contain."""
    granted_bytes = LARGE_BYTES
    reader: object
    """The user that reads, with its rights; None before a login that the port requires."""
    connection: Connection

    @property
    def may_be_silent(self) -> bool:
        """True if the client need not send anything."""
        return False

    def connected(self) -> None:
        """Called once `connection` is set and open."""

    def closed(self) -> None:
        """Called when the connection is closed."""

    def check_rights(self) -> str:
        """Give the client its user's present rights. Return why the connection must be closed, or ""."""
        return ""

    def answer_gets(
        self, counters: Counters, data: bytes, pos: int, out: list[bytes], count_max: int, turn_ends: float
    ) -> tuple[int, int, int]:
        """Append to `out` the answers to plain GETs from `pos` on. Stop at a request for the general path, `count_max`,
        `BYTES_MAX` or the end of the turn. Return the position of the next request, the number of answers and their
        bytes.
        """
        return pos, 0, 0


class Connection(asyncio.Protocol):
    def __init__(self, host: Host, session: ServedSession, slot: Slot) -> None:
        self.slot = slot
        self.last_received_s = host.now_s
        self.transport: asyncio.Transport
        self.outgoing: Outgoing
        self.session = session
        self.host = host
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []
        self._size = 0
        self._bytes_needed = HEADER_SIZE
        """Bytes needed before the next request can be read."""
        self._skip = 0
        """Bytes of a refused request that are still to come."""
        self._paused = False
        self._answer_bytes = 0
        """Bytes of answers written since the client stopped taking data."""
        self._waiting = False
        """True while received requests wait for the next turn."""
        self._held: asyncio.Task[None] | None = None
        """The task of the answer that further requests wait for."""
        self._is_busy = False
        self._goodbye = False
        """True to hang up when all answers are written."""
        self._is_new = True
        self._management: Management | None = None
        """Set if the client speaks HTTP."""
        self.ended = False

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.outgoing = Outgoing(transport)
        self.slot.abort = self.abort
        self.session.connection = self
        self.session.connected()
        self.host.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self._pieces.clear()
        if self._held is not None:
            self._held.cancel()
        if self.session.producer is not None:
            self.session.producer.stop()
        self.session.closed()
        if self._management is not None:
            self._management.close()
        self.slot.release()
        self.host.closed(self)

    def data_received(self, data: bytes) -> None:
        self.last_received_s = self.host.now_s
        if self.ended:
            return
        if self._is_new:
            self._is_new = False
            if is_http(data):
                self._management = Management(self.session, self.outgoing.write, self.hang_up, self.slot.establish)
        if self._management is not None:
            self._management.feed(data)
            return
        self._pieces.append(data)
        self._size += len(data)
        if self._paused or self._waiting or self._held:
            return
        if self._is_busy and self._size >= self._bytes_needed:
            self._wait_for_turn()
        else:
            self._work()

    def pause_writing(self) -> None:
        if self.session.producer is None:
            self._pause()
        self.outgoing.pause(self.host.now_s)
        self.host.paused(self)

    def _pause(self) -> None:
        self._paused = True
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused, self._answer_bytes = False, 0
        self.outgoing.resume()
        if not (self.ended or self._waiting or self._held):
            self._work()
            self._read_on()

    # -- for the endpoint, the session and its producer

    @property
    def silence_s(self) -> float:
        """Seconds since the client last sent data, accurate to a second."""
        return self.host.now_s - self.last_received_s

    def write(self, data: bytes) -> None:
        if not (self.ended or self.transport.is_closing()):
            self.host.counters.bytes_sent += len(data)
            self.outgoing.write(data)

    async def writable(self) -> None:
        await self.outgoing.writable.wait()

    def hang_up(self) -> None:
        """Close once everything is sent."""
        self.ended = True
        self.outgoing.close()

    def abort(self) -> None:
        self.ended = True
        self.transport.abort()

    # -- work

    def _work(self) -> None:
        if self._size < self._bytes_needed and not self._skip:
            return
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        pos = min(self._skip, len(data))
        self._skip -= pos
        out: list[bytes] = []
        counters = self.host.counters
        began, answered = perf_counter(), counters.requests
        try:
            pos = self._answer_all(data, pos, out)
        except ProtocolError as error:
            log.debug("request-invalid", error=str(error))
            counters.errors += 1
            self._flush(out)
            self.hang_up()
            return
        self._flush(out)
        if counters.requests > answered:
            counters.latencies.observe(perf_counter() - began, counters.requests - answered)
        if self.slot.pending and pos and self.session.logged_in:
            self.slot.establish()
        if self._goodbye:
            self.hang_up()
        if self.ended:
            return
        self._size = len(data) - pos
        if self._size:
            self._pieces.append(data[pos:] if pos else data)
        if self._held:
            self.transport.pause_reading()
        elif self._size >= self._bytes_needed and not self._paused:
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        self._waiting = True
        self.transport.pause_reading()
        self.host.turns.call(self._next_turn)

    def _next_turn(self) -> None:
        self._waiting = False
        if not (self._paused or self._held or self.ended):
            self._work()
            self._read_on()

    def _read_on(self) -> None:
        if not (self._paused or self._waiting or self._held or self.ended):
            self.transport.resume_reading()

    def _flush(self, out: list[bytes]) -> None:
        if out:
            sent = out[0] if len(out) == 1 else b"".join(out)
            out.clear()
            if self.session.producer is not None and not self.outgoing.writable.is_set():
                self._answer_bytes += len(sent)
                if self._answer_bytes > ANSWERS_BYTES_MAX:
                    self._pause()
            self.write(sent)

    def _answer_all(self, data: bytes, pos: int, out: list[bytes]) -> int:
        """Answer requests from `pos` on. Return the position of the next request, and set the bytes needed for it."""
        counters = self.host.counters
        answer_gets = self.session.answer_gets
        end = len(data)
        gathered = 0
        turn_ends = perf_counter() + TURN_S
        self._is_busy = False
        left = TURN_REQUESTS
        while left > 0:
            if end - pos < HEADER_SIZE:
                fr.frame_size(data, pos)  # raises at once if the first byte begins no frame
                self._bytes_needed = HEADER_SIZE
                return pos
            count = 0
            if data[pos + 1] == _GET:
                pos, count, byte_count = answer_gets(counters, data, pos, out, left, turn_ends)
                gathered += byte_count
            if not count:
                size = fr.frame_size(data, pos)
                if size > REQUEST_BYTES_MAX:
                    answer = self._refuse_large(data, pos)
                    self._skip = max(size - (end - pos), 0)
                    size = min(size, end - pos)
                elif end - pos < size:
                    self._bytes_needed = size
                    return pos
                else:
                    frame, _ = fr.decode(data, pos)
                    answer = self._answer(frame)
                if answer:
                    out.append(answer)
                    gathered += len(answer)
                pos += size
                count = 1
            left -= count
            self._bytes_needed = HEADER_SIZE
            if gathered > BYTES_MAX:
                self._flush(out)
                gathered = 0
            if self.ended or self._paused or self._goodbye or self._held:
                return pos
            if perf_counter() > turn_ends:
                self._is_busy = True
                break
        if 0 < end - pos < HEADER_SIZE:
            fr.frame_size(data, pos)  # as above, if the turn ended first
        return pos

    def _refuse_large(self, data: bytes, pos: int) -> bytes:
        magic, opcode, _, _, _, vbucket, _, opaque, _ = HEADER.unpack_from(data, pos)
        self._check_magic(magic, opcode)
        self.host.counters.requests += 1
        self.host.counters.refused += 1
        if opcode in self.session.changes:
            reply = self._reply(Frame(magic, opcode, 0, vbucket, opaque))
        else:
            reply = self.session.refuse(Status.E2BIG, "the request is too large")
        assert isinstance(reply, Reply), "refusals are neither quiet nor slow"
        return self._encode(Frame(_REQUEST, opcode, 0, vbucket, opaque), reply, perf_counter())

    @staticmethod
    def _check_magic(magic: int, opcode: int) -> None:
        if magic not in (_REQUEST, _FLEX_REQUEST):
            raise RemoteProtocolError(f"not a request: magic 0x{magic:02x}", op=opcode)

    def _answer(self, frame: Frame) -> bytes:
        began = perf_counter()
        magic, opcode = frame.magic, frame.opcode
        if magic in _RESPONSES:
            dcp_requests.take_answer(self.session, frame)
            return b""
        self.host.counters.requests += 1
        if magic != _REQUEST:
            if magic == Magic.SERVER_RESPONSE:
                return b""
            self._check_magic(magic, opcode)
        if opcode == _QUITQ:
            self._goodbye = True
            return b""
        try:
            reply = self._reply(frame)
        except NeedsMemory as error:
            return self._begin(self._answer_in_worker(frame, error.byte_count, began))
        if isinstance(reply, Later):
            return self._begin(self._log_in(frame, reply, began))
        return self._count(frame, reply, began)

    def _count(self, frame: Frame, reply: Reply | None, began: float) -> bytes:
        self._tally(reply)
        return b"" if reply is None else self._encode(frame, reply, began)

    def _tally(self, reply: Reply | None) -> None:
        counters = self.host.counters
        if reply is None or reply.status == Status.KEY_ENOENT:
            counters.misses += 1
        elif reply.status in _GOOD:
            counters.hits += 1
        elif reply.status != Status.AUTH_CONTINUE:
            counters.refused += 1
        self._goodbye = self._goodbye or (reply is not None and reply.hang_up)

    # -- answers that take time

    def _begin(self, answering: Coroutine[Any, Any, None]) -> bytes:
        """Answer in a task, for which the client's further requests wait. Return no bytes yet."""
        self.slot.logging_in = self.slot.pending  # before a login only the login itself takes time
        self._held = self._loop.create_task(answering)
        self._held.add_done_callback(self._answered)
        return b""

    async def _log_in(self, frame: Frame, later: Later, began: float) -> None:
        await later.wait()
        await self.outgoing.writable.wait()
        self._answered_later(self._count(frame, later.answer(), began))

    async def _answer_in_worker(self, frame: Frame, byte_count: int, began: float) -> None:
        """Answer a request in the worker thread. Its memory counts until the client has taken the answer."""
        worker, session, reader = self.host.worker, self.session, self.session.reader

        def work() -> tuple[Reply | None, bytes]:
            session.granted_bytes = byte_count
            try:
                reply = self._reply(frame)
                assert not isinstance(reply, Later), "it does not need the worker"
                return reply, b"" if reply is None else self._encode(frame, reply, began)
            finally:
                session.granted_bytes = LARGE_BYTES

        while True:
            async with worker.memory(byte_count):
                try:
                    reply, answer = await worker.run(work)
                except NeedsMemory as error:
                    byte_count = error.byte_count
                    continue
                await self.outgoing.writable.wait()
                if session.reader != reader:
                    reply = self.session.refuse(Status.EACCESS, RIGHTS_CHANGED)
                    answer = self._encode(frame, reply, began)
                self._tally(reply)
                self._answered_later(answer)
                reply = None  # its value was copied
                await self.outgoing.writable.wait()
                return

    def _answered_later(self, answer: bytes) -> None:
        if not self.ended:
            self._flush([answer] if answer else [])
            if self.session.logged_in:
                self.slot.establish()
            if self._goodbye:
                self.hang_up()

    def _answered(self, task: asyncio.Task[None]) -> None:
        self.slot.logging_in = False
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("answer-failed", error=repr(error))
            self.abort()
        self._held = None
        self._next_turn()

    def _encode(self, frame: Frame, reply: Reply, began: float) -> bytes:
        return self.session.encode(frame, reply, (perf_counter() - began) * 1e6)

    def _reply(self, frame: Frame) -> Reply | Later | None:
        return self._guarded(frame, partial(dispatch.answer, self.session, self.session.operations, frame))

    def _guarded(self, frame: Frame, compute: Callable[[], T]) -> T | Reply:
        try:
            return dispatch.guarded(self.session, compute)
        except ValueError as error:
            log.error("document-unreadable", opcode=frame.opcode, error=str(error))
            return self.session.refuse(Status.EINTERNAL, "the document cannot be read")
