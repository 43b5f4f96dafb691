"""Real KV processes under a supervisor: they listen, share a port, and are replaced one by one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.config import to_wire
from mirror.errors import ConfigError
from mirror.supervise.server import open_server
from mirror.supervise.supervisor import Supervisor
from storage import directory, keys, records
from storage.model import FailoverEntry, Identity, Seqno, SnapshotRange, Vbuuid
from storage.writer import GroupWriter
from tests.supervise.scripted import look_up, settings_for, worker_command

IDENTITY = Identity("c1", "demo", "b1", 8, 4)
KEY = b"k1"
HEADER = struct.Struct(">BBHBBHIIQ")
WAIT_S = 60.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    directory.create(str(path), IDENTITY)
    vbid = keys.vbid_of(KEY, 8)
    writer = GroupWriter.open(
        directory.group_path(str(path), vbid % 4),
        group=vbid % 4,
        vbids=directory.group_vbids(IDENTITY, vbid % 4),
        identity=IDENTITY,
        sync="unsafe",
        clock_ms=SystemClock().wall_ms,
    )
    writer.save_failover_log(vbid, [FailoverEntry(Vbuuid(5), Seqno(0))])
    row = (writer.row_prefix(vbid) + (1).to_bytes(8), records.encode_mutation(KEY, b"value", 1))
    writer.stage(vbid, [row], 10, SnapshotRange(Seqno(1), Seqno(1)))
    writer.publish(vbid, 1, 1)
    writer.commit()
    writer.close()
    return path


@asynccontextmanager
async def service(data: Path, **values: Any) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    lines: list[str] = []
    supervisor = Supervisor(
        settings_for(data, **values), look_up, clock=SystemClock(), command=worker_command, announce=lines.append
    )
    running = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(WAIT_S):
            while not lines or any(row["phase"] != "running" for row in supervisor.status_document()["servers"]):
                assert not running.done(), running.result()
                await asyncio.sleep(0.02)
        yield supervisor, lines
    finally:
        supervisor.stop()
        await running


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.02)


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


async def test_processes_share_a_port_and_a_killed_one_takes_only_its_own_along(data: Path) -> None:
    async with service(data, kv=f"0,unix:{data}/kv.sock", kv_processes=2) as (supervisor, lines):
        assert [line.partition("://")[0] for line in lines] == ["kv couchbase", f"kv unix:{data}/kv.sock"]
        clients = [await connect(lines[number % 2]) for number in range(24)]
        assert {await value_of(client) for client in clients} == {b"value"}
        before = supervisor.status_document()["servers"]
        assert [row["kind"] for row in before] == ["kv", "kv"]
        assert [row["slot"] for row in supervisor.status_document()["workers"]] == [0, 1]
        os.kill(before[0]["pid"], signal.SIGKILL)
        gone = 0
        for client in clients:
            try:
                assert await value_of(client) == b"value"
            except (ConnectionError, asyncio.IncompleteReadError):
                gone += 1
        assert 0 < gone < len(clients), "both processes had connections, and only those of one are gone"

        def replaced() -> bool:
            first = supervisor.status_document()["servers"][0]
            return first["phase"] == "running" and first["pid"] not in (None, before[0]["pid"])

        await until(replaced)
        after = supervisor.status_document()["servers"]
        assert after[1]["pid"] == before[1]["pid"]
        assert after[0]["restarts"] == 1
        fresh = [await connect(lines[number % 2]) for number in range(16)]
        assert {await value_of(client) for client in fresh} == {b"value"}
        for _, writer in (*clients, *fresh):
            writer.close()


async def test_a_server_reports_what_it_did(data: Path) -> None:
    async with service(data, kv="0") as (supervisor, lines):
        client = await connect(lines[0])
        await value_of(client)
        await until(lambda: supervisor.status_document()["servers"][0]["counters"].get("kv_hits") == 1)
        assert json.dumps(supervisor.status_document()["listeners"]).startswith('{"kv": ["couchbase://127.0.0.1:')
        client[1].close()


async def test_a_server_without_data_or_with_a_taken_address_says_so(tmp_path: Path, data: Path) -> None:
    start = {"slot": 1000, "kind": "kv", "revision": 1, "listeners": []}
    settings = to_wire(settings_for(data))
    with pytest.raises(ConfigError, match="without data"):
        await open_server({**start, "settings": settings | {"data": None}})
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match="kv: cannot listen"):
        await open_server({**start, "settings": settings, "listeners": [[f"127.0.0.1:{port}", None]]})
    taken.close()
    work = await open_server({**start, "settings": settings, "listeners": [["127.0.0.1:0", None]]})
    assert work.status()["vbuckets"] == []
    with pytest.raises(ConfigError, match="no command 'x'"):
        await work.request({"op": "x"})
    running = asyncio.create_task(work.run())
    await work.stop()
    await running
