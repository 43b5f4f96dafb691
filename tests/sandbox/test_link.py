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
