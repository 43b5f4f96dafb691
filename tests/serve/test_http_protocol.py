"""Connections that misbehave: too many, too slow, too greedy, or no HTTP at all; each harms itself alone."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mirror.config import Settings
from mirror.serve.http import protocol as http_protocol
from mirror.serve.http import requests as http_requests
from mirror.serve.http.framing import CHUNK_LINE_BYTES_MAX, HEAD_BYTES_MAX, HEADERS_MAX
from mirror.serve.http.protocol import READ_BYTES
from mirror.serve.http.service import BUDGETED_BYTES
from mirror.server.admission import IDLE_TIMEOUT_S
from tests.serve.http_site import Site, recorded_at_once, request
from tests.supervise.conftest import eventually_now

LIVEZ, HOST = b"GET /livez HTTP/1.1\r\n", b"Host: localhost\r\n"
MULTI_GET = b"POST /v1/collections/_default/multi-get HTTP/1.1\r\n" + HOST
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def read_one(line: socket.socket) -> bytes:
    """Read an answer, and drop its date."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += line.recv(1)
    length = re.search(rb"content-length: (\d+)", found)
    for _ in range(int(length[1]) if length else 0):
        found += line.recv(1)
    return re.sub(rb"date: [^\r]*\r\n", b"", found)


@pytest.mark.parametrize("line", [b"X y: 1", b"Content-Length: 4", b"Transfer-Encoding: chunked", b": x", b"X"])
def test_a_refused_request_head_has_one_answer_with_any_body(
    site: Site, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The body behind it was given to a server that was gone: a traceback in the log."""
    answer = site.raw(MULTI_GET + b"Content-Length: 4\r\n" + line + b"\r\n\r\nabcd")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert [each.name for each in caplog.records if each.name == "asyncio"] == []


@pytest.mark.parametrize(
    ("key", "headers", "status"),
    [
        ("a", "", 200),
        ("a?form=stored", "", 200),
        ("a?as_of=1", "", 200),
        ("a", "If-None-Match: *\r\n", 304),
        ("none", "", 404),
        ("a?unknown=1", "", 400),
        ("a?as_of=soon", "", 400),
        ("a", "Sec-Fetch-Site: cross-site\r\n", 403),
        ("a", "Authorization: Basic !\r\n", 401),
    ],
)
def test_an_answer_at_once_equals_that_of_the_application(site: Site, key: str, headers: str, status: int) -> None:
    """A head that is not plain ASCII is for the server's parser."""
    site.source.put("a", b'{"v":1}', flags=7, expiry=2**32 - 1)
    sent = f"GET {site.document(key)} HTTP/1.1\r\nHost: localhost\r\n{headers}".encode()
    at_once, answers = recorded_at_once(site), site.server.service.requests.answers
    with site.connect() as line:
        line.sendall(sent + b"\r\n")
        answer = read_one(line)
        (once,) = answers.items()
        line.sendall(sent + b"X: \xe9\r\n\r\n")
        assert read_one(line) == answer
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        line.sendall(request("/livez"))
        read_one(line)  # what was before is counted
    assert answers[once[0]] == 2 * once[1] == 2
    assert at_once == [True, False], "`/livez` is for the application"


def test_a_request_that_may_wait_or_is_sent_in_pieces_is_not_answered_at_once(site: Site) -> None:
    site.source.put("a", b"1")
    site.source.put("large", b"x" * (BUDGETED_BYTES + 1), datatype=0)
    at_once = recorded_at_once(site)
    assert len(site.get(site.document("large")).content) == BUDGETED_BYTES + 1
    token = f"{site.source.vbid_of(b'a')}:{0xABCD}:1"
    site.get(site.document("a"), params={"token": token})
    site.client.head(site.document("a"))
    site.get("/livez")
    site.get(site.document("a"), headers={"Connection": "close"})
    assert at_once == [False] * 3


def test_pipelined_requests_are_not_answered_at_once(site: Site) -> None:
    """Or the other connections would wait for all that one client requested ahead."""
    site.source.put("a", b"1")
    at_once = recorded_at_once(site)
    with site.connect() as line:
        line.sendall(request(site.document("a")) * 3)
        assert len({read_one(line) for _ in range(3)}) == 1
    assert at_once == []


def test_half_a_request_behind_an_answered_one_times_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "REQUEST_TIMEOUT_S", 0.1)
    with contextlib.suppress(ConnectionResetError):
        assert site.raw(request(site.document("a")) + b"GET /liv").startswith(b"HTTP/1.1 404 ")


def test_garbage_behind_an_answered_request_ends_the_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.1)
    with site.connect() as line:
        line.sendall(request(site.document("a")) + b"\x00garbage\r\n\r\n")
        assert [part[:3] for part in line.makefile("rb").read().split(b"HTTP/1.1 ")[1:]] == [b"404", b"400"]
        eventually_now(lambda: connections(site) == 0)


def test_the_time_of_an_idle_connection_begins_with_its_last_answer(site: Site) -> None:
    async def ask(idle_s: float) -> bool:
        (connection,) = site.server.gate.connections
        connection.sweep(site.loop.time() + idle_s)
        return connection.is_closing()

    for path in (site.document("a"), "/livez"):
        with site.connect() as line:
            line.sendall(request(path))
            assert read_one(line)
            assert not site.call(ask(IDLE_TIMEOUT_S - 1))
            assert site.call(ask(IDLE_TIMEOUT_S + 1))
            assert line.makefile("rb").read() == b""


def connections(site: Site) -> int:
    return len(site.server.gate.connections)


def test_more_connections_than_allowed_are_turned_away_and_the_others_go_on(site: Site) -> None:
    site.server.admission.settings = Settings(reader_connections_max=2)
    sent = request(site.document("a"))
    with site.connect() as one, site.connect() as two:
        for line in (one, two):
            line.sendall(sent)
            assert line.recv(65536)
        answer = site.raw(b"")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"urn:dcp-mirror:too-busy" in answer
        one.sendall(request("/livez", "Connection: close"))
        assert b"alive" in one.makefile("rb").read()
    eventually_now(lambda: connections(site) == 0)
    assert site.server.admission.rejected_count == 1
    site.get("/livez")


@pytest.mark.parametrize("said", [b"", b"GET /livez HT", b"POST /v1/collections/a/multi-get HTTP/1.1\r\nHost: a\r\n"])
def test_a_client_that_does_not_finish_a_request_is_disconnected(
    site: Site, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "REQUEST_TIMEOUT_S", 0.1)
    with contextlib.suppress(ConnectionResetError):
        assert site.raw(said) == b""
    eventually_now(lambda: connections(site) == 0)


@pytest.mark.parametrize(
    "said",
    [
        LIVEZ + HOST + b"X: ",
        b"POST /v1/collections/_default/multi-get HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n",
    ],
    ids=["head", "body"],
)
def test_single_slow_bytes_do_not_extend_the_timeout(site: Site, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow heads and slow bodies: the time for a request is not begun again by each byte."""
    monkeypatch.setattr(http_protocol, "REQUEST_TIMEOUT_S", 0.3)
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


def test_a_connection_without_a_login_times_out_and_one_with_a_login_stays(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.server.admission.LOGIN_TIMEOUT_S", 0.3)
    with site.connect() as probe, site.connect() as reader:
        reader.sendall(request(site.document("a"), method="HEAD"))
        assert b" 404 " in reader.recv(65536)
        with contextlib.suppress(ConnectionError):
            while True:
                probe.sendall(request("/livez"))
                if not probe.recv(65536):
                    break
        reader.sendall(request("/livez", method="HEAD"))
        assert b" 200 " in reader.recv(65536)
        assert site.server.admission.evicted_count == 1


@pytest.mark.parametrize("path", ["/livez", "/v1/collections/_default/documents/a"])
def test_an_idle_connection_times_out(site: Site, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "IDLE_TIMEOUT_S", 0)
    assert site.raw(request(path)).startswith(b"HTTP/1.1 ")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x80\x00\x00\x00garbage\r\n\r\n", b"not an HTTP request"),
        (b"GET / HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n", b"not an HTTP request"),
        (b"GET /%zz\x00 HTTP/1.1\r\n" + HOST + b"\r\n", b"not an HTTP request"),
        (MULTI_GET + CHUNKED + b"no length\r\n", b"not an HTTP request"),
        (LIVEZ + b"\r\n", b"it needs exactly one Host header"),
        (LIVEZ + HOST + b"Host: other\r\n\r\n", b"it needs exactly one Host header"),
        (LIVEZ + HOST + b"a: b\r\n" * HEADERS_MAX + b"\r\n", b"it has more than 100 headers"),
        (LIVEZ + b"X: " + b"x" * (HEAD_BYTES_MAX + 1), b"head is too long"),
    ],
    ids=["magic", "no colon", "target", "chunk", "no host", "two hosts", "many headers", "long head"],
)
def test_a_malformed_request_is_refused_with_the_reason(site: Site, sent: bytes, said: bytes) -> None:
    answer = site.raw(sent)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"urn:dcp-mirror:bad-request" in answer
    assert said in answer
    assert b"retry-after" not in answer.lower(), "the same request fails again"
    eventually_now(lambda: connections(site) == 0)
    site.get("/livez")


def test_a_request_with_the_maximum_of_headers_is_accepted(site: Site) -> None:
    more = b"a: b\r\n" * (HEADERS_MAX - 2) + b"Connection: close\r\n\r\n"
    assert site.raw(LIVEZ + HOST + more).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "rest",
    [
        b"0\r\nX: " + b"x" * HEAD_BYTES_MAX,
        b"0\r\n" + b"X: x\r\n" * (HEAD_BYTES_MAX // 6 + 1),
        b"2;" + b"x" * CHUNK_LINE_BYTES_MAX,
    ],
    ids=["trailer", "trailers", "extension"],
)
def test_a_chunked_body_whose_framing_has_no_end_is_refused(site: Site, rest: bytes) -> None:
    """Trailers and extensions of chunks once had no bound: they were kept, and copied with each piece that came."""
    answer = site.raw(MULTI_GET + CHUNKED + b"2\r\n{}\r\n" + rest)
    assert b"HTTP/1.1 400 " in answer
    assert b"are too long" in answer


@pytest.mark.parametrize("body", [b"Content-Length: 9\r\n\r\n{}", CHUNKED + b"2\r\n{}\r\n"], ids=["length", "chunks"])
def test_a_body_that_is_neither_read_nor_complete_ends_the_connection(site: Site, body: bytes) -> None:
    """The server would have to read it to its end, to find the next request."""
    answer = site.raw(LIVEZ + HOST + body)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    "body",
    [b"Content-Length: 99999999\r\n\r\n", CHUNKED + b"fffff\r\n" + b" " * 0xFFFFF + b"\r\nfffff\r\n" + b" " * 0xFFFF],
    ids=["length", "chunks"],
)
def test_a_body_beyond_its_limit_is_refused_with_any_declared_length(site: Site, body: bytes) -> None:
    with site.connect() as line:
        line.sendall(MULTI_GET + b"Connection: close\r\n" + body)
        assert line.recv(65536).startswith(b"HTTP/1.1 413 ")
    site.get("/livez")


def test_a_client_that_does_not_read_a_large_document_is_disconnected(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.source.put("big", b"x" * (16 << 20), datatype=0)
    monkeypatch.setattr(http_protocol, "SEND_TIMEOUT_S", 0.2)
    budget = site.server.service.budget
    with site.connect() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sendall(request(site.document("big")))
        eventually_now(lambda: budget.out_bytes == 16 << 20)
        eventually_now(lambda: budget.out_bytes == 0)
    eventually_now(lambda: connections(site) == 0)
    assert site.get("/livez").json() == {"status": "alive"}


def test_documents_of_a_page_count_against_the_budget_before_it_is_complete(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = site.server.service.budget
    counted = []
    judge = site.server.service.__class__.judge_at

    def judged(*given: Any, **more: Any) -> None:
        counted.append(budget.out_bytes)
        judge(*given, **more)

    monkeypatch.setattr(site.server.service.__class__, "judge_at", judged)
    keys = [site.source.key_of(vbid) for vbid in (0, 1, 2)]
    for key in keys:
        site.source.put(key, b'"' + b"x" * 100_000 + b'"')
    assert len(site.get("/v1/collections/_default/documents").json()["documents"]) == 3
    eventually_now(lambda: budget.out_bytes == 0)
    assert [each // 100_000 for each in counted[:4]] == [0, 1, 2, 3]
    budget._bytes_max = 250_000
    counted.clear()
    assert budget.try_take(1)
    assert site.get("/v1/collections/_default/documents", 503).json()["type"] == "urn:dcp-mirror:too-busy"
    assert len(counted) == 3
    eventually_now(lambda: budget.out_bytes == 1)


def test_requests_that_come_ahead_of_their_answers_take_turns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 clients that pipelined once kept others waiting for 0.4 s."""
    site.source.put("a", b"1")
    one = request(site.document("a"))
    last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    turns = site.server.gate.turns
    assert turns is site.server.service.turns, "large answers take them too"
    taken: list[None] = []

    def counted(step: Callable[[], object]) -> None:
        taken.append(None)
        turns.call(step)

    monkeypatch.setattr(site.server.gate, "turns", SimpleNamespace(call=counted))
    with site.connect() as line:
        for _ in range(5):
            line.sendall(one)
            assert b"200 OK" in line.recv(4096)
        assert not taken, "a client that waits for its answers is answered at once"
        line.sendall(one * 49 + last)
        assert line.makefile("rb").read().count(b"HTTP/1.1 200 OK") == 50
    assert len(taken) == 49, "all but the first"


def test_pipelined_requests_wait_as_bytes_and_are_answered_in_order(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 5_000
    monkeypatch.setattr("mirror.server.admission.LOGIN_TIMEOUT_S", 600)  # no client logs in
    one = LIVEZ + HOST + b"X: " + b"x" * 1000 + b"\r\n\r\n"
    last = request("/livez", "Connection: close")
    held: list[int] = []

    async def look() -> None:
        held.extend(each._framing.byte_count for each in site.server.gate.connections)

    with site.connect() as line:
        sender = threading.Thread(target=line.sendall, args=(one * sent + last,))
        sender.start()
        answer = bytearray()
        while chunk := line.recv(1 << 20):
            answer += chunk
            if len(held) < 200:
                site.call(look())
        sender.join(30)
    assert answer.count(b"HTTP/1.1 200 OK") == sent + 1
    assert 0 < max(held) <= 2 * READ_BYTES, "of five megabytes"


def test_garbage_after_requests_is_reported_once_they_are_answered(site: Site) -> None:
    answer = site.raw(request("/livez") * 3 + b"\x00garbage\r\n\r\n")
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"400"]
    assert b"urn:dcp-mirror:bad-request" in answer


KEYS = '{"keys":["a","none"]}'
QUESTIONS = {
    "GET": request("/v1/collections/_default/documents/a"),
    "POST": request("/v1/collections/_default/multi-get", method="POST", body=KEYS),
    "chunked POST": MULTI_GET + CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(KEYS), KEYS.encode()),
}


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "h2c, websocket"])
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("step", [1, 7, 10_000], ids="packets of {} bytes".format)
def test_an_upgrade_header_does_not_change_the_answer(site: Site, protocol: str, question: str, step: int) -> None:
    """Java's HttpClient, Ktor and `curl --http2` make this offer with every request, and lost their bodies."""
    site.source.put("a", b'{"v":1}')
    plain = QUESTIONS[question]
    line, _, rest = plain.partition(b"\r\n")
    offer = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
    offering = line + b"\r\n" + offer.encode() + rest
    with site.connect() as connection:
        connection.sendall(plain)
        expected = read_one(connection)
        assert expected.startswith(b"HTTP/1.1 200 OK")
        for sent in (offering, offering + plain, plain):  # pipelined, too, and the connection stays usable
            for at in range(0, len(sent), step):
                connection.sendall(sent[at : at + step])
            for _ in range(sent.count(line)):
                assert read_one(connection) == expected


def test_a_request_for_a_tunnel_is_refused_and_closed(site: Site) -> None:
    assert site.raw(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 4")


def test_an_answer_has_a_date_header(site: Site) -> None:
    (date,) = site.get("/livez").headers.get_list("date")
    assert date.endswith("GMT")
