"""A DCP connection of a node: its streams, faults of streams, and the order in which the streams send.

`mirror.server.producer` has the rules of requests, flow control and noops. By default each stream sends one message in
turn, as in kv_engine (docs/protocol.md 2.8).
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import NamedTuple, Protocol

from mirror.sandbox.data.bucket import Bucket
from mirror.sandbox.data.streams import AcceptedStream, RefusalFault, Sent
from mirror.sandbox.dcp import filter as filters
from mirror.sandbox.dcp.filter import SandboxFilter
from mirror.sandbox.dcp.producer_stream import DISK, ProducerStream
from mirror.server.controls import Controls
from mirror.server.errors import OutOfPlace, Refused, rolled_back, unknown_collection
from mirror.server.producer import Producer, ProducerPort
from mirror.server.rollback import StreamHistory
from mirror.wire.constants import (
    SnapshotFlag,
    Status,
    StreamEndReason,
    StreamRequestFlag,
    VbucketRole,
)
from mirror.wire.events import StreamRequest
from storage.model import FailoverLog

_LONG_PURGE_SEQNO = re.compile(rb'"purge_seqno"\s*:\s*"[0-9]{21,}"')
PIECE_BYTES = 256 * 1024
TURNS_BYTES = 1024 * 1024
"""Limit of the bytes sent at once while the streams take turns: 1 KiB for each of 1,024 streams."""


class StreamRights(NamedTuple):
    may_stream: bool
    sees_system: bool


class SandboxProducerPort(ProducerPort, Protocol):
    @property
    def bucket(self) -> Bucket: ...

    @property
    def node_number(self) -> int: ...

    @property
    def rights(self) -> StreamRights: ...

    @property
    def in_turn(self) -> bool:
        """True if each stream sends one message in turn; else each sends several (a piece)."""

    def piece_bytes(self, stream: ProducerStream) -> int:
        """Return the size of a stream's next piece; 0: send nothing now."""


class SandboxProducer(Producer[ProducerStream, SandboxFilter]):
    _port: SandboxProducerPort

    def __init__(self, port: SandboxProducerPort, name: str, controls: Controls, rng: Random) -> None:
        super().__init__(port, name, controls)
        self.markers_answered: list[int] = []
        """Opaques of the markers that the client answered, in order."""
        self._rng = rng
        self._turns: dict[ProducerStream, None] = {}
        """The streams that may have a message. To look at all 1,024 for each write took 0.7 ms."""
        self._listeners: dict[ProducerStream, Callable[[], None]] = {}

    def start(self, report: Callable[[BaseException], None] | None = None) -> None:
        self._port.bucket.stream_faults.on_change.append(self.wake)
        super().start(report)

    def stop(self) -> None:
        if self.wake in self._port.bucket.stream_faults.on_change:
            self._port.bucket.stream_faults.on_change.remove(self.wake)
        super().stop()

    # --- requests

    def request_stream(self, request: StreamRequest) -> FailoverLog:
        bucket, number = self._port.bucket, self._port.node_number
        is_here = bucket.state_on(request.vbid, number) != VbucketRole.DEAD
        counters = bucket.sent[request.vbid] if is_here else Sent()
        log = super().request_stream(request)
        counters.stream_requests.append(
            AcceptedStream(
                request.start_seqno, request.snap_start_seqno, request.snap_end_seqno, request.vbuuid, self.name
            )
        )
        return log

    def marker_answered(self, opaque: int) -> None:
        self.markers_answered.append(opaque)

    def end_streams(self, vbid: int, reason: StreamEndReason) -> int:
        found = [stream for stream in self.streams.values() if stream.vbid == vbid]
        for stream in found:
            self.end_stream(stream, reason)
        return len(found)

    # --- checks of a stream request

    def _check_request(self, request: StreamRequest) -> StreamRequest:
        port = self._port
        fault = port.bucket.stream_faults.refusal(request.vbid)
        if fault is not None:
            raise self._refusal(fault)
        state = port.bucket.state_on(request.vbid, port.node_number)
        served = state == VbucketRole.ACTIVE or (
            state == VbucketRole.REPLICA and not request.flags & StreamRequestFlag.ACTIVE_VB_ONLY
        )
        if not served:
            raise Refused(Status.NOT_MY_VBUCKET)
        if not port.rights.may_stream:
            raise Refused(Status.EACCESS)
        if request.flags & StreamRequestFlag.FROM_LATEST:
            vbucket = port.bucket.vbuckets[request.vbid]
            high = vbucket.high_seqno
            vbuuid = request.vbuuid or int(vbucket.vbuuid)
            return replace(request, start_seqno=high, snap_start_seqno=high, snap_end_seqno=high, vbuuid=vbuuid)
        return request

    def _parse_filter(self, request: StreamRequest) -> SandboxFilter:
        profile = self._port.bucket.profile
        if profile.since(8, 0) and _LONG_PURGE_SEQNO.search(request.value):
            raise OutOfPlace("a purge seqno above 64 bits")  # 8.0.2 hangs up
        return filters.parse(
            request.value,
            self._port.bucket.manifest,
            has_collections=self.controls.collections,
            has_stream_ids=self.controls.stream_ids,
            known=profile.stream_keys,
            may_be_empty=profile.since(8, 0),
            sees_system=self._port.rights.sees_system,
        )

    def _history(self, request: StreamRequest, stream_filter: SandboxFilter) -> StreamHistory:
        vbucket = self._port.bucket.vbuckets[request.vbid]
        return StreamHistory(
            vbucket.failover_log,
            vbucket.high_seqno,
            vbucket.purge_seqno,
            stream_filter.holds_all(vbucket.collection_high_seqno, request.start_seqno),
        )

    def _open_stream(
        self, request: StreamRequest, stream_filter: SandboxFilter, history: StreamHistory
    ) -> ProducerStream:
        bucket = self._port.bucket
        vbucket = bucket.vbuckets[request.vbid]
        return ProducerStream(
            vbucket,
            request,
            stream_filter,
            replace(self.controls),
            self._rng,
            bucket.tuning,
            # In the recordings of 6.0.5 markers of disk snapshots lack the checkpoint flag.
            disk_flags=DISK if bucket.profile.since(6, 5) else int(SnapshotFlag.DISK),
            ephemeral=bucket.map.ephemeral,
            announced_ends=None if vbucket.bounded else bucket.sent[request.vbid].snapshot_ends,
        )

    def _opened(self, stream: ProducerStream) -> None:
        listener = self._listeners[stream] = partial(self._changed, stream)
        stream.vbucket.changed.add(listener)
        listener()

    def _changed(self, stream: ProducerStream) -> None:
        self._turns[stream] = None
        self.wake()

    def _forget(self, stream: ProducerStream) -> None:
        super()._forget(stream)
        self._turns.pop(stream, None)
        stream.vbucket.changed.discard(self._listeners.pop(stream))

    def _refusal(self, fault: RefusalFault) -> Refused:
        """Return the refusal that a fault asks for. A rollback without `value` goes to seqno 0."""
        if fault.value is not None:
            return Refused(fault.status, value=fault.value, bare=True)
        if fault.status == Status.ROLLBACK:
            return rolled_back(0)
        if fault.status in (Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE):
            return unknown_collection(self._port.bucket.manifest.uid, fault.status)
        return Refused(fault.status)

    # --- sending

    async def _pump(self) -> None:
        while True:
            self._wake.clear()
            if not await self._round():
                await self._wake.wait()

    async def _round(self) -> bool:
        """Send one piece of all streams, or (without `in_turn`) one of each stream. Return True if a piece was sent."""
        self._send_stream_ends()
        busy = False
        for data in self._one_piece() if self._port.in_turn else self._piece_of_each():
            busy = True
            self._send(data)
            await self._port.writable()
            await asyncio.sleep(0)
            self._send_stream_ends()
        return busy

    def _one_piece(self) -> Iterator[bytes]:
        if not self.window.is_open:
            return
        free_bytes = TURNS_BYTES
        if self.window.window_bytes:
            free_bytes = min(free_bytes, self.window.window_bytes - self.window.outstanding)
        rights = self._port.rights  # no other task can change these meanwhile
        ready: deque[ProducerStream] = deque()
        before: list[tuple[ProducerStream, int, int]] = []
        out = bytearray()
        for stream in list(self._turns):
            if len(out) >= free_bytes:
                break
            if self._has_turn(stream, rights):
                before.append((stream, stream.frames_sent, stream.bytes_sent))
                if stream.add_message(out):
                    ready.append(stream)
            elif not stream.has_more:
                self._turns.pop(stream, None)
        while ready and len(out) < free_bytes:
            stream = ready.popleft()
            if stream.add_message(out):
                ready.append(stream)
        for stream, frames, bytes_sent in before:
            counters = self._port.bucket.sent[stream.vbid]
            counters.frames += stream.frames_sent - frames
            counters.bytes += stream.bytes_sent - bytes_sent
            if stream.ended:
                self._forget(stream)
        for stream in ready:
            if stream in self._turns:
                del self._turns[stream]
                self._turns[stream] = None
        if out:
            yield bytes(out)

    def _piece_of_each(self) -> Iterator[bytes]:
        for stream in list(self.streams.values()):
            if self.streams.get((stream.vbid, stream.stream_id)) is not stream:
                continue
            if not self._has_turn(stream, self._port.rights):
                continue
            if not self.window.is_open:
                return
            free_bytes = self._port.piece_bytes(stream)
            if self.window.window_bytes:
                free_bytes = min(free_bytes, self.window.window_bytes - self.window.outstanding)
            frames = stream.frames_sent
            data = stream.take(free_bytes)
            if data:
                counters = self._port.bucket.sent[stream.vbid]
                counters.frames += stream.frames_sent - frames
                counters.bytes += len(data)
            if stream.ended:
                self._forget(stream)
            if data:
                yield data

    def _has_turn(self, stream: ProducerStream, rights: StreamRights) -> bool:
        """True if the stream may send now. If the user has lost a privilege that the stream needs, end the stream."""
        if not stream.has_more or self._port.bucket.stream_faults.muted(stream.vbid, self._port.node_number):
            return False
        if not rights.may_stream or (stream.filter.hidden is None and not rights.sees_system):
            self.end_stream(stream, StreamEndReason.LOST_PRIVILEGES)
            return False
        return True

    @property
    def _noops_withheld(self) -> bool:
        return self._port.bucket.stream_faults.noops_withheld
