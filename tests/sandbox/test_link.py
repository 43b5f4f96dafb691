"""The link: order is kept when it is slow, nothing passes when it is silent, and damage is damage."""

from __future__ import annotations

import asyncio
from random import Random
from typing import cast

from mirror.sandbox.node.link import SLOW_BACKLOG_MAX, NetworkLink


class Wire:
    """A transport that only remembers."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = ""

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = "close"

    def abort(self) -> None:
        self.closed = "abort"

    def is_closing(self) -> bool:
        return bool(self.closed)

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0


def made() -> tuple[NetworkLink, Wire]:
    wire = Wire()
    return NetworkLink(cast("asyncio.Transport", wire), Random(1)), wire


async def test_a_sound_link_forwards_at_once() -> None:
    link, wire = made()
    link.send(b"abc")
    assert (wire.data, link.bytes_sent) == (b"abc", 3)


async def test_a_slow_link_keeps_the_order_and_makes_senders_wait() -> None:
    link, wire = made()
    link.slow(1000)
    data = bytes(range(256)) * (SLOW_BACKLOG_MAX // 256 + 1)
    link.send(data)
    waiting = asyncio.create_task(link.writable())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert 0 < len(wire.data) < 2000
    link.slow(0)
    await waiting
    assert wire.data == data
    link.send(b"more")
    assert wire.data == data + b"more"


async def test_silence_forwards_nothing_and_closes_nothing() -> None:
    link, wire = made()
    link.silence()
    link.send(b"abc")
    assert (wire.data, wire.closed, link.silent) == (b"", "", True)


async def test_garbled_pieces_have_their_length_and_other_bytes() -> None:
    link, wire = made()
    link.garble(1)
    link.send(bytes(1000))
    assert len(wire.data) == 1000
    assert any(wire.data)
    link.send(bytes(10))
    assert wire.data[1000:] == bytes(10)


async def test_a_truncated_piece_is_the_last() -> None:
    link, wire = made()
    link.truncate()
    link.send(b"x" * 30)
    link.send(b"y")
    assert (wire.data, wire.closed) == (b"x" * 20, "close")
    other, gone = made()
    other.cut()
    assert gone.closed == "abort"


async def test_a_full_transport_makes_senders_wait() -> None:
    link, _ = made()
    link.pause()
    waiting = asyncio.create_task(link.writable())
    await asyncio.sleep(0)
    assert not waiting.done()
    link.resume()
    await waiting
    link.pause()
    link.closed()
    await link.writable()
