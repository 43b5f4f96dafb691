from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator

import msgpack
import pytest
import pytest_asyncio

from mirror.errors import SupervisionError
from mirror.messages import Answer, Beat
from mirror.supervise.processes import channel as module
from mirror.supervise.processes.channel import Channel


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[tuple[socket.socket, Channel]]:
    line, ours = socket.socketpair()
    channel = await Channel.open(ours)
    with line:
        yield line, channel
    await channel.close()


async def test_an_end_in_the_middle_of_a_message_ends_the_channel(ends: tuple[socket.socket, Channel]) -> None:
    line, channel = ends
    line.sendall(struct.pack(">I", 100) + b"half")
    line.close()
    assert await channel.receive() is None


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
async def test_garbage_is_a_supervision_error(ends: tuple[socket.socket, Channel], garbage: bytes) -> None:
    line, channel = ends
    line.sendall(garbage)
    with pytest.raises(SupervisionError):
        await channel.receive()


async def test_a_message_that_is_too_long_is_refused_before_it_is_sent(
    ends: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, channel = ends
    monkeypatch.setattr(module, "MESSAGE_LENGTH_MAX", 100)
    with pytest.raises(SupervisionError, match="limit"):
        channel.send(Answer(1, {"x": "x" * 200}))
    channel.send(Beat())
    assert msgpack.unpackb(line.recv(100)[4:]) == {"op": "beat"}
