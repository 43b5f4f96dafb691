"""A service with all its listeners over a store that a test filled; its source is away. And its second client."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from mirror.serve.access.auth import entry_of, new_salt_key
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode
from mirror.wire.frame import Frame, FrameBuffer
from storage.model import Collection, Seqno
from tests.cli.conftest import environment
from tests.crash.service import LIMIT_S, Service, until
from tests.oracle import kv_client
from tests.ports import free_ports
from tests.serve.http_site import make_certificate
from tests.serve.kv_rig import DEFAULT, Store

USER, PASSWORD = "ann", "a good password"
VALUE = b'{"small": true}'
BOB = "bob"
"""A user of the default collection, with the same password."""
SECRET = b'{"secret": "TOPSECRET"}'
"""The document `secret` of `hr.salaries`, which has the number 9."""
LARGE_BYTES = 20 * 1024 * 1024
MIDDLE_BYTES = 300 * 1000
PAUSE_S = 0.002
MIB = 1024 * 1024


class Kv:
    def __init__(self, port: int, *, login: bool = True, user: str = USER, timeout_s: float = LIMIT_S) -> None:
        self.line = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._buffer = FrameBuffer()
        if login:
            assert self.log_in(user) == 0

    def log_in(self, user: str, password: str = PASSWORD) -> int:
        return self.ask(kv_client.sasl_auth(b"PLAIN", f"\0{user}\0{password}".encode())).status

    def send(self, *frames: Frame) -> None:
        self.line.sendall(b"".join(map(fr.encode, frames)))

    def receive(self) -> Frame:
        while (frame := self._buffer.next_frame()) is None:
            data = self.line.recv(1 << 20)
            if not data:
                raise ConnectionError("the server hung up")
            self._buffer.feed(data)
        return frame

    def ask(self, frame: Frame) -> Frame:
        self.send(frame)
        return self.receive()

    def read(self) -> None:
        assert self.ask(fr.request(Opcode.GET, key=b"small")).value == VALUE

    def close(self) -> None:
        self.line.close()


class Http:
    def __init__(self, port: int, *, login: bool = True, user: str = USER) -> None:
        self.line = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        token = base64.b64encode(f"{user}:{PASSWORD}".encode()).decode()
        self.head = "Host: localhost\r\n" + (f"Authorization: Basic {token}\r\n" if login else "")

    def send(self, path: str, *, method: str = "GET", more: str = "") -> None:
        self.line.sendall(f"{method} {path} HTTP/1.1\r\n{self.head}{more}\r\n".encode())

    def get(self, path: str) -> tuple[int, bytes]:
        self.send(path)
        return self._answer()

    def changes(self, query: str, more: str = "") -> bytes:
        self.send(f"/v1/changes?follow=false{query}", more=more)
        data = bytearray()
        while not data.endswith(b"0\r\n\r\n"):
            data += self.more()
        return bytes(data)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        head = f"POST {path} HTTP/1.1\r\n{self.head}Content-Length: {len(body)}\r\n\r\n"
        return self.ask(head.encode() + body)

    def ask(self, request: bytes) -> tuple[int, bytes]:
        self.line.sendall(request)
        return self._answer()

    def _answer(self) -> tuple[int, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.more()
        head, _, body = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        pieces, left = [body], int(fields[b"content-length"]) - len(body)
        while left > 0:
            pieces.append(self.more())
            left -= len(pieces[-1])
        return int(head.split(b" ", 2)[1]), b"".join(pieces)

    def more(self) -> bytes:
        data = self.line.recv(1 << 20)
        if not data:
            raise ConnectionError("the server hung up")
        return data

    def read(self) -> None:
        assert self.get("/v1/collections/_default/documents/small") == (200, VALUE)

    def close(self) -> None:
        self.line.close()


@dataclass
class Site:
    service: Service
    kv: int
    kv_tls: int
    http: int
    http_tls: int
    dcp: int
    dcp_tls: int
    steps: Path = Path()
    """Folder in which the processes of the listeners write their long steps."""
    closing: ExitStack = field(default_factory=ExitStack)

    def servers(self) -> dict[str, psutil.Process]:
        status = self.service.status()
        rows = status["servers"] if status else []
        return {row["kind"]: psutil.Process(row["pid"]) for row in rows}

    def long_steps(self) -> Counter[str]:
        """The long steps of the event loops so far: processor time and name."""
        return Counter(line for path in self.steps.iterdir() for line in path.read_text().splitlines())

    def rss_bytes(self, kind: str) -> int:
        return int(self.servers()[kind].memory_info().rss)


def write_users(folder: Path, *names: str) -> Path:
    users = {name: entry_of(PASSWORD, ("_default._default",) if name == BOB else ("*",)) for name in names}
    path = folder / "users.json"
    path.write_text(json.dumps({"users": users, "salt_key": new_salt_key()}))
    return path


def p99_s(read: Callable[[], object], count: int) -> float:
    """The longest but one in a hundred of the times that a client waits for a document."""
    waits = []
    for _ in range(count):
        began = time.perf_counter()
        read()
        waits.append(time.perf_counter() - began)
        time.sleep(PAUSE_S)
    return sorted(waits)[-1 - count // 100]


@contextmanager
def attacked(folder: Path, *settings: str, **more: Any) -> Iterator[Site]:
    """A service over three documents, with one user."""
    store = Store(folder, vbuckets=16)
    store.logs()
    seqnos: dict[int, int] = {}
    filler = b"x" * 1000
    documents = {b"small": VALUE}
    for name, size in ((b"middle", MIDDLE_BYTES), (b"large", LARGE_BYTES)):
        documents[name] = b'{"a":[%b]}' % b",".join([b'"%b"' % filler] * (size // len(filler)))
    for number, (key, value) in enumerate(documents.items(), 1):
        vbid = store.put(key, value, number, datatype=1)
        seqnos[vbid] = number
    store.collections(10, {8: "hr"}, DEFAULT, Collection(9, 8, "salaries", Seqno(10)))
    store.put(b"secret", SECRET, 11, cid=9, datatype=1)
    store.close()
    write_users(folder, USER, BOB)
    cert, key_file = make_certificate(folder)
    kv, kv_tls, http, http_tls, dcp, dcp_tls = free_ports(6)
    flags = [
        "--kv", f"{kv},tls://127.0.0.1:{kv_tls}", "--http", f"{http},tls://127.0.0.1:{http_tls}", "--dcp", f"{dcp},tls://127.0.0.1:{dcp_tls}",
        "--workers", "1", "--set", f"users_file={folder / 'users.json'}", "--set", f"listen_tls_cert_file={cert}",
        "--set", f"listen_tls_key_file={key_file}", *(part for each in settings for part in ("--set", each)),
    ]  # fmt: skip
    steps = folder / "steps"
    steps.mkdir()
    env = environment(PYTHONPATH=str(Path(__file__).parent / "timer"), LONG_STEPS=str(steps))
    with Service("couchbase://demo@127.0.0.1:1/orders", Path(store.path), *flags, **{"env": env, **more}) as service:
        service.start()
        site = Site(service, kv, kv_tls, http, http_tls, dcp, dcp_tls, steps)
        until("all listeners to run", lambda: len(site.servers()) == 3 and connected(site))
        with site.closing:
            yield site
        service.terminate()
        assert "Traceback" not in service.log.read_text(errors="replace")


def connected(site: Site) -> bool:
    for port in (site.kv, site.kv_tls, site.http, site.http_tls, site.dcp, site.dcp_tls):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return False
    return True
