"""Cuts what an HTTP client sends into heads and parts of bodies, so that the server gets one request at a time.

The module finds where requests end (RFC 9112, sections 6 and 7). The server's parser judges the bytes, which pass
unchanged, except for offers of another protocol: httptools would take the body of such a request for the other
protocol's (RFC 9110, 7.8).
"""

from __future__ import annotations

import re
from typing import NamedTuple

HEAD_BYTES_MAX = 256 * 1024
"""Limit of request line and headers, and of the trailers of a chunked body."""
HEADERS_MAX = 100
CHUNK_LINE_BYTES_MAX = 4 * 1024
"""Limit of the line before a chunk: its size and extensions."""

_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;|$)")


class BadFraming(Exception):
    """The client's bytes are no request, or too long for one."""


class Head(NamedTuple):
    data: bytes
    """The bytes for the server."""
    line: bytes
    headers: list[tuple[bytes, bytes]]
    """Names are in lower case."""


class Framing:
    def __init__(self) -> None:
        self._data = bytearray()
        self._searched = 0
        """Bytes that are known to hold no end of a head or line."""
        self._left = 0
        """Bytes to come of the body, or of a chunk."""
        self._in_chunks = self._in_trailers = False
        self._trailer_bytes = 0
        self.is_last = False
        """True if the end of the request is not known: then no other request follows."""

    @property
    def byte_count(self) -> int:
        """Bytes that were not cut off yet."""
        return len(self._data)

    @property
    def in_body(self) -> bool:
        return self.is_last or self._in_chunks or self._left > 0

    def feed(self, data: bytes) -> None:
        self._data += data

    def next_head(self) -> Head | None:
        """Return the next head once it is complete. Raises BadFraming."""
        if not self._searched:
            while self._data.startswith((b"\r", b"\n")):
                del self._data[:1]
            if self._data and not self._data[:1].isalpha():
                raise BadFraming("not an HTTP request")
        end = self._end_of(b"\r\n\r\n", HEAD_BYTES_MAX, "the request's head is too long")
        if end is None:
            return None
        data = self._cut(end)
        line, *lines = data[:-4].split(b"\r\n")
        if len(lines) > HEADERS_MAX:
            raise BadFraming(f"it has more than {HEADERS_MAX} headers")
        headers = []
        for each in lines:
            name, _, value = each.partition(b":")
            headers.append((name.lower(), value.strip()))
        if line.endswith(b"HTTP/1.1") and [name for name, _ in headers].count(b"host") != 1:
            raise BadFraming("it needs exactly one Host header")
        if any(name == b"upgrade" for name, _ in headers):
            kept = (each for each, (name, _) in zip(lines, headers, strict=True) if name != b"upgrade")
            data = b"\r\n".join((line, *kept, b"", b""))
        self._begin_body(line, headers)
        return Head(data, line, headers)

    def _begin_body(self, line: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        lengths = [value for name, value in headers if name == b"content-length"]
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
        if codings == [b"chunked"] and not lengths:
            self._in_chunks, self._in_trailers, self._trailer_bytes = True, False, 0
        elif not codings and len(lengths) == 1 and lengths[0].isdigit() and len(lengths[0]) < 20:
            self._left = int(lengths[0])
        else:
            self.is_last = bool(codings or lengths) or line.startswith(b"CONNECT ")

    def next_part(self, bytes_max: int) -> bytes:
        """Return the next bytes of the body; empty if more data must come first. Raises BadFraming."""
        if self.is_last:
            return self._cut(min(bytes_max, len(self._data)))
        if self._left:
            part = self._cut(min(bytes_max, self._left, len(self._data)))
            self._left -= len(part)
            return part
        limit = HEAD_BYTES_MAX - self._trailer_bytes if self._in_trailers else CHUNK_LINE_BYTES_MAX
        end = self._end_of(b"\r\n", limit, "the chunks or trailers of the request are too long")
        if end is None:
            return b""
        line = self._cut(end)
        if self._in_trailers:
            self._trailer_bytes += len(line)
            self._in_chunks = line != b"\r\n"
            return line
        size = _CHUNK_SIZE.match(line[:-2])
        if size is None:
            raise BadFraming("not an HTTP request: the size of a chunk is not a number")
        count = int(size[1], 16)
        self._in_trailers = not count
        self._left = count + 2 if count else 0
        return line

    def _end_of(self, mark: bytes, bytes_max: int, problem: str) -> int | None:
        at = self._data.find(mark, max(self._searched - len(mark) + 1, 0))
        end = at + len(mark) if at >= 0 else len(self._data)
        if end > bytes_max:
            raise BadFraming(problem)
        self._searched = len(self._data) if at < 0 else 0
        return None if at < 0 else end

    def _cut(self, byte_count: int) -> bytes:
        data = bytes(self._data[:byte_count])
        del self._data[:byte_count]
        self._searched = 0
        return data
