"""Attacks on a port, each in its own process until it is stopped."""

from __future__ import annotations

import base64
import contextlib
import multiprocessing
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mirror.wire import codec_dcp
from mirror.wire import events as ev
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec
from mirror.wire.constants import DcpOpenFlag, Opcode
from storage.format.keys import vbid_of
from storage.model import SEQNO_MAX
from tests.hostile.site import Http, Kv, Site
from tests.oracle import kv_client

XATTR_PATH = 4
CONNECTIONS = 2_000


Run = Callable[[Site], None]
ATTACKS: list[tuple[str, Run]] = []
"""The port whose second client is watched, and the attack."""


def attack(kind: str) -> Callable[[Run], Run]:
    def note(run: Run) -> Run:
        ATTACKS.append((kind, run))
        return run

    return note


def at_once(count: int, attacked: Callable[[], None]) -> None:
    """The same by many connections, each of which begins again when it is closed."""

    def repeat() -> None:
        while True:
            with contextlib.suppress(OSError):
                attacked()

    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def over_http(site: Site, ask: Callable[[Http], tuple[int, bytes]], statuses: tuple[int, ...], count: int = 8) -> None:
    """Send requests one after the other from some clients."""

    def repeat() -> None:
        client = Http(site.http)
        while True:
            assert ask(client)[0] in statuses

    at_once(count, repeat)


def over_kv(site: Site, *frames: fr.Frame, login: bool = True, count: int = 8) -> None:
    def repeat() -> None:
        client = Kv(site.kv, login=login)
        while True:
            client.send(*frames)
            for _ in frames:
                client.receive()

    at_once(count, repeat)


def lookup(key: bytes, path: bytes, flags: int) -> fr.Frame:
    specs = [LookupSpec(int(Opcode.SUBDOC_GET), path, flags)] * 16
    return fr.request(Opcode.SUBDOC_MULTI_LOOKUP, key=key, value=kv_client.encode_lookup_specs(specs))


LARGE = lookup(b"large", b"$document.CAS", XATTR_PATH)
MIDDLE = lookup(b"middle", b"$document", XATTR_PATH)
PATHS = lookup(b"middle", b"a[-1]", 0)


@attack("kv")
def checksums_of_a_large_document(site: Site) -> None:
    """16 look-ups once blocked all clients for 23 s."""
    over_kv(site, *[LARGE] * 16, count=1)


@attack("kv")
def checksums_of_many_requests(site: Site) -> None:
    """128 of them once ended in the watchdog's SIGKILL."""
    over_kv(site, *[MIDDLE] * 128, count=1)


@attack("kv")
def paths_of_many_requests(site: Site) -> None:
    """Others once waited 0.2 s."""
    over_kv(site, *[PATHS] * 128)


@attack("kv")
def wrong_passwords(site: Site) -> None:
    """588 guesses a second once took others from 0.03 to 22 ms."""
    clients: list[Kv] = []
    guess = kv_client.sasl_auth(b"PLAIN", b"\0ann\0wrong")
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


@attack("http")
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


@attack("kv")
def silence_before_tls(site: Site) -> None:
    """3,000 once took 634 MB of KV."""
    silence(site.kv_tls)


@attack("http")
def silence_before_https(site: Site) -> None:
    """20,200 once took 6.2 GB."""
    silence(site.http_tls)


@attack("kv")
def silence_before_login(site: Site) -> None:
    """1,024 once locked all clients out for 600 s."""
    silence(site.kv, fr.encode(kv_client.noop()))


@attack("http")
def large_documents_over_http(site: Site) -> None:
    """Others once waited 1.8 s."""
    over_http(site, lambda client: client.get("/v1/collections/_default/documents/large"), (200, 503), 16)


@attack("http")
def pages_with_large_documents(site: Site) -> None:
    """The server once checked 20 MiB of JSON in one step of 0.9 s."""
    over_http(site, lambda client: client.get("/v1/collections/_default/documents?limit=1000"), (200, 503))


@attack("kv")
def long_names_and_passwords(site: Site) -> None:
    """Before a login: text that has to be prepared (RFC 4013), 60 KiB of it."""
    text = "\u00e9" * 15_000
    frames = (
        kv_client.sasl_auth(b"PLAIN", f"\0{text}\0{text}".encode()),
        kv_client.sasl_auth(b"SCRAM-SHA512", f"n,,n={text},r={text[:5000]}".encode()),
    )

    def ask() -> None:
        client = Kv(site.kv, login=False)
        for frame in frames * 2:
            client.ask(frame)
        client.close()

    at_once(8, ask)


@attack("kv")
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


@attack("kv")
def tls_records_of_one_byte(site: Site) -> None:
    """Each is decrypted by itself, before any login."""
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


@attack("dcp")
def streams_opened_and_closed(site: Site) -> None:
    """Of DCP."""

    def ask() -> None:
        client = Kv(site.dcp)
        client.ask(kv_client.select_bucket(b"orders"))
        client.ask(codec_dcp.to_frame(ev.DcpOpen(secrets.token_hex(8).encode(), int(DcpOpenFlag.PRODUCER))))
        for _ in range(100):
            for vbid in set(range(16)) - {vbid_of(b"large", 16)}:
                request = ev.StreamRequest(vbid, 0, 0, SEQNO_MAX, 0, 0, 0, opaque=vbid)
                client.send(codec_dcp.to_frame(request), codec_dcp.to_frame(ev.CloseStream(vbid, opaque=vbid)))
            client.line.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while client.line.recv(1 << 20):
                    pass
            client.line.setblocking(True)
        client.close()

    at_once(8, ask)


@attack("http")
def waits_for_writes(site: Site) -> None:
    """64 tokens in each of 200 requests, which look for them as long as they wait."""
    tokens = "&".join(f"token={vbid % 16}:77:{10**12 + vbid}" for vbid in range(64))
    path = f"/v1/collections/_default/documents/small?timeout_ms=60000&{tokens}"
    over_http(site, lambda client: client.get(path), (504,), 200)


@attack("http")
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


@contextmanager
def under_way(run: Run, site: Site) -> Iterator[None]:
    """The attack, in a niced process: it stands for another machine, and must not take the second client's GIL or
    processor time.
    """
    ports = Site(site.service, site.kv, site.kv_tls, site.http, site.http_tls, site.dcp, site.dcp_tls)
    process = multiprocessing.get_context("fork").Process(target=_attack, args=(run, ports), daemon=True)
    process.start()
    try:
        yield
        assert process.is_alive(), f"the attack ended by itself: {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _attack(run: Run, site: Site) -> None:
    os.nice(10)
    run(site)
