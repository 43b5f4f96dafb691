"""What discards counts what the server sent, for one client and for several."""

from __future__ import annotations

import asyncio

import pytest

from mirror.bench.drain import Server, discard, measured
from mirror.sandbox import SandboxCluster

DOCUMENTS = 400


async def test_each_client_receives_every_byte_once_and_acknowledges_no_more() -> None:
    async with SandboxCluster(vbuckets=4) as cluster:
        cluster.bucket.load((b"key-%d" % number, b"value") for number in range(DOCUMENTS))
        server = Server(cluster.host, cluster.nodes[0].port or 0, "demo", "demo", "demo")
        volume = await asyncio.to_thread(measured, server)
        assert volume.documents == DOCUMENTS
        assert 0 < volume.uncounted_bytes < volume.size_bytes
        for clients in (1, 3):
            timing = await asyncio.to_thread(discard, server, volume, clients)
            assert timing.documents == clients * DOCUMENTS


async def test_the_acknowledged_bytes_open_the_window_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirror.bench.drain.WINDOW_BYTES", 4096)
    async with SandboxCluster(vbuckets=2) as cluster:
        cluster.bucket.load((b"key-%d" % number, b"v" * 200) for number in range(DOCUMENTS))
        server = Server(cluster.host, cluster.nodes[0].port or 0, "demo", "demo", "demo")
        volume = await asyncio.to_thread(measured, server)
        assert volume.size_bytes > 20 * 4096
        assert (await asyncio.to_thread(discard, server, volume)).documents == DOCUMENTS


async def test_a_server_that_refuses_is_an_error_that_names_the_request() -> None:
    async with SandboxCluster(vbuckets=1) as cluster:
        server = Server(cluster.host, cluster.nodes[0].port or 0, "demo", "demo", "wrong")
        with pytest.raises(RuntimeError, match="SASL_AUTH with status 0x20"):
            await asyncio.to_thread(measured, server)
