"""Events are numbered, logged as one line each, kept up to a limit, and waited for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.supervise import logs
from mirror.supervise.event_log import EVENTS_KEPT, EventLog
from mirror.supervise.events import DiskFree, MapChanged


def change(rev: int) -> MapChanged:
    return MapChanged(rev_epoch=1, rev=rev, nodes=3)


async def test_an_event_is_one_line_of_the_log_and_goes_to_the_hook(capsys: pytest.CaptureFixture[str]) -> None:
    forwarded: list[dict[str, Any]] = []
    logs.set_up("info", json=True)
    EventLog(SystemClock(), forwarded.append).add(change(8))
    [line] = capsys.readouterr().err.splitlines()
    logged = json.loads(line)
    assert {name: logged[name] for name in ("event", "level", "rev_epoch", "rev", "nodes")} == {
        "event": "map-changed", "level": "info", "rev_epoch": 1, "rev": 8, "nodes": 3,
    }  # fmt: skip
    assert [(each["number"], each["event"]) for each in forwarded] == [(1, "map-changed")]


async def test_the_number_that_is_kept_is_bounded_and_a_gap_is_seen() -> None:
    log = EventLog(SystemClock(), lambda _: None)
    for rev in range(EVENTS_KEPT + 5):
        log.add(change(rev))
    found = await log.after(2, 0)
    assert len(found) == EVENTS_KEPT
    assert (found[0]["number"], found[-1]["number"]) == (6, EVENTS_KEPT + 5)
    assert [each["rev"] for each in log.newest(2)] == [EVENTS_KEPT + 4, EVENTS_KEPT + 3]


async def test_a_client_waits_for_the_next_event() -> None:
    log = EventLog(SystemClock(), lambda _: None)
    log.add(change(1))
    assert [each["number"] for each in await log.after(0, 20)] == [1], "there is one already"
    waiting = [asyncio.create_task(log.after(1, 20)) for _ in range(3)]
    await asyncio.sleep(0)
    log.add(DiskFree(groups=(1,)))
    log.add(change(2))
    for task in waiting:
        assert [each["number"] for each in await task] == [2, 3]
    assert await log.after(3, 0.01) == []
