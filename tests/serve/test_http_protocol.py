"""Connections that misbehave: too many, too slow, too greedy, or no HTTP at all; each harms itself alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

import pytest

from mirror.serve import http_requests
from mirror.serve.http_protocol import (
    FRAMING_BYTES_MAX,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    SLICE_BYTES,
    BoundedProtocol,
)
from mirror.serve.listener import Limits
from tests.serve.http_site import Site
from tests.supervise.conftest import eventually_now


def read_all(line: socket.socket) -> bytes:
    found = b""
    while chunk := line.recv(65536):
        found += chunk
    return found


def connections(site: Site) -> int:
    return len(site.server.gate.state.connections)


def test_more_connections_than_allowed_are_turned_away_and_the_others_go_on(site: Site) -> None:
    site.server.admission.limits = Limits(connections_max=2)
    asked = f"GET {site.document('a')} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with site.connect() as one, site.connect() as two:
        for line in (one, two):
            line.sendall(asked)
            assert line.recv(65536)
        with site.connect() as third:
            answer = read_all(third)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"urn:dcp-mirror:too-busy" in answer
        one.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"alive" in read_all(one)
    eventually_now(lambda: connections(site) == 0)
    assert site.server.admission.rejected_count == 1
    site.get("/livez")


@pytest.mark.parametrize("said", [b"", b"GET /livez HT", b"POST /v1/collections/a/multi-get HTTP/1.1\r\nHost: a\r\n"])
def test_who_does_not_finish_a_request_is_hung_up_on(site: Site, said: bytes) -> None:
    site.server.gate.request_timeout_s = 0.1
    with site.connect() as line:
        line.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert read_all(line) == b""
    eventually_now(lambda: connections(site) == 0)


@pytest.mark.parametrize(
    "said",
    [
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"POST /v1/collections/_default/multi-get HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n",
    ],
    ids=["head", "body"],
)
def test_a_byte_now_and_then_is_no_progress(site: Site, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow heads and slow bodies: the time for a request is not begun again by each byte."""
    site.server.gate.request_timeout_s = 0.3
    monkeypatch.setattr(http_requests, "BODY_TIMEOUT_S", 0.3)
    with site.connect() as line:
        line.sendall(said)
        line.settimeout(0.02)
        closed = False
        while not closed:
            try:
                line.sendall(b" ")
                answer = line.recv(65536)
                assert answer[:13] in (b"", b"HTTP/1.1 408 ")
                closed = True
            except TimeoutError:
                continue
            except ConnectionError:
                closed = True
    eventually_now(lambda: connections(site) == 0)
    site.get("/livez")


def test_a_connection_without_a_login_is_closed_in_the_end_and_one_with_stays(site: Site) -> None:
    site.server.admission.limits = Limits(login_timeout_s=0.3)
    with site.connect() as probe, site.connect() as reader:
        reader.sendall(f"HEAD {site.document('a')} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert b" 404 " in reader.recv(65536)
        with contextlib.suppress(ConnectionError):
            while True:
                probe.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if not probe.recv(65536):
                    break
        reader.sendall(b"HEAD /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in reader.recv(65536)
        assert site.server.admission.evicted_count == 1


def test_an_idle_connection_is_closed_in_the_end(site: Site) -> None:
    site.server._config.timeout_keep_alive = 0  # what `reader_idle_timeout_s` sets
    with site.connect() as line:
        line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"alive" in read_all(line)


def test_what_is_no_http_is_told_so(site: Site) -> None:
    for garbage in (
        b"\x80\x00\x00\x00garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /%zz\x00 HTTP/1.1\r\n\r\n",
    ):
        with site.connect() as line:
            line.sendall(garbage)
            answer = read_all(line)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"urn:dcp-mirror:bad-request" in answer
    site.get("/livez")


def test_a_head_without_an_end_is_bounded(site: Site) -> None:
    with site.connect() as line:
        line.sendall(b"GET /livez HTTP/1.1\r\nX: " + b"x" * (HEAD_BYTES_MAX + 1))
        assert read_all(line).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "rest", [b"0\r\nX: " + b"x" * FRAMING_BYTES_MAX, b"2;" + b"x" * FRAMING_BYTES_MAX], ids=["trailer", "extension"]
)
@pytest.mark.parametrize("path", [b"POST /v1/collections/_default/multi-get", b"GET /livez"])
def test_a_chunked_body_whose_framing_has_no_end_is_refused(site: Site, path: bytes, rest: bytes) -> None:
    """Trailers and extensions of chunks once had no bound: they were kept, and copied with each piece that came."""
    head = b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    with site.connect() as line:
        line.sendall(path + head + rest + b"x" * 2 * SLICE_BYTES)
        answer = read_all(line)
        assert b"HTTP/1.1 400 " in answer
        assert b"have no end" in answer


def test_a_body_beyond_its_limit_is_refused_whatever_it_claims(site: Site) -> None:
    head = b"POST /v1/collections/_default/multi-get HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    for framing, body in (
        (b"Content-Length: 99999999\r\n\r\n", b""),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"fffff\r\n" + b" " * 0xFFFFF + b"\r\nfffff\r\n" + b" " * 0xFFFF),
    ):
        with site.connect() as line:
            line.sendall(head + framing + body)
            assert line.recv(65536).startswith(b"HTTP/1.1 413 ")
    site.get("/livez")


def test_a_reader_that_takes_nothing_of_a_large_document_is_hung_up_on(site: Site) -> None:
    site.source.put("big", b"x" * (16 << 20), datatype=0)
    site.server.gate.send_timeout_s = 0.2
    budget = site.server.service.budget
    with site.connect() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sendall(f"GET {site.document('big')} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        eventually_now(lambda: budget.out_bytes == 16 << 20)
        eventually_now(lambda: budget.out_bytes == 0)
    eventually_now(lambda: connections(site) == 0)
    assert site.get("/livez").json() == {"status": "alive"}


def test_slow_readers_together_hold_no_more_than_the_budget(site: Site) -> None:
    site.source.put("big", b"x" * (16 << 20), datatype=0)
    site.server.service.budget._bytes_max = 20 << 20
    with site.connect() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sendall(f"GET {site.document('big')} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        eventually_now(lambda: site.server.service.budget.out_bytes)
        assert site.get(site.document("big"), 503).json()["type"] == "urn:dcp-mirror:too-busy"
        site.get("/livez")
    eventually_now(lambda: site.server.service.budget.out_bytes == 0)
    assert len(site.get(site.document("big")).content) == 16 << 20


def test_pipelined_requests_are_answered_in_order(site: Site) -> None:
    site.source.put("a", b"1")
    one = f"GET {site.document('a')} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    last = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with site.connect() as line:
        line.sendall(one * 50 + last)
        answer = read_all(line)
    assert answer.count(b"HTTP/1.1 200 OK") == 51
    assert answer.endswith(b'{"status":"alive"}')


def test_what_is_asked_far_ahead_waits_as_bytes_and_is_answered_in_order(site: Site) -> None:
    asked = 5_000
    site.server.admission.limits = Limits(login_timeout_s=600)  # nobody logs in, and a busy machine may take its time
    one = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1000 + b"\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    held: list[tuple[int, int]] = []

    async def look() -> None:
        for each in site.server.gate.state.connections:
            assert isinstance(each, BoundedProtocol)
            held.append((len(each._unparsed), len(each.pipeline)))

    with site.connect() as line:
        sender = threading.Thread(target=line.sendall, args=(one * asked + last,))
        sender.start()
        answer = bytearray()
        while chunk := line.recv(1 << 20):
            answer += chunk
            if len(held) < 200:
                site.call(look())
        sender.join(30)
    assert answer.count(b"HTTP/1.1 200 OK") == asked + 1
    unparsed, waiting = (max(each) for each in zip(*held, strict=True))
    assert 0 < unparsed <= 2 * 256 * 1024, "of five megabytes"
    assert 0 < waiting <= SLICE_BYTES // 16


def test_garbage_after_requests_is_told_once_they_are_answered(site: Site) -> None:
    with site.connect() as line:
        line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3 + b"\x00garbage\r\n\r\n")
        answer = read_all(line)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"400"]
    assert b"urn:dcp-mirror:bad-request" in answer


def test_garbage_in_a_body_is_the_fault_of_its_request(site: Site) -> None:
    head = b"POST /v1/collections/_default/multi-get HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with site.connect() as line:
        line.sendall(head + b"no length\r\n")
        assert read_all(line).startswith(b"HTTP/1.1 400 ")
    eventually_now(lambda: connections(site) == 0)


@pytest.mark.parametrize("hosts", [b"", b"Host: localhost\r\nHost: other\r\n"])
def test_a_request_names_one_host(site: Site, hosts: bytes) -> None:
    with site.connect() as line:
        line.sendall(b"GET /livez HTTP/1.1\r\n" + hosts + b"\r\n")
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"it names no host, or several" in answer


def test_who_wants_another_protocol_is_answered_in_this_one_and_asked_to_come_again(site: Site) -> None:
    """As curl --http2 does."""
    more = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n\r\n"
    with site.connect() as line:
        line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + more)
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"connection: close" in answer


def test_an_answer_says_when_it_was_given(site: Site) -> None:
    answer: Any = site.get("/livez")
    assert answer.headers["date"].endswith("GMT")
    assert answer.headers.get_list("date") == [answer.headers["date"]]
    site.call(asyncio.sleep(0))


def test_a_request_with_too_many_headers_is_refused(site: Site) -> None:
    for count, status in ((HEADERS_MAX - 1, b"200"), (HEADERS_MAX, b"400")):
        with site.connect() as line:
            line.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * (count - 1))
            line.sendall(b"Connection: close\r\n\r\n")
            assert read_all(line).split(b" ", 2)[1] == status
