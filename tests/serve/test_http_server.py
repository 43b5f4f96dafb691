"""One HTTP process from start to end: what is on its way is finished, streams end, and its figures are reported."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.messages import Resync
from mirror.serve.http.server import HttpServer
from mirror.serve.listener import Address, listening_socket, reserve
from mirror.supervise.status import stored_status
from tests.serve.http_site import Site, Source
from tests.supervise.conftest import eventually


def server_at(source: Source, *sockets: tuple[Address, socket.socket]) -> HttpServer:
    return HttpServer(Settings(data=Path(source.path)), sockets, stored_status, SystemClock())


async def test_a_stop_finishes_what_is_on_its_way_and_ends_streams(source: Source) -> None:
    held = reserve(Address(), "http")
    server = server_at(source, (held.address, listening_socket(held.address)))
    await server.start()
    task = asyncio.create_task(server.run())
    key = source.key_of(4).decode()
    async with httpx.AsyncClient(base_url=f"http://{held.address.authority}") as client:
        token = {"token": "4:43981:1", "timeout_ms": "60000"}
        waiting = asyncio.create_task(client.get(f"/v1/collections/_default/documents/{key}", params=token))

        async def follow() -> str:
            return (await client.get("/v1/changes", params={"since": "now"})).text

        stream = asyncio.create_task(follow())
        await eventually(lambda: server.service.requests.streams.total() and len(server.gate.state.tasks) == 2)
        status = server.status()
        assert (status["streams"], status["connections"]) == (1, 2)
        await server.stop()
        await asyncio.wait_for(task, 30)
        assert (await waiting).status_code == 504, "it was answered, not cut off"
        assert (await stream).startswith("retry:")
        with pytest.raises(httpx.ConnectError):
            await client.get("/livez")
    held.release()


async def test_a_unix_socket_is_served_too(source: Source, tmp_path: Path) -> None:
    source.put("a", b"1")
    held = reserve(Address("", 0, str(tmp_path / "http.sock")), "http")
    assert held.inherited is not None
    own = listening_socket(held.address, socket.fromfd(held.inherited, socket.AF_UNIX, socket.SOCK_STREAM).detach())
    server = server_at(source, (held.address, own))
    await server.start()
    task = asyncio.create_task(server.run())
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "http.sock"))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/v1/collections/_default/documents/a")
    assert answer.content == b"1"
    await server.stop()
    await task
    held.release()


def test_from_elsewhere_nobody_is_anonymous(site: Site, source: Source) -> None:
    async def serve() -> None:
        held = reserve(Address("0.0.0.0"), "http")
        server = server_at(source, (held.address, listening_socket(held.address)))
        await server.start()
        task = asyncio.create_task(server.run())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{held.address.port}") as client:
            assert (await client.get("/v1/status")).status_code == 401
            assert (await client.get("/livez")).status_code == 200
        await server.stop()
        await task
        held.release()

    asyncio.run(serve())


async def test_settings_that_make_no_sense(source: Source) -> None:
    with pytest.raises(ConfigError, match="data"):
        HttpServer(Settings(), [], stored_status, SystemClock())
    server = server_at(source)
    with pytest.raises(ConfigError, match="knows no command"):
        await server.request(Resync(1))
    assert server.status()["counters"]["http_requests"] == 0
