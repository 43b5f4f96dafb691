"""`events` against a service in the test's own process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import events as command
from mirror.errors import SupervisionError
from mirror.messages import GetEvents
from tests.supervise import in_process
from tests.supervise.conftest import eventually
from tests.supervise.in_process import vbids_of, vbucket


async def test_events_are_lines_for_people_and_objects_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_process.use(monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]})
    async with in_process.serving(tmp_path) as service:
        await eventually(lambda: service.status_document()["events"])
        capsys.readouterr()
        await asyncio.to_thread(command.events, tmp_path)
        assert "first-fill-done  the first fill is done: 8 vbuckets, 40 seqnos\n" in capsys.readouterr().out
        await asyncio.to_thread(command.events, tmp_path, as_json=True)
        [line] = capsys.readouterr().out.splitlines()
        assert json.loads(line) == service.status_document()["events"][0]


def test_without_a_service_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SupervisionError, match=r"no service runs .* its log"):
        command.events(tmp_path)


def test_following_goes_on_with_the_next_service_and_shows_each_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(pid: int, *numbers: int) -> dict[str, Any]:
        return {"pid": pid, "events": [{"pid": pid, "number": number} for number in numbers]}

    requested: list[tuple[int, float]] = []
    answers: Iterator[Any] = iter(
        [answer(1, 1, 2), answer(1), answer(1, 3), None, None, answer(2), answer(2, 1), answer(2, 2), KeyboardInterrupt]
    )

    def ask(_path: Path, request: GetEvents) -> Any:
        requested.append((request.after, request.wait_s))
        found = next(answers)
        if found is KeyboardInterrupt:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr("mirror.client.ask", ask)
    monkeypatch.setattr(command, "AWAY_INTERVAL_S", 0)
    command.events(tmp_path, follow=True, as_json=True)
    out, err = capsys.readouterr()
    shown = [json.loads(line) for line in out.splitlines()]
    assert [(each["pid"], each["number"]) for each in shown] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]
    assert [after for after, _ in requested] == [0, 2, 2, 3, 3, 3, 0, 1, 2]
    assert requested[0][1] == 0
    assert err.count("waiting for the next one") == 1
