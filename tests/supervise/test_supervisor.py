"""Supervision with real processes: what is killed comes back, what is told to stop stops, and nobody is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mirror.client import SOCKET_NAME, ServiceSaidNo, socket_address
from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import (
    AuthRejected,
    BucketChanged,
    ConfigError,
    ConnectFailed,
    ExitCode,
    MirrorError,
    SupervisionError,
)
from mirror.lease import Lease
from mirror.supervise.supervisor import Source, Supervisor, exit_words
from storage import directory
from storage.model import Identity
from tests.supervise.conftest import eventually, eventually_now
from tests.supervise.scripted import look_up, settings_for, worker_command

SCRIPTED = Path(__file__).with_name("scripted.py")
SOURCE = Source("c1", "demo", "b1", 8)


def supervisor(data: Path, **values: Any) -> Supervisor:
    arguments: dict[str, Any] = {"clock": SystemClock(), "command": worker_command} | values
    lookup = arguments.pop("look_up", look_up)
    settings = arguments.pop("settings", None) or settings_for(data)
    return Supervisor(settings, lookup, **arguments)


def phases(service: Supervisor) -> list[str]:
    return [worker["phase"] for worker in service.status_document()["workers"]]


def pids(service: Supervisor) -> list[int]:
    return [worker["pid"] for worker in service.status_document()["workers"]]


def running(service: Supervisor, count: int = 2) -> Callable[[], bool]:
    return lambda: phases(service).count("running") == count


@asynccontextmanager
async def serving(service: Supervisor) -> AsyncIterator[Supervisor]:
    """The service until the block ends, then a clean stop of all it started."""
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        service.stop()
        await task


async def ask(data: Path, request: dict[str, Any]) -> dict[str, Any]:
    with socket_address(data) as address:
        reader, writer = await asyncio.open_unix_connection(address, limit=2**24)
    writer.write(json.dumps(request).encode() + b"\n")
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    await writer.wait_closed()
    return answer


async def test_groups_are_shared_out_and_everyone_reports(tmp_path: Path) -> None:
    async with serving(supervisor(tmp_path)) as service:
        await eventually(lambda: len(service.status_document()["vbuckets"]) == 8)
        document = service.status_document()
        assert [worker["groups"] for worker in document["workers"]] == [[0, 2], [1, 3]]
        assert document["service"] == "up"
        assert document["bucket_uuid"] == "b1"
        assert document["totals"]["documents"] == 8
        assert all(worker["private_bytes"] > 0 for worker in document["workers"])
        assert directory.load(str(tmp_path)) == Identity("c1", "demo", "b1", 8, 4)
    assert phases(service) == ["absent", "absent"]
    assert not (tmp_path / SOCKET_NAME).exists()


async def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    async with serving(supervisor(tmp_path)) as service:
        await eventually(running(service))
        victim, other = pids(service)
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: running(service)() and pids(service)[0] != victim)
        worker = service.status_document()["workers"][0]
        assert worker["restarts"] == 1
        assert worker["last_exit"] == "SIGKILL"
        assert pids(service)[1] == other


async def test_a_worker_that_stands_still_is_killed_and_replaced(tmp_path: Path) -> None:
    service = supervisor(tmp_path, settings=settings_for(tmp_path, worker_heartbeat_timeout_s=1.5))
    async with serving(service):
        await eventually(running(service))
        victim = pids(service)[0]
        os.kill(victim, signal.SIGSTOP)
        await eventually(lambda: running(service)() and pids(service)[0] != victim)
        worker = service.status_document()["workers"][0]
        assert (worker["last_exit"], worker["last_error"]) == ("SIGKILL", "no heartbeat")
        assert not psutil.pid_exists(victim)


async def test_a_crash_loop_is_slowed_down_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(supervisor(tmp_path)) as service:
        await eventually(running(service))
        monkeypatch.setenv("SCRIPT", "crash")
        victim, other = pids(service)
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: service.status_document()["workers"][0]["restarts"] >= 2)
        assert service.status_document()["workers"][0]["last_exit"] == "SIGSEGV"
        assert pids(service)[1] == other
        monkeypatch.setenv("SCRIPT", "")
        await eventually(running(service))


@pytest.mark.parametrize(("script", "words"), [("bug", "ZeroDivisionError: a bug"), ("refused", "wrong password")])
async def test_what_a_worker_says_before_it_dies_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setenv("SCRIPT", script)
    async with serving(supervisor(tmp_path)) as service:
        await eventually(lambda: any(worker["last_error"] for worker in service.status_document()["workers"]))
        errors = [worker["last_error"] for worker in service.status_document()["workers"] if worker["last_error"]]
        assert words in errors[0]


async def test_a_worker_that_will_not_stop_is_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPT", "stubborn")
    service = supervisor(tmp_path, settings=settings_for(tmp_path, stop_timeout_s=0.5))
    async with serving(service):
        await eventually(running(service))
        children = pids(service)
    assert not any(psutil.pid_exists(pid) for pid in children)
    assert {worker["last_exit"] for worker in service.status_document()["workers"]} == {"SIGKILL"}


async def test_a_second_interrupt_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPT", "stubborn")
    service = supervisor(tmp_path, settings=settings_for(tmp_path, stop_timeout_s=3600))
    task = asyncio.create_task(service.run())
    await eventually(running(service))
    os.kill(os.getpid(), signal.SIGINT)
    await eventually(lambda: phases(service) == ["stopping", "stopping"])
    os.kill(os.getpid(), signal.SIGINT)
    assert await task == ExitCode.DONE


async def test_a_second_service_on_the_same_data_is_refused(tmp_path: Path) -> None:
    async with serving(supervisor(tmp_path)) as service:
        await eventually(running(service))
        with pytest.raises(SupervisionError, match=str(os.getpid())):
            await supervisor(tmp_path).run()
        assert (await ask(tmp_path, {"op": "ping"})) == {"ok": True, "pid": os.getpid()}


async def test_commands_arrive(tmp_path: Path) -> None:
    service = supervisor(tmp_path)
    task = asyncio.create_task(service.run())
    await eventually(running(service))
    status = (await ask(tmp_path, {"op": "status"}))["status"]
    assert [row["vbid"] for row in status["vbuckets"]] == list(range(8))
    assert status["vbuckets"][0]["vbuuid"] == "000000000abc"
    assert "unknown command" in (await ask(tmp_path, {"op": "dance"}))["error"]
    assert (await ask(tmp_path, {"op": "stop"}))["ok"]
    assert await task == ExitCode.DONE


async def test_fewer_workers_after_a_reload_take_over_the_groups(tmp_path: Path) -> None:
    fresh: list[Settings] = [settings_for(tmp_path, workers=1)]
    async with serving(supervisor(tmp_path, reload=lambda: fresh[0])) as service:
        await eventually(running(service))
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(running(service, 1))
        await eventually(lambda: service.status_document()["workers"][0]["groups"] == [0, 1, 2, 3])
        assert service.status_document()["workers"][1]["last_exit"] == "exit 0"


async def test_changed_settings_reach_the_workers_by_a_restart_of_each(tmp_path: Path) -> None:
    fresh = settings_for(tmp_path, commit_interval_ms=50)
    async with serving(supervisor(tmp_path, reload=lambda: fresh)) as service:
        await eventually(running(service))
        before = pids(service)
        await ask(tmp_path, {"op": "reload"})
        await eventually(lambda: running(service)() and not set(before) & set(pids(service)))
        assert {worker["last_exit"] for worker in service.status_document()["workers"]} == {"exit 0"}


async def test_new_limits_of_leases_take_effect_without_a_restart_of_workers(tmp_path: Path) -> None:
    asking = {"op": "lease", "id": "a", "name": "job", "seconds": 30, "positions": [[0, 1, 5]]}
    fresh = settings_for(tmp_path, lease_max_s=10)
    async with serving(supervisor(tmp_path, reload=lambda: fresh)) as service:
        await eventually(running(service))
        before = pids(service)
        assert (await ask(tmp_path, asking))["ok"]
        await ask(tmp_path, {"op": "reload"})
        answer = await ask(tmp_path, asking | {"id": "b"})
        assert not answer["ok"]
        assert "ask for 1 to 10 s" in answer["error"]
        assert pids(service) == before


async def test_bad_new_settings_change_nothing(tmp_path: Path) -> None:
    asked = []

    def reload() -> Settings:
        asked.append(True)
        raise ConfigError("the file is no TOML")

    async with serving(supervisor(tmp_path, reload=reload)) as service:
        await eventually(running(service))
        before = pids(service)
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: asked)
        assert (await ask(tmp_path, {"op": "status"}))["ok"]
        assert pids(service) == before


async def test_until_caught_up_ends_by_itself(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    service = supervisor(tmp_path, until_caught_up=True, progress=seen.append)
    assert await service.run() == ExitCode.DONE
    assert seen[-1]["catch_up"]["vbuckets_done"] == 8
    assert seen[-1]["catch_up"]["share"] == 1.0


async def test_until_caught_up_fails_with_what_the_source_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPT", "refused")
    with pytest.raises(MirrorError, match="wrong password") as caught:
        await supervisor(tmp_path, until_caught_up=True).run()
    assert caught.value.exit_code is ExitCode.REFUSED


async def test_interrupting_the_way_to_caught_up_is_no_success(tmp_path: Path) -> None:
    async def never(settings: Settings, bucket_uuid: str | None = None) -> Source:
        raise ConnectFailed("nobody there")

    service = supervisor(tmp_path, until_caught_up=True, look_up=never)
    task = asyncio.create_task(service.run())
    await eventually(lambda: service.status_document()["source_error"])
    os.kill(os.getpid(), signal.SIGINT)
    assert await task == ExitCode.INTERRUPTED


async def test_a_refusal_at_start_ends_the_service_and_leaves_no_mirror(tmp_path: Path) -> None:
    async def refuse(settings: Settings, bucket_uuid: str | None = None) -> Source:
        raise AuthRejected("wrong password for demo")

    with pytest.raises(AuthRejected):
        await supervisor(tmp_path, look_up=refuse).run()
    assert not directory.exists(str(tmp_path))


async def test_a_source_that_is_away_is_waited_for(tmp_path: Path) -> None:
    answers: list[Source | MirrorError] = [ConnectFailed("nobody there"), ConnectFailed("nobody there"), SOURCE]

    async def come_back(settings: Settings, bucket_uuid: str | None = None) -> Source:
        answer = answers.pop(0)
        if isinstance(answer, MirrorError):
            raise answer
        return answer

    async with serving(supervisor(tmp_path, look_up=come_back)) as service:
        await eventually(lambda: "nobody there" in (service.status_document()["source_error"] or ""))
        await eventually(running(service))
        assert service.status_document()["source_error"] is None


async def test_known_data_is_worked_on_while_the_source_is_away(tmp_path: Path) -> None:
    directory.create(str(tmp_path), Identity("c1", "demo", "b1", 8, 4))

    async def away(settings: Settings, bucket_uuid: str | None = None) -> Source:
        raise ConnectFailed("nobody there")

    async with serving(supervisor(tmp_path, look_up=away)) as service:
        await eventually(running(service))
        assert service.status_document()["state"] == "source unreachable"


async def test_somebody_waiting_for_the_end_is_not_kept_for_ever(tmp_path: Path) -> None:
    async def away(settings: Settings, bucket_uuid: str | None = None) -> Source:
        raise ConnectFailed("nobody there")

    settings = settings_for(tmp_path, bootstrap_timeout_s=0.1)
    with pytest.raises(ConnectFailed):
        await supervisor(tmp_path, settings=settings, until_caught_up=True, look_up=away).run()


@pytest.mark.parametrize(
    "identity",
    [Identity("c1", "demo", "another", 8, 4), Identity("c1", "demo", "b1", 16, 4)],
    ids=["bucket", "vbuckets"],
)
async def test_another_buckets_data_is_left_as_it_is(tmp_path: Path, identity: Identity) -> None:
    directory.create(str(tmp_path), identity)
    with pytest.raises(BucketChanged) as caught:
        await supervisor(tmp_path).run()
    assert caught.value.exit_code is ExitCode.DATA
    assert directory.load(str(tmp_path)) == identity


async def test_the_number_of_groups_cannot_change_but_the_number_of_workers_can(tmp_path: Path) -> None:
    directory.create(str(tmp_path), Identity("c1", "demo", "b1", 8, 4))
    with pytest.raises(ConfigError, match="4 groups, not 2"):
        await supervisor(tmp_path, groups_asked=2).run()
    async with serving(supervisor(tmp_path, settings=settings_for(tmp_path, workers=3, groups=8))) as service:
        await eventually(running(service, 3))
        assert [worker["groups"] for worker in service.status_document()["workers"]] == [[0, 3], [1], [2]]


async def test_a_mirror_of_some_collections_refuses_to_become_one_of_others(tmp_path: Path) -> None:
    selected = settings_for(tmp_path, collections="inventory.route, inventory.airline")
    async with serving(supervisor(tmp_path, settings=selected)) as service:
        await eventually(running(service))
        assert service.status_document()["selection"] == "collections inventory.airline, inventory.route"
    assert directory.load(str(tmp_path)).selection == "collections inventory.airline,inventory.route"
    for other, named in (({"scope": "inventory"}, "scope inventory"), ({"collections": "a.b"}, "collections a.b")):
        with pytest.raises(ConfigError, match=f"inventory.route, not {named}") as caught:
            await supervisor(tmp_path, settings=settings_for(tmp_path, **other)).run()
        assert "leave --collection and --scope out" in str(caught.value)
    async with serving(supervisor(tmp_path)) as service:  # not named again: it stays what it was made for
        await eventually(running(service))
    with pytest.raises(ConfigError, match="track_prepares is set, and the data directory mirrors"):
        await supervisor(tmp_path, settings=settings_for(tmp_path, track_prepares=True)).run()


async def test_a_mirror_of_the_whole_bucket_refuses_to_become_one_of_a_part(tmp_path: Path) -> None:
    directory.create(str(tmp_path), Identity("c1", "demo", "b1", 8, 4))
    with pytest.raises(ConfigError, match="mirrors the whole bucket, not scope inventory"):
        await supervisor(tmp_path, settings=settings_for(tmp_path, scope="inventory")).run()


async def test_a_lease_outlives_the_death_of_a_worker_and_ends_when_one_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, worker_heartbeat_timeout_s=1.5)
    async with serving(supervisor(tmp_path, settings=settings)) as service:

        def is_another(victim: int) -> bool:
            return running(service)() and victim not in pids(service)

        await eventually(running(service))
        positions = {0: (1, 5), 1: (1, 5)}
        held = [[vbid, *position] for vbid, position in positions.items()]
        with pytest.raises(ServiceSaidNo, match="lease of 0"):
            await asyncio.to_thread(Lease, tmp_path, positions, name="job", seconds=0)
        lease = await asyncio.to_thread(Lease, tmp_path, positions, name="job", seconds=3)
        renewal = {"op": "lease", "id": lease.id, "name": "job", "seconds": 30, "positions": held}
        victim = pids(service)[0]
        os.kill(victim, signal.SIGSTOP)
        assert (await ask(tmp_path, renewal))["ok"], "asked while it stood still, and answered once it was dead"
        assert (await ask(tmp_path, renewal))["ok"], "it is not there, or still starting"
        await eventually(lambda: is_another(victim))
        assert (await ask(tmp_path, renewal))["ok"]
        assert lease.lost is None
        monkeypatch.setenv("SCRIPT", "forgetful")
        victim = pids(service)[1]
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: is_another(victim))
        await eventually(lambda: lease.lost)
        assert isinstance(lease.lost, ServiceSaidNo)
        assert "1:5 is not kept" in str(lease.lost)
        assert service.status_document()["leases"] == []
        refused = await ask(tmp_path, renewal)
        assert (refused["ok"], refused["retryable"]) == (False, False)
        await asyncio.to_thread(lease.release)


async def test_a_worker_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    tries = []

    def command(descriptor: int) -> list[str]:
        tries.append(descriptor)
        return list(worker_command(descriptor)) if len(tries) > 2 else ["/nonexistent/python"]

    async with serving(supervisor(tmp_path, command=command)) as service:
        await eventually(running(service))
        assert len(tries) == 4


@pytest.mark.parametrize("missing", ["data", "source"])
def test_what_is_not_said_is_asked_for(tmp_path: Path, missing: str) -> None:
    without: dict[str, Any] = {missing: None}
    settings = replace(settings_for(tmp_path), **without)
    with pytest.raises(ConfigError, match=missing):
        Supervisor(settings, look_up, clock=SystemClock())


def children_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_the_children_of_a_killed_supervisor_are_gone(tmp_path: Path) -> None:
    """One that runs, and one that is stopped and cannot notice: the kernel does it."""
    with subprocess.Popen([sys.executable, SCRIPTED, "service", tmp_path], stderr=subprocess.DEVNULL) as service:
        children = eventually_now(lambda: len(children_of(service)) == 2 and children_of(service))
        assert children
        eventually_now(lambda: all(len(child.net_connections("unix")) >= 1 for child in children))
        eventually_now(lambda: all("scripted.py" in " ".join(child.cmdline()) for child in children))
        eventually_now(lambda: ask_now(tmp_path)["workers"][0]["phase"] == "running")
        eventually_now(lambda: ask_now(tmp_path)["workers"][1]["phase"] == "running")
        children[0].suspend()
        service.kill()
        service.wait()
        eventually_now(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    again = subprocess.Popen([sys.executable, SCRIPTED, "service", tmp_path], stderr=subprocess.DEVNULL)
    with again:
        eventually_now(lambda: ask_now(tmp_path).get("state") == "catching up" or ask_now(tmp_path).get("workers"))
        again.terminate()
        assert again.wait() == 0


def test_closing_the_terminal_stops_what_was_started_in_it(tmp_path: Path) -> None:
    """The terminal's SIGHUP is no order to read the settings again: nobody would be left to stop the service."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, str(SCRIPTED), "service", str(tmp_path)])
    eventually_now(lambda: [worker["phase"] for worker in ask_now(tmp_path)["workers"]] == ["running", "running"])
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ask_now(tmp_path)["workers"] == []


def ask_now(data: Path) -> dict[str, Any]:
    """The status by a fresh connection; empty workers while nobody answers."""
    try:
        answer: dict[str, Any] = asyncio.run(ask(data, {"op": "status"}))["status"]
    except (OSError, ValueError):
        return {"workers": []}
    absent = {"phase": "absent"}
    answer["workers"] += [absent] * (2 - len(answer["workers"]))
    return answer


def test_how_it_ended_is_said_in_words() -> None:
    assert [exit_words(status) for status in (0, 3, -9, -11, -200)] == [
        "exit 0",
        "exit 3",
        "SIGKILL",
        "SIGSEGV",
        "signal 200",
    ]
