"""Recordings of real engines, served as sources to the feed.

The login, the map and everything else that is not a stream is `mirror.server`'s: HELLO grants what the recording
granted, a control gets the recorded answer if there is one. A stream request gets the recorded answers of its vbucket,
in their order, then the recorded messages above the requested start with the opaque rewritten. A recorded ROLLBACK is
given to the request that got it (same start, same vbuuid), as often as it comes. A stream that is requested with an end
gets a STREAM_END.

Invariants: flow control is kept as a server keeps it; what is sent was recorded, but for opaques, failover logs of
requests that were never made, and the ends of streams.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from mirror.server import dcp_requests, dispatch, requests
from mirror.server.errors import Refused
from mirror.server.session import LoginAttempt, Operation, Reply, Revision, Session, VbucketHistory
from mirror.wire import events as ev
from mirror.wire.codec_dcp import decode, decode_failover_log, encode_all_vb_seqnos, encode_failover_log, to_frame
from mirror.wire.constants import BODY_LENGTH_MAX, ControlKey, Datatype, Feature, Opcode, Status, StreamEndReason
from mirror.wire.errors import ProtocolError
from mirror.wire.flow_control import ProducerWindow, counted_size
from mirror.wire.frame import Frame, FrameBuffer, encode
from mirror.wire.sasl import ScramServer
from storage.model import SEQNO_MAX, FailoverLog
from tests.feed.harness import Mirror
from tests.recordings import Passed, passed

USER, PASSWORD, BUCKET, BUCKET_UUID, CLUSTER_UUID = "demo", "secret", "default", "b0", "c0"

SEQNO_EVENTS = (
    ev.Mutation, ev.Deletion, ev.Expiration, ev.Prepare, ev.Commit, ev.Abort, ev.SystemEvent, ev.SeqnoAdvanced,
)  # fmt: skip
CHUNK_BYTES_MAX = 5000
OPTIONAL_CONTROLS = frozenset(
    (
        ControlKey.MAX_MARKER_VERSION,
        ControlKey.CHANGE_STREAMS,
        ControlKey.ENABLE_SYNC_WRITES,
        ControlKey.ENABLE_OUT_OF_ORDER_SNAPSHOTS,
        ControlKey.FLATBUFFERS_SYSTEM_EVENTS,
    )
)
"""Controls that change a stream: a recording shows their effect only if the server took them."""
VBUCKETS = 16
NO_HISTORY = encode_failover_log([(1, 0)])
"""A vbucket that nothing ever happened to."""
OPERATIONS: dict[int, Operation[Session]] = requests.OPERATIONS | dcp_requests.OPERATIONS


@dataclass
class Exchange:
    """A stream request, its answer, and what the server sent for it."""

    request: ev.StreamRequest
    status: int
    body: bytes
    messages: list[Frame] = field(default_factory=list)

    @property
    def failover_log(self) -> bytes:
        return self.body if self.status == Status.SUCCESS else b""

    @cached_property
    def end_seqno(self) -> int:
        ends = [0]
        for message in self.messages:
            event = decode(message) if message.opcode != Opcode.DCP_NOOP else None
            if isinstance(event, ev.SnapshotMarker):
                ends.append(event.end_seqno)
            elif isinstance(event, SEQNO_EVENTS):
                ends.append(event.seqno)
        return max(ends)


@dataclass
class Script:
    """The recorded answers and messages of each vbucket."""

    features: frozenset[int]
    exchanges: dict[int, list[Exchange]]
    failover_logs: dict[int, bytes] = field(default_factory=dict)
    controls: dict[bytes, int] = field(default_factory=dict)
    """Key and value of the request -> status."""

    @cached_property
    def high_seqnos(self) -> dict[int, int]:
        return {
            vbid: max((each.end_seqno for each in exchanges if each.status == Status.SUCCESS), default=0)
            for vbid, exchanges in self.exchanges.items()
        }


def mirror_at(path: Path, **settings: Any) -> Mirror:
    """A mirror of the source of any recording, not started."""
    return Mirror(path, bucket=BUCKET, bucket_uuid=BUCKET_UUID, vbuckets=VBUCKETS, password=PASSWORD, settings=settings)


def read_script(name: str) -> Script:
    return _script_of(passed(f"{name}.jsonl"))


def _script_of(frames: Iterable[Passed]) -> Script:
    features: set[int] = set()
    script = Script(frozenset(), {})
    request_of: dict[tuple[int, int], Frame] = {}
    open_now: dict[tuple[int, int], Exchange] = {}
    newest: Exchange | None = None
    for each in frames:
        frame, name = each.frame, (each.conn, each.frame.opaque)
        if each.ours:
            if not frame.is_response:
                request_of[name] = frame
            continue
        request = request_of.get(name)
        if frame.is_response and request is not None and request.opcode == frame.opcode:
            if frame.opcode == Opcode.HELLO and frame.status == Status.SUCCESS and len(frame.value) % 2 == 0:
                features |= {code for (code,) in struct.iter_unpack(">H", frame.value)}
            elif frame.opcode == Opcode.DCP_CONTROL:
                script.controls[request.key + b"=" + request.value] = frame.status
            elif frame.opcode == Opcode.DCP_GET_FAILOVER_LOG and frame.status == Status.SUCCESS:
                script.failover_logs[request.vbucket] = frame.value
            elif frame.opcode == Opcode.DCP_STREAM_REQ:
                event = decode(request)
                assert isinstance(event, ev.StreamRequest), "the opcode says so"
                newest = open_now[name] = Exchange(event, frame.status, frame.value)
                script.exchanges.setdefault(event.vbid, []).append(newest)
        elif not frame.is_response and frame.opcode == Opcode.DCP_NOOP:
            if newest is not None:
                newest.messages.append(frame)
        elif not frame.is_response and name in open_now:
            open_now[name].messages.append(frame)
    script.features = frozenset(features)
    return script


def fresh_exchange(vbid: int, failover_log: list[tuple[int, int]], events: list[ev.Event]) -> Exchange:
    """A stream from 0 that brings these events."""
    stream_request = ev.StreamRequest(vbid, 0, 0, 2**64 - 1, 0, 0, 0)
    return Exchange(
        stream_request, Status.SUCCESS, encode_failover_log(failover_log), [to_frame(event) for event in events]
    )


def stored_events(state: dict[str, Any], vbid: int, last_seqno: int) -> list[ev.Event]:
    """The documents that the server held at or below a seqno, as it would send them: from the recorded state."""
    events: list[tuple[int, ev.Event]] = []
    for name, held in state["keys"].items():
        if held is None or "disk" not in held or held["disk"]["seq"] > last_seqno:
            continue
        seqno, key = held["disk"]["seq"], name.encode()
        if held["deleted"]:
            events.append((seqno, ev.Deletion(vbid, key, seqno, held["rev"], held["cas"])))
        else:
            value, datatype = held["value"].encode(), held["get_datatype"] & Datatype.JSON
            events.append(
                (
                    seqno,
                    ev.Mutation(
                        vbid, key, seqno, held["rev"], held["cas"], held["flags"], held["expiry"], 0, datatype, value
                    ),
                )
            )
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


class RecordedSource:
    """A server on a free port of the loopback that plays a script. `async with`."""

    def __init__(self, script: Script, *, seed: int = 0) -> None:
        """`seed` decides where the bytes are cut."""
        self.script = script
        self.random = random.Random(seed)
        self.played: dict[int, list[Exchange]] = {}
        self.requests: list[ev.StreamRequest] = []
        self.last_end: dict[int, int] = {}
        """Of the markers that were sent: how far each vbucket's clients were informed."""
        self.windows: list[ProducerWindow] = []
        self.noops_answered = 0
        self.markers_answered = 0
        self.without_noops = False
        self.statuses_sent: list[int] = []
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None, "it was entered"
        self._server.close()
        for connection in list(self._connections):
            connection.writer.transport.abort()
        await self._server.wait_closed()

    @property
    def connection_string(self) -> str:
        return f"couchbase://{USER}@127.0.0.1:{self.port}/{BUCKET}"

    def play_next(self, script: Script) -> None:
        """Go on with another script, as a server that was restarted: every connection breaks."""
        self.script = script
        self.played = {}
        for connection in list(self._connections):
            connection.writer.transport.abort()

    def choose(self, request: ev.StreamRequest) -> Exchange:
        exchanges = self.script.exchanges.get(request.vbid, [])
        played = self.played.setdefault(request.vbid, [])
        for exchange in exchanges:
            same = (exchange.request.start_seqno, exchange.request.vbuuid) == (request.start_seqno, request.vbuuid)
            if exchange.status == Status.ROLLBACK and same and request.start_seqno:
                return exchange
        chosen: Exchange | None = None
        for exchange in exchanges:
            if exchange.status == Status.ROLLBACK or exchange in played:
                continue
            if exchange.status == Status.NOT_SUPPORTED and not self.without_noops:
                continue  # that was for requests before enable_noop: ours come after it
            played.append(exchange)
            chosen = exchange
            if exchange.status != Status.SUCCESS or self.part_above(exchange, request.start_seqno):
                return exchange
        if chosen is None:
            answers = [exchange for exchange in exchanges if exchange.status != Status.ROLLBACK]
            if not answers:
                return Exchange(request, Status.NOT_MY_VBUCKET, b"")
            chosen = replace(answers[-1], messages=[])
        return chosen

    @staticmethod
    def part_above(exchange: Exchange, start_seqno: int) -> list[Frame]:
        """Return the messages that a client lacks which holds everything up to a seqno."""
        part = []
        for message in exchange.messages:
            event = decode(message) if message.opcode != Opcode.DCP_NOOP else None
            if isinstance(event, ev.SnapshotMarker) and event.end_seqno <= start_seqno:
                continue
            if isinstance(event, SEQNO_EVENTS) and event.seqno <= start_seqno:
                continue
            part.append(message)
        return part

    def failover_log(self, vbid: int) -> bytes:
        if vbid in self.script.failover_logs:
            return self.script.failover_logs[vbid]
        logs = [exchange.failover_log for exchange in self.script.exchanges.get(vbid, []) if exchange.failover_log]
        return logs[-1] if logs else NO_HISTORY

    def high_seqnos(self) -> list[tuple[int, int]]:
        return sorted(self.script.high_seqnos.items())

    def cluster_map(self) -> bytes:
        active = [[0] if vbid in self.script.exchanges else [-1] for vbid in range(VBUCKETS)]
        return json.dumps(
            {
                "rev": 1,
                "name": BUCKET,
                "uuid": BUCKET_UUID,
                "nodesExt": [{"services": {"kv": self.port, "mgmt": self.port}, "thisNode": True}],
                "vBucketServerMap": {
                    "hashAlgorithm": "CRC",
                    "numReplicas": 0,
                    "serverList": [f"$HOST:{self.port}"],
                    "vBucketMap": active,
                },
            }
        ).encode()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self, reader, writer)
        self._connections.add(connection)
        try:
            await connection.run()
        except (ConnectionError, ProtocolError, asyncio.CancelledError):
            pass  # the client went away or sent garbage, or all is over
        finally:
            self._connections.discard(connection)
            writer.transport.abort()


class _Session(Session):
    """A client of a replayed source: one user, one bucket, and the features that the recording granted."""

    version = b"7.2.0"
    bucket_name = BUCKET
    no_collections_status = Status.UNKNOWN_COMMAND
    """A recording of streams does not hold a manifest."""
    open_flags = 0xFFFF_FFFF
    """All: what they changed is in the recording."""

    def __init__(self, source: RecordedSource, connection: _Connection) -> None:
        super().__init__()
        self.source = source
        self.connection = connection
        self.grantable = frozenset(source.script.features | {Feature.SELECT_BUCKET})
        self._user = ""

    @property
    def logged_in(self) -> bool:
        return bool(self._user)

    def password_attempt(self, username: str, password: str) -> LoginAttempt[bool]:
        return self.login_attempt(username, lambda: (username, password) == (USER, PASSWORD) or None)

    def scram_server(self, mechanism: str) -> ScramServer:
        return ScramServer(mechanism, {USER: PASSWORD}.get)

    def log_in(self, username: str) -> None:
        self._user = username

    def log_out(self) -> None:
        self._user = ""

    @property
    def map_revision(self) -> Revision:
        return 0, 1

    def map_text(self, *, with_bucket: bool) -> bytes:
        return self.source.cluster_map()

    @property
    def manifest_uid(self) -> int:
        return 0

    def manifest_text(self) -> bytes:
        return b""

    def scope_id(self, name: str) -> int | None:
        """Not known."""

    def collection_id(self, scope: str, name: str) -> int | None:
        """Not known."""

    def all_vb_seqnos(self, state: int, collection_id: int | None) -> Reply:
        return Reply(value=encode_all_vb_seqnos(self.source.high_seqnos()))

    def vbucket_history(self, vbid: int) -> VbucketHistory:
        high_seqno = dict(self.source.high_seqnos()).get(vbid, 0)
        return VbucketHistory(
            FailoverLog.of(decode_failover_log(self.source.failover_log(vbid))), high_seqno, high_seqno
        )

    def statistics(self, group: str, vbid: int | None) -> dict[str, str]:
        raise Refused(Status.KEY_ENOENT)

    def open_producer(self, name: str, flags: int) -> None:
        self.producer = _Producer(name, self.source, self.connection)  # type: ignore[assignment]


class _Producer:
    """The recorded streams as a producer of one connection."""

    def __init__(self, name: str, source: RecordedSource, connection: _Connection) -> None:
        self.name = name
        self.source = source
        self.connection = connection

    def control(self, name: bytes, value: bytes) -> Status:
        if name == ControlKey.CONNECTION_BUFFER_SIZE and value.isdigit():
            self.connection.window.window_bytes = min(int(value), 2**32 - 1)
            return Status.SUCCESS
        recorded = self.source.script.controls.get(name + b"=" + value)
        default = Status.EINVAL if name in OPTIONAL_CONTROLS else Status.SUCCESS
        return default if recorded is None else Status(recorded)

    def request_stream(self, request: ev.StreamRequest) -> FailoverLog:
        """The recorded answer; the messages follow it."""
        source, vbid = self.source, request.vbid
        source.requests.append(request)
        exchange = source.choose(request)
        source.statuses_sent.append(exchange.status)
        if exchange.status != Status.SUCCESS:
            raise Refused(exchange.status, value=exchange.body, bare=True)
        messages = source.part_above(exchange, request.start_seqno)
        for message in messages:
            if message.opcode == Opcode.DCP_SNAPSHOT_MARKER:
                marker = decode(message)
                assert isinstance(marker, ev.SnapshotMarker), "the opcode says so"
                source.last_end[vbid] = max(source.last_end.get(vbid, 0), marker.end_seqno)
        ended = any(message.opcode == Opcode.DCP_STREAM_END for message in messages)
        is_there = max(exchange.end_seqno, request.start_seqno) >= request.end_seqno
        if not ended and request.end_seqno != SEQNO_MAX and is_there:
            messages.append(to_frame(ev.StreamEnd(vbid, StreamEndReason.OK)))
        for message in messages:
            noop = message.opcode == Opcode.DCP_NOOP
            self.connection.queue.put_nowait(message if noop else replace(message, opaque=request.opaque))
        return FailoverLog.of(decode_failover_log(exchange.body))

    def close_stream(self, vbid: int, stream_id: int | None) -> None:
        """Accepted; what was sent is sent."""

    def acked(self, count: int) -> None:
        self.connection.window.acked(count)
        self.connection.opened.set()

    def marker_answered(self, opaque: int) -> None:
        self.source.markers_answered += 1

    def statistics(self) -> dict[str, str]:
        return {}


class _Connection:
    def __init__(self, source: RecordedSource, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.source = source
        self.reader = reader
        self.writer = writer
        self.window = ProducerWindow(0)
        self.opened = asyncio.Event()
        self.queue: asyncio.Queue[Frame] = asyncio.Queue()
        self.session = _Session(source, self)
        self.in_mid_frame = False
        self.deferred = b""
        source.windows.append(self.window)

    async def run(self) -> None:
        sending = asyncio.create_task(self._send_streams())
        buffer = FrameBuffer(BODY_LENGTH_MAX)
        try:
            while data := await self.reader.read(65536):
                buffer.feed(data)
                while (frame := buffer.next_frame()) is not None:
                    self._take(frame)
        finally:
            sending.cancel()

    async def _send_streams(self) -> None:
        """Send as far as the window allows, in pieces that cut frames anywhere."""
        unsent = b""
        while True:
            frame = await self.queue.get()
            while not self.window.is_open:
                await self._flush(unsent)
                unsent = b""
                self.opened.clear()
                await self.opened.wait()
            self.window.sent(counted_size(frame))
            unsent += encode(frame)
            if self.queue.empty() or len(unsent) > CHUNK_BYTES_MAX:
                await self._flush(unsent)
                unsent = b""

    async def _flush(self, data: bytes) -> None:
        self.in_mid_frame = True
        while data and not self.writer.is_closing():
            size = self.source.random.randint(1, CHUNK_BYTES_MAX) if len(data) < 100_000 else 65536
            self.writer.write(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        self.in_mid_frame = False
        if not self.writer.is_closing():
            self.writer.write(self.deferred)
        self.deferred = b""

    def _take(self, frame: Frame) -> None:
        if frame.is_response:
            self.source.noops_answered += frame.opcode == Opcode.DCP_NOOP
            dcp_requests.take_answer(self.session, frame)
            return
        reply = dispatch.answer_at_once(self.session, OPERATIONS, frame)
        if reply is None:
            return
        answer = self.session.encode(frame, reply, 0.5)
        if self.in_mid_frame:
            self.deferred += answer
        elif not self.writer.is_closing():
            self.writer.write(answer)
