"""Recordings of real engines, as a source that answers machines: the server's side is replayed, opaques rewritten."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from mirror.ingest import events as ev
from mirror.ingest import instructions as ins
from mirror.ingest.state import Phase
from mirror.wire.codec_dcp import decode, decode_failover_log, decode_rollback_seqno
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.events import StreamEvent, StreamRequest
from mirror.wire.frame import Frame
from mirror.wire.scan import is_data, row_of
from storage.model import FailoverLog
from tests import recordings
from tests.ingest.toy_store import Rig, ToyStore


def frames_of(name: str, direction: str) -> list[Frame]:
    """All frames of one direction, in order."""
    return [frame for which, frame in recordings.frames(name) if which == direction]


@dataclass
class Replay:
    """Feeds the server's side of a recording to one rig per stream, as far as the machines ask what was recorded."""

    name: str
    rigs: dict[tuple[int, int | None], Rig] = field(default_factory=dict)
    accepted: int = 0
    unasked: list[StreamRequest] = field(default_factory=list)
    """Recorded requests that the machine did not make, because it stood elsewhere."""
    _routes: dict[int, tuple[Rig, int]] = field(default_factory=dict)
    _run: list[Frame] = field(default_factory=list)

    def run(self) -> Replay:
        server = frames_of(self.name, "s2c")
        requests: dict[int, deque[StreamRequest]] = defaultdict(deque)
        for frame in frames_of(self.name, "c2s"):
            if frame.opcode == Opcode.DCP_STREAM_REQ and len(frame.extras) == 48:
                request = decode(frame)
                assert isinstance(request, StreamRequest)
                requests[frame.opaque].append(request)
        granted = next((f.value for f in server if f.opcode == Opcode.HELLO and f.is_response), b"")
        self.collections = int(Feature.COLLECTIONS) in [
            int.from_bytes(granted[at : at + 2]) for at in range(0, len(granted), 2)
        ]
        self.failover_logs = [
            FailoverLog.of(decode_failover_log(frame.value))
            for frame in server
            if frame.opcode == Opcode.DCP_GET_FAILOVER_LOG and frame.status == Status.SUCCESS
        ]
        for frame in server:
            if is_data(frame) and frame.opaque in self._routes:
                if self._run and self._run[-1].opaque != frame.opaque:
                    self._flush()
                self._run.append(frame)
                continue
            self._flush()
            if frame.is_response:
                if frame.opcode == Opcode.DCP_STREAM_REQ and requests[frame.opaque]:
                    self._answer(requests[frame.opaque].popleft(), frame)
            elif frame.opaque in self._routes and frame.opcode != Opcode.DCP_NOOP:
                rig, opaque = self._routes[frame.opaque]
                event = decode(frame)
                assert isinstance(event, StreamEvent)
                rig.feed(replace(event, opaque=opaque))
        self._flush()
        return self

    def _flush(self) -> None:
        """Hand the data frames since the last other frame in, as one run."""
        if self._run:
            rig, opaque = self._routes[self._run[0].opaque]
            prefix = int(rig.store.staging_branch).to_bytes(4)
            key_prefix = b"" if self.collections else b"\0"
            rig.feed_rows(opaque, [row_of(frame, prefix, key_prefix) for frame in self._run])
            self._run.clear()

    def _answer(self, request: StreamRequest, frame: Frame) -> None:
        stream_id = stream_id_of(request)
        rig = self.rigs.get((request.vbid, stream_id))
        if rig is None:
            store = store_before(request, frame)
            rig = self.rigs[(request.vbid, stream_id)] = Rig(store)
        machine = rig.machine
        if machine.phase in (Phase.IDLE, Phase.REFUSED):
            rig.feed(ev.Start(collections=self.collections))
        elif machine.phase is Phase.WAITING:
            rig.feed(ev.RetryDue())
        elif (
            machine.phase is Phase.STREAMING and frame.status == Status.SUCCESS
        ):  # the recording client closed the stream, or went on without it
            rig.feed(ev.ConnectionLost())
            rig.feed(ev.Start(collections=self.collections))
        if machine.phase is Phase.ASKING_LOG:
            rig.feed(ev.FailoverLogReceived(self.failover_logs.pop(0) if self.failover_logs else FailoverLog()))
        offset = rig.last(ins.RequestStream).offset
        refused = frame.status not in (Status.SUCCESS, Status.ROLLBACK)
        if machine.phase is not Phase.REQUESTING or (offset.start_seqno != request.start_seqno and not refused):
            self.unasked.append(request)
            return
        opaque = rig.opaque_counter
        if frame.status == Status.SUCCESS:
            self.accepted += 1
            self._routes[frame.opaque] = (rig, opaque)
            rig.feed(ev.StreamAccepted(opaque, FailoverLog.of(decode_failover_log(frame.value))))
        elif frame.status == Status.ROLLBACK:
            rig.feed(ev.StreamRollback(opaque, decode_rollback_seqno(frame.value)))
        else:
            rig.feed(ev.StreamRefused(opaque, frame.status, frame.value))


def stream_id_of(request: StreamRequest) -> int | None:
    try:
        sid: int | None = json.loads(request.value).get("sid")
    except ValueError:  # no value, or one that the recording client spoilt on purpose
        return None
    return sid


def store_before(request: StreamRequest, answer: Frame) -> ToyStore:
    """The store of a mirror that would make this request; where it has to go back, with a boundary there."""
    store = ToyStore(request.vbid)
    log = FailoverLog.of([(request.vbuuid, 0)])
    start, snap_start, snap_end = request.start_seqno, request.snap_start_seqno, request.snap_end_seqno
    if start == 0:
        return store
    if snap_start < start < snap_end:
        return store.holding(snap_start, log, start, (snap_start, snap_end))
    if answer.status == Status.ROLLBACK and 0 < decode_rollback_seqno(answer.value) < start:
        store.holding(decode_rollback_seqno(answer.value))
    return store.holding(start, log)
