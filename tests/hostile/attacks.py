"""What an attacker does to a port, each in a process of its own and for as long as it is let."""

from __future__ import annotations

import base64
import contextlib
import json
import multiprocessing
import os
import secrets
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mirror.wire import codec_dcp, codec_kv
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec
from mirror.wire.constants import NO_END_SEQNO, DcpOpenFlag, Opcode
from storage.format.keys import vbid_of
from tests.hostile.site import LARGE_BYTES, Http, Kv, Site
from tests.oracle import kv_client
from tests.serve.kv_rig import ALL_FEATURES

XATTR_PATH = 4
CONNECTIONS = 2_000


@dataclass(frozen=True, slots=True)
class Attack:
    """One of them."""

    kind: str
    """The port whose second client is watched."""
    run: Callable[[Site], None]

    def __str__(self) -> str:
        return self.run.__name__


def lookup(key: bytes, path: bytes, flags: int) -> fr.Frame:
    specs = [LookupSpec(int(Opcode.SUBDOC_GET), path, flags)] * 16
    return fr.request(Opcode.SUBDOC_MULTI_LOOKUP, key=key, value=kv_client.encode_lookup_specs(specs))


def pipelined(site: Site, frame: fr.Frame, count: int) -> None:
    client = Kv(site.kv)
    while True:
        client.send(*[frame] * count)
        for _ in range(count):
            client.receive()


LARGE = lookup(b"large", b"$document.CAS", XATTR_PATH)
MIDDLE = lookup(b"middle", b"$document", XATTR_PATH)
PATHS = lookup(b"middle", b"a[-1]", 0)


def checksums_of_a_large_document(site: Site) -> None:
    """16 look-ups once froze everybody for 23 s."""
    pipelined(site, LARGE, 16)


def checksums_of_many_requests(site: Site) -> None:
    """128 of them once ended in the watchdog's SIGKILL."""
    pipelined(site, MIDDLE, 128)


def paths_of_many_requests(site: Site) -> None:
    """Others once waited 0.2 s."""
    for _ in range(7):
        threading.Thread(target=pipelined, args=(site, PATHS, 128), daemon=True).start()
    pipelined(site, PATHS, 128)


def wrong_passwords(site: Site) -> None:
    """588 guesses a second once took others from 0.03 to 22 ms."""
    clients: list[Kv] = []
    guess = codec_kv.sasl_auth(b"PLAIN", b"\0ann\0wrong")
    while True:
        while len(clients) < 16:
            clients.append(Kv(site.kv, login=False))
        for client in clients:
            with contextlib.suppress(OSError):
                client.send(guess)
        for client in list(clients):
            try:
                client.receive()
            except OSError:
                clients.remove(client)


def wrong_passwords_over_http(site: Site) -> None:
    token = base64.b64encode(b"ann:wrong").decode()
    client = Http(site.http, login=False)
    client.head += f"Authorization: Basic {token}\r\n"
    while True:
        try:
            client.get("/v1/status")
        except OSError:
            client = Http(site.http, login=False)


def silence(port: int, said: bytes = b"") -> None:
    """Connections that never log in; those that are closed are replaced."""
    lines: list[socket.socket] = []
    while True:
        with contextlib.suppress(OSError):
            lines.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            lines[-1].sendall(said)
        if len(lines) > CONNECTIONS:
            lines.pop(0).close()


def silence_before_tls(site: Site) -> None:
    """3,000 once took 634 MB of KV."""
    silence(site.kv_tls)


def silence_before_https(site: Site) -> None:
    """20,200 once took 6.2 GB."""
    silence(site.http_tls)


def silence_before_login(site: Site) -> None:
    """1,024 once kept everybody out for 600 s."""
    silence(site.kv, fr.encode(kv_client.noop()))


def heads_without_an_end(site: Site) -> None:
    silence(site.http, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")


def bodies_without_an_end(site: Site) -> None:
    token = base64.b64encode(b"ann:wrong").decode()
    head = f"Host: localhost\r\nAuthorization: Basic {token}\r\nContent-Length: 1000000\r\n\r\n"
    silence(site.http, f"POST /v1/collections/0/multi-get HTTP/1.1\r\n{head}".encode() + b"{")


def positions_that_unpack(site: Site) -> None:
    """8 KiB once stalled everybody for 1.25 s."""
    packed = base64.urlsafe_b64encode(zlib.compress(b"0:0:0," * 699_050)).rstrip(b"=").decode()
    client = Http(site.http)
    while True:
        assert client.get(f"/v1/changes?since=z{packed}&follow=false")[0] == 400


def parameters_without_number(site: Site) -> None:
    client = Http(site.http)
    while True:
        assert client.get("/v1/collections/0/documents?" + "&".join(["a=b"] * 12_000))[0] == 400


def streams_that_nobody_reads(site: Site) -> None:
    lines = []
    while True:
        client = Http(site.http)
        client.line.sendall(f"GET /v1/changes HTTP/1.1\r\n{client.head}\r\n".encode())
        lines.append(client)
        if len(lines) > 200:
            lines.pop(0).close()
            time.sleep(0.01)


def at_once(count: int, attack: Callable[[], None]) -> None:
    """The same by many connections, each of which begins again when it is closed."""

    def repeat() -> None:
        while True:
            with contextlib.suppress(OSError):
                attack()

    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def large_documents_over_http(site: Site) -> None:
    """Others once waited 1.8 s."""

    def read() -> None:
        client = Http(site.http)
        while True:
            client.get("/v1/collections/_default/documents/large")

    at_once(16, read)


def pages_with_large_documents(site: Site) -> None:
    """Whether 20 MiB are JSON was once found out in one step of 0.9 s."""

    def read() -> None:
        client = Http(site.http)
        while True:
            assert client.get("/v1/collections/_default/documents?limit=1000")[0] in (200, 503)

    at_once(8, read)


def multi_gets_of_large_documents(site: Site) -> None:
    def read() -> None:
        client = Http(site.http)
        while True:
            found = client.post("/v1/collections/_default/multi-get", b'{"keys": ["large", "middle"]}')
            assert found[0] in (200, 503)

    at_once(8, read)


def changes_with_large_documents(site: Site) -> None:
    def read() -> None:
        client = Http(site.http)
        client.line.sendall(f"GET /v1/changes?follow=false HTTP/1.1\r\n{client.head}\r\n".encode())
        while True:
            client._more()

    at_once(8, read)


def large_documents_over_kv(site: Site) -> None:
    def read() -> None:
        client = Kv(site.kv)
        while True:
            client.ask(fr.request(Opcode.GET, key=b"large"))

    at_once(8, read)


def scans_of_large_documents(site: Site) -> None:
    expected = b'{"range":{"start":"bGFyZ2U=","end":"bGFyZ2U="}}'

    def read() -> None:
        client = Kv(site.kv)
        vbid = vbid_of(b"large", 16)
        while True:
            made = client.ask(fr.request(Opcode.RANGE_SCAN_CREATE, vbucket=vbid, value=expected, datatype=1))
            assert made.status == 0, made
            extras = kv_client.encode_scan_continue(codec_kv.ScanLimits(made.value))
            answer = client.ask(fr.request(Opcode.RANGE_SCAN_CONTINUE, vbucket=vbid, extras=extras))
            assert len(answer.value) > LARGE_BYTES

    at_once(8, read)


def scans_that_wait(site: Site) -> None:
    """For a seqno that does not come: 1,024 of them once looked for it 200,000 times a second."""
    required = {"vb_uuid": "77", "seqno": 10**12, "timeout_ms": 60_000}
    body = {"range": {"start": "AA==", "end": "/w=="}, "snapshot_requirements": required}
    frame = fr.request(Opcode.RANGE_SCAN_CREATE, value=json.dumps(body).encode(), datatype=1)

    def wait() -> None:
        client = Kv(site.kv)
        client.ask(codec_kv.hello(b"", ALL_FEATURES))
        client.send(*[frame] * 64)
        while True:
            client.receive()

    at_once(16, wait)


def scans_that_are_not_continued(site: Site) -> None:
    body = b'{"range":{"start":"bGFyZ2U=","end":"bGFyZ2U="}}'
    frame = fr.request(Opcode.RANGE_SCAN_CREATE, vbucket=vbid_of(b"large", 16), value=body, datatype=1)
    clients = [Kv(site.kv) for _ in range(200)]
    while True:
        for client in clients:
            client.send(*[frame] * 64)
            for _ in range(64):
                client.receive()


def lists_of_features(site: Site) -> None:
    """Before a login: 60 KiB in each request."""
    frame = codec_kv.hello(b"", range(30_000))

    def ask() -> None:
        client = Kv(site.kv, login=False)
        while True:
            client.send(*[frame] * 8)
            for _ in range(8):
                client.receive()

    at_once(8, ask)


def long_names_and_passwords(site: Site) -> None:
    """Before a login: text that has to be prepared (RFC 4013), 60 KiB of it."""
    text = "\u00e9" * 15_000
    frames = (
        codec_kv.sasl_auth(b"PLAIN", f"\0{text}\0{text}".encode()),
        codec_kv.sasl_auth(b"SCRAM-SHA512", f"n,,n={text},r={text[:5000]}".encode()),
    )

    def ask() -> None:
        client = Kv(site.kv, login=False)
        for frame in frames * 2:
            client.ask(frame)
        client.close()

    at_once(8, ask)


def requests_in_single_bytes(site: Site) -> None:
    """60 KiB, a byte in each packet."""
    frame = fr.encode(fr.request(Opcode.GET, key=b"k" * 250, value=b"x" * 60_000))

    def trickle() -> None:
        client = Kv(site.kv)
        client.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(frame)):
            client.line.send(frame[at : at + 1])

    at_once(8, trickle)


def hellos_in_bulk(site: Site) -> None:
    """250 TLS handshakes begun in one moment, none of which goes on."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    hello = outgoing.read()
    while True:
        lines = []
        for _ in range(250):
            with contextlib.suppress(OSError):
                lines.append(socket.create_connection(("127.0.0.1", site.kv_tls), timeout=2))
        for line in lines:
            with contextlib.suppress(OSError):
                line.send(hello)
        time.sleep(0.15)
        for line in lines:
            line.close()


def tls_records_of_one_byte(site: Site) -> None:
    """Each is decrypted by itself; nobody has logged in."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE

    def trickle() -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = trusting.wrap_bio(incoming, outgoing)
        line = socket.create_connection(("127.0.0.1", site.kv_tls), timeout=10)
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                line.sendall(outgoing.read())
                incoming.write(line.recv(65536))
        noops = fr.encode(kv_client.noop()) * 1000
        for at in range(len(noops)):
            session.write(noops[at : at + 1])
        records = outgoing.read()
        line.sendall(records)
        line.close()

    at_once(4, trickle)


def streams_opened_and_closed(site: Site) -> None:
    """Of DCP."""

    def ask() -> None:
        client = Kv(site.dcp)
        client.ask(codec_kv.select_bucket(b"orders"))
        client.ask(codec_dcp.to_frame(ev.DcpOpen(secrets.token_hex(8).encode(), int(DcpOpenFlag.PRODUCER))))
        for _ in range(100):
            for vbid in set(range(16)) - {vbid_of(b"large", 16)}:
                request = ev.StreamRequest(vbid, 0, 0, NO_END_SEQNO, 0, 0, 0, opaque=vbid)
                client.send(codec_dcp.to_frame(request), codec_dcp.to_frame(ev.CloseStream(vbid, opaque=vbid)))
            client.line.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while client.line.recv(1 << 20):
                    pass
            client.line.setblocking(True)
        client.close()

    at_once(8, ask)


def connections_that_take_each_others_name(site: Site) -> None:
    """Of DCP."""

    def ask() -> None:
        client = Kv(site.dcp)
        client.ask(codec_kv.select_bucket(b"orders"))
        client.ask(codec_dcp.to_frame(ev.DcpOpen(b"the same", int(DcpOpenFlag.PRODUCER))))
        client.close()

    at_once(16, ask)


def bodies_in_chunks_of_one_byte(site: Site) -> None:
    """100,000 chunks were once one step of 14 ms."""

    def ask() -> None:
        client = Http(site.http)
        head = f"POST /v1/collections/0/multi-get HTTP/1.1\r\n{client.head}Transfer-Encoding: chunked\r\n\r\n".encode()
        while True:
            client.ask(head + b"1\r\n \r\n" * 100_000 + b"2\r\n{}\r\n0\r\n\r\n")

    at_once(8, ask)


def heads_in_single_bytes(site: Site) -> None:
    def trickle() -> None:
        client = Http(site.http)
        client.line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in f"GET / HTTP/1.1\r\n{client.head}X: {'x' * 50_000}".encode():
            client.line.send(bytes((byte,)))

    at_once(8, trickle)


def waits_for_writes(site: Site) -> None:
    """64 tokens in each of 200 requests, which look for them as long as they wait."""
    tokens = "&".join(f"token={vbid % 16}:77:{10**12 + vbid}" for vbid in range(64))

    def wait() -> None:
        client = Http(site.http)
        client.get(f"/v1/collections/_default/documents/small?timeout_ms=60000&{tokens}")

    at_once(200, wait)


def streams_that_come_and_go(site: Site) -> None:
    def ask() -> None:
        client = Http(site.http)
        client.line.sendall(f"GET /v1/changes?since=now HTTP/1.1\r\n{client.head}\r\n".encode())
        client._more()
        client.close()

    at_once(8, ask)


def pages_that_nobody_waits_for(site: Site) -> None:
    def ask() -> None:
        client = Http(site.http)
        client.line.sendall(f"GET /v1/collections/_default/documents?limit=1000 HTTP/1.1\r\n{client.head}\r\n".encode())
        client.close()

    at_once(8, ask)


def http_clients_that_pipeline_and_read_nothing(site: Site) -> None:
    """200 of them once kept others waiting for 0.4 s."""
    one = f"GET /v1/collections/_default/documents/small HTTP/1.1\r\n{Http(site.http).head}\r\n".encode() * 100
    clients = [Http(site.http) for _ in range(200)]
    for client in clients:
        client.line.setblocking(False)
    while True:
        for client in clients:
            with contextlib.suppress(OSError):
                client.line.send(one)
        time.sleep(0.01)


ATTACKS = (
    Attack("kv", checksums_of_a_large_document),
    Attack("kv", checksums_of_many_requests),
    Attack("kv", paths_of_many_requests),
    Attack("kv", wrong_passwords),
    Attack("kv", silence_before_tls),
    Attack("kv", silence_before_login),
    Attack("http", wrong_passwords_over_http),
    Attack("http", silence_before_https),
    Attack("http", heads_without_an_end),
    Attack("http", bodies_without_an_end),
    Attack("http", positions_that_unpack),
    Attack("http", parameters_without_number),
    Attack("http", streams_that_nobody_reads),
    Attack("http", large_documents_over_http),
    Attack("http", pages_with_large_documents),
    Attack("http", multi_gets_of_large_documents),
    Attack("http", changes_with_large_documents),
    Attack("kv", large_documents_over_kv),
    Attack("kv", scans_of_large_documents),
    Attack("kv", scans_that_wait),
    Attack("kv", scans_that_are_not_continued),
    Attack("kv", lists_of_features),
    Attack("kv", long_names_and_passwords),
    Attack("kv", requests_in_single_bytes),
    Attack("kv", hellos_in_bulk),
    Attack("kv", tls_records_of_one_byte),
    Attack("dcp", streams_opened_and_closed),
    Attack("dcp", connections_that_take_each_others_name),
    Attack("http", bodies_in_chunks_of_one_byte),
    Attack("http", heads_in_single_bytes),
    Attack("http", waits_for_writes),
    Attack("http", streams_that_come_and_go),
    Attack("http", pages_that_nobody_waits_for),
    Attack("http", http_clients_that_pipeline_and_read_nothing),
)


@contextmanager
def under_way(attack: Attack, site: Site) -> Iterator[None]:
    """The attack, in a niced process: it stands for another machine, and must not take the second client's GIL or
    processor time.
    """
    ports = Site(site.service, site.kv, site.kv_tls, site.http, site.http_tls, site.dcp, site.dcp_tls)
    process = multiprocessing.get_context("fork").Process(target=_attack, args=(attack, ports), daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive(), f"the attack ended by itself: {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _attack(attack: Attack, site: Site) -> None:
    os.nice(10)
    attack.run(site)
