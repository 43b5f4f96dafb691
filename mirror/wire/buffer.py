"""A queue that takes received bytes and returns whole frames.

The owner calls `next_frame` until it returns None, and only then feeds again, so the queue stays small. A byte is
copied a bounded number of times, even if bytes arrive one by one.
"""

from __future__ import annotations

from mirror.wire.constants import BODY_LENGTH_MAX, HEADER_SIZE
from mirror.wire.frame import Frame, decode, frame_size


class FrameBuffer:
    __slots__ = ("_bytes_needed", "_data", "_pieces", "_pos", "_size", "body_length_max")

    def __init__(self, body_length_max: int = BODY_LENGTH_MAX) -> None:
        assert 0 < body_length_max < 1 << 32
        self.body_length_max = body_length_max
        self._data = b""
        self._pos = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._bytes_needed = 1

    def __len__(self) -> int:
        return self._size

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        if data:
            self._pieces.append(bytes(data))
            self._size += len(data)

    def next_frame(self) -> Frame | None:
        if self._size < self._bytes_needed:
            return None
        if self._pieces:
            self._data = b"".join((self._data[self._pos :], *self._pieces))
            self._pieces.clear()
            self._pos = 0
        size = frame_size(self._data, self._pos, self.body_length_max)
        if size == 0 or size > self._size:
            self._bytes_needed = size or HEADER_SIZE
            return None
        frame, end = decode(self._data, self._pos, self.body_length_max)
        self._size -= size
        self._pos = end
        self._bytes_needed = 1
        if self._size == 0:
            self._data, self._pos = b"", 0
        return frame
