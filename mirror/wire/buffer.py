"""A queue of received bytes that gives whole frames.

Knows the limits of frames; must never know their content. Invariants: bytes leave in the order they came, each exactly
once; a byte is copied a bounded number of times, however small its pieces; a header is judged on arrival, so an
impossible length is an error at once. Holds at most one incomplete frame and the bytes fed since the last drain: the
owner drains (`next_frame` until None, or `take` and `release`) before feeding again.
"""

from __future__ import annotations

from mirror.wire.constants import BODY_LENGTH_MAX, HEADER_SIZE
from mirror.wire.errors import RemoteProtocolError
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

    @property
    def ready(self) -> bool:
        """True if `take` has something new; False if more bytes must come first."""
        return self._size >= self._bytes_needed

    def take(self) -> tuple[bytes, int]:
        """Return all bytes, and the position of the first that was not handed out. Call `release` next."""
        if self._pieces:
            rest = self._data[self._pos :] if self._pos else self._data
            self._data = b"".join((rest, *self._pieces)) if rest else b"".join(self._pieces)
            self._pieces.clear()
            self._pos = 0
        return self._data, self._pos

    def release(self, pos: int) -> None:
        """Drop the bytes before `pos` of those that `take` returned, and check the header at `pos`."""
        assert not self._pieces, "bytes were fed between take and release"
        assert self._pos <= pos <= len(self._data)
        self._size -= pos - self._pos
        self._pos = pos
        if self._size == 0:
            self._data, self._pos, self._bytes_needed = b"", 0, 1
            return
        size = frame_size(self._data, pos, self.body_length_max)
        self._bytes_needed = size or HEADER_SIZE

    def next_frame(self) -> Frame | None:
        if self._size < self._bytes_needed:
            return None
        data, pos = self.take()
        size = frame_size(data, pos, self.body_length_max)
        if size == 0 or size > self._size:
            self._bytes_needed = size or HEADER_SIZE
            return None
        frame, end = decode(data, pos, self.body_length_max)
        self._size -= size
        self._pos = end
        self._bytes_needed = 1
        if self._size == 0:
            self._data, self._pos = b"", 0
        return frame

    def end(self) -> None:
        """Note that the peer sends no more: bytes still here are a cut frame."""
        if self._size:
            raise RemoteProtocolError(f"the connection ended inside of a frame: {self._size} bytes of it came")
