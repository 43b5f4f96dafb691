"""The source of the status, the rate of its requests, and its record of the past."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mirror.serve.http.status import StatusReporter, _together, ask_service
from mirror.serve.http.view import Mirror
from mirror.serve.objects import dumps
from mirror.supervise.listeners.control import ControlServer
from mirror.supervise.status import stored_status
from storage.env import directory
from storage.errors import NotAMirror
from tests.manual_clock import ManualClock
from tests.serve.http_site import IDENTITY, Source, service_report


def status_of(data: Path, clock: ManualClock) -> StatusReporter:
    return StatusReporter(Mirror(data), stored_status, clock, lag_limit_s=30)


async def test_the_status_comes_from_the_service_if_it_runs_and_else_from_the_store(source: Source) -> None:
    data = Path(source.path)
    clock = ManualClock()
    status = status_of(data, clock)
    assert (await status.report())["service"] == "down"
    queries = 0

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal queries
        queries += 1
        assert request == {"op": "status"}
        return {"status": service_report(data)}

    control = ControlServer(data, answer)
    await control.start()
    try:
        assert (await status.report())["service"] == "down", "that is fresh enough"
        clock.advance(1)
        found = await asyncio.gather(*(status.report() for _ in range(20)))
        assert {report["service"] for report in found} == {"up"}
        assert queries == 1
    finally:
        await control.stop()
    clock.advance(1)
    assert (await status.report())["service"] == "down"


async def test_a_report_is_rendered_once(source: Source) -> None:
    """The metrics of 1,024 vbuckets once took 47 ms of the event loop in each scrape."""
    clock = ManualClock()
    status = status_of(Path(source.path), clock)
    threads: list[threading.Thread] = []

    def render(report: dict[str, Any]) -> bytes:
        threads.append(threading.current_thread())
        return str(report["service"]).encode()

    assert [await status.rendered(render) for _ in range(5)] == [b"down"] * 5
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    assert (await status.rendered(dumps))[:1] == b"{"
    clock.advance(1)
    await status.rendered(render)
    assert len(threads) == 2


@pytest.mark.parametrize("said", [b'{"ok": false}\n', b'{"ok": true, "status": 1}\n'])
async def test_a_service_with_a_malformed_answer_counts_as_down(tmp_path: Path, said: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said)
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "control.sock")
    assert await ask_service(tmp_path) is None
    server.close()
    assert await ask_service(tmp_path / "nowhere") is None


def test_a_failover_of_many_vbuckets_is_one_entry_of_the_history() -> None:
    """The page counted 50 vbuckets of 127: as many as it was sent."""
    first = [{"vbid": vbid, "time_ms": 90_000 - vbid, "from_seqno": 9, "to_seqno": 7} for vbid in range(127)]
    second = [{"vbid": 3, "time_ms": 80_000, "from_seqno": 5, "to_seqno": 4}]
    assert _together("rollback", [*first, *second]) == [
        {"event": "rollback", "time_ms": 90_000, "vbuckets": 127, "seqnos": 254, "first": first[0]},
        {"event": "rollback", "time_ms": 80_000, "vbuckets": 1, "seqnos": 1, "first": second[0]},
    ]
    assert _together("resync-done", [{"vbid": 1, "time_ms": 5}, {"vbid": 1, "time_ms": 4}]) == [
        {"event": "resync-done", "time_ms": 5, "vbuckets": 1, "seqnos": 0, "first": {"vbid": 1, "time_ms": 5}}
    ]


async def test_the_status_shows_rollbacks_resyncs_history_and_disk(source: Source) -> None:
    key = source.key_of(2)
    for _ in range(3):
        source.put(key)
    source.rollback(2, 1)
    whole = json.loads(await status_of(Path(source.path), ManualClock()).rendered(dumps))
    assert [(each["vbid"], each["from_seqno"], each["to_seqno"]) for each in whole["history"]["rollbacks"]] == [
        (2, 3, 1)
    ]
    assert whole["history"]["past"] == _together("rollback", whole["history"]["rollbacks"])
    assert whole["history"]["resync_count"] == 0
    assert whole["history"]["floor_oldest_ms"] is not None
    assert 0 < whole["disk"]["mirror_bytes"] < whole["disk"]["total_bytes"]
    assert whole["lag_limit_s"] == 30


async def test_a_missing_mirror_is_an_error_until_it_is_made(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    with pytest.raises(NotAMirror):
        await status_of(tmp_path, ManualClock()).report()
    mirror.refresh()
    directory.create(str(tmp_path), IDENTITY)
    assert mirror.view.identity == IDENTITY
    mirror.close()


def test_a_group_that_was_recreated_is_read_again(source: Source) -> None:
    mirror = Mirror(Path(source.path))
    key = source.key_of(1)
    source.put(key)
    before = mirror.view
    assert before.exists(key)
    mirror.refresh()
    assert mirror.view is before
    source.writers.pop(1).close()
    path = directory.group_path(source.path, 1)
    os.rename(path, path + ".damaged")
    os.mkdir(path + ".new")
    directory.create_environment(path + ".new", 1, IDENTITY, time_ms=1)
    os.rename(path + ".new", path)
    mirror.refresh()
    assert mirror.view is not before
    assert mirror.view.unfilled([1]) == [1]
    mirror.close()
