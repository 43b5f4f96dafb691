"""Events of a running service: noticed in the reports of its workers, logged, and handed to clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mirror.config import Settings
from mirror.errors import ConnectFailed
from mirror.feed.cluster.discovery import Source
from mirror.supervise.events.log import read_events
from mirror.supervise.supervisor import Supervisor
from tests.supervise import in_process, scripted
from tests.supervise.conftest import eventually
from tests.supervise.in_process import Report, vbids_of, vbucket
from tests.supervise.scripted import settings_for
from tests.supervise.service import ask


def names(data: Path) -> list[str]:
    return [event["event"] for event in read_events(data)]


def has_events(service: Supervisor, count: int) -> bool:
    return len(service.reports.document()["events"]) == count


async def test_events_are_logged_shown_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rolled_back: dict[str, Any] = {}

    def reports(groups: Sequence[int]) -> Report:
        return {"vbuckets": [vbucket(vbid, **rolled_back) for vbid in vbids_of(groups)], "counters": {}}

    started = in_process.use(monkeypatch, reports)
    settings = settings_for(tmp_path / "data", workers=1)
    async with in_process.serving(tmp_path / "data", settings) as service:
        await eventually(lambda: service.reports.document()["events"])
        assert names(tmp_path / "data") == ["first-fill-done"]
        rolled_back |= {"rollback_count": 1, "last_rollback": [9, 5]}
        await eventually(lambda: len(list(read_events(tmp_path / "data"))) == 2)
        [found] = ({**each} for each in read_events(tmp_path / "data", after=1))
        assert (found["number"], found["event"], found["vbuckets"], found["seqnos"]) == (2, "rollback", 8, 32)
        started[0].send_signal(9)
        await eventually(lambda: len(started) == 2)
        document = service.reports.document()
        assert [each["event"] for each in document["events"]] == ["worker-ended", "rollback", "first-fill-done"]
        assert document["events"][0]["text"].endswith("died: SIGKILL")
    logged = "".join(capsys.readouterr())
    assert logged.count("rollback ") == 1
    assert "seqnos=32" in logged
    assert "vbuckets=8" in logged


async def test_a_source_that_is_away_at_the_start_is_one_event_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process.use(monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]})
    answers = [ConnectFailed("refused at db1"), ConnectFailed("refused at db2"), None]

    async def look_up(settings: Settings, bucket_uuid: str | None = None) -> Source:
        if (error := answers.pop(0)) is not None:
            raise error
        return await scripted.look_up(settings, bucket_uuid)

    async with in_process.serving(tmp_path, look_up=look_up) as service:
        await eventually(lambda: len(service.reports.document()["events"]) == 3)
        assert names(tmp_path) == ["source-unreachable", "source-reached", "first-fill-done"]
        document = service.reports.document()
        assert ("refused at db1" in document["events"][2]["text"], document["source_error"]) == (True, None)


async def test_an_expired_lease_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process.use(monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]})
    command = {"op": "lease", "id": "a", "name": "nightly job", "seconds": 1, "positions": [[0, 1, 5]]}
    async with in_process.serving(tmp_path) as service:
        await eventually(lambda: service.reports.document()["events"])
        assert (await ask(tmp_path, command))["ok"]
        await eventually(lambda: len(service.reports.document()["events"]) == 2)
        assert service.reports.document()["events"][0] | {"time_ms": 0} == {
            "number": 2, "time_ms": 0, "event": "lease-expired", "level": "warning", "lease": "a",
            "reader": "nightly job", "vbuckets": 1,
            "text": "the lease of 'nightly job' on 1 vbuckets has expired: its reader may lose history",
        }  # fmt: skip
