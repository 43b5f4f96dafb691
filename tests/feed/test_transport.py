"""A connection: frames in pieces, answers by opaque, ends that every waiting request hears of."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from mirror.clock import SystemClock
from mirror.errors import ClusterError, ConnectFailed, HandshakeFailed, SourceTimeout
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.transport import OPAQUE_MAX, Link, Opaques, open_link
from mirror.wire import events as ev
from mirror.wire.codec_dcp import encode as encode_event
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import Frame, encode, request, response
from mirror.wire.scan import Run
from tests.feed.scripted_node import ScriptedNode, refuse, silent
from tests.manual_clock import ManualClock


class Listener:
    """A receiver that remembers."""

    def __init__(self) -> None:
        self.items: list[Run | Frame] = []
        self.lost: list[ClusterError] = []

    def on_batch(self, items: list[Run | Frame]) -> None:
        self.items += items

    def on_lost(self, error: ClusterError) -> None:
        self.lost.append(error)


def link_in_memory() -> tuple[Link, Listener]:
    link = Link(NodeAddress("node", 1), SystemClock())
    listener = Listener()
    link.on_batch, link.on_lost = listener.on_batch, listener.on_lost
    return link, listener


def mutation(seqno: int, opaque: int, value: bytes = b"{}") -> bytes:
    return encode_event(ev.Mutation(3, b"\0key", seqno, 1, 1, value=value, opaque=opaque))


async def connect(node: ScriptedNode, timeout_s: float = 5.0) -> Link:
    return await open_link(NodeAddress("127.0.0.1", node.port), tls=None, timeout_s=timeout_s, clock=SystemClock())


@pytest.mark.parametrize("size", [1, 7, 23, 24, 25, 100, 10_000])
async def test_the_result_does_not_depend_on_how_the_bytes_are_cut(size: int) -> None:
    link, listener = link_in_memory()
    link.routes[9] = b"\0\0\0\1"
    noop = encode(request(Opcode.DCP_NOOP, opaque=5))
    data = mutation(1, 9) + mutation(2, 9, b"x" * 3000) + noop + mutation(3, 9) + mutation(4, 8) + noop
    for start in range(0, len(data), size):
        link.data_received(data[start : start + size])
    rows = [row for item in listener.items if isinstance(item, Run) for row in item.rows]
    assert [key for key, _ in rows] == [b"\0\0\0\1" + seqno.to_bytes(8) for seqno in (1, 2, 3)]
    others = [item.opcode for item in listener.items if isinstance(item, Frame)]
    assert others == [Opcode.DCP_NOOP, Opcode.DCP_MUTATION, Opcode.DCP_NOOP]


async def test_a_large_frame_in_small_pieces_is_joined_once() -> None:
    """The pieces wait unjoined: work per piece does not depend on how much is there already."""
    link, listener = link_in_memory()
    link.routes[9] = b"\0\0\0\1"
    data = mutation(1, 9, bytes(20 * 1024 * 1024))
    for start in range(0, len(data), 64 * 1024):
        link.data_received(data[start : start + 64 * 1024])
        assert max(map(len, link._pieces), default=0) <= 64 * 1024
    (run,) = listener.items
    assert isinstance(run, Run)
    assert run.rows[0][1] == data


async def test_received_data_stays_when_the_read_buffer_is_reused() -> None:
    """All connections of a thread receive into the same memory: what they keep of it are copies."""
    data = mutation(1, 9) + mutation(2, 9, b"x" * 3000) + mutation(3, 9)
    links = [link_in_memory() for _ in range(3)]
    for link, _ in links:
        link.read_bytes_max = 1000
        link.routes[9] = b"\0\0\0\1"
    assert len({id(link.get_buffer(-1).obj) for link, _ in links}) == 1
    for start in range(0, len(data), 1000):
        piece = data[start : start + 1000]
        for link, _ in links:
            buffer = link.get_buffer(-1)
            assert len(buffer) == 1000
            buffer[: len(piece)] = piece
            link.buffer_updated(len(piece))
            buffer[:] = bytes(1000)
    for link, listener in links:
        rows = [row for item in listener.items if isinstance(item, Run) for row in item.rows]
        assert b"".join(value for _, value in rows) == data
        assert all(type(part) is bytes for row in rows for part in row)
        assert link._pieces == []


async def test_an_impossible_length_ends_the_connection_at_once() -> None:
    link, listener = link_in_memory()
    link.data_received(b"\x80\x57" + b"\xff" * 22)
    assert link.closed
    (error,) = listener.lost
    assert isinstance(error, HandshakeFailed)
    assert "broke the protocol" in error.what
    link.data_received(mutation(1, 9))
    assert listener.items == []


async def test_answers_find_their_requests_in_any_order_and_others_are_dropped() -> None:
    link, listener = link_in_memory()
    answers: list[tuple[str, int]] = []
    frames = {}
    for name in ("first", "second"):
        frames[name] = request(Opcode.NOOP, opaque=link.next_opaque())
        link.ask(frames[name], lambda outcome, name=name: answers.append((name, outcome.status)))  # type: ignore[misc]
    late = response(frames["second"], Status.EINVAL)
    link.data_received(encode(late) + encode(late) + encode(response(frames["first"])))
    assert answers == [("second", Status.EINVAL), ("first", Status.SUCCESS)]
    assert listener.items == []
    assert not link._pending


async def test_every_waiting_request_is_notified_once_when_the_connection_ends() -> None:
    link, listener = link_in_memory()
    reported: list[object] = []
    link.ask(request(Opcode.NOOP, opaque=link.next_opaque()), reported.append)
    link.connection_lost(ConnectionResetError("reset"))
    link.connection_lost(None)
    link.ask(request(Opcode.NOOP, opaque=link.next_opaque()), reported.append)
    assert len(reported) == 1, "never from within the call"
    await asyncio.sleep(0)
    assert len(reported) == 2
    assert all(isinstance(error, ConnectFailed) for error in reported)
    assert len(listener.lost) == 1
    assert "reset" in listener.lost[0].what


async def test_a_node_that_does_not_read_is_reported_after_the_current_call() -> None:
    """The caller may be a machine that executes instructions, which takes one event at a time."""
    async with ScriptedNode() as node:
        link, reported = await connect(node), Listener()
        link.on_lost = reported.on_lost
        answers: list[object] = []
        large = request(Opcode.NOOP, opaque=link.next_opaque(), value=bytes(20 * 1024 * 1024))
        link.ask(large, answers.append)
        link.ask(request(Opcode.NOOP, opaque=link.next_opaque()), answers.append)
        link.send(b"more")
        assert (answers, reported.lost) == ([], [])
        await asyncio.sleep(0)
        assert answers == reported.lost * 2
        assert "does not read our requests" in str(reported.lost[0])


async def test_an_opaque_in_use_is_not_given_again() -> None:
    opaques = Opaques()
    opaques._last = OPAQUE_MAX - 1
    link = Link(NodeAddress("node", 1), SystemClock(), opaques)
    assert link.next_opaque() == OPAQUE_MAX
    link.routes[1] = b"\0\0\0\1"
    assert link.next_opaque() == 2
    other = Link(NodeAddress("other", 1), SystemClock(), opaques)
    assert other.next_opaque() == 3


async def test_a_request_returns_the_response_with_any_status() -> None:
    async with ScriptedNode({Opcode.NOOP: refuse(Status.EBUSY)}) as node:
        link = await connect(node)
        assert (await link.request(Opcode.NOOP, timeout_s=5)).status == Status.EBUSY
        assert not link.secure
        link.close()


async def test_a_request_without_an_answer_is_a_timeout_and_leaves_nothing_behind() -> None:
    async with ScriptedNode({Opcode.NOOP: silent}) as node:
        link = await connect(node)
        with pytest.raises(SourceTimeout, match="NOOP"):
            await link.request(Opcode.NOOP, timeout_s=0.02)
        assert not link._pending
        link.close()


async def test_a_connection_is_silent_only_while_something_waits_for_an_answer() -> None:
    clock = ManualClock()
    link = Link(NodeAddress("node", 1), clock)
    link.routes[9] = b"\0\0\0\1"
    clock.advance(100)
    assert link.silence_s == 0, "nothing was requested"
    link.ask(request(Opcode.GET_ALL_VB_SEQNOS, opaque=5), lambda _outcome: None)
    assert link.silence_s == 0, "it counts from the request"
    clock.advance(3)
    assert link.silence_s == 3
    link.data_received(mutation(1, 9))
    assert link.silence_s == 0, "anything that comes is a sign of life"
    clock.advance(2)
    link.ask(request(Opcode.GET_ALL_VB_SEQNOS, opaque=6), lambda _outcome: None)
    assert link.silence_s == 2, "the first request still waits"
    for opaque in (5, 6):
        link.data_received(encode(response(request(Opcode.GET_ALL_VB_SEQNOS, opaque=opaque))))
    clock.advance(100)
    assert link.silence_s == 0


async def test_an_address_that_drops_packets_does_not_hide_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may still carry the address of a node that is gone: no host answers there, not even with a refusal."""
    async with ScriptedNode() as node:
        with contextlib.ExitStack() as stack:
            dead = stack.enter_context(socket.socket())
            dead.bind(("127.0.0.2", node.port))
            dead.listen(0)
            for _ in range(8):  # fill its queue
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(dead.getsockname())
            found = [
                (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, node.port))
                for host in ("127.0.0.2", "127.0.0.1")
            ]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: found)
            link = await open_link(NodeAddress("db.example", node.port), tls=None, timeout_s=20, clock=SystemClock())
            assert (await link.request(Opcode.NOOP, timeout_s=20)).status == Status.SUCCESS
            link.close()


async def test_an_unreachable_address_is_one_clear_error() -> None:
    with pytest.raises(ConnectFailed, match=r"127\.0\.0\.1:1 cannot be reached") as caught:
        await open_link(NodeAddress("127.0.0.1", 1), tls=None, timeout_s=5, clock=SystemClock())
    assert caught.value.retryable
    with pytest.raises(ConnectFailed, match="cannot be resolved"):
        await open_link(NodeAddress("no.such.host.invalid", 1), tls=None, timeout_s=5, clock=SystemClock())
    with pytest.raises(ConnectFailed, match="cannot be a host's name"):
        await open_link(NodeAddress("a" * 64, 1), tls=None, timeout_s=5, clock=SystemClock())
