"""`events` against a service in the test's own process."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from cli import status as command
from mirror.clock import SystemClock
from mirror.supervise.events.kinds import MapChanged
from mirror.supervise.events.log import EVENTS_FILE, EventLog
from tests.cli.conftest import call
from tests.supervise import in_process
from tests.supervise.conftest import eventually
from tests.supervise.in_process import vbids_of, vbucket


async def test_events_are_lines_for_people_and_objects_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_process.use(monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]})
    async with in_process.serving(tmp_path) as service:
        await eventually(lambda: service.reports.document()["events"])
        capsys.readouterr()
        await asyncio.to_thread(command.events, tmp_path)
        assert "first-fill-done  the first fill is done: 8 vbuckets, 40 seqnos\n" in capsys.readouterr().out
        await asyncio.to_thread(command.events, tmp_path, as_json=True)
        [line] = capsys.readouterr().out.splitlines()
        assert json.loads(line) == service.reports.document()["events"][0]


def written(data: Path, *ages_s: float) -> None:
    for number, age_s in enumerate(ages_s, 1):
        event = {"number": number, "time_ms": int((time.time() - age_s) * 1000), "event": "map-changed"}
        with (data / EVENTS_FILE).open("a") as file:
            file.write(json.dumps(event | {"level": "info", "text": f"age {age_s:g}"}) + "\n")


def test_events_are_readable_with_the_service_down(mirrored: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "mirror.json").write_bytes((mirrored / "mirror.json").read_bytes())
    assert call("events", "--data", data).out == ""
    written(data, 8000, 3000, 10)
    assert [line.split("  ")[-1] for line in call("events", "--data", data).out.splitlines()] == [
        "age 8000", "age 3000", "age 10"
    ]  # fmt: skip
    recent = call("events", "--data", data, "--since", "1h", "--json").lines
    assert [each["number"] for each in recent] == [2, 3]
    moment = datetime.fromtimestamp(time.time() - 600).isoformat()  # noqa: DTZ006  local, as people type it
    assert [each["number"] for each in call("events", "--data", data, "--since", moment, "--json").lines] == [3]
    call("events", "--data", data, "--since", "yesterday").assert_complains(2, "neither a time nor an age")
    assert call("events", "--data", tmp_path / "missing").code == 2


def test_a_follower_sees_each_event_once_even_across_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def next_service() -> None:
        EventLog(SystemClock(), tmp_path).add(MapChanged(rev_epoch=1, rev=8, nodes=3))

    looks = iter([lambda: written(tmp_path, 5.0), lambda: None, next_service])

    def sleep(_: float) -> None:
        look = next(looks, None)
        if look is None:
            raise KeyboardInterrupt
        look()

    monkeypatch.setattr(time, "sleep", sleep)
    command.events(tmp_path, follow=True, as_json=True)
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [each["number"] for each in shown] == [1, 2]
