"""A store that a test writes to, and a real HTTP process's server over it, on a port of its own."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import trustme

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.config_reader import validated
from mirror.health import assess
from mirror.serve.http.server import HttpServer
from mirror.server.listener import Address, listening_socket, reserve
from mirror.supervise.status import stored_status, totals
from mirror.wire import codec_dcp
from mirror.wire.events import CollectionCreated
from mirror.wire.system_events import encode_system_event
from storage.env import directory
from storage.format import keys, records
from storage.history.purge import Window
from storage.model import Collection, FailoverLog, Identity, Manifest, ManifestUid, Seqno, SnapshotRange
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.frames import encode_deletion

VBUCKETS = 8
GROUPS = 2
IDENTITY = Identity("cluster", "bucket", "uuid", VBUCKETS, GROUPS)
VBUUID = 0xABCD


@dataclass
class Source:
    """Writes to the store as a worker would; seqnos count up for each vbucket."""

    path: str
    identity: Identity = IDENTITY
    writers: list[GroupWriter] = field(default_factory=list)
    seqnos: dict[int, int] = field(default_factory=dict)
    now_ms: int = 1_700_000_000_000
    rolled_back: bool = False

    def clock(self) -> int:
        self.now_ms += 1
        return self.now_ms

    def open(self) -> None:
        for group in range(GROUPS):
            vbids = self.identity.group_vbids(group)
            path = directory.group_path(self.path, group)
            writer = GroupWriter(
                path,
                WriterOptions(
                    group=group,
                    identity=self.identity,
                    sync="unsafe",
                    resync_reads="unavailable",
                    clock_ms=self.clock,
                    map_size=1 << 28,
                ),
            )
            for vbid in vbids:
                writer.vbuckets[vbid].save(failover_log=FailoverLog.of([(VBUUID, 0)]))
                writer.vbuckets[vbid].publish(0, 0)  # the source has nothing yet
            writer.commit()
            self.writers.append(writer)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()

    def writer(self, vbid: int) -> GroupWriter:
        return self.writers[vbid % GROUPS]

    def vbid_of(self, key: bytes) -> int:
        return keys.vbid_of(key, VBUCKETS)

    def snapshot(self, vbid: int, *items: tuple[bytes, bytes | None], publish: bool = True, **more: Any) -> int:
        """Stage a snapshot of documents (None: a deletion) and publish it; returns its end."""
        writer = self.writer(vbid)
        first = self.seqnos.get(vbid, 0) + 1
        rows = []
        for seqno, (key, value) in enumerate(items, first):
            frame = (
                encode_deletion(key, seqno, collection_id=more.get("collection_id", 0))
                if value is None
                else records.encode_mutation(key, value, seqno, **({"cas": seqno << 16} | more))
            )
            rows.append((writer.vbuckets[vbid].prefix + seqno.to_bytes(8, "big"), frame))
        last = self.seqnos[vbid] = first + len(items) - 1
        writer.vbuckets[vbid].stage(rows, 0, SnapshotRange(Seqno(first), Seqno(last)))
        if publish:
            writer.vbuckets[vbid].publish(last, first)
        writer.commit()
        return last

    def put(self, key: bytes | str, value: bytes | None = b'{"v":1}', **more: Any) -> int:
        """Publish a document in its own snapshot; it is JSON if its value is."""
        key = key.encode() if isinstance(key, str) else key
        is_json = value is not None and value[:1] in b'{["0123456789tfn'
        return self.snapshot(self.vbid_of(key), (key, value), **({"datatype": int(is_json)} | more))

    def collections(self, vbid: int, *collections: Collection) -> None:
        """A system event after which these collections exist next to the default one."""
        writer = self.writer(vbid)
        seqno = self.seqnos[vbid] = self.seqnos.get(vbid, 0) + 1
        default = Collection(0, 0, "_default", Seqno(0))
        manifest = Manifest(
            ManifestUid(7), {0: "_default", 8: "shop"}, {each.collection_id: each for each in (default, *collections)}
        )
        content = CollectionCreated(7, 8, collections[-1].collection_id if collections else 0, "orders")
        frame = codec_dcp.encode(encode_system_event(content, vbid=vbid, seqno=seqno))
        writer.vbuckets[vbid].system_event(seqno, frame, manifest, SnapshotRange(Seqno(seqno), Seqno(seqno)))
        writer.vbuckets[vbid].publish(seqno, seqno)
        writer.commit()

    def resync_reads(self, setting: str) -> None:
        """Let readers have the old copy of vbuckets that are resynced (`stale`), or refuse them (`unavailable`)."""
        for writer in self.writers:
            writer.owner.options = replace(writer.owner.options, resync_reads=setting)

    def purge(self, **window: int) -> None:
        for writer in self.writers:
            writer.background.purger.window = Window(**window)
            while (vbid := writer.background.purger.plan(self.clock())) is not None:
                writer.background.purge(vbid, self.clock())

    def rollback(self, vbid: int, to_seqno: int) -> int:
        self.rolled_back = True
        found = self.writer(vbid).vbuckets[vbid].rollback(to_seqno)
        self.seqnos[vbid] = found.boundary_seqno
        return found.boundary_seqno

    def key_of(self, vbid: int, number: int = 0) -> bytes:
        count = 0
        while True:
            key = b"key-%d" % count
            if self.vbid_of(key) == vbid:
                if not number:
                    return key
                number -= 1
            count += 1


@dataclass
class Site:
    url: str
    source: Source
    server: HttpServer
    loop: asyncio.AbstractEventLoop
    data: Path
    client: httpx.Client
    reports: list[dict[str, Any]]
    """Ends with what the status is made of, where a test wants another one than the store's."""

    def get(self, path: str, status: int = 200, **more: Any) -> httpx.Response:
        answer = self.client.get(path, **more)
        assert answer.status_code == status, (answer.status_code, answer.text[:500])
        return answer

    def stands(self, report: dict[str, Any]) -> None:

        async def forget() -> None:
            self.reports.append(report)
            status = self.server.service.status
            async with status._reading:  # else a report that is being made would be kept
                status._report, status._disk_and_history_s = None, float("-inf")

        self.call(forget())

    def multi_get(
        self, keys: Iterable[bytes | str], status: int = 200, collection: str = "_default", **more: Any
    ) -> Any:
        names = [key if isinstance(key, str) else key.decode() for key in keys]
        answer = self.client.post(f"/v1/collections/{collection}/multi-get", json={"keys": names}, **more)
        assert answer.status_code == status, (answer.status_code, answer.text[:500])
        return answer.json()

    def scan(self, status: int = 200, collection: str = "_default", **params: Any) -> Any:
        return self.get(f"/v1/collections/{collection}/documents", status, params=params).json()

    def pages(self, **params: Any) -> list[Any]:
        """All pages of a scan."""
        found = [self.scan(**params)]
        while found[-1]["next"] is not None:
            again = {name: params[name] for name in ("collection", "limit", "auth") if name in params}
            found.append(self.scan(**again, page=found[-1]["next"]))
        return found

    def changes(self, auth: Any = None, **params: Any) -> list[dict[str, Any]]:
        text = self.get("/v1/changes", auth=auth, params={"follow": "false"} | params).text
        return [event for event in events(text) if "event" in event]

    def raw(self, request: bytes) -> bytes:
        """Everything that is answered on a connection of its own."""
        with self.connect() as line:
            line.sendall(request)
            return b"".join(iter(partial(line.recv, 65536), b""))

    def document(self, key: str, collection: str = "_default._default") -> str:
        return f"/v1/collections/{collection}/documents/{key}"

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=30)


def request(path: str, *headers: str, method: str = "GET", body: str = "", user: str = "") -> bytes:
    """The bytes of a request; `user` is NAME:PASSWORD."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if user:
        lines.append(f"Authorization: Basic {base64.b64encode(user.encode()).decode()}")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", body)).encode()


def service_report(data: Path, **more: Any) -> dict[str, Any]:
    """A status as a healthy service would give it, of what the store says."""
    found = stored_status(data)
    for row in found["vbuckets"]:
        row |= {"state": "streaming", "source_high_seqno": row["published_seqno"], "lag_seqnos": 0, "lag_s": 0.0}
        row |= {"node": "db1.example:11210", "worker": 0, "report_age_s": 0.1}
    found |= {"service": "up"}
    found["totals"] |= totals(found["vbuckets"])
    return judged(found | more)


def judged(report: dict[str, Any]) -> dict[str, Any]:
    """A report of a service with the judgement that its rows deserve."""
    found = assess(report["vbuckets"], report["vbuckets_held"], lag_limit_s=30)
    return report | {
        "state": found.state,
        "message": found.message,
        "reasons": found.reasons,
        "troubles": [trouble.row() for trouble in found.troubles],
    }


@asynccontextmanager
async def serving_http(
    settings: Settings, address: Address | None = None, stored: Callable[[Path], Any] = stored_status
) -> AsyncIterator[tuple[HttpServer, Address]]:
    held = reserve(address or Address(), "http")
    inherited = None if held.inherited is None else os.dup(held.inherited)
    sockets = [(held.address, listening_socket(held.address, inherited))]
    server = HttpServer(settings, sockets, stored, SystemClock())
    await server.start()
    task = asyncio.create_task(server.run())
    try:
        yield server, held.address
    finally:
        await server.stop()
        await task
        held.release()


@contextmanager
def running(data: Path, source: Source, address: Address | None = None, **settings: Any) -> Iterator[Site]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    reports: list[dict[str, Any]] = [{}]

    def stored(path: Path) -> dict[str, Any]:
        return reports[-1] or stored_status(path)

    def call(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    served = serving_http(validated({"data": data, **settings}), address, stored)
    try:
        server, address = call(served.__aenter__())
        url = f"{'https' if address.tls else 'http'}://{address.authority if address.path is None else 'localhost'}"
        with httpx.Client(base_url=url, timeout=30) as client:
            try:
                yield Site(url, source, server, loop, data, client, reports)
            finally:
                call(served.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def made(folder: Path, identity: Identity = IDENTITY) -> Iterator[Source]:
    path = folder / "data"
    directory.create(str(path), identity)
    source = Source(str(path), identity)
    source.open()
    try:
        yield source
    finally:
        source.close()


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        event: dict[str, Any] = {}
        for line in block.split("\n"):
            name, _, value = line.partition(": ")
            if name in ("id", "event", "data"):
                event[name] = json.loads(value) if name == "data" else value
        if event:
            found.append(event)
    return found


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Files with a certificate for localhost, its authority behind it, and its key: clients may trust the first."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(str(cert))
    authority.cert_pem.write_to_path(str(cert), append=True)
    certificate.private_key_pem.write_to_path(str(key))
    return cert, key
