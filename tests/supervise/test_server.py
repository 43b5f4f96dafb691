"""Real server processes under a supervisor: they listen, share a port, are replaced one by one, and hear of changes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.config import to_wire
from mirror.errors import ConfigError
from mirror.messages import Resync, StartServer
from mirror.supervise.processes.server import open_server
from mirror.supervise.supervisor import Supervisor
from mirror.wire import frame as fr
from mirror.wire.events import Mutation
from mirror.wire.frame import Frame
from storage.env import directory
from storage.format import keys, records
from storage.model import FailoverLog, Identity, Seqno, SnapshotRange
from storage.write.writer import GroupWriter, WriterOptions
from tests.serve.dcp_rig import DcpClient
from tests.supervise.conftest import eventually as until
from tests.supervise.scripted import settings_for
from tests.supervise.service import service_of, serving

IDENTITY = Identity("c1", "demo", "b1", 8, 4)
KEY = b"k1"
HEADER = struct.Struct(">BBHBBHIIQ")
WAIT_S = 60.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    directory.create(str(path), IDENTITY)
    vbid = keys.vbid_of(KEY, 8)
    writer = GroupWriter(
        directory.group_path(str(path), vbid % 4),
        WriterOptions(group=vbid % 4, identity=IDENTITY, sync="unsafe", clock_ms=SystemClock().wall_ms),
    )
    writer.vbuckets[vbid].save(failover_log=FailoverLog.of([(5, 0)]))
    row = (writer.vbuckets[vbid].prefix + (1).to_bytes(8), records.encode_mutation(KEY, b"value", 1))
    writer.vbuckets[vbid].stage([row], 10, SnapshotRange(Seqno(1), Seqno(1)))
    writer.vbuckets[vbid].publish(1, 1)
    writer.commit()
    writer.close()
    return path


@asynccontextmanager
async def service(data: Path, **values: Any) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    lines: list[str] = []
    made = service_of(data, settings=settings_for(data, **values), announce=lines.append)
    async with serving(made) as supervisor:
        await until(lambda: lines and {row["phase"] for row in supervisor.reports.document()["servers"]} == {"running"})
        yield supervisor, lines


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(line: str) -> Streams:
    place = line.partition(" ")[2]
    if place.startswith("unix:"):
        return await asyncio.open_unix_connection(place.removeprefix("unix:"))
    return await asyncio.open_connection("127.0.0.1", int(place.rpartition(":")[2]))


async def value_of(streams: Streams, key: bytes = KEY) -> bytes:
    reader, writer = streams
    writer.write(HEADER.pack(0x80, 0, len(key), 0, 0, 0, len(key), 0, 0) + key)
    async with asyncio.timeout(WAIT_S):
        head = HEADER.unpack(await reader.readexactly(24))
        return (await reader.readexactly(head[6]))[4:]


async def page_of(streams: Streams) -> bytes:
    """The document by HTTP, on a connection that stays open."""
    reader, writer = streams
    writer.write(b"GET /v1/collections/_default._default/documents/%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % KEY)
    async with asyncio.timeout(WAIT_S):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        return await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r")[0]))


KINDS: dict[str, tuple[str, Callable[[Streams], Awaitable[bytes]]]] = {
    "kv": ("0,unix:{data}/kv.sock", value_of),
    "http": ("0", page_of),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_processes_share_a_port_and_a_killed_one_ends_only_its_own_clients(kind: str, data: Path) -> None:
    addresses, read = KINDS[kind]
    settings: dict[str, Any] = {kind: addresses.format(data=data), f"{kind}_processes": 2}
    async with service(data, **settings) as (supervisor, lines):
        shown = {"kv": ["kv couchbase", f"kv unix:{data}/kv.sock"], "http": ["http http"]}
        assert [line.partition("://")[0] for line in lines] == shown[kind]
        clients = [await connect(lines[number % len(lines)]) for number in range(24)]
        assert {await read(client) for client in clients} == {b"value"}
        before = supervisor.reports.document()["servers"]
        assert [row["kind"] for row in before] == [kind, kind]
        assert [row["slot"] for row in supervisor.reports.document()["workers"]] == [0, 1]
        os.kill(before[0]["pid"], signal.SIGKILL)
        gone = 0
        for client in clients:
            try:
                assert await read(client) == b"value"
            except (ConnectionError, asyncio.IncompleteReadError):
                gone += 1
        assert 0 < gone < len(clients), "both processes had connections, and only those of one are gone"

        def replaced() -> bool:
            first = supervisor.reports.document()["servers"][0]
            return first["phase"] == "running" and first["pid"] not in (None, before[0]["pid"])

        await until(replaced)
        after = supervisor.reports.document()["servers"]
        assert after[1]["pid"] == before[1]["pid"]
        assert after[0]["restarts"] == 1
        fresh = [await connect(lines[number % len(lines)]) for number in range(16)]
        assert {await read(client) for client in fresh} == {b"value"}
        for _, writer in (*clients, *fresh):
            writer.close()


def servers(supervisor: Supervisor) -> dict[str, int]:
    """Kind -> process, of the servers that run; workers must not have been disturbed."""
    document = supervisor.reports.document()
    assert [(row["phase"], row["restarts"]) for row in document["workers"]] == [("running", 0)] * 2
    return {row["kind"]: row["pid"] for row in document["servers"] if row["phase"] == "running"}


async def receive(streams: Streams) -> Frame:
    reader, _ = streams
    async with asyncio.timeout(WAIT_S):
        head = await reader.readexactly(HEADER.size)
        return fr.decode(head + await reader.readexactly(HEADER.unpack(head)[6]))[0]


async def ask(streams: Streams, frame: Frame) -> Frame:
    streams[1].write(fr.encode(frame))
    return await receive(streams)


async def test_a_server_reports_its_counters(data: Path) -> None:
    async with service(data, kv="0") as (supervisor, lines):
        client = await connect(lines[0])
        await value_of(client)
        await until(lambda: supervisor.reports.document()["servers"][0]["counters"].get("kv_hits") == 1)
        assert json.dumps(supervisor.reports.document()["listeners"]).startswith('{"kv": ["couchbase://127.0.0.1:')
        client[1].close()


async def test_dcp_processes_serve_streams_and_count_the_documents_sent(data: Path) -> None:
    async with service(data, dcp="0", dcp_processes=2) as (supervisor, lines):
        assert [line.partition("://")[0] for line in lines] == ["dcp couchbase"]
        vbid = keys.vbid_of(KEY, 8)
        for number in range(6):
            client = await DcpClient(*await connect(lines[0])).open("demo", name=f"c{number}", login=False)
            assert (await client.stream(vbid)).status == 0
            (document,) = (await client.until_end(1))[1:]
            assert isinstance(document, Mutation)
            assert document.value == b"value"
            await client.close()
        rows = supervisor.reports.document()["servers"]
        assert [row["kind"] for row in rows] == ["dcp", "dcp"]

        def sent() -> int:
            rows = supervisor.reports.document()["servers"]
            return sum(row["counters"].get("dcp_documents", 0) for row in rows)

        await until(lambda: sent() == 6)


async def test_a_server_without_data_or_with_an_address_in_use_is_an_error(tmp_path: Path, data: Path) -> None:
    settings = to_wire(settings_for(data))
    start = StartServer(slot=1000, settings=settings, kind="kv", revision=1, listeners=[], login_secret="00")
    with pytest.raises(ConfigError, match="no data directory is given"):
        await open_server(replace(start, settings=settings | {"data": None}), lambda _message: None)
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match="kv: cannot listen"):
        await open_server(replace(start, listeners=[[f"127.0.0.1:{port}", None]]), lambda _message: None)
    taken.close()
    work = await open_server(replace(start, listeners=[["127.0.0.1:0", None]]), lambda _message: None)
    assert work.status()["vbuckets"] == []
    with pytest.raises(ConfigError, match="no command 'resync'"):
        await work.request(Resync(1))
    running = asyncio.create_task(work.run())
    await work.stop()
    await running
