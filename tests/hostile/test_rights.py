"""A user of one collection, or a client without a login, gets no document of another, and disturbs no other client."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest

from mirror.serve.http.requests import from_base64url, to_base64url
from mirror.wire import codec_dcp, codec_kv
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.codec_kv import ScanLimits
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.sasl import ScramClient
from storage.format.keys import vbid_of
from storage.model import SEQNO_MAX
from tests.crash.service import LIMIT_S, until
from tests.hostile.site import BOB, PASSWORD, USER, Http, Kv, Site, attacked, write_users
from tests.oracle import kv_client

VBID = vbid_of(b"secret", 16)
LAST = 0xBEEF
HIDDEN = (b"TOPSECRET", base64.b64encode(b"TOPSECRET"), b"salaries")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rights")


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    with attacked(folder) as served:
        yield served


OPEN: list[Kv | Http] = []


def kv(port: int, *, user: str = USER, login: bool = True) -> Kv:
    """A KV or DCP client that is closed at the end of its test."""
    client = Kv(port, user=user, login=login)
    OPEN.append(client)
    return client


def web(port: int, *, user: str = USER, login: bool = True) -> Http:
    client = Http(port, user=user, login=login)
    OPEN.append(client)
    return client


@pytest.fixture(autouse=True)
def unharmed(site: Site) -> Iterator[None]:
    """After each attack the processes are those of before, and others read."""
    processes = {kind: process.pid for kind, process in site.servers().items()}
    yield
    while OPEN:
        OPEN.pop().close()
    for client in (kv(site.kv), web(site.http)):
        client.read()
        client.close()
    assert {kind: process.pid for kind, process in site.servers().items()} == processes


def shows_nothing(answer: bytes) -> None:
    assert not [text for text in HIDDEN if text in answer], answer[:500]


def received(line: socket.socket, seconds: float = 0.3) -> bytes:
    """Return all bytes until the peer is silent or hangs up."""
    line.settimeout(seconds)
    data = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while more := line.recv(1 << 20):
            data += more
    return data


def test_the_secret_is_readable_for_a_user_with_the_right(site: Site) -> None:
    assert b"TOPSECRET" in web(site.http).get("/v1/collections/hr.salaries/documents/secret")[1]
    client = kv(site.kv)
    client.ask(kv_client.hello(b"x", [Feature.COLLECTIONS]))
    assert b"TOPSECRET" in client.ask(fr.request(Opcode.GET, key=b"\x09secret", vbucket=VBID)).value


def test_a_collection_is_refused_in_every_spelling_of_its_name(site: Site) -> None:
    client = web(site.http, user=BOB)
    plain = (
        "hr.salaries 9 09 +9 9.0 0x9 \uff19 \u0669 HR.SALARIES .salaries hr..salaries 4294967305 -4294967287 9,0 * hr.*"
    )
    for name in (*plain.split(), " 9", "9 ", "hr.salaries\0", "_default._default/../hr.salaries"):
        for spelt in {quote(name, safe=""), quote(name, safe="./*+"), quote(quote(name, safe=""), safe="")}:
            for path in ("documents/secret", "documents", f"documents?vbid={VBID}", f"documents?as_of=11&vbid={VBID}"):
                status, body = client.get(f"/v1/collections/{spelt}/{path}")
                assert status in (400, 403, 404), (name, path)
                assert b"TOPSECRET" not in body
            status, body = client.post(f"/v1/collections/{spelt}/multi-get", b'{"keys":["secret"]}')
            assert status in (400, 403, 404)
            status, body = client.get(f"/v1/changes?follow=false&collection={spelt}")
            assert status in (400, 403, 404)


def test_existing_and_missing_documents_are_refused_with_the_same_text(site: Site) -> None:
    """With conditional requests, too: an ETag or 304 would say that a document is there."""
    client = web(site.http, user=BOB)
    head = client.head
    since = "If-Modified-Since: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    for condition in ("", "If-None-Match: *\r\n", "Range: bytes=0-0\r\n", since):
        client.head = head + condition
        found = {client.get(f"/v1/collections/hr.salaries/documents/{key}") for key in ("secret", "missing")}
        found |= {client.get("/v1/collections/hr.nothing/documents/secret")}
        assert len(found) == 1
        assert found.pop()[0] == 403
    bodies = [b'{"keys":["%s"]}' % key for key in (b"secret", b"missing")]
    assert len({client.post("/v1/collections/9/multi-get", body) for body in bodies}) == 1
    reader = kv(site.kv, user=BOB)
    reader.ask(kv_client.hello(b"x", [Feature.COLLECTIONS, Feature.XERROR]))
    answers = [
        reader.ask(fr.request(Opcode.GET, key=b"\x09" + key, vbucket=vbid_of(key, 16)))
        for key in (b"secret", b"missing")
    ]
    assert len({(each.status, each.value) for each in answers}) == 1


def test_a_foreign_or_forged_page_token_shows_no_document(site: Site) -> None:
    ann, bob = web(site.http), web(site.http, user=BOB)
    scan = "/v1/collections/{}/documents?limit=1"
    tokens = []
    for collection in ("_default", "hr.salaries"):
        body = ann.get(scan.format(collection) + f"&vbid={VBID}")[1]
        page = json.loads(body)["next"] or json.loads(ann.get(scan.format(collection))[1])["next"]
        tokens.append(json.loads(from_base64url(page)) if page else None)
    whole = next(token for token in tokens if token)
    forged = []
    for at, values in enumerate([(2,), range(16), range(3), (0, 11, 2**63), (), (0,), ("",), (0, 8, 9, 2**31), ("",)]):
        forged += [[*whole[:at], value, *whole[at + 1 :]] for value in values]
    forged += [[*each[:7], 9, *each[8:]] for each in list(forged)]
    for token in forged:
        text = to_base64url(json.dumps(token).encode())
        for collection in ("_default", "9"):
            status, body = bob.get(f"/v1/collections/{collection}/documents?page={text}&limit=1")
            assert status in (200, 400, 403, 404, 410), (status, token)
            shows_nothing(body)


def test_changes_show_neither_documents_nor_names_of_other_collections(site: Site) -> None:
    """From the beginning, from positions of others, and by the header that goes before the parameter."""
    seen = web(site.http).changes(f"&vbid={VBID}")
    assert b"TOPSECRET" in seen
    positions = [line.removeprefix(b"id: ").decode() for line in seen.split(b"\n") if line.startswith(b"id: ")]
    for query, header in [
        ("", ""),
        *((f"&since={each}", "") for each in positions),
        *(("&since=now", f"Last-Event-ID: {each}\r\n") for each in positions),
    ]:
        bob = web(site.http, user=BOB)
        answer = bob.changes(f"&vbid={VBID}{query}", header)
        assert answer.startswith(b"HTTP/1.1 200")
        shows_nothing(answer)
        assert b"secret" not in answer, "nor its key"
        bob.close()


def test_another_collection_is_refused_by_every_opcode_and_key_encoding(site: Site) -> None:
    """Every opcode, with collection ids longer than they need to be, and with collections switched off again."""
    keys = [
        prefix + b"secret"
        for prefix in (b"\x09", b"\x89\x00", b"\x89\x80\x00", b"\x89\x80\x80\x80\x00", b"\x89\x80\x80\x80\x10")
    ]
    lookup = kv_client.encode_lookup_specs([codec_kv.LookupSpec(int(Opcode.SUBDOC_GET), b"secret", 0)])
    for opcode in range(256):
        if opcode in (Opcode.SASL_AUTH, Opcode.QUIT, Opcode.QUITQ, Opcode.SASL_STEP):
            continue
        client = kv(site.kv, user=BOB)
        client.ask(kv_client.hello(b"x", [Feature.COLLECTIONS, Feature.XATTR, Feature.JSON, Feature.SNAPPY]))
        for key in keys:
            for extras, value in ((b"", b""), (b"", lookup), (b"\0\6\0", b"secret"), (bytes(4), b""), (b"\2", b"")):
                with contextlib.suppress(OSError):
                    client.send(fr.request(opcode, key=key, extras=extras, value=value, vbucket=VBID))
        answer = b""
        with contextlib.suppress(OSError):
            client.send(kv_client.noop(opaque=LAST))
            while (found := client.receive()).opaque != LAST:
                answer += found.key + found.value
        assert b"TOPSECRET" not in answer, opcode
        client.close()
    client = kv(site.kv, user=BOB)
    client.ask(kv_client.hello(b"x", [Feature.COLLECTIONS]))
    client.ask(kv_client.hello(b"x", []))
    for key in keys:
        assert client.ask(fr.request(Opcode.GET, key=key, vbucket=VBID)).status != 0


def test_a_range_scan_belongs_to_the_user_who_began_it(site: Site) -> None:
    """Nor does a user who logs in on the connection of another, or fails to, keep the other's rights."""
    client = kv(site.kv)
    body = json.dumps({"collection": "9", "range": {"start": "AA==", "end": "/w=="}}).encode()
    made = client.ask(fr.request(Opcode.RANGE_SCAN_CREATE, value=body, datatype=1, vbucket=VBID))
    assert made.status == 0
    go_on = fr.request(
        Opcode.RANGE_SCAN_CONTINUE, extras=kv_client.encode_scan_continue(ScanLimits(made.value)), vbucket=VBID
    )
    assert client.log_in(BOB) == 0
    assert client.ask(go_on).status == Status.EACCESS
    again = client.ask(fr.request(Opcode.RANGE_SCAN_CREATE, value=body, datatype=1, vbucket=VBID))
    assert again.status == Status.UNKNOWN_COLLECTION
    assert client.log_in(USER, "wrong") == Status.AUTH_ERROR
    assert client.ask(fr.request(Opcode.GET, key=b"small")).status == Status.EACCESS
    other = kv(site.kv, user=BOB)
    assert other.ask(go_on).status == Status.KEY_ENOENT


def test_an_unreadable_and_an_unknown_collection_id_get_the_same_status(site: Site) -> None:
    """KV and DCP gave one status for a collection that may not be read, and another for one that does not exist."""

    def by_http(number: int) -> list[object]:
        bob = web(site.http, user=BOB)
        base = f"/v1/collections/{number}/documents"
        return [bob.get(path)[0] for path in (f"{base}/secret", base, f"/v1/changes?follow=false&collection={number}")]

    def by_kv(number: int) -> list[object]:
        client = kv(site.kv, user=BOB)
        client.ask(kv_client.hello(b"x", [Feature.COLLECTIONS, Feature.XATTR, Feature.JSON]))
        scan = json.dumps({"collection": f"{number:x}", "range": {"start": "AA==", "end": "/w=="}}).encode()
        frames = [fr.request(opcode, key=bytes([number]) + b"secret", vbucket=VBID) for opcode in GETTERS]
        frames.append(fr.request(Opcode.RANGE_SCAN_CREATE, value=scan, datatype=1, vbucket=VBID))
        seqnos = bytes(3) + b"\1" + number.to_bytes(4, "big")
        frames.append(fr.request(Opcode.GET_ALL_VB_SEQNOS, extras=seqnos))
        answers = [client.ask(each) for each in frames]
        assert all(each.status for each in answers)
        return [(each.status, each.value) for each in answers]

    def by_dcp(number: int) -> list[object]:
        client = kv(site.dcp, user=BOB)
        client.ask(kv_client.hello(b"x", [Feature.COLLECTIONS, Feature.XATTR]))
        client.ask(kv_client.select_bucket(b"orders"))
        value = b'{"collections":["%x"]}' % number
        request = ev.StreamRequest(VBID, 0, 0, SEQNO_MAX, 0, 0, 0, value, opaque=7)
        for event in (ev.DcpOpen(b"bob", 1, opaque=1), ev.DcpControl(b"enable_noop", b"true", opaque=2), request):
            client.line.sendall(codec_dcp.encode(event))
        while (answer := client.receive()).opaque != 7:
            pass
        assert answer.status
        return [answer.status, answer.value]

    for ask in (by_http, by_kv, by_dcp):
        assert ask(9) == ask(77), "9 exists, and bob may not read it"


GETTERS = (Opcode.GET, Opcode.GET_META, Opcode.GET_REPLICA, Opcode.SUBDOC_GET)


@pytest.mark.parametrize(
    "value",
    [
        b"", b"{}", b'{"collections":[]}', b'{"collections":["9"]}', b'{"collections":["0","9"]}',
        b'{"collections":["09"]}', b'{"collections":["0x9"]}', b'{"collections":[9]}',
        b'{"collections":["0"],"collections":["9"]}', b'{"scope":"8"}', b'{"scope":"0","collections":["9"]}',
        b'{"uid":"0","collections":["100000009"]}', b'{"scope":8}',
    ],
)  # fmt: skip
def test_another_collection_is_refused_by_every_stream_filter(value: bytes, site: Site) -> None:
    client = kv(site.dcp, user=BOB)
    client.ask(kv_client.hello(b"x", [Feature.COLLECTIONS, Feature.XATTR]))
    assert client.ask(kv_client.select_bucket(b"orders")).status == 0
    request = ev.StreamRequest(VBID, 0, 0, SEQNO_MAX, 0, 0, 0, value, opaque=7)
    for event in (ev.DcpOpen(b"bob", 1, opaque=1), ev.DcpControl(b"enable_noop", b"true", opaque=2), request):
        client.line.sendall(codec_dcp.encode(event))
    while (answer := client.receive()).opaque != 7:
        pass
    shows_nothing(answer.value + (b"" if answer.status else received(client.line)))


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", "Content-Length: 5\r\nContent-Length: 0\r\n",
        "Content-Length: 0, 5\r\n", "Content-Length: +0\r\n", "Content-Length: -1\r\n", "Content-Length: 0x10\r\n",
        "Transfer-Encoding: xchunked\r\n", "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding : chunked\r\n", "Transfer-Encoding:\r\n chunked\r\n",
        "X: a\r\n\x0bContent-Length: 0\r\n", "X: a\rContent-Length: 5\r\n",
    ],
)  # fmt: skip
def test_a_request_of_ambiguous_length_does_not_hide_another_request(framing: str, site: Site) -> None:
    """Two readers of such bytes, a proxy and the mirror, would not agree where the next request begins."""
    bob = web(site.http, user=BOB)
    hidden = "GET /v1/collections/hr.salaries/documents/secret HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST /v1/collections/_default/multi-get HTTP/1.1\r\n{bob.head}{framing}\r\n0\r\n\r\n{hidden}"
    bob.line.sendall(head.encode("latin-1"))
    answer = received(bob.line, 1.0)
    shows_nothing(answer)
    assert answer.count(b"HTTP/1.1 ") <= 1 or b"HTTP/1.1 40" in answer
    assert b"HTTP/1.1 200" not in answer


@pytest.mark.parametrize(
    "lines",
    [
        "Authorization: Basic {bob}\r\nAuthorization: Basic {wrong}\r\n",
        "Authorization: Basic {wrong}\r\nAuthorization: Basic {ann}\r\n",
        "Authorization: Basic {nul}\r\n",
        "Authorization: Basic {ann}, Basic {bob}\r\n",
        "Proxy-Authorization: Basic {ann}\r\n",
        "Authorization: Basic {bob}\r\nX-Forwarded-User: ann\r\nRemote-User: ann\r\n",
        "Authorization: Bearer {ann}\r\n",
        "Authorization: Basic {name}\r\n",
        "Cookie: Authorization=Basic {ann}\r\nAuthorization: Basic {bob}\r\n",
    ],
)
def test_a_forged_header_does_not_give_the_rights_of_another_user(lines: str, site: Site) -> None:
    def basic(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    words = {"ann": basic(f"{USER}:{PASSWORD}"), "bob": basic(f"{BOB}:{PASSWORD}"), "wrong": basic(f"{USER}:wrong")}
    words |= {"nul": basic(f"{USER}:{PASSWORD}\0"), "name": basic(f"{USER}\0:{PASSWORD}")}
    for target in (
        "/v1/collections/9/documents/secret",
        f"http://{USER}:{quote(PASSWORD)}@localhost/v1/collections/9/documents/secret",
    ):
        client = web(site.http, login=False)
        status, body = client.ask(f"GET {target} HTTP/1.1\r\n{client.head}{lines.format(**words)}\r\n".encode())
        assert status in (400, 401, 403, 404)
        shows_nothing(body)


@pytest.mark.parametrize(
    "first",
    [
        b"n,a=ann,n=bob,r=abcdefgh",
        b"p=tls-unique,,n=bob,r=abcdefgh",
        b"n,,n=ann,r=abc,n=bob",
        b"n,,n=bob\0,r=abcdefgh",
        b"n,,n=" + b"b" * 4000 + b",r=abcdefgh",
        b"n,,m=ext,n=bob,r=abcdefgh",
        b"n,,n=,r=abcdefgh",
        b"n,,n==2C,r=",
        b"\xff\xfe",
    ],
)
def test_a_forged_first_login_message_does_not_change_the_user(first: bytes, site: Site) -> None:
    client, exchange = kv(site.kv, login=False), ScramClient("SCRAM-SHA512", BOB, PASSWORD, nonce="abcdefgh")
    exchange.first()
    challenge = client.ask(kv_client.sasl_auth(b"SCRAM-SHA512", first))
    if challenge.status == Status.AUTH_CONTINUE:
        final = exchange.final(challenge.value)
        assert client.ask(kv_client.sasl_step(b"SCRAM-SHA512", final)).status == Status.AUTH_ERROR
    assert client.ask(fr.request(Opcode.GET, key=b"small")).status == Status.EACCESS


@pytest.mark.parametrize("kind", ["pipe", "directory", "missing", "not JSON", "too large", "no user"])
def test_an_unreadable_users_file_leaves_the_previous_users(kind: str, site: Site, folder: Path) -> None:
    """A pipe in its place stopped each process at its next login, until the supervisor killed it."""
    path = folder / "users.json"
    kept = path.read_bytes()
    path.unlink()
    try:
        if kind == "pipe":
            os.mkfifo(path, 0o600)
        elif kind == "directory":
            path.mkdir()
        elif kind != "missing":
            path.write_bytes({"not JSON": b"{", "too large": b" " * (9 << 20), "no user": b'{"users": []}'}[kind])
        for user in (USER, BOB):
            for client in (kv(site.kv, user=user), kv(site.dcp, user=user)):
                client.read()
                client.close()
            assert web(site.http, user=user).get("/v1/collections/_default/documents/small")[0] == 200
    finally:
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(kept)


def test_a_removed_user_gets_no_answer_on_an_open_connection(site: Site, folder: Path) -> None:
    """Pipelined requests, and a login of before, on every port."""
    clients = [kv(site.kv, user=BOB), kv(site.dcp, user=BOB)]
    page = web(site.http, user=BOB)
    for client in clients:
        client.read()
    page.read()
    kept = (folder / "users.json").read_bytes()
    write_users(folder, USER)
    try:
        assert page.get("/v1/collections/_default/documents/small")[0] == 401
        for client in clients:
            until("the server to hang up", partial(gone, client))
            assert kv(site.kv, login=False).log_in(BOB) == Status.AUTH_ERROR
    finally:
        (folder / "users.json").write_bytes(kept)


def gone(client: Kv) -> bool:
    """True once the server hung up."""
    client.line.settimeout(LIMIT_S)
    try:
        client.send(fr.request(Opcode.GET, key=b"small"))
        return client.receive().status == Status.EACCESS
    except OSError:
        return True


def test_password_guesses_that_hang_up_early_count_as_failures(site: Site) -> None:
    def failed() -> int:
        row = next(row for row in (site.service.status() or {})["servers"] if row["kind"] == "kv")
        return int(row["counters"].get("kv_failed_logins", 0))

    before = failed()
    for number in range(60):
        client = kv(site.kv, login=False)
        client.send(kv_client.sasl_auth(b"PLAIN", f"\0{USER}\0guess{number}".encode()))
        received(client.line, 0.01)
        client.close()
    until("the failures to be counted", lambda: failed() >= before + 60)
