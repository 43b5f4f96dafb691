"""Connections that misbehave: too many, too slow, too greedy, or no HTTP at all; each harms itself alone."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from typing import Any

import pytest

from mirror.config import Settings
from mirror.serve.http import protocol as http_protocol
from mirror.serve.http import requests as http_requests
from mirror.serve.http.protocol import HEAD_BYTES_MAX, READ_BYTES
from tests.serve.http_site import Site, request
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


def test_more_connections_than_allowed_are_closed_and_the_others_go_on(site: Site) -> None:
    site.server.admission.settings = Settings(reader_connections_max=2)
    sent = request(site.document("a"))
    with site.connect() as one, site.connect() as two:
        for line in (one, two):
            line.sendall(sent)
            assert line.recv(65536)
        assert site.raw(b"") == b""
        one.sendall(request("/livez", "Connection: close"))
        assert b"alive" in one.makefile("rb").read()
    eventually_now(lambda: connections(site) == 0)
    assert site.server.admission.rejected_count == 1
    site.get("/livez")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x80\x00\x00\x00garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + HOST + b"no colon\r\n\r\n",
        b"GET /%zz\x00 HTTP/1.1\r\n" + HOST + b"\r\n",
        MULTI_GET + CHUNKED + b"no length\r\n",
        MULTI_GET + b"Content-Length: 4\r\nTransfer-Encoding: x\r\n\r\nabcd",
        LIVEZ + b"\r\n",
        LIVEZ + HOST + b"Host: other\r\n\r\n",
        LIVEZ + b"X: " + b"x" * (HEAD_BYTES_MAX + READ_BYTES),
    ],
    ids=["magic", "no colon", "target", "chunk", "encoding", "no host", "two hosts", "long head"],
)
def test_a_malformed_request_is_refused(site: Site, sent: bytes) -> None:
    for before in (b"", request("/livez")):
        with contextlib.suppress(ConnectionResetError):  # what was not read resets the connection
            assert b"HTTP/1.1 400 " in site.raw(before + sent)
    eventually_now(lambda: connections(site) == 0)
    site.get("/livez")


def connections(site: Site) -> int:
    return len(site.server.gate.connections)


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
    with site.connect() as reader:
        reader.sendall(request(site.document("a"), method="HEAD"))
        assert b" 404 " in reader.recv(65536)
        monkeypatch.setattr("mirror.server.admission.LOGIN_TIMEOUT_S", 0.1)
        with site.connect() as probe, contextlib.suppress(ConnectionError):
            while True:
                probe.sendall(request("/livez"))
                if not probe.recv(65536):
                    break
        reader.sendall(request("/livez", method="HEAD"))
        assert b" 200 " in reader.recv(65536)
        assert site.server.admission.evicted_count == 1


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


def test_pipelined_requests_wait_as_bytes_and_are_answered_in_order(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 2_000
    monkeypatch.setattr("mirror.server.admission.LOGIN_TIMEOUT_S", 600)  # no client logs in
    one = LIVEZ + HOST + b"X: " + b"x" * 1000 + b"\r\n\r\n"
    last = request("/livez", "Connection: close")
    received, held = [0], [0]
    updated = http_protocol.HttpConnection.buffer_updated

    def noted(connection: http_protocol.HttpConnection, byte_count: int) -> None:
        received[0] += byte_count
        held[0] = max(held[0], received[0] - site.server.service.requests.request_total * len(one))
        updated(connection, byte_count)

    monkeypatch.setattr(http_protocol.HttpConnection, "buffer_updated", noted)
    with site.connect() as line:
        sender = threading.Thread(target=line.sendall, args=(one * sent + last,))
        sender.start()
        answer = line.makefile("rb").read()
        sender.join(30)
    assert answer.count(b"HTTP/1.1 200 OK") == sent + 1
    assert 0 < held[0] <= 3 * READ_BYTES, "of two megabytes"


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
