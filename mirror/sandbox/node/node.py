"""A node: its listeners, certificate and connections, and the dispatch of requests.

A request that cannot be decoded is refused, and the connection stays open (servers up to 6.0 hang up after a bad DCP
request). A new certificate is for new connections only.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mirror.errors import ConfigError
from mirror.sandbox.data.bucket import Bucket
from mirror.sandbox.data.clustermap import SandboxAddress
from mirror.sandbox.dcp.producer import PIECE_BYTES, SandboxProducer, StreamRights
from mirror.sandbox.dcp.producer_stream import ProducerStream
from mirror.sandbox.kv import document_requests
from mirror.sandbox.kv.sandbox_session import SandboxSession
from mirror.sandbox.node.link import NetworkLink
from mirror.server import dcp_requests, dispatch, requests
from mirror.server import document_requests as reads
from mirror.server.controls import Controls
from mirror.server.errors import OutOfPlace
from mirror.server.management import Management, is_http
from mirror.server.producer import IDLE_TIMEOUT_S
from mirror.server.session import DCP_STREAM, Operation
from mirror.wire import frame as fr
from mirror.wire.constants import Magic, Opcode, StreamEndReason
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame, FrameBuffer

OPERATIONS: dict[int, Operation[SandboxSession]] = {
    **requests.OPERATIONS,
    **reads.OPERATIONS,
    **document_requests.OPERATIONS,
    **dcp_requests.OPERATIONS,
}

SMALL_PIECE_BYTES = 200
"""Size of a stream's piece for the fault `stop_mid_snapshot`."""

ACCEPT_TURNS = 4
"""Rounds of the event loop that asyncio needs to set up accepted connections."""

DURATION_US = 0.5
"""The duration of every request, in answers to clients with the feature TRACING."""

_REQUESTS = (Magic.REQUEST, Magic.FLEX_REQUEST)
_QUITQ = int(Opcode.QUITQ)


@dataclass(slots=True)
class NodeTls:
    """The nodes' certificate, and their rules for client certificates. Raises ConfigError for unusable files."""

    cert_file: Path
    """Certificate and its chain (PEM)."""
    key_file: Path | None = None
    """None: the key is in `cert_file`."""
    client_ca_file: Path | None = None
    """The authority of client certificates; None: the nodes request no certificates."""
    clients_need_certificate: bool = False
    """True to close TLS connections without a known user's certificate; else a password is enough."""
    context: ssl.SSLContext = field(init=False)

    def __post_init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.client_ca_file is not None:
            try:
                self.context.load_verify_locations(self.client_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise _unusable(self.client_ca_file, error) from error
            self.context.verify_mode = ssl.CERT_REQUIRED if self.clients_need_certificate else ssl.CERT_OPTIONAL
        elif self.clients_need_certificate:
            raise ConfigError("client certificates are required, but no CA is given", hint="name their CA")
        self.rotate()

    def rotate(self, cert_file: Path | None = None, key_file: Path | None = None) -> None:
        """Use another certificate for new connections; without arguments, load the present files again."""
        cert = cert_file or self.cert_file
        key = key_file or (None if cert_file is not None else self.key_file)
        try:
            self.context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise _unusable(cert, error) from error
        self.cert_file, self.key_file = cert, key


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be used: {error.strerror or error}", hint="give PEM files")


class NodeConnection(asyncio.Protocol):
    def __init__(self, node: SandboxNode) -> None:
        self.node = node
        self.session = SandboxSession(self)
        self.link: NetworkLink
        self.stop_after_pieces: int | None = None
        """Fault: fall silent after this many more pieces from inside snapshots; None: no fault."""
        self._transport: asyncio.Transport
        self._buffer = FrameBuffer()
        self._is_new = True
        self._management: Management | None = None
        """Set if the client speaks HTTP."""
        self._last_received_s = asyncio.get_running_loop().time()

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.link = NetworkLink(transport, self.node.bucket.rng)
        self.node.connections.add(self)
        if self.node.stopped:
            self.link.cut()  # accepted while the node was stopping
            return
        certificate = self._transport.get_extra_info("peercert")
        if certificate:
            self.session.user = self.bucket.users.of_certificate(certificate)
            self.session.certified = self.session.user is not None
        secure = self._transport.get_extra_info("ssl_object") is not None
        if secure and self.node.certificates_needed and not self.session.certified:
            self._transport.close()
        for rule in self.node.on_connect:
            rule(self)

    def data_received(self, data: bytes) -> None:
        if self.link.silent:
            return
        self._last_received_s = asyncio.get_running_loop().time()
        if self._is_new:
            self._is_new = False
            if is_http(data):
                self._management = Management(self.session, self.write, self.hang_up)
        if self._management is not None:
            self._management.feed(data)
            return
        self._buffer.feed(data)
        try:
            while (frame := self._buffer.next_frame()) is not None and not self._transport.is_closing():
                self._dispatch(frame)
        except (RemoteProtocolError, OutOfPlace):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.node.connections.discard(self)
        self.link.closed()
        if self._management is not None:
            self._management.close()
        if self.producer is not None:
            self.producer.stop()

    def pause_writing(self) -> None:
        self.link.pause()

    def resume_writing(self) -> None:
        self.link.resume()

    # --- for operations and the producer

    @property
    def bucket(self) -> Bucket:
        return self.node.bucket

    @property
    def node_number(self) -> int:
        return self.node.number

    @property
    def producer(self) -> SandboxProducer | None:
        producer = self.session.producer
        assert producer is None or isinstance(producer, SandboxProducer)
        return producer

    @property
    def silence_s(self) -> float:
        return asyncio.get_running_loop().time() - self._last_received_s

    def write(self, data: bytes) -> None:
        self.link.send(data)

    def map_changed(self) -> None:
        if self._management is not None:
            self._management.map_changed()
        elif (message := self.session.map_notification()) is not None:
            self.write(fr.encode(message))

    async def writable(self) -> None:
        await self.link.writable()

    def hang_up(self) -> None:
        self._transport.close()

    def open_producer(self, name: str, flags: int) -> None:
        for other in list(self.node.connections):
            if other.producer is not None and other.producer.name == name:
                other.hang_up()
        bucket = self.bucket
        abilities = bucket.profile.abilities(keeps_history=bucket.keeps_history)
        controls = Controls(abilities, self.session.collections, self.session.snappy, flags)
        producer = SandboxProducer(self, name, controls, bucket.rng)
        producer.idle_timeout_s = self.node.dcp_idle_timeout_s
        self.session.producer = producer
        producer.start()
        for rule in self.node.on_dcp_open:
            rule(self)

    @property
    def rights(self) -> StreamRights:
        # From 7.0 on streams need a privilege of their own (docs/protocol.md 2.2).
        may_stream = not self.bucket.profile.since(7, 0) or self.session.may(DCP_STREAM)
        return StreamRights(may_stream, self.session.sees_system)

    @property
    def in_turn(self) -> bool:
        return self.bucket.tuning.in_turn and self.stop_after_pieces is None

    def piece_bytes(self, stream: ProducerStream) -> int:
        if self.stop_after_pieces is None:
            return PIECE_BYTES
        if stream.in_snapshot_until:
            if self.stop_after_pieces == 0:
                self.link.silence()
                return 0
            self.stop_after_pieces -= 1
        return SMALL_PIECE_BYTES

    # --- dispatch

    def _dispatch(self, frame: Frame) -> None:
        if frame.magic not in _REQUESTS:
            if frame.magic != Magic.SERVER_RESPONSE:
                dcp_requests.take_answer(self.session, frame)
            return
        if frame.opcode == _QUITQ:
            self.hang_up()
            return
        reply = dispatch.answer_at_once(self.session, OPERATIONS, frame)
        if reply is not None:
            self.write(self.session.encode(frame, reply, DURATION_US))
            if reply.hang_up:
                self.hang_up()


class SandboxNode:
    def __init__(self, number: int, bucket: Bucket) -> None:
        self.number = number
        self.bucket = bucket
        self.port: int | None = None
        self.tls_port: int | None = None
        self.certificates_needed = False
        """True if only users with a certificate are served over TLS."""
        self.connections: set[NodeConnection] = set()
        self.on_connect: list[Callable[[NodeConnection], None]] = []
        self.on_dcp_open: list[Callable[[NodeConnection], None]] = []
        self.dcp_idle_timeout_s = IDLE_TIMEOUT_S
        self.stopped = False
        """True from `stop` to the next `start`."""
        self._servers: list[asyncio.Server] = []
        self._held: list[socket.socket] = []
        """Sockets that keep the ports of a stopped node from other programs."""

    @property
    def alive(self) -> bool:
        return bool(self._servers)

    async def start(
        self, host: str, port: int | None, *, tls_port: int | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen without TLS at `port`, and with TLS at `tls_port`; 0 picks a free port, None opens no port."""
        self.stopped = False
        if port is not None:
            self.port = await self._listen(host, port, None)
        if tls_port is not None:
            assert tls is not None, "a TLS port needs a certificate"
            self.tls_port = await self._listen(host, tls_port, tls)
        self._let_ports_go()

    async def _listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: NodeConnection(self), host, port, ssl=tls, reuse_address=True)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening and break all connections, as if the process had died. The ports stay reserved."""
        self.stopped = True
        servers, self._servers = self._servers, []
        places = [(each.family, each.getsockname()) for server in servers for each in server.sockets]
        for connection in list(self.connections):
            connection.link.cut()
        # If a server closes shortly after asyncio accepted a connection, asyncio neither sets up nor closes the
        # connection. So stop accepting, let asyncio set up the accepted connections, and then close the servers.
        for server in servers:
            for listening in server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        for server in servers:
            server.close()
        for family, place in places:
            held = socket.socket(family)  # bound, not listening: connections are refused
            self._held.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # another program took the port
                held.bind(place)

    async def close(self) -> None:
        await self.stop()
        self._let_ports_go()

    def _let_ports_go(self) -> None:
        while self._held:
            self._held.pop().close()

    @property
    def address(self) -> SandboxAddress:
        return SandboxAddress(self.number, self.port, self.tls_port)

    def end_streams(self, vbid: int) -> None:
        for connection in list(self.connections):
            if connection.producer is not None:
                connection.producer.end_streams(vbid, StreamEndReason.STATE_CHANGED)

    def announce_map(self) -> None:
        """Send the new map, or only its revision, to the clients that negotiated this (SDK RFC 75)."""
        for connection in self.connections:
            connection.map_changed()
