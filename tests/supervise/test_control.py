from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import select
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mirror import client
from mirror.client import SOCKET_NAME, ServiceSaidNo, socket_address
from mirror.errors import ConfigError, SupervisionError
from mirror.messages import Ping
from mirror.supervise.listeners import control
from mirror.supervise.listeners.control import ControlServer, Handler


async def echo(request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "fail":
        raise ConfigError("that is wrong", hint="do it right")
    if request["op"] == "sleep":
        await asyncio.sleep(60)
    return {"echo": request}


@asynccontextmanager
async def serving(directory: Path, handler: Handler = echo) -> AsyncIterator[ControlServer]:
    server = ControlServer(directory, handler)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def ask(directory: Path, *lines: bytes) -> list[dict[str, Any]]:
    with socket_address(directory) as address:
        reader, writer = await asyncio.open_unix_connection(address)
    for line in lines:
        writer.write(line + b"\n")
    writer.write_eof()
    answers = [json.loads(line) for line in (await reader.read()).splitlines()]
    writer.close()
    await writer.wait_closed()
    return answers


async def test_a_request_is_a_line_and_only_the_owner_may_send_one(tmp_path: Path) -> None:
    (tmp_path / SOCKET_NAME).touch()  # of a dead service
    async with serving(tmp_path):
        assert stat.S_IMODE((tmp_path / SOCKET_NAME).stat().st_mode) == 0o600
        answers = await ask(tmp_path, b'{"op": "one"}', b'{"op": "two"}')
        assert answers == [{"ok": True, "echo": {"op": "one"}}, {"ok": True, "echo": {"op": "two"}}]
    assert not (tmp_path / SOCKET_NAME).exists()


async def test_a_client_that_leaves_without_its_answer_leaves_no_traceback(
    tmp_path: Path, untaken_errors: list[dict[str, Any]]
) -> None:
    async with serving(tmp_path):
        with socket_address(tmp_path) as address, socket.socket(socket.AF_UNIX) as line:
            line.connect(address)
            line.sendall(b'{"op": "one"}\n')
            await asyncio.to_thread(select.select, [line], [], [])
        (served,) = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait({served})
    gc.collect()
    assert not untaken_errors


async def test_garbage_and_failures_are_answered_by_a_line_each(tmp_path: Path) -> None:
    async with serving(tmp_path):
        answers = await ask(tmp_path, b"garbage", b"[1]", b'{"no": "op"}', b'{"op": "fail"}', b'{"op": "ok"}')
        assert [answer["ok"] for answer in answers] == [False, False, False, False, True]
        assert answers[3] == {"ok": False, "error": "that is wrong (do it right)", "exit_code": 2, "retryable": False}


async def test_a_request_without_end_does_not_harm_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_LENGTH_MAX", 1000)
    async with serving(tmp_path):
        assert await ask(tmp_path, b"x" * 100_000) == [{"ok": False, "error": "the request is too long"}]
        assert (await ask(tmp_path, b'{"op": "ok"}'))[0]["ok"]


async def test_a_command_that_hangs_is_answered_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER_TIMEOUT_S", 0.05)
    async with serving(tmp_path):
        (answer,) = await ask(tmp_path, b'{"op": "sleep"}')
        assert "no answer" in answer["error"]


async def test_a_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    async with serving(deep):
        assert (await ask(deep, b'{"op": "ok"}'))[0]["ok"]


async def test_more_clients_than_allowed_are_turned_away_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were told that no service runs, so a lease counted as granted."""
    monkeypatch.setattr(control, "CLIENTS_MAX", 1)
    async with serving(tmp_path):
        with socket_address(tmp_path) as address:
            reader, writer = await asyncio.open_unix_connection(address)
            writer.write(b'{"op": "first"}\n')
            assert json.loads(await reader.readline())["ok"]
            with pytest.raises(ServiceSaidNo, match="1 clients are connected already") as caught:
                await asyncio.to_thread(client.ask, tmp_path, Ping())
            assert caught.value.retryable
        writer.close()


async def test_a_missing_directory_for_a_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(SupervisionError, match="missing"):
        await ControlServer(tmp_path / "missing", echo).start()


async def test_a_client_that_reads_nothing_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of them once kept the operator out for ever."""
    monkeypatch.setattr(control, "SEND_TIMEOUT_S", 0.05)
    monkeypatch.setattr(control, "CLIENTS_MAX", 1)
    answered: list[bool] = []
    requested = asyncio.Event()

    async def talk(_: dict[str, Any]) -> dict[str, Any]:
        answered.append(True)
        requested.set()
        return {"long": "x" * 1024 * 1024}

    async with serving(tmp_path, talk) as server:
        with socket_address(tmp_path) as address:
            reader, writer = await asyncio.open_unix_connection(address, limit=1024)
        writer.write(b'{"op": "one"}\n' * 20)
        async with asyncio.timeout(20):
            await requested.wait()
            await asyncio.wait(set(server._clients))
        assert answered == [True]
        assert (await ask(tmp_path, b'{"op": "ok"}'))[0]["ok"]
        taken = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                taken += len(data)
        assert taken < 1024 * 1024, "what it had not taken is not kept for it"
        writer.close()


@pytest.mark.parametrize("said", [b"", b'{"op": ', b'{"op": "one"}\n'])
async def test_a_client_that_sends_nothing_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.05)
    async with serving(tmp_path):
        with socket_address(tmp_path) as address:
            reader, writer = await asyncio.open_unix_connection(address)
        writer.write(said)
        async with asyncio.timeout(20):
            answered = await reader.read()
        assert answered.count(b"\n") == said.count(b"\n"), "hung up, after the requests were answered"
        writer.close()
