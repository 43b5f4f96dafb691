"""A child's life at its end of the pipe, with the test as the supervisor."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from mirror.config import to_wire
from mirror.messages import Answer, Beat, GetStatus, PipeMessage, Ready, Request, Resync, StartWorker, StopWork
from mirror.supervise.processes.channel import Channel
from mirror.supervise.processes.child import worker_command
from tests.supervise.scripted import settings_for
from tests.supervise.scripted import worker_command as scripted_command

M = TypeVar("M", bound=PipeMessage)
Ends = tuple[Channel, asyncio.subprocess.Process]


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Ends]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *scripted_command(theirs.fileno()), pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL
        )
    channel = await Channel.open(ours)
    yield channel, process
    await channel.close()
    await process.wait()


async def expect(channel: Channel, kind: type[M]) -> M:
    while (message := await channel.receive()) is not None:
        if isinstance(message, kind):
            return message
        assert isinstance(message, Beat)
    raise AssertionError(f"the worker exited without {kind}")


def start_of(data: Path) -> StartWorker:
    return StartWorker(slot=0, groups=[0, 1], settings=to_wire(settings_for(data)))


async def test_a_worker_beats_answers_and_stops_on_command(worker: Ends, tmp_path: Path) -> None:
    channel, process = worker
    channel.send(start_of(tmp_path))
    await expect(channel, Ready)
    await expect(channel, Beat)
    channel.send(Request(7, GetStatus()))
    answer = await expect(channel, Answer)
    assert answer.id == 7
    assert answer.value is not None
    assert [row["vbid"] for row in answer.value["vbuckets"]] == [0, 1, 4, 5]
    channel.send(Request(8, Resync(1)))
    assert (await expect(channel, Answer)).value == {"heard": {"op": "resync", "vbid": 1}}
    channel.send(StopWork())
    assert await process.wait() == 0


async def test_a_worker_ends_with_its_pipe(worker: Ends, tmp_path: Path) -> None:
    channel, process = worker
    channel.send(start_of(tmp_path))
    await expect(channel, Ready)
    await channel.close()
    assert await process.wait() == 0


async def test_a_worker_without_a_first_message_ends_quietly(worker: Ends) -> None:
    channel, process = worker
    await channel.close()
    assert await process.wait() == 0


@pytest.mark.parametrize(("name", "ends"), [("INT", False), ("HUP", False), ("TERM", True)])
async def test_a_worker_ignores_the_signals_of_the_terminal(
    worker: Ends, tmp_path: Path, name: str, ends: bool
) -> None:
    channel, process = worker
    channel.send(start_of(tmp_path))
    await expect(channel, Ready)
    process.send_signal(signal.Signals[f"SIG{name}"])
    if not ends:
        channel.send(Request(1, GetStatus()))
        await expect(channel, Answer)
        channel.send(StopWork())
    assert await process.wait() == 0


@pytest.mark.parametrize(
    "arguments", [[], ["garbage"], ["0"], ["999"]], ids=["none", "no number", "no socket", "closed"]
)
def test_a_worker_started_by_hand_is_refused(arguments: Sequence[str]) -> None:
    command = [*worker_command(0)[:-1], *arguments]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["a worker is started by its supervisor alone: use `dcp-mirror run`"]
