"""One connection to a node: opens it (TCP or TLS), turns bytes into frames, and matches answers to requests.

Every request gets exactly one answer: its response, or the error that ended the connection or the wait. All connections
of a thread receive into one shared buffer.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable

from mirror.clock import Clock
from mirror.errors import ClusterError, ConnectFailed, HandshakeFailed, SourceTimeout
from mirror.feed.connection.connection_string import NodeAddress, is_name
from mirror.feed.connection.tls import Tls, hung_up
from mirror.wire.constants import BODY_LENGTH_MAX, HEADER_SIZE, Magic, opcode_name
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame, encode, frame_size, request
from mirror.wire.scan import Run, scan

OPAQUE_MAX = 2**32 - 1
PENDING_REQUESTS_MAX = 8192
"""Limit of unanswered requests on one connection: eight for each of 1,024 vbuckets. The next fails (SourceTimeout)."""
WRITE_BUFFER_MAX = 8 * 1024 * 1024
"""Limit of our unsent bytes. Above it, the node must have stopped reading, and we close the connection."""
READ_BYTES_MAX = 4 * 1024 * 1024
"""Limit of one read. The source mixes its streams, so a larger read has more rows of each to stage at once."""
NEXT_ADDRESS_DELAY_S = 0.25
"""Delay before a name's next address is tried in parallel (RFC 8305), because the first may not answer."""

OnAnswer = Callable[[Frame | ClusterError], None]


class _ReadBuffer(threading.local):
    """The receive buffer of this thread's connections. A connection uses up its bytes before another one reads."""

    memory = memoryview(b"")


_read_buffer = _ReadBuffer()


class Opaques:
    """A counter of opaques, shared by all sessions of a consumer: a vbucket never sees an opaque twice."""

    def __init__(self) -> None:
        self._last = 0

    def take(self) -> int:
        self._last = self._last % OPAQUE_MAX + 1
        return self._last


class Link(asyncio.BufferedProtocol):
    def __init__(
        self, address: NodeAddress, clock: Clock, opaques: Opaques | None = None, tls: Tls | None = None
    ) -> None:
        self.address = address
        self._tls = tls
        self.routes: dict[int, bytes] = {}
        """The prefix of the rows' keys, by the stream's opaque. The scanner makes rows of these streams only."""
        self.on_batch: Callable[[list[Run | Frame]], None] | None = None
        """Takes the items of a read that are no answers, in order. Each answer goes to its request and ends a batch."""
        self.on_lost: Callable[[ClusterError], None] | None = None
        """Called once, when the connection is closed or lost."""
        self.read_bytes_max = READ_BYTES_MAX
        self._clock = clock
        self.last_received = self._waits_since = clock.monotonic()
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._have = 0
        self._need = 0
        self._opaques = opaques or Opaques()
        self._pending: dict[int, OnAnswer] = {}
        self.error: ClusterError | None = None

    # -- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        if len(_read_buffer.memory) < self.read_bytes_max:
            _read_buffer.memory = memoryview(bytearray(self.read_bytes_max))
        return _read_buffer.memory[: self.read_bytes_max]

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(_read_buffer.memory[:nbytes])

    def data_received(self, data: bytes | memoryview) -> None:
        if self.error is not None:
            return
        self.last_received = self._clock.monotonic()
        self._have += len(data)
        if self._have < self._need:  # joining at each read would copy a message of 20 MiB thousands of times
            self._pieces.append(bytes(data))
            return
        try:
            self._dispatch(self._scan(b"".join((*self._pieces, data))))
        except RemoteProtocolError as error:
            self.close(HandshakeFailed(f"{self.address} broke the protocol: {error}"))

    def _scan(self, data: bytes) -> list[Run | Frame]:
        """Scan `data`, keep only its incomplete rest, and return the items."""
        items, pos = scan(data, 0, self.routes, BODY_LENGTH_MAX)
        rest = data[pos:]
        self._need = (frame_size(rest) or HEADER_SIZE) if rest else 0
        self._pieces = [rest] if rest else []
        self._have = len(rest)
        return items

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ssl.SSLError) and self._tls is not None:
            self.close(self._tls.failure(exc, str(self.address)))
            return
        why = f": {exc}" if exc else ""
        self.close(ConnectFailed(f"the connection to {self.address} was closed{why}"))

    # -- our side -------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.error is not None

    @property
    def secure(self) -> bool:
        return self.tls_object is not None

    @property
    def tls_object(self) -> ssl.SSLObject | None:
        """The result of the TLS handshake; None: the connection is not encrypted."""
        found = None if self._transport is None else self._transport.get_extra_info("ssl_object")
        return found if isinstance(found, ssl.SSLObject) else None

    @property
    def silence_s(self) -> float:
        """Seconds without a received byte while a request waits; 0 if none waits."""
        return self._clock.monotonic() - max(self.last_received, self._waits_since) if self._pending else 0.0

    def next_opaque(self) -> int:
        """Return an opaque that no open request or stream of this connection uses."""
        while True:
            opaque = self._opaques.take()
            if opaque not in self._pending and opaque not in self.routes:
                return opaque

    def send(self, data: bytes) -> None:
        """Send bytes. If the node does not read, close the connection soon."""
        if self.error is not None or self._transport is None:
            return
        if self._transport.get_write_buffer_size() > WRITE_BUFFER_MAX:
            error = SourceTimeout(f"{self.address} does not read our requests")
            # Not now: `close` calls the owners of requests back, and one of them may be the caller.
            asyncio.get_running_loop().call_soon(self.close, error)
            return
        self._transport.write(data)

    def ask(self, frame: Frame, on_answer: OnAnswer) -> None:
        """Send a request (its opaque from `next_opaque`); `on_answer` is called once, never from within this call."""
        error = self.error
        if error is None and len(self._pending) >= PENDING_REQUESTS_MAX:
            error = SourceTimeout(f"{self.address} left {len(self._pending)} requests unanswered")
        if error is not None:
            # Not now: the caller would get the answer before it knows that it has asked.
            asyncio.get_running_loop().call_soon(on_answer, error)
            return
        assert frame.opaque not in self._pending, "an opaque is used once"
        if not self._pending:
            self._waits_since = self._clock.monotonic()
        self._pending[frame.opaque] = on_answer
        self.send(encode(frame))

    async def request(
        self,
        opcode: int,
        *,
        timeout_s: float,
        vbucket: int = 0,
        extras: bytes = b"",
        key: bytes = b"",
        value: bytes = b"",
    ) -> Frame:
        """Send a request and return its response, even one with an error status. Raises ClusterError."""
        opaque = self.next_opaque()
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

        def settle(outcome: Frame | ClusterError) -> None:
            if answer.done():
                return
            if isinstance(outcome, Frame):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)

        self.ask(request(opcode, vbucket=vbucket, opaque=opaque, extras=extras, key=key, value=value), settle)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            self._pending.pop(opaque, None)
            raise SourceTimeout(f"{self.address} did not answer {opcode_name(opcode)} within {timeout_s:g} s") from None

    def close(self, error: ClusterError | None = None) -> None:
        if self.error is not None:
            return
        self.error = error or ConnectFailed(f"the connection to {self.address} was closed by us", hint="")
        if self._transport is not None:
            if error is None and self.secure:
                self._transport.close()  # sends close_notify at once: servers log its absence as an error
            self._transport.abort()
        pending, self._pending = self._pending, {}
        self._pieces = []
        self.routes = {}
        for on_answer in pending.values():
            on_answer(self.error)
        if self.on_lost is not None:
            self.on_lost(self.error)

    def _dispatch(self, items: list[Run | Frame]) -> None:
        """Hand answers to their requests, and other items to `on_batch`, in the order of the bytes."""
        batch: list[Run | Frame] = []
        for item in items:
            if isinstance(item, Run) or item.magic == Magic.REQUEST:
                batch.append(item)
            elif item.is_response:
                on_answer = self._pending.pop(item.opaque, None)
                if on_answer is None:
                    continue  # the request has timed out
                if batch and self.on_batch is not None and self.error is None:
                    self.on_batch(batch)
                    batch = []
                if self.error is None:
                    on_answer(item)
            else:
                batch.append(item)
        if batch and self.on_batch is not None and self.error is None:
            self.on_batch(batch)


async def open_link(
    address: NodeAddress, *, tls: Tls | None, timeout_s: float, clock: Clock, opaques: Opaques | None = None
) -> Link:
    """Resolve the name and connect. Raises ConnectFailed (retryable) or TlsFailed."""
    loop = asyncio.get_running_loop()
    where = str(address)
    try:
        async with asyncio.timeout(timeout_s):
            _, link = await loop.create_connection(
                lambda: Link(address, clock, opaques, tls),
                address.host,
                address.port,
                ssl=None if tls is None else tls.context,
                # Only for names, because asyncio leaks a socket if a parallel attempt is cancelled.
                happy_eyeballs_delay=NEXT_ADDRESS_DELAY_S if is_name(address.host) else None,
                server_hostname=None if tls is None else address.host.partition("%")[0],
            )
            return link
    except TimeoutError:
        raise ConnectFailed(f"{where} did not take the connection within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        assert tls is not None
        raise tls.failure(error, where) from None
    except socket.gaierror as error:
        raise ConnectFailed(
            f"the name {address.host} cannot be resolved: {error.strerror}",
            hint="check the host in the connection string and the machine's DNS",
        ) from None
    except UnicodeError as error:
        raise ConnectFailed(f"{address.host!r:.100} cannot be a host's name: {error}") from None
    except OSError as error:
        if tls is not None and isinstance(error, ConnectionResetError):
            raise hung_up("during", where, tls.settings) from None
        reason = error.strerror or str(error)
        raise ConnectFailed(f"{where} cannot be reached: {reason}") from None
