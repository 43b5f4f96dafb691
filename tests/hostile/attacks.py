"""What an attacker does to a port, each in a process of its own and for as long as it is let."""

from __future__ import annotations

import base64
import contextlib
import multiprocessing
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mirror.wire import codec_kv
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec
from mirror.wire.constants import Opcode
from storage.keys import vbid_of
from tests.hostile.site import LARGE_BYTES, Http, Kv, Site
from tests.oracle import kv_client

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
)


@contextmanager
def under_way(attack: Attack, site: Site) -> Iterator[None]:
    """The attack, in a process of its own: it must not take the second client's processor time by sharing its GIL."""
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
    attack.run(site)
