"""An HTTP process from start to end: it completes its answers, ends its streams, and reports its figures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.messages import Resync
from mirror.serve.http.server import HttpServer
from mirror.serve.listener import Address
from mirror.supervise.status import stored_status
from tests.serve.http_site import Source, serving_http
from tests.supervise.conftest import eventually


async def test_a_stop_finishes_what_is_on_its_way_and_ends_streams(source: Source) -> None:
    key = source.key_of(4).decode()
    token = {"token": "4:43981:1", "timeout_ms": "60000"}
    async with httpx.AsyncClient() as client:
        async with serving_http(Settings(data=Path(source.path))) as (server, address):
            url = f"http://{address.authority}"
            waiting = asyncio.create_task(client.get(f"{url}/v1/collections/_default/documents/{key}", params=token))
            stream = asyncio.create_task(client.get(f"{url}/v1/changes", params={"since": "now"}))
            await eventually(lambda: server.service.requests.streams.total() and len(server.gate.state.tasks) == 2)
            status = server.status()
            assert (status["streams"], status["connections"]) == (1, 2)
        assert (await waiting).status_code == 504, "it was answered, not cut off"
        assert (await stream).text.startswith("retry:")
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/livez")


async def test_a_unix_socket_is_served_too(source: Source, tmp_path: Path) -> None:
    source.put("a", b"1")
    path = str(tmp_path / "http.sock")
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with (
        serving_http(Settings(data=Path(source.path)), Address("", 0, path)),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        assert (await client.get("/v1/collections/_default/documents/a")).content == b"1"


async def test_from_elsewhere_nobody_is_anonymous(source: Source) -> None:
    async with (
        serving_http(Settings(data=Path(source.path)), Address("0.0.0.0")) as (_, address),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{address.port}") as client,
    ):
        assert (await client.get("/v1/status")).status_code == 401
        assert (await client.get("/livez")).status_code == 200


async def test_settings_that_make_no_sense(source: Source) -> None:
    with pytest.raises(ConfigError, match="data"):
        HttpServer(Settings(), [], stored_status, SystemClock())
    server = HttpServer(Settings(data=Path(source.path)), [], stored_status, SystemClock())
    with pytest.raises(ConfigError, match="knows no command"):
        await server.request(Resync(1))
    assert server.status()["counters"]["http_requests"] == 0
