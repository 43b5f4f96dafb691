"""A DCP connection from the producer's side: open, controls, stream requests, and what is sent when.

Knows the rules of DCP_OPEN, DCP_CONTROL and DCP_STREAM_REQ and their refusals (docs/protocol.md 2.2-2.5, 2.8-2.10; the
recordings 72_i*, 72_k*), and the window of flow control. Must never know sockets: bytes leave through the connection
that it is given. Invariants: a message is sent only while the window is open, so the window is overshot by at most one
message; streams take turns; everything about a vbucket is asked of the bucket, every rollback of the producer's rule.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from mirror.ingest.rollback import OutOfRange, Rollback, producer_answer
from mirror.sandbox import filter as filters
from mirror.sandbox.controls import Controls
from mirror.sandbox.encoder import ClientFeatures, ItemEncoder
from mirror.sandbox.filter import StreamFilter
from mirror.sandbox.manifest import BucketManifest
from mirror.sandbox.profile import Profile
from mirror.sandbox.stream import DISK, ProducerStream, StreamOptions, StreamTuning
from mirror.sandbox.stream_faults import Refused, StreamFaults
from mirror.sandbox.vbucket import Vbucket
from mirror.wire import codec_dcp
from mirror.wire.constants import (
    SnapshotFlag,
    Status,
    StreamEndReason,
    StreamRequestFlag,
    VbucketState,
)
from mirror.wire.events import DcpNoop, StreamRequest
from mirror.wire.flow_control import ProducerWindow

NOOP_OPAQUE_FIRST = 10_000_000
IDLE_TIMEOUT_DEFAULT = 360.0


@dataclass(frozen=True, slots=True)
class AcceptedStream:
    """A stream request that was accepted, as tests want to know it."""

    start_seqno: int
    snap_start_seqno: int
    snap_end_seqno: int
    vbuuid: int
    connection: str


@dataclass(slots=True)
class Sent:
    """What was sent of a vbucket, over all connections."""

    frames: int = 0
    bytes: int = 0
    stream_requests: list[AcceptedStream] = field(default_factory=list)
    refused_requests: int = 0
    snapshot_ends: set[int] = field(default_factory=set)
    """Seqnos at which a snapshot that was announced ends: a client may publish at no other."""


class ProducerPort(Protocol):
    """What a producer needs of its connection and node."""

    def send(self, data: bytes) -> None:
        """Send now, or as soon as the socket takes it."""

    async def writable(self) -> None:
        """Return when the socket can take more."""

    def close(self) -> None:
        """Hang up."""

    def state_of(self, vbid: int) -> VbucketState:
        """State of a vbucket on this node."""

    def vbucket(self, vbid: int) -> Vbucket:
        """A vbucket."""

    def sent(self, vbid: int) -> Sent:
        """Counters of a vbucket."""

    def may_stream(self) -> bool:
        """Whether the user has the privilege that streams need."""

    def sees_system(self) -> bool:
        """Whether the system's collections exist for the user."""

    def piece_bytes(self, stream: ProducerStream) -> int:
        """How much to send of a stream at once; 0 when it must wait."""

    @property
    def node_number(self) -> int:
        """The node's number in the cluster."""

    @property
    def manifest(self) -> BucketManifest:
        """The manifest."""

    @property
    def profile(self) -> Profile:
        """What the server speaks."""

    @property
    def keeps_history(self) -> bool:
        """Whether the bucket's storage keeps every version."""

    @property
    def tuning(self) -> StreamTuning:
        """The server's settings."""

    @property
    def stream_faults(self) -> StreamFaults:
        """What is to go wrong."""


@dataclass(slots=True)
class Refusal:
    """A stream request's answer that is not success."""

    status: Status
    value: bytes = b""
    context: bool = False
    """The answer carries the error context of an unknown collection."""
    exact: bool = False
    """The value is all there is to say: a fault wants it so."""


class DcpProducer:
    """The DCP side of one connection, from DCP_OPEN on."""

    def __init__(
        self, port: ProducerPort, name: str, features: ClientFeatures, rng: Random, *, live_snapshot_items: int
    ) -> None:
        """`features` holds what HELLO and DCP_OPEN said; controls add to it."""
        self.name = name
        self.features = features
        self.streams: dict[tuple[int, int | None], ProducerStream] = {}
        self.window = ProducerWindow()
        self.controls = Controls(features, profile=port.profile, keeps_history=port.keeps_history)
        self.idle_timeout = IDLE_TIMEOUT_DEFAULT
        self.ack_markers = False
        """Set by tests: memory and disk markers ask for an answer."""
        self.markers_answered: list[int] = []
        """Opaques of the markers that the client answered, in order."""
        self._port = port
        self._rng = rng
        self._live_snapshot_items = live_snapshot_items
        self._wake = asyncio.Event()
        self._pumping: asyncio.Task[None] | None = None
        self._noop_task: asyncio.Task[None] | None = None
        self._noop_opaque = NOOP_OPAQUE_FIRST
        self._heard = asyncio.get_running_loop().time()

    def start(self) -> None:
        """Begin to send."""
        self._port.stream_faults.on_change.append(self.wake)
        self._pumping = asyncio.create_task(self._pump())

    def stop(self) -> None:
        """The connection is gone."""
        if self.wake in self._port.stream_faults.on_change:
            self._port.stream_faults.on_change.remove(self.wake)
        for task in (self._pumping, self._noop_task):
            if task is not None:
                task.cancel()
        for stream in self.streams.values():
            stream.vbucket.changed.discard(self.wake)
        self.streams.clear()

    def wake(self) -> None:
        """There may be something to send."""
        self._wake.set()

    def heard(self) -> None:
        """The client said something."""
        self._heard = asyncio.get_running_loop().time()

    # --- requests

    def control(self, name: bytes, value: bytes) -> Status:
        """DCP_CONTROL."""
        controls = self.controls
        noops = (controls.noop_enabled, controls.noop_interval)
        status = controls.set(name, value)
        if controls.buffer_bytes != self.window.window_bytes:
            self.window.resize(controls.buffer_bytes)
            self.wake()
        if noops != (controls.noop_enabled, controls.noop_interval):
            self._restart_noops()
        return status

    def request_stream(self, request: StreamRequest) -> tuple[Refusal | None, bytes]:
        """DCP_STREAM_REQ: a refusal, or None and the failover log; the stream begins with `wake`."""
        refusal, stream = self._judge(request)
        vbid = request.vbid
        if refusal is not None or stream is None:
            if refusal is not None and refusal.status != Status.NOT_MY_VBUCKET:
                self._port.sent(vbid).refused_requests += 1
            return refusal, b""
        self.streams[vbid, stream.stream_id] = stream
        stream.vbucket.changed.add(self.wake)
        self._port.sent(vbid).stream_requests.append(
            AcceptedStream(
                request.start_seqno, request.snap_start_seqno, request.snap_end_seqno, request.vbuuid, self.name
            )
        )
        log = [(int(entry.vbuuid), int(entry.seqno)) for entry in stream.vbucket.failover_log]
        return None, codec_dcp.encode_failover_log(log)

    def close_stream(self, vbid: int, stream_id: int | None) -> tuple[Status, bytes]:
        """DCP_CLOSE_STREAM: the status, and the STREAM_END to send after the answer (empty unless it was asked for)."""
        if (stream_id is not None) != self.controls.stream_ids:
            return Status.DCP_STREAM_ID_INVALID, b""
        stream = self.streams.pop((vbid, stream_id), None)
        if stream is None:
            return Status.DCP_STREAM_NOT_FOUND if self.controls.v7_status_codes else Status.KEY_ENOENT, b""
        self._forget(stream)
        end = stream.end(StreamEndReason.CLOSED)
        return Status.SUCCESS, end if self.controls.end_on_close else b""

    def send_counted(self, data: bytes) -> None:
        """Send what flow control counts, whether the window is open or not (stream ends)."""
        if data:
            self.window.sent(len(data))
            self._port.send(data)

    def acked(self, count: int) -> None:
        """DCP_BUFFER_ACK. Raises RemoteProtocolError for more than was sent."""
        self.window.acked(count)
        self.wake()

    def end_streams(self, vbid: int, reason: StreamEndReason) -> int:
        """The vbucket's streams are over. Returns how many there were."""
        keys = [key for key in self.streams if key[0] == vbid]
        for key in keys:
            stream = self.streams.pop(key)
            self._forget(stream)
            self.send_counted(stream.end(reason))
        return len(keys)

    def _forget(self, stream: ProducerStream) -> None:
        if not any(other.vbucket is stream.vbucket for other in self.streams.values()):
            stream.vbucket.changed.discard(self.wake)

    # --- the rules of a stream request

    def _judge(self, request: StreamRequest) -> tuple[Refusal | None, ProducerStream | None]:
        fault = self._port.stream_faults.refusal(request.vbid)
        if fault is not None:
            return _refused(fault), None
        request = replace(request, flags=request.flags & self._port.profile.stream_flags)
        state = self._port.state_of(request.vbid)
        active_only = bool(request.flags & StreamRequestFlag.ACTIVE_VB_ONLY)
        if state not in (VbucketState.ACTIVE, VbucketState.REPLICA):
            return Refusal(Status.NOT_MY_VBUCKET), None
        if state == VbucketState.REPLICA and active_only:
            return Refusal(Status.NOT_MY_VBUCKET), None
        if not self._port.may_stream():
            return Refusal(Status.EACCESS), None
        if (self.features.xattrs or request.value) and not self.controls.noop_enabled:
            return Refusal(Status.NOT_SUPPORTED), None
        try:
            stream_filter = filters.parse(
                request.value,
                self._port.manifest,
                has_collections=self.features.collections,
                has_stream_ids=self.controls.stream_ids,
                known=self._port.profile.stream_keys,
                sees_system=self._port.sees_system(),
            )
        except filters.FilterError as error:
            unknown = error.status in (Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE)
            return Refusal(error.status, context=unknown), None
        if self.features.sync_writes and self.features.collections and stream_filter.collections is not None:
            return Refusal(Status.NOT_SUPPORTED), None
        if (request.vbid, stream_filter.stream_id) in self.streams:
            return Refusal(Status.KEY_EEXISTS), None
        vbucket = self._port.vbucket(request.vbid)
        answer = producer_answer(
            request.start_seqno,
            request.snap_start_seqno,
            request.snap_end_seqno,
            request.vbuuid,
            vbucket.failover_log,
            vbucket.high_seqno,
            vbucket.purge_seqno,
            end_seqno=request.end_seqno,
            strict_vbuuid=bool(request.flags & StreamRequestFlag.STRICT_VBUUID),
            ignore_purged_tombstones=bool(request.flags & StreamRequestFlag.IGNORE_PURGED_TOMBSTONES),
            client_purge_seqno=stream_filter.purge_seqno,
            holds_whole_filter=_holds_all(stream_filter, vbucket, request.start_seqno),
        )
        if isinstance(answer, OutOfRange):
            return Refusal(Status.ERANGE), None
        if isinstance(answer, Rollback):
            return Refusal(Status.ROLLBACK, codec_dcp.encode_rollback_seqno(answer.seqno)), None
        options = StreamOptions(
            marker_v2=self.features.sync_writes and self.controls.consumer_name,
            marker_v2_2=self.controls.marker_v2_2,
            oso=self.controls.oso,
            oso_with_seqno_advanced=self.controls.oso_with_seqno_advanced,
            change_streams=self.controls.change_streams,
            tuning=self._port.tuning,
            seqno_advanced=self.features.collections,
            disk_flags=DISK if self._port.profile.checkpoint_in_disk_markers else int(SnapshotFlag.DISK),
            ack_markers=self.ack_markers,
            live_snapshot_items=self._live_snapshot_items,
            announced_ends=self._port.sent(request.vbid).snapshot_ends,
        )
        encoder = ItemEncoder(self.features)
        return None, ProducerStream(vbucket, request, stream_filter, encoder, options, self._rng)

    def _restart_noops(self) -> None:
        if self._noop_task is not None:
            self._noop_task.cancel()
        self._noop_task = asyncio.create_task(self._noops()) if self.controls.noop_enabled else None

    # --- sending

    async def _pump(self) -> None:
        while True:
            self._wake.clear()
            if not await self._round():
                await self._wake.wait()

    async def _round(self) -> bool:
        """Give each stream its turn; True when anything was sent."""
        busy = False
        for key, stream in list(self.streams.items()):
            if self.streams.get(key) is not stream or not stream.has_more:
                continue
            if self._port.stream_faults.muted(stream.vbucket.vbid, self._port.node_number):
                continue
            if not self._may_go_on(stream):
                del self.streams[key]
                self._forget(stream)
                self.send_counted(stream.end(StreamEndReason.LOST_PRIVILEGES))
                continue
            if not self.window.is_open:
                return False
            room = self._port.piece_bytes(stream)
            if not room:
                continue
            if self.window.window_bytes:
                room = min(room, self.window.window_bytes - self.window.outstanding)
            frames, more = stream.frames_sent, stream.uncounted_bytes
            data = stream.take(room)
            if data:
                busy = True
                counters = self._port.sent(stream.vbucket.vbid)
                counters.frames += stream.frames_sent - frames
                counters.bytes += len(data)
                self.window.sent(len(data) + stream.uncounted_bytes - more)
                self._port.send(data)
            if stream.ended:
                del self.streams[key]
                self._forget(stream)
            if data:
                await self._port.writable()
                await asyncio.sleep(0)
        return busy

    def _may_go_on(self, stream: ProducerStream) -> bool:
        """Privileges are looked at with each change that is to be sent, not only when the stream begins."""
        return self._port.may_stream() and (self._port.sees_system() or not stream.sees_system)

    async def _noops(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.controls.noop_interval)
            if loop.time() - self._heard > self.idle_timeout:
                self._port.close()
                return
            if self.streams and not self._port.stream_faults.noops_withheld:
                self._noop_opaque += 1
                self._port.send(codec_dcp.encode(DcpNoop(opaque=self._noop_opaque)))


def _refused(fault: Refused) -> Refusal:
    """The answer that a fault asks for; a rollback without a seqno goes to the very beginning."""
    if fault.value is not None:
        return Refusal(fault.status, fault.value, exact=True)
    if fault.status == Status.ROLLBACK:
        return Refusal(fault.status, codec_dcp.encode_rollback_seqno(0))
    return Refusal(fault.status, context=fault.status in (Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE))


def _holds_all(stream_filter: StreamFilter, vbucket: Vbucket, start_seqno: int) -> bool:
    """Whether nothing that the filter shows is above the start (then purging has taken nothing from the client)."""
    if stream_filter.collections is None or stream_filter.legacy:
        return False
    newest = (vbucket.collection_high_seqno.get(id_, 0) for id_ in stream_filter.collections)
    return start_seqno >= max(newest, default=0)
