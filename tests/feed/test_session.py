"""A node's session: negotiation, streams by opaque, flow control to the byte, signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.errors import ClusterError, HandshakeFailed, NotSupported, PrivilegeMissing, SourceTimeout
from mirror.feed.connection.node_session import NodeSession, StreamAnswer
from mirror.feed.connection.transport import Link, Opaques
from mirror.ingest.events import KeyRefused, StreamAccepted, StreamRefused, StreamRollback
from mirror.ingest.instructions import RequestStream
from mirror.ingest.offset import StreamOffset
from mirror.wire import events as ev
from mirror.wire.codec_dcp import encode as encode_event
from mirror.wire.codec_dcp import encode_failover_log
from mirror.wire.constants import Feature, Opcode, Status, StreamEndReason
from mirror.wire.flow_control import ProducerWindow, counted_size
from mirror.wire.frame import Frame, decode, encode, request, response
from mirror.wire.scan import Row
from storage.model import SEQNO_MAX, FailoverLog, Seqno, Vbuuid
from tests.feed.scripted_node import Answer, ScriptedNode, refuse, silent
from tests.feed.test_bootstrap import access_to, first
from tests.manual_clock import ManualClock
from tests.sim.loop import SimLoop

PREFIX = b"\0\0\0\7"
VBID = 3


class Owner:
    """Remembers its notifications: of the session, and of every stream."""

    vbid = VBID

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.byte_count = 0
        self.events: list[ev.Event | KeyRefused] = []
        self.answers: list[StreamAnswer] = []
        self.lost: list[ClusterError] = []
        self.notified = asyncio.Event()

    def on_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None:
        self.rows += rows
        self.byte_count += byte_count
        self.notified.set()

    def on_event(self, event: ev.Event | KeyRefused) -> None:
        self.events.append(event)
        self.notified.set()

    def on_answer(self, answer: StreamAnswer) -> None:
        self.answers.append(answer)
        self.notified.set()

    def on_closed(self, session: NodeSession, error: ClusterError) -> None:
        self.lost.append(error)
        self.notified.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                self.notified.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.notified.wait(), 0.01)


def make(node: ScriptedNode, path: Path, **settings: Any) -> tuple[NodeSession, Owner]:
    access = access_to(node, path, **{"noop_interval_s": 20, "connection_buffer_size": 4096, **settings})
    owner = Owner()
    session = NodeSession(access, first(access), owner, SystemClock(), name="dcp-mirror:test:0", opaques=Opaques())
    return session, owner


@asynccontextmanager
async def opened(
    path: Path, answers: dict[int, Answer] | None = None, **settings: Any
) -> AsyncIterator[tuple[ScriptedNode, NodeSession, Owner]]:
    async with ScriptedNode(answers) as node:
        session, owner = make(node, path, **settings)
        await session.open()
        try:
            yield node, session, owner
        finally:
            session.close()


@asynccontextmanager
async def streaming(
    path: Path, answers: dict[int, Answer] | None = None, **settings: Any
) -> AsyncIterator[tuple[ScriptedNode, NodeSession, Owner, int]]:
    """A session with an open stream, whose opaque comes last."""
    async with opened(path, answers, **settings) as (node, session, owner):
        opaque = session.request_stream(VBID, stream_request(), PREFIX, owner)
        await owner.until(lambda: bool(owner.answers))
        yield node, session, owner, opaque


def stream_request(start: int = 0, purge_seqno: int | None = None) -> RequestStream:
    offset = StreamOffset.between_snapshots(Seqno(start), Vbuuid(99))
    return RequestStream(offset, SEQNO_MAX, purge_seqno)


def mutation(seqno: int, value: bytes = b"{}", key: bytes = b"\0key", stream_id: int | None = None) -> ev.Mutation:
    return ev.Mutation(VBID, key, seqno, 1, 1, value=value, stream_id=stream_id)


# -- negotiation --------------------------------------------------------------------------------------------------


async def test_the_negotiation_sends_one_control_at_a_time_and_tolerates_refusals(tmp_path: Path) -> None:
    def control(_node: ScriptedNode, frame: Frame) -> list[Frame]:
        waiting = frame.key in (b"enable_noop", b"set_noop_interval", b"connection_buffer_size")
        return [response(frame, Status.SUCCESS if waiting else Status.EINVAL)]

    async with opened(tmp_path, {Opcode.DCP_CONTROL: control}) as (node, session, _):
        assert session.ready
        assert session.controls["enable_noop"]
        assert not session.controls["enable_expiry_opcode"]
        assert not session.sends_purge_seqno
        names = [frame.key for frame in node.received_requests(Opcode.DCP_CONTROL)]
        assert names[:3] == [b"enable_noop", b"set_noop_interval", b"connection_buffer_size"]
        assert b"enable_sync_writes" not in names
        assert b"consumer_name" not in names, "with a name we would become a durability acker"
        (open_,) = node.received_requests(Opcode.DCP_OPEN)
        assert open_.key == b"dcp-mirror:test:0"
        assert int.from_bytes(open_.extras[4:]) == 0x01 | 0x04 | 0x20 | 0x100


CONTROLS_80 = [
    (b"enable_noop", b"true"),
    (b"set_noop_interval", b"20"),
    (b"connection_buffer_size", b"4096"),
    (b"supports_cursor_dropping_vulcan", b"true"),
    (b"send_stream_end_on_client_close_stream", b"true"),
    (b"enable_expiry_opcode", b"true"),
    (b"include_deleted_user_xattrs", b"true"),
    (b"v7_dcp_status_codes", b"true"),
    (b"flatbuffers_system_events", b"true"),
    (b"max_marker_version", b"2.2"),
]


WITH_COLLECTIONS = {b"include_deleted_user_xattrs", b"flatbuffers_system_events", b"max_marker_version"}
FORCED, HISTORY = (b"force_value_compression", b"true"), (b"change_streams", b"true")


@pytest.mark.parametrize(
    ("absent", "settings", "expected"),
    [
        (set(), {}, CONTROLS_80),
        (set(), {"compression": "forced", "change_streams": True}, [*CONTROLS_80, FORCED, HISTORY]),
        (
            {Feature.COLLECTIONS, Feature.SNAPPY},  # compression would be EINVAL
            {"compression": "forced", "change_streams": True},
            [each for each in CONTROLS_80 if each[0] not in WITH_COLLECTIONS],
        ),
    ],
)
async def test_a_server_is_requested_every_feature_that_it_and_a_mirror_know(
    tmp_path: Path, absent: set[Feature], settings: dict[str, Any], expected: list[tuple[bytes, bytes]]
) -> None:
    def control(_node: ScriptedNode, frame: Frame) -> list[Frame]:
        return [response(frame, Status.NOT_SUPPORTED if frame.key == b"change_streams" else Status.SUCCESS)]

    async with ScriptedNode({Opcode.DCP_CONTROL: control}) as node:
        node.features -= absent
        session, _ = make(node, tmp_path, **settings)
        await session.open()
        controls = [(frame.key, frame.value) for frame in node.received_requests(Opcode.DCP_CONTROL)]
        assert sorted(controls) == sorted(expected)
        assert not session.controls.get("change_streams", False), "not on this storage: going on without"
        session.close()


@pytest.mark.parametrize("status", [Status.EINVAL, Status.NOT_SUPPORTED])
async def test_a_refused_required_control_ends_the_session(tmp_path: Path, status: int) -> None:
    async with ScriptedNode({Opcode.DCP_CONTROL: refuse(status)}) as node:
        session, _ = make(node, tmp_path)
        with pytest.raises(NotSupported, match="enable_noop"):
            await session.open()


async def test_a_refused_fraction_of_a_second_is_rounded_up(tmp_path: Path) -> None:
    def control(_node: ScriptedNode, frame: Frame) -> list[Frame]:
        return [response(frame, Status.EINVAL if b"." in frame.value and b"noop" in frame.key else Status.SUCCESS)]

    async with opened(tmp_path, {Opcode.DCP_CONTROL: control}, noop_interval_s=1.5) as (node, session, _):
        tried = [f.value for f in node.received_requests(Opcode.DCP_CONTROL) if f.key == b"set_noop_interval"]
        assert tried == [b"1.5", b"2"]
        assert session.noop_interval_s == 2
        assert session.sends_purge_seqno, "max_marker_version was taken"


async def test_open_flags_unknown_to_the_server_are_left_out(tmp_path: Path) -> None:
    """As 6.0.5 does: EINVAL, and it hangs up."""

    def open_(node: ScriptedNode, frame: Frame) -> list[Frame]:
        flags = int.from_bytes(frame.extras[4:])
        return [response(frame, Status.EINVAL if flags & 0x120 else Status.SUCCESS)]

    async with opened(tmp_path, {Opcode.DCP_OPEN: open_}) as (node, _, _):
        flags = [int.from_bytes(frame.extras[4:]) for frame in node.received_requests(Opcode.DCP_OPEN)]
        assert flags == [0x125, 0x25, 0x05]
        assert node.connections == 3


OPEN_REFUSALS = [
    (Status.EACCESS, PrivilegeMissing),
    (Status.EINVAL, NotSupported),
    (Status.ETMPFAIL, HandshakeFailed),
    (Status.NO_BUCKET, HandshakeFailed),
]


@pytest.mark.parametrize(("status", "kind"), OPEN_REFUSALS)
async def test_a_refused_dcp_open_is_one_clear_error(tmp_path: Path, status: int, kind: type[ClusterError]) -> None:
    async with ScriptedNode({Opcode.DCP_OPEN: refuse(status)}) as node:
        session, owner = make(node, tmp_path)
        with pytest.raises(kind):
            await session.open()
        assert owner.lost == [], "who was never open cannot be lost"


# -- streams ------------------------------------------------------------------------------------------------------


async def test_a_stream_request_carries_its_position_and_its_filter(tmp_path: Path) -> None:
    async with opened(tmp_path, {Opcode.DCP_STREAM_REQ: silent}) as (node, session, owner):
        request = stream_request(start=17, purge_seqno=2**63)
        session.request_stream(VBID, request, PREFIX, owner, {"collections": ["8", "a"]})
        await owner.until(lambda: bool(node.received_requests(Opcode.DCP_STREAM_REQ)))
        (frame,) = node.received_requests(Opcode.DCP_STREAM_REQ)
        value = b'{"collections":["8","a"],"purge_seqno":"%d"}' % 2**63
        sent = ev.StreamRequest(VBID, 0x10, 17, SEQNO_MAX, 99, 17, 17, value)
        assert encode_event(sent, opaque=frame.opaque) == encode(frame)


async def test_a_stream_is_accepted_rolled_back_or_refused_with_its_context(tmp_path: Path) -> None:
    """`test_vbucket` has each status come to a vbucket."""
    log = encode_failover_log([(2**48 - 1, 5), (1, 0)])
    answers: dict[int, Answer] = {Opcode.DCP_STREAM_REQ: refuse(Status.SUCCESS, log)}
    async with opened(tmp_path, answers) as (node, session, owner):
        first = session.request_stream(VBID, stream_request(), PREFIX, owner)
        await owner.until(lambda: len(owner.answers) == 1)
        node.answers[Opcode.DCP_STREAM_REQ] = refuse(Status.ROLLBACK, (2**64 - 2).to_bytes(8))
        second = session.request_stream(VBID, stream_request(5), PREFIX, owner)
        await owner.until(lambda: len(owner.answers) == 2)
        node.answers[Opcode.DCP_STREAM_REQ] = refuse(Status.EACCESS, b"context")
        third = session.request_stream(VBID, stream_request(5), PREFIX, owner)
        await owner.until(lambda: len(owner.answers) == 3)
        entries = FailoverLog.of([(2**48 - 1, 5), (1, 0)])
        assert owner.answers == [
            StreamAccepted(first, entries),
            StreamRollback(second, 2**64 - 2),
            StreamRefused(third, Status.EACCESS, b"context"),
        ]
        assert len({first, second, third}) == 3
        assert (len(session.streams), session.ready) == (1, True)


@pytest.mark.parametrize("body", [b"x", bytes(15)])
async def test_a_malformed_answer_ends_the_connection(tmp_path: Path, body: bytes) -> None:
    answers: dict[int, Answer] = {Opcode.DCP_STREAM_REQ: refuse(Status.SUCCESS, body)}
    async with opened(tmp_path, answers) as (_, session, owner):
        session.request_stream(VBID, stream_request(), PREFIX, owner)
        await owner.until(lambda: bool(owner.lost))
        assert isinstance(owner.lost[0], HandshakeFailed)
        assert owner.answers == []


@pytest.mark.parametrize("reason", [StreamEndReason.OK, 99])
async def test_the_end_of_a_stream_reaches_its_owner_and_ends_its_opaque(tmp_path: Path, reason: int) -> None:
    async with streaming(tmp_path) as (node, session, owner, opaque):
        node.send(
            encode_event(mutation(1), opaque=opaque),
            encode_event(ev.StreamEnd(VBID, reason), opaque=opaque),
            encode_event(mutation(2), opaque=opaque),
        )
        await owner.until(lambda: session.dropped_bytes > 0)
        assert [event.reason for event in owner.events if isinstance(event, ev.StreamEnd)] == [reason]
        assert len(owner.rows) == 1
        assert len(session.streams) == 0


async def test_rows_arrive_with_prefix_and_seqno_in_stored_form(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (node, _, owner, opaque):
        node.send(
            encode_event(mutation(1), opaque=opaque),
            encode_event(mutation(2, stream_id=5), opaque=opaque),  # a flexible frame is stored as a plain one
        )
        await owner.until(lambda: len(owner.rows) == 2)
        assert [key for key, _ in owner.rows] == [PREFIX + seqno.to_bytes(8) for seqno in (1, 2)]
        stored = [decode(value)[0] for _, value in owner.rows]
        assert [frame.key for frame in stored] == [b"\0key", b"\0key"]
        assert [frame.framing for frame in stored] == [b"", b""]


async def test_keys_of_a_connection_without_collections_get_the_default_collection_id(tmp_path: Path) -> None:
    async with ScriptedNode() as node:
        node.features -= {0x12}
        session, owner = make(node, tmp_path)
        await session.open()
        assert session.handshake.collections is False
        opaque = session.request_stream(VBID, stream_request(), PREFIX, owner)
        await owner.until(lambda: bool(owner.answers))
        plain = [mutation(1, key=b"k" * 250), mutation(2, key=b"\xff", value=b""), mutation(3, key=b"s", stream_id=1)]
        deleted = ev.Deletion(VBID, b"d", 4, 9, 8, delete_time=7)
        node.send(*(encode_event(event, opaque=opaque) for event in [*plain, deleted]))
        await owner.until(lambda: len(owner.rows) == 4)
        frames = [decode(value)[0] for _, value in owner.rows]
        assert [frame.key for frame in frames] == [b"\0" + b"k" * 250, b"\0\xff", b"\0s", b"\0d"]
        assert [frame.wire_size for frame in frames] == [len(value) for _, value in owner.rows]
        assert [frame.value for frame in frames] == [b"{}", b"", b"{}", b""]
        assert (frames[3].cas, len(frames[3].extras)) == (8, 21)
        session.close()


async def test_a_closed_stream_delivers_no_rows_and_its_bytes_are_acked(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (node, session, owner, opaque):
        session.close_stream(VBID, opaque)
        session.close_stream(VBID, opaque)
        late = encode_event(mutation(1, bytes(3000)), opaque=opaque)
        node.send(late)
        await owner.until(lambda: bool(node.received_requests(Opcode.DCP_BUFFER_ACK)))
        assert owner.rows == []
        assert session.dropped_bytes == len(late)
        (ack,) = node.received_requests(Opcode.DCP_BUFFER_ACK)
        assert int.from_bytes(ack.extras) == len(late)
        assert len(node.received_requests(Opcode.DCP_CLOSE_STREAM)) == 1
        session.close_stream(VBID, None)
        await owner.until(lambda: len(node.received_requests(Opcode.DCP_CLOSE_STREAM)) == 2)


async def test_a_marker_with_ack_is_answered_with_its_opaque(tmp_path: Path) -> None:
    async with opened(tmp_path) as (node, session, owner):
        session.answer_marker(VBID, 1234)
        await owner.until(lambda: bool(node.answered))
        assert (node.answered[0].opcode, node.answered[0].opaque) == (Opcode.DCP_SNAPSHOT_MARKER, 1234)


async def test_a_message_that_is_not_dcp_ends_the_connection(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (node, _, owner, opaque):
        node.send(request(Opcode.DCP_SNAPSHOT_MARKER, vbucket=VBID, opaque=opaque, extras=b"bad"))
        await owner.until(lambda: bool(owner.lost))
        assert "broke the protocol" in owner.lost[0].what


# -- flow control -------------------------------------------------------------------------------------------------


async def test_held_acks_are_sent_on_release(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (node, session, owner, opaque):
        session.acks_held = True
        node.send(encode_event(mutation(1, b"x" * 8000), opaque=opaque))
        await owner.until(lambda: bool(owner.rows))
        node.send(request(Opcode.DCP_NOOP, opaque=77))
        await owner.until(lambda: bool(node.answered))
        assert node.received_requests(Opcode.DCP_BUFFER_ACK) == []
        session.release_acks()
        await owner.until(lambda: bool(node.received_requests(Opcode.DCP_BUFFER_ACK)))
        (ack,) = node.received_requests(Opcode.DCP_BUFFER_ACK)
        assert int.from_bytes(ack.extras) == owner.byte_count == session.ledger.acked_total


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(1, 5))])
async def test_the_window_never_loses_bytes(tmp_path: Path, seed: int) -> None:
    """A producer that counts as a server does gets every byte back, expected or not."""
    chance = random.Random(seed)
    window = ProducerWindow(4096)

    def acked(_node: ScriptedNode, frame: Frame) -> None:
        window.acked(int.from_bytes(frame.extras))

    async with streaming(tmp_path, {Opcode.DCP_BUFFER_ACK: acked}) as (node, session, owner, opaque):
        makers: list[Callable[[int], ev.Event]] = [
            lambda seqno: mutation(seqno, bytes(chance.randrange(400))),
            lambda seqno: ev.Deletion(VBID, b"\0k", seqno, 1, 1),
            lambda seqno: ev.Expiration(VBID, b"\0k", seqno, 1, 1),
            lambda seqno: ev.Prepare(VBID, b"\0k", seqno, 1, 1, value=b"v"),
            lambda seqno: ev.Commit(VBID, b"\0k", seqno - 1, seqno),
            lambda seqno: ev.Abort(VBID, b"\0k", seqno - 1, seqno),
            lambda seqno: ev.SeqnoAdvanced(VBID, seqno),
            lambda seqno: ev.SnapshotMarker(VBID, seqno, seqno, 1),
            lambda seqno: ev.OsoSnapshot(VBID, 1),
            lambda seqno: ev.SystemEvent(VBID, seqno, 3, 0, b"s", bytes(12)),
            lambda seqno: ev.DcpNoop(),
            lambda seqno: mutation(seqno, stream_id=9),
        ]
        sent_bytes = 0
        for seqno in range(1, 600):
            await owner.until(lambda: window.is_open)
            frame = decode(
                encode_event(chance.choice(makers)(seqno), opaque=opaque if chance.random() < 0.8 else 77_777)
            )[0]
            window.sent(counted_size(frame))
            sent_bytes += counted_size(frame)
            node.send(frame)
        await owner.until(lambda: session.ledger.received_total == sent_bytes)
        await owner.until(lambda: window.outstanding == session.ledger.unacked)
        assert session.ledger.unacked < 4096
        assert session.dropped_bytes > 0


async def test_messages_for_the_nodes_of_a_cluster_are_ignored_and_acked(tmp_path: Path) -> None:
    others = (Opcode.DCP_FLUSH, Opcode.DCP_SET_VBUCKET_STATE, Opcode.DCP_CACHE_TRANSFER, 0x68)
    async with streaming(tmp_path, connection_buffer_size=1 << 20) as (node, session, owner, opaque):
        sent = [Frame(0x80, opcode, vbucket=VBID, opaque=opaque, value=b"x") for opcode in others]
        sent.append(decode(encode_event(ev.SnapshotMarker(VBID, 1, 20, 1), opaque=opaque))[0])
        for frame in sent:
            node.send(frame)
        await owner.until(lambda: bool(owner.events))
        assert len(owner.events) == 1
        assert session.ledger.received_total == sum(map(counted_size, sent))
        assert owner.lost == []


# -- signs of life ------------------------------------------------------------------------------------------------


async def test_a_noop_is_answered_before_earlier_data_is_processed(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (node, session, owner, opaque):
        answered_at: list[int] = []
        link_send = session.link.send

        def watched(data: bytes) -> None:
            answered_at.append(len(owner.rows))
            link_send(data)

        session.link.send = watched  # type: ignore[method-assign]
        node.send(encode_event(mutation(1), opaque=opaque) + encode_event(ev.DcpNoop(), opaque=4321))
        await owner.until(lambda: bool(node.answered))
        assert (node.answered[0].opcode, node.answered[0].opaque) == (Opcode.DCP_NOOP, 4321)
        assert answered_at[0] == 0
        assert len(answered_at) == 1
        assert session.ledger.received_total == counted_size(decode(encode_event(mutation(1)))[0])


async def test_own_noops_keep_a_connection_without_streams_alive(tmp_path: Path) -> None:
    async with opened(tmp_path, noop_interval_s=0.5) as (node, session, owner):
        await owner.until(lambda: len(node.received_requests(Opcode.NOOP)) >= 5)
        assert session.ready


async def test_a_node_that_leaves_a_failover_log_request_unanswered_is_left(tmp_path: Path) -> None:
    """Its noops are answered: without a limit the vbucket would wait for its failover log for ever, and say nothing."""
    for opcode, words in (
        (Opcode.DCP_GET_FAILOVER_LOG, "failover log of vb 3"),
        (Opcode.DCP_STREAM_REQ, "stream request of vb 3"),
        (Opcode.DCP_CLOSE_STREAM, "closing of vb 3's stream"),
    ):
        async with opened(tmp_path, {opcode: silent}, request_timeout_s=1) as (_, session, owner):
            if opcode == Opcode.DCP_GET_FAILOVER_LOG:
                session.get_failover_log(VBID, lambda _outcome: None)
            elif opcode == Opcode.DCP_STREAM_REQ:
                session.request_stream(VBID, stream_request(), PREFIX, owner)
            else:
                session.close_stream(VBID, None)
            await owner.until(lambda owner=owner: bool(owner.lost))  # type: ignore[misc]
            assert isinstance(owner.lost[0], SourceTimeout)
            assert words in owner.lost[0].what


async def test_own_noops_continue_if_the_source_keeps_its_own_interval(tmp_path: Path) -> None:
    """A server that does not take our interval sends its noops every three minutes: silence is not death."""

    def control(_node: ScriptedNode, frame: Frame) -> list[Frame]:
        return [response(frame, Status.EINVAL if frame.key == b"set_noop_interval" else Status.SUCCESS)]

    answers: dict[int, Answer] = {Opcode.DCP_CONTROL: control, Opcode.DCP_STREAM_REQ: refuse(Status.SUCCESS, b"")}
    async with opened(tmp_path, answers, noop_interval_s=0.5) as (node, session, owner):
        session.request_stream(VBID, stream_request(), PREFIX, owner)
        await owner.until(lambda: bool(owner.answers))
        await owner.until(lambda: len(node.received_requests(Opcode.NOOP)) >= 5)
        assert session.ready


async def test_a_silent_connection_is_ended(tmp_path: Path) -> None:
    async with opened(tmp_path, {Opcode.NOOP: silent}, noop_interval_s=0.1) as (_, session, owner):
        await owner.until(lambda: bool(owner.lost))
        assert isinstance(owner.lost[0], SourceTimeout)
        assert "silent" in owner.lost[0].what
        assert not session.ready


async def test_a_lost_connection_is_reported_once_and_closes_its_streams(tmp_path: Path) -> None:
    async with opened(tmp_path, {Opcode.DCP_STREAM_REQ: silent}) as (node, session, owner):
        session.request_stream(VBID, stream_request(), PREFIX, owner)
        await owner.until(lambda: bool(node.received_requests(Opcode.DCP_STREAM_REQ)))
        node.hang_up()
        await owner.until(lambda: bool(owner.lost))
        session.close()
        assert len(owner.lost) == 1
        assert owner.answers == []
        assert len(session.streams) == 0
        assert (await session.closed) is owner.lost[0]


# -- slow nodes, in simulated time ---------------------------------------------------------------------------------


class SlowNode:
    """Answers requests in order, a fixed time after the answer before; requests in `skipped` never."""

    def __init__(self, path: Path, pause_s: float, skipped: Container[int] = ()) -> None:
        self.clock = ManualClock()
        self.loop = SimLoop(self.clock)
        self.owner = Owner()
        self.pause_s = pause_s
        self.waiting: deque[Frame] = deque()
        self._skipped = skipped
        node = ScriptedNode()
        node.port = 11210
        access = access_to(node, path, request_timeout_s=30)
        with self.loop.running():
            self.session = NodeSession(
                access, first(access), self.owner, self.clock, name="dcp-mirror:test:0", opaques=Opaques()
            )
            link = self.session._link = Link(self.session.address, self.clock)
            link.on_batch, link.on_lost = self.session.on_batch, self.session.on_lost
            transport: Any = self
            link._transport = transport
            self.session.ready = True

    def write(self, data: bytes) -> None:
        self.waiting.append(decode(data)[0])
        if len(self.waiting) == 1:
            self.loop.call_later(self.pause_s, self.answer)

    def answer(self) -> None:
        frame = self.waiting.popleft()
        if self.waiting:
            self.loop.call_later(self.pause_s, self.answer)
        if frame.vbucket not in self._skipped and self.session.ready:
            self.session.link.data_received(encode(response(frame, value=encode_failover_log(((1, 0),)))))

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        """Nothing is open."""

    def request_all(self) -> float:
        """Request 1,024 streams at once; return the seconds until each is answered or the connection is closed."""
        began_s = self.clock.monotonic()
        with self.loop.running():
            for vbid in range(1024):
                self.session.request_stream(vbid, stream_request(), PREFIX, self.owner)
            while self.session.requests.unanswered and (due_s := self.loop.next_due_in()) is not None:
                self.clock.advance(due_s)
                self.loop.run_due()
        return self.clock.monotonic() - began_s


@pytest.mark.parametrize("per_second", [25, 1, 0.05])
def test_a_node_that_answers_slowly_opens_the_streams_of_1024_vbuckets(tmp_path: Path, per_second: float) -> None:
    """All requests were sent at once, each with 30 s of its own: the first that expired closed the connection."""
    node = SlowNode(tmp_path, 1 / per_second)
    assert node.request_all() == pytest.approx(1024 / per_second)
    assert len(node.owner.answers) == 1024
    assert node.session.ready


@pytest.mark.parametrize(("skipped", "after_s"), [(range(1024), 30), (range(500, 1024), 50), ({500}, 50)])
def test_a_node_that_leaves_a_request_unanswered_is_left(
    tmp_path: Path, skipped: Container[int], after_s: float
) -> None:
    """Its time begins with the answer before, so that later answers do not delay the end."""
    node = SlowNode(tmp_path, 1 / 25, skipped)
    assert node.request_all() == pytest.approx(after_s)
    assert "did not answer the stream request of vb" in node.owner.lost[0].what
    assert len(node.session.streams) == 0
