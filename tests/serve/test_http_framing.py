"""Where requests end: whatever the sizes of the packets, and as the server's own parser sees it."""

from __future__ import annotations

from collections.abc import Iterable

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.serve.http.framing import BadFraming, Framing

NAMES = st.sampled_from((b"Host", b"X", b"Content-Type", b"Accept"))
VALUES = st.binary(max_size=20).map(lambda value: bytes(byte for byte in value if 32 < byte < 127))
CHUNKS = st.lists(st.binary(min_size=1, max_size=40), max_size=4)


def chunked(chunks: Iterable[bytes], trailers: Iterable[bytes], extension: bytes) -> bytes:
    parts = [b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in chunks]
    return b"".join((*parts, b"0\r\n", *(b"T: %b\r\n" % each for each in trailers), b"\r\n"))


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A request, and its body."""
    headers = [b"Host: a", *(b"X%d: %b" % (number, draw(VALUES)) for number in range(draw(st.integers(0, 3))))]
    kind = draw(st.sampled_from(("none", "length", "chunks")))
    body = sent = b""
    if kind == "length":
        body = sent = draw(st.binary(max_size=100))
        headers.append(b"content-length: %d" % len(body))
    elif kind == "chunks":
        chunks = draw(CHUNKS)
        body, sent = (
            b"".join(chunks),
            chunked(chunks, draw(st.lists(VALUES, max_size=2)), draw(st.sampled_from((b"", b";a=b")))),
        )
        headers.append(b"Transfer-Encoding: chunked")
    return b"\r\n".join((b"POST / HTTP/1.1", *headers, b"", b"")) + sent, body


class Parsed:
    """What httptools makes of a head and the parts behind it."""

    def __init__(self) -> None:
        self.body, self.is_complete = b"", False
        self.parser = httptools.HttpRequestParser(self)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        assert not self.is_complete
        self.is_complete = True


def cut(sent: bytes, sizes: list[int], bytes_max: int) -> list[bytes]:
    """Give the bytes in packets, and return the body of each request."""
    framing, found = Framing(), list[bytes]()
    parsed = None
    while sent:
        size = sizes.pop() if sizes else len(sent)
        framing.feed(sent[:size])
        sent = sent[size:]
        while True:
            if framing.in_body:
                assert parsed is not None
                part = framing.next_part(bytes_max)
            else:
                if parsed is not None:
                    assert parsed.is_complete, "the parser is at the end of the request, too"
                    found.append(parsed.body)
                    parsed = None
                head = framing.next_head()
                part = b"" if head is None else head.data
                parsed = None if head is None else Parsed()
            if not part:
                break
            assert parsed is not None
            parsed.parser.feed_data(part)
    assert (parsed, framing.byte_count) == (None, 0)
    return found


@given(st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(1, 60), max_size=40), st.integers(1, 50))
def test_requests_are_cut_where_the_parser_ends_them(
    made: list[tuple[bytes, bytes]], sizes: list[int], bytes_max: int
) -> None:
    assert cut(b"".join(sent for sent, _ in made), sizes, bytes_max) == [body for _, body in made]


@given(st.binary(max_size=300), st.lists(st.integers(1, 60), max_size=40))
def test_any_bytes_are_cut_or_refused(data: bytes, sizes: list[int]) -> None:
    framing = Framing()
    given_bytes = 0
    try:
        for at in (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", data):
            framing.feed(at)
            while part := (framing.next_part(99) if framing.in_body else getattr(framing.next_head(), "data", b"")):
                given_bytes += len(part)
    except BadFraming:
        return
    assert given_bytes + framing.byte_count <= 57 + len(data)


@pytest.mark.parametrize(
    "headers",
    [
        b"Transfer-Encoding: chunked\r\nContent-Length: 5", b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: x", b"Content-Length: +5", b"Content-Length: 5\r\nContent-Length: 5",
        b"Content-Length: 5, 5",
        b"Content-Length: 99999999999999999999", b"Content-Length:",
    ],
)  # fmt: skip
def test_a_request_of_ambiguous_length_is_the_last(headers: bytes) -> None:
    """The server judges it; nothing behind it is taken for another request."""
    framing = Framing()
    framing.feed(b"POST / HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert framing.next_head() is not None
    assert framing.is_last
    assert framing.next_part(9) == b"GET / HTT"
    assert framing.in_body


def test_an_upgrade_header_is_left_out() -> None:
    framing = Framing()
    framing.feed(b"GET / HTTP/1.1\r\nUPGRADE : h2c\r\nhost: a\r\nUpgrade:websocket\r\n\r\n")
    head = framing.next_head()
    assert head is not None
    assert head.data == b"GET / HTTP/1.1\r\nUPGRADE : h2c\r\nhost: a\r\n\r\n", "a name with a blank is no name"
