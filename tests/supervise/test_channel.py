from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from mirror.errors import SupervisionError
from mirror.messages import Answer, Beat
from mirror.supervise.processes import channel
from mirror.supervise.processes.channel import Channel


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    one, other = await Channel.open(left), await Channel.open(right)
    yield one, other
    await one.close()
    await other.close()


async def test_an_end_in_the_middle_of_a_message_is_an_end() -> None:
    left, right = socket.socketpair()
    receiver = await Channel.open(right)
    left.sendall(struct.pack(">I", 100) + b"half")
    left.close()
    assert await receiver.receive() is None
    await receiver.close()


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 1) + b"\xc1",
        struct.pack(">I", 1) + b"\x90",
        struct.pack(">I", 1) + b"\x80",
    ],
    ids=["too long", "no msgpack", "no object", "no op"],
)
async def test_garbage_is_an_error_by_name(garbage: bytes) -> None:
    left, right = socket.socketpair()
    receiver = await Channel.open(right)
    left.sendall(garbage)
    with pytest.raises(SupervisionError):
        await receiver.receive()
    left.close()
    await receiver.close()


async def test_too_long_a_message_is_refused_before_it_is_sent(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MESSAGE_LENGTH_MAX", 100)
    with pytest.raises(SupervisionError, match="limit"):
        ends[0].send(Answer(1, {"x": "x" * 200}))
    ends[0].send(Beat())
    assert await ends[1].receive() == Beat()
