"""Bytes in any pieces, frames out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire.constants import HEADER_SIZE, Opcode
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.frame import Frame, FrameBuffer, encode, request
from tests.wire.shapes import frames


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, pos = [], 0
    for size in sizes:
        pieces.append(data[pos : pos + size])
        pos += size
    return [*pieces, data[pos:]]


@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 90), max_size=20))
def test_frames_come_out_whole_and_in_order(sent: list[Frame], sizes: list[int]) -> None:
    buffer, got = FrameBuffer(), []
    for piece in cut(b"".join(map(encode, sent)), sizes):
        buffer.feed(bytearray(piece))
        while (frame := buffer.next_frame()) is not None:
            got.append(frame)
    assert got == sent
    assert len(buffer) == 0


def test_a_large_frame_in_small_pieces_is_joined_once() -> None:
    """The pieces stay apart until the last has come: the cost is linear in the bytes, not in bytes times pieces."""
    frame = request(Opcode.SET, key=b"k", value=b"v" * 1_000_000)
    data = encode(frame)
    buffer = FrameBuffer()
    buffer.feed(data[:HEADER_SIZE])
    assert buffer.next_frame() is None
    for pos in range(HEADER_SIZE, len(data) - 1, 1000):
        buffer.feed(data[pos : min(pos + 1000, len(data) - 1)])
        assert buffer.next_frame() is None
    assert len(buffer._pieces) == (len(data) - 1 - HEADER_SIZE + 999) // 1000, "kept as they came"
    buffer.feed(data[-1:])
    assert buffer.next_frame() == frame
    assert buffer._pieces == []


def test_a_header_above_the_limit_is_refused_before_its_body_arrives() -> None:
    buffer = FrameBuffer(1000)
    data = encode(request(Opcode.SET, key=b"k", value=b"v" * 1000))
    buffer.feed(data[:23])
    assert buffer.next_frame() is None
    buffer.feed(data[23:24])
    with pytest.raises(RemoteProtocolError, match="limit of 1000"):
        buffer.next_frame()
    with pytest.raises(RemoteProtocolError):
        buffer.next_frame()
