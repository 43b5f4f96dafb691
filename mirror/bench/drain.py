"""A DCP client that stores nothing: it receives the streams of all vbuckets, discards and acknowledges them.

Knows one server on loopback, blocking sockets and flow control; nothing of what it receives. `measured` reads once
with open eyes and says how much there is; after that `discard` only counts bytes, which is the least that any consumer
can do. Invariant: no byte is acknowledged that was not received and does not count (docs/protocol.md 2.8).
"""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass

from mirror.bench.limits import Timing
from mirror.config import Settings
from mirror.wire import codec_dcp, codec_kv
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.buffer import FrameBuffer
from mirror.wire.constants import ControlKey, DcpOpenFlag, Feature, Opcode, Status
from mirror.wire.flow_control import ACK_SHARE, FlowControlLedger, counted_size
from mirror.wire.frame import Frame

WINDOW_BYTES = Settings().connection_buffer_size
"""The flow-control window of a worker's connection."""
READ_BYTES = 4 << 20
PATIENCE_S = 120.0
_FEATURES = (Feature.XATTR, Feature.XERROR, Feature.SELECT_BUCKET, Feature.SNAPPY, Feature.JSON, Feature.COLLECTIONS)


@dataclass(frozen=True, slots=True)
class Server:
    """Whom to ask, and for what. Without a password nobody logs in."""

    host: str
    port: int
    bucket: str
    user: str = ""
    password: str = ""


@dataclass(frozen=True, slots=True)
class Volume:
    """What one client receives from the first stream request to the end of the last stream."""

    documents: int
    size_bytes: int
    uncounted_bytes: int
    """Of these, what does not count for flow control: answers."""


class _DrainClient:
    """One connection: a context in which it is open for DCP."""

    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self._name = name.encode()
        self._frames = FrameBuffer()
        self._high_seqnos: dict[int, int] = {}
        self.socket: socket.socket

    def __enter__(self) -> _DrainClient:
        self.socket = socket.create_connection((self._server.host, self._server.port), timeout=PATIENCE_S)
        try:
            self._open()
        except BaseException:
            self.socket.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _open(self) -> None:
        server = self._server
        self._ask(codec_kv.hello(b"dcp-mirror bench", _FEATURES))
        if server.password:
            self._ask(codec_kv.sasl_auth(b"PLAIN", f"\0{server.user}\0{server.password}".encode()))
        self._ask(codec_kv.select_bucket(server.bucket.encode()))
        self._ask(codec_dcp.to_frame(ev.DcpOpen(self._name, DcpOpenFlag.PRODUCER)))
        self._ask(codec_dcp.to_frame(ev.DcpControl(ControlKey.CONNECTION_BUFFER_SIZE, b"%d" % WINDOW_BYTES)))
        answer = self._ask(fr.request(Opcode.GET_ALL_VB_SEQNOS, extras=codec_dcp.encode_all_vb_seqnos_request()))
        self._high_seqnos = {vbid: seqno for vbid, seqno in codec_dcp.decode_all_vb_seqnos(answer.value) if seqno}

    def _ask(self, frame: Frame) -> Frame:
        self.socket.sendall(fr.encode(frame))
        while (answer := self._frames.next_frame()) is None:
            self._frames.feed(self._more())
        _check(answer)
        return answer

    def _more(self) -> bytes:
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise RuntimeError("the server hung up")
        return data

    def request_streams(self) -> None:
        """Ask for every vbucket, from the beginning to what is there now."""
        requests = [ev.StreamRequest(vbid, 0, 0, seqno, 0, 0, 0) for vbid, seqno in self._high_seqnos.items()]
        self.socket.sendall(b"".join(codec_dcp.encode(each, opaque=each.vbid + 1) for each in requests))

    def acknowledge(self, count: int) -> None:
        """Give the server back so many bytes of its window."""
        self.socket.sendall(codec_dcp.encode(ev.BufferAck(count)))

    def measure(self) -> Volume:
        """Receive all, frame by frame."""
        self.request_streams()
        ledger = FlowControlLedger(WINDOW_BYTES)
        left, documents, size_bytes = len(self._high_seqnos), 0, 0
        while left:
            self._frames.feed(self._more())
            while (frame := self._frames.next_frame()) is not None:
                if frame.opcode == Opcode.DCP_STREAM_REQ:
                    _check(frame)
                ledger.received(counted_size(frame))
                size_bytes += frame.wire_size
                documents += frame.opcode == Opcode.DCP_MUTATION
                left -= frame.opcode == Opcode.DCP_STREAM_END
            if count := ledger.take_ack():
                self.acknowledge(count)
        return Volume(documents, size_bytes, size_bytes - ledger.received_total)


def _check(answer: Frame) -> None:
    if answer.status != Status.SUCCESS:
        raise RuntimeError(f"the server answers {Opcode(answer.opcode).name} with status 0x{answer.status:x}")


def measured(server: Server) -> Volume:
    """What one client receives. Raises RuntimeError where the server refuses, OSError where it cannot be reached."""
    with _DrainClient(server, "bench-measure") as client:
        return client.measure()


def discard(server: Server, volume: Volume, clients: int = 1) -> Timing:
    """Let so many clients receive it at once, all in this thread; `documents` is of all their documents."""
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        opened = [stack.enter_context(_DrainClient(server, f"bench-{number}")) for number in range(clients)]
        for client in opened:
            selector.register(client.socket, selectors.EVENT_READ, client)
        buffer = bytearray(READ_BYTES)
        received = dict.fromkeys(opened, 0)
        acknowledged = dict.fromkeys(opened, 0)
        threshold = int(WINDOW_BYTES * ACK_SHARE)
        start, cpu_start = time.perf_counter(), time.process_time()
        for client in opened:
            client.request_streams()
        left = clients
        while left:
            ready = selector.select(PATIENCE_S)
            if not ready:
                raise RuntimeError(f"the server sent nothing for {PATIENCE_S:g} s")
            for key, _ in ready:
                client = key.data
                count = client.socket.recv_into(buffer)
                if not count:
                    raise RuntimeError("the server hung up")
                received[client] += count
                if received[client] >= volume.size_bytes:
                    selector.unregister(client.socket)
                    left -= 1
                elif (due := received[client] - volume.uncounted_bytes - acknowledged[client]) >= threshold:
                    client.acknowledge(due)
                    acknowledged[client] += due
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        return Timing(clients * volume.documents, seconds, cpu_s)
