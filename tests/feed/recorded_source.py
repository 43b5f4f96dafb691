"""A recording of a real engine, served as a source: our side of the login, the recorded side of the streams.

The login, the map and everything else that is not a stream is answered here; HELLO grants what the recording granted.
A stream request is answered with the recorded answers of its vbucket, in their order, and followed by the recorded
messages with the opaque rewritten, those at or below the requested start left out. A recorded ROLLBACK is given to the
very request that got it (same start, same vbuuid), as often as it is asked. Flow control is kept as a server keeps it.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mirror.feed.sasl import ScramServer, plain_decode
from mirror.wire import events as ev
from mirror.wire.buffer import FrameBuffer
from mirror.wire.codec_dcp import decode, encode_all_vb_seqnos, encode_failover_log, to_frame
from mirror.wire.constants import BODY_LENGTH_MAX, Datatype, Feature, Opcode, Status
from mirror.wire.flow_control import ProducerWindow, counted_size
from mirror.wire.frame import Frame, encode, response

USER, PASSWORD, BUCKET, BUCKET_UUID, CLUSTER_UUID = "demo", "secret", "default", "b0", "c0"
VBUCKETS = 16
SEQNO_EVENTS = (
    ev.Mutation, ev.Deletion, ev.Expiration, ev.Prepare, ev.Commit, ev.Abort, ev.SystemEvent, ev.SeqnoAdvanced,
)  # fmt: skip
CHUNK_BYTES_MAX = 5000


@dataclass
class Exchange:
    """A stream request, its answer, and what the server sent for it."""

    asked: ev.StreamRequest
    status: int
    body: bytes
    messages: list[Frame] = field(default_factory=list)

    @property
    def failover_log(self) -> bytes:
        return self.body if self.status == Status.SUCCESS else b""


@dataclass
class Script:
    """What a source does for each vbucket."""

    features: frozenset[int]
    exchanges: dict[int, list[Exchange]]
    failover_logs: dict[int, bytes] = field(default_factory=dict)


def frames_of(lines: list[dict[str, Any]], direction: str) -> list[tuple[float, Frame]]:
    """The frames of one direction, each with the time at which its last byte passed."""
    buffer = FrameBuffer(BODY_LENGTH_MAX)
    found = []
    for line in lines:
        if line["dir"] == direction:
            buffer.feed(bytes.fromhex(line["hex"]))
            while (frame := buffer.next_frame()) is not None:
                found.append((line["t"], frame))
    return found


def read_script(folder: Path, name: str) -> Script:
    """A recording as a script."""
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    notes = json.loads((folder / f"{name}.json").read_text())
    asked = {frame.opaque: frame for _, frame in frames_of(lines, "c2s") if frame.opcode == Opcode.DCP_STREAM_REQ}
    script = Script(frozenset(int(code, 16) for code in notes["hello_features_granted"]), {})
    open_now: dict[int, Exchange] = {}
    newest: Exchange | None = None
    failover_log_asked = {
        frame.opaque: frame.vbucket
        for _, frame in frames_of(lines, "c2s")
        if frame.opcode == Opcode.DCP_GET_FAILOVER_LOG
    }
    for _, frame in frames_of(lines, "s2c"):
        if frame.is_response and frame.opcode == Opcode.DCP_STREAM_REQ:
            request = decode(asked[frame.opaque])
            assert isinstance(request, ev.StreamRequest)
            newest = Exchange(request, frame.status, frame.value)
            open_now[frame.opaque] = newest
            script.exchanges.setdefault(request.vbid, []).append(newest)
        elif frame.is_response and frame.opcode == Opcode.DCP_GET_FAILOVER_LOG:
            script.failover_logs[failover_log_asked[frame.opaque]] = frame.value
        elif not frame.is_response and frame.opcode == Opcode.DCP_NOOP:
            if newest is not None:
                newest.messages.append(frame)
        elif not frame.is_response and frame.opaque in open_now:
            open_now[frame.opaque].messages.append(frame)
    for vbid, exchanges in script.exchanges.items():
        script.exchanges[vbid] = _joined(exchanges)
    return script


def _joined(exchanges: list[Exchange]) -> list[Exchange]:
    """Streams of one vbucket that ran side by side (stream ids, each with a filter) as the one stream of a client
    without filters: the messages in the order of their seqnos, the snapshots' ends the larger of each pair."""
    beside = [
        exchange
        for exchange in exchanges
        if exchange.status == Status.SUCCESS and any(message.stream_id is not None for message in exchange.messages)
    ]
    if len(beside) < 2:
        return exchanges
    markers: list[ev.SnapshotMarker] = []
    items: dict[int, Frame] = {}
    for exchange in beside:
        own = [event for event in map(decode, exchange.messages) if isinstance(event, ev.SnapshotMarker)]
        for index, marker in enumerate(own):
            if index < len(markers):
                markers[index] = replace(markers[index], end_seqno=max(markers[index].end_seqno, marker.end_seqno))
            else:
                markers.append(marker)
        for message in exchange.messages:
            event = decode(message)
            if isinstance(event, SEQNO_EVENTS):
                items.setdefault(event.seqno, message)
    messages: list[Frame] = []
    last = 0
    for marker in markers:
        messages.append(to_frame(marker))
        messages += [items[seqno] for seqno in sorted(items) if last < seqno <= marker.end_seqno]
        last = marker.end_seqno
    joined = Exchange(beside[0].asked, beside[0].status, beside[0].body, messages)
    return [joined, *(exchange for exchange in exchanges if exchange not in beside)]


def fresh_exchange(vbid: int, failover_log: list[tuple[int, int]], events: list[ev.Event]) -> Exchange:
    """A stream from 0 that brings these events."""
    asked = ev.StreamRequest(vbid, 0, 0, 2**64 - 1, 0, 0, 0)
    return Exchange(asked, Status.SUCCESS, encode_failover_log(failover_log), [to_frame(event) for event in events])


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
    """A server on a free port of the loopback that plays a script."""

    def __init__(self, script: Script, *, seed: int = 0) -> None:
        self.script = script
        self.random = random.Random(seed)
        self.played: dict[int, list[Exchange]] = {}
        self.requests: list[ev.StreamRequest] = []
        self.last_end: dict[int, int] = {}
        self.windows: list[ProducerWindow] = []
        self.noops_answered = 0
        self.markers_answered = 0
        self.without_noops = False
        self.statuses_sent: list[int] = []
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> RecordedSource:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
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

    def choose(self, asked: ev.StreamRequest) -> Exchange:
        """The answer to a stream request."""
        exchanges = self.script.exchanges.get(asked.vbid, [])
        played = self.played.setdefault(asked.vbid, [])
        for exchange in exchanges:
            same = (exchange.asked.start_seqno, exchange.asked.vbuuid) == (asked.start_seqno, asked.vbuuid)
            if exchange.status == Status.ROLLBACK and same and asked.start_seqno:
                return exchange
        chosen: Exchange | None = None
        for exchange in exchanges:
            if exchange.status == Status.ROLLBACK or exchange in played:
                continue
            if exchange.status == Status.NOT_SUPPORTED and not self.without_noops:
                continue  # that was for requests before enable_noop: ours come after it
            played.append(exchange)
            chosen = exchange
            if exchange.status != Status.SUCCESS or self.part_above(exchange, asked.start_seqno):
                return exchange
        if chosen is None:
            answers = [exchange for exchange in exchanges if exchange.status != Status.ROLLBACK]
            chosen = replace(answers[-1], messages=[])
        return chosen

    @staticmethod
    def part_above(exchange: Exchange, start_seqno: int) -> list[Frame]:
        """What a client lacks that holds everything up to a seqno."""
        part = []
        oso = any(message.opcode == Opcode.DCP_OSO_SNAPSHOT for message in exchange.messages)
        for message in exchange.messages:
            event = decode(message)
            if isinstance(event, ev.SnapshotMarker) and event.end_seqno <= start_seqno:
                continue
            if isinstance(event, SEQNO_EVENTS) and event.seqno <= start_seqno and not oso:
                continue
            part.append(message)
        return part

    def failover_log(self, vbid: int) -> bytes:
        if vbid in self.script.failover_logs:
            return self.script.failover_logs[vbid]
        logs = [exchange.failover_log for exchange in self.script.exchanges.get(vbid, []) if exchange.failover_log]
        return logs[-1] if logs else b""

    def cluster_map(self) -> bytes:
        active = [[0] if vbid in self.script.exchanges else [-1] for vbid in range(VBUCKETS)]
        return json.dumps(
            {
                "rev": 1,
                "name": BUCKET,
                "uuid": BUCKET_UUID,
                "nodesExt": [{"services": {"kv": self.port, "mgmt": 1}, "thisNode": True}],
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
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client went away, or the test is over
        finally:
            self._connections.discard(connection)
            writer.transport.abort()


class _Connection:
    """One client's connection."""

    def __init__(self, source: RecordedSource, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.source = source
        self.reader = reader
        self.writer = writer
        self.window = ProducerWindow(0)
        self.opened = asyncio.Event()
        self.queue: asyncio.Queue[Frame] = asyncio.Queue()
        self.scram: ScramServer | None = None
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
        while data:
            size = self.source.random.randint(1, CHUNK_BYTES_MAX) if len(data) < 100_000 else 65536
            self.writer.write(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        self.in_mid_frame = False
        self.writer.write(self.deferred)
        self.deferred = b""

    def _answer(self, frame: Frame, status: int = Status.SUCCESS, **parts: Any) -> None:
        answer = encode(response(frame, status, **parts))
        if self.in_mid_frame:
            self.deferred += answer
        else:
            self.writer.write(answer)

    def _take(self, frame: Frame) -> None:
        source = self.source
        opcode = frame.opcode
        if frame.is_response:
            source.noops_answered += opcode == Opcode.DCP_NOOP
            source.markers_answered += opcode == Opcode.DCP_SNAPSHOT_MARKER
        elif opcode == Opcode.HELLO:
            asked = [code for (code,) in struct.iter_unpack(">H", frame.value)]
            granted = [code for code in asked if code in source.script.features | {Feature.SELECT_BUCKET}]
            self._answer(frame, value=b"".join(code.to_bytes(2) for code in granted))
        elif opcode == Opcode.SASL_LIST_MECHS:
            self._answer(frame, value=b"SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN")
        elif opcode == Opcode.SASL_AUTH and frame.key == b"PLAIN":
            known = plain_decode(frame.value) == (USER, PASSWORD)
            self._answer(frame, Status.SUCCESS if known else Status.AUTH_ERROR)
        elif opcode == Opcode.SASL_AUTH:
            self.scram = ScramServer(frame.key.decode(), {USER: PASSWORD}.get)
            self._answer(frame, Status.AUTH_CONTINUE, value=self.scram.challenge(frame.value))
        elif opcode == Opcode.SASL_STEP:
            assert self.scram is not None
            self._answer(frame, value=self.scram.outcome(frame.value))
        elif opcode == Opcode.GET_CLUSTER_CONFIG:
            self._answer(frame, value=source.cluster_map())
        elif opcode == Opcode.DCP_CONTROL and frame.key == b"connection_buffer_size":
            self.window.resize(int(frame.value))
            self._answer(frame)
        elif opcode == Opcode.DCP_CONTROL and frame.key == b"max_marker_version":
            self._answer(frame, Status.EINVAL)
        elif opcode == Opcode.DCP_BUFFER_ACK:
            self.window.acked(int.from_bytes(frame.extras))
            self.opened.set()
        elif opcode == Opcode.GET_ALL_VB_SEQNOS:
            self._answer(frame, value=encode_all_vb_seqnos(sorted(source.last_end.items())))
        elif opcode == Opcode.DCP_GET_FAILOVER_LOG:
            self._answer(frame, value=source.failover_log(frame.vbucket))
        elif opcode == Opcode.DCP_STREAM_REQ:
            self._stream(frame)
        elif opcode in (
            Opcode.SELECT_BUCKET, Opcode.DCP_OPEN, Opcode.DCP_CONTROL, Opcode.NOOP, Opcode.DCP_CLOSE_STREAM,
        ):  # fmt: skip
            self._answer(frame)
        else:
            self._answer(frame, Status.UNKNOWN_COMMAND)

    def _stream(self, frame: Frame) -> None:
        source = self.source
        asked = decode(frame)
        assert isinstance(asked, ev.StreamRequest)
        source.requests.append(asked)
        exchange = source.choose(asked)
        source.statuses_sent.append(exchange.status)
        self._answer(frame, exchange.status, value=exchange.body)
        if exchange.status != Status.SUCCESS:
            return
        for message in source.part_above(exchange, asked.start_seqno):
            event = decode(message)
            if isinstance(event, ev.SnapshotMarker):
                source.last_end[asked.vbid] = max(source.last_end.get(asked.vbid, 0), event.end_seqno)
            self.queue.put_nowait(
                message if message.opcode == Opcode.DCP_NOOP else replace(message, opaque=frame.opaque)
            )


__all__ = [
    "BUCKET", "BUCKET_UUID", "CLUSTER_UUID", "PASSWORD", "USER", "VBUCKETS", "Exchange", "RecordedSource", "Script",
    "fresh_exchange", "read_script", "stored_events",
]  # fmt: skip
