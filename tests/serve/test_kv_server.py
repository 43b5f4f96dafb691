"""Limits over all connections of a process: the idle, the greedy, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mirror.serve.access.auth import FileUsers, entry_of
from mirror.server.outgoing import HIGH_WATER_BYTES
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status
from tests.serve.dcp_rig import until
from tests.serve.kv_rig import Client, Endpoint, Store, serving, with_users

HUGE = 2_000_000
MIDDLE = 250_000
"""Answered in one step, unlike what is larger (test_kv_large)."""


@pytest.fixture
def store(store: Store) -> Store:
    store.put(b"huge", b"x" * HUGE, 1)
    store.put(b"middle", b"x" * MIDDLE, 2)
    return store


async def greedy(endpoint: Endpoint, count: int = 120) -> Client:
    """Ask for much, and take none of it."""
    before, dropped = set(endpoint.server.connections), endpoint.server.dropped_count
    client = await endpoint.connect()
    for _ in range(count):
        client.writer.write(fr.encode(fr.request(Opcode.GET, key=b"middle")))
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.writer.drain()
    while True:
        made = endpoint.server.connections - before
        if endpoint.server.dropped_count > dropped or any(each.outgoing.paused_s is not None for each in made):
            return client
        await asyncio.sleep(0.005)


async def test_an_idle_client_is_disconnected_and_a_busy_one_is_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.server.endpoint.IDLE_TIMEOUT_S", 100)
    async with serving(store.path) as endpoint:
        idle, busy = await endpoint.connect(), await endpoint.connect()
        assert await idle.alive()
        assert await busy.alive()
        endpoint.server.now_s += 99
        assert await busy.alive()
        endpoint.server.now_s += 2
        endpoint.server.sweep()
        assert await idle.receive() is None
        assert await busy.alive()
        assert endpoint.server.dropped_count == 1


async def test_a_client_that_reads_nothing_for_too_long_is_disconnected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.server.endpoint.SEND_TIMEOUT_S", 10)
    async with serving(store.path) as endpoint:
        await greedy(endpoint)
        (connection,) = endpoint.server.connections
        endpoint.server.now_s += 9
        endpoint.server.sweep()
        assert endpoint.server.dropped_count == 0
        connection.outgoing._unsent_seen += 1  # as if something had been taken since
        endpoint.server.sweep()
        endpoint.server.now_s += 9
        endpoint.server.sweep()
        assert endpoint.server.dropped_count == 0
        endpoint.server.now_s += 2
        endpoint.server.sweep()
        await until(lambda: not endpoint.server.connections)
        assert endpoint.server.dropped_count == 1


async def test_all_clients_together_hold_at_most_the_limit_of_unsent_bytes(store: Store) -> None:
    unsent_bytes_max = 2 * (HIGH_WATER_BYTES + MIDDLE)
    async with serving(store.path, reader_unsent_bytes_max=unsent_bytes_max) as endpoint:
        for _ in range(8):
            await greedy(endpoint)
            held = sum(each.outgoing.unsent_bytes for each in endpoint.server.connections)
            assert held <= unsent_bytes_max
        await until(lambda: endpoint.server.dropped_count >= 4)
        patient = await endpoint.connect()
        assert len((await patient.get(b"middle")).value) == MIDDLE


async def test_a_stop_sends_pending_answers(store: Store) -> None:
    async with serving(store.path) as endpoint:
        client = await endpoint.connect()
        await client.send(fr.request(Opcode.GET, key=b"huge"))
        await until(lambda: endpoint.server.counters.hits > 0)
        stopping = asyncio.create_task(endpoint.server.stop(5))
        assert len((await client.answer()).value) == HUGE
        assert await client.receive() is None
        await stopping


async def test_the_counters_of_a_server_add_up(store: Store) -> None:
    async with serving(store.path) as endpoint:
        client = await endpoint.connect()
        await client.get(b"huge")
        await client.get(b"none")
        await client.ask(fr.request(Opcode.SET, key=b"a"))
        found = endpoint.server.status()
        expected = {
            "kv_connections": 1, "kv_requests": 3, "kv_hits": 1, "kv_misses": 1, "kv_refused": 1, "kv_errors": 0,
        }  # fmt: skip
        assert {name: found[name] for name in expected} == expected
        assert found["kv_sent_bytes"] == HUGE + 28 + 24 + 24


async def test_a_removed_user_is_disconnected_and_a_changed_one_gets_its_new_rights(
    store: Store, tmp_path: Path
) -> None:
    """Within a sweep, which comes every second; connections that ask for nothing included."""
    users = {name: entry_of("pw") for name in ("ann", "bob", "eve", "dan")}
    file = with_users(tmp_path / "users.json", users)
    async with serving(store.path, readers=FileUsers(file)) as endpoint:
        clients = {}
        for name in users:
            client = clients[name] = await endpoint.connect()
            assert await client.login(name, "pw") == 0
            assert len((await client.get(b"huge")).value) == HUGE
        users["eve"] = entry_of("another")
        users["bob"]["read"] = ["shop.*"]
        del users["ann"]
        with_users(file, users)
        endpoint.server.sweep()
        assert await clients["ann"].receive() is None
        assert await clients["eve"].receive() is None, "its password was changed"
        assert (await clients["bob"].get(b"huge")).status == Status.EACCESS
        assert len((await clients["dan"].get(b"huge")).value) == HUGE


async def test_an_answer_that_waited_is_checked_against_the_rights_at_its_end(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large document was sent by the rights of its request."""
    users = {"ann": entry_of("pw")}
    file = with_users(tmp_path / "users.json", users)
    async with serving(store.path, readers=FileUsers(file)) as endpoint:
        reading = await endpoint.connect()
        assert await reading.login("ann", "pw") == 0
        read, judged = asyncio.Event(), asyncio.Event()
        run = endpoint.server.worker.run

        async def run_and_wait(work: Callable[[], Any]) -> Any:
            answer = await run(work)
            read.set()
            await judged.wait()
            return answer

        monkeypatch.setattr(endpoint.server.worker, "run", run_and_wait)
        await reading.send(fr.request(Opcode.GET, key=b"huge"))
        await read.wait()
        users["ann"]["read"] = ["shop.*"]
        with_users(file, users)
        endpoint.server.sweep()
        store.put(b"huge", b"written after the change", 3)
        judged.set()
        assert (await reading.answer()).status == Status.EACCESS


async def test_the_sweeper_keeps_the_time_and_notices_a_recreated_group(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.server.endpoint.SWEEP_S", 0.005)
    monkeypatch.setattr("mirror.server.endpoint.REPLACED_CHECK_S", 0.01)
    async with serving(store.path) as endpoint:
        began = endpoint.server.now_s
        looked = []
        monkeypatch.setattr(endpoint.bucket, "reopen_if_replaced", lambda: looked.append(1))
        await until(lambda: bool(looked) and endpoint.server.now_s > began)
