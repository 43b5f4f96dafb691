"""Events of a running service: noticed in the reports of its workers, logged, and handed to clients and the hook."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import ConfigError, ConnectFailed
from mirror.feed.cluster.discovery import Source
from mirror.supervise.events.log import read_events
from mirror.supervise.supervisor import RunOptions, Supervisor
from tests.supervise import in_process, scripted
from tests.supervise.conftest import eventually
from tests.supervise.in_process import Report, vbids_of, vbucket
from tests.supervise.scripted import settings_for
from tests.supervise.service import ask


def names(data: Path) -> list[str]:
    return [event["event"] for event in read_events(data)]


def has_events(service: Supervisor, count: int) -> bool:
    return len(service.reports.document()["events"]) == count


async def test_events_are_logged_shown_passed_to_the_hook_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rolled_back: dict[str, Any] = {}

    def reports(groups: Sequence[int]) -> Report:
        return {"vbuckets": [vbucket(vbid, **rolled_back) for vbid in vbids_of(groups)], "counters": {}}

    started = in_process.use(monkeypatch, reports)
    hooked = tmp_path / "hooked"
    settings = settings_for(tmp_path / "data", workers=1, on_event=f"tee -a {hooked}")
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
        await eventually(lambda: hooked.exists() and hooked.read_text().count("\n") == 3)
        assert {json.loads(line)["number"] for line in hooked.read_text().splitlines()} == {1, 2, 3}
    logged = "".join(capsys.readouterr())
    assert logged.count("rollback ") == 1
    assert "seqnos=32" in logged
    assert "vbuckets=8" in logged


async def test_an_event_of_the_last_second_runs_the_command_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was logged at the stop, and its command was cancelled before it began."""
    rolled_back: dict[str, Any] = {}
    in_process.use(
        monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid, **rolled_back) for vbid in vbids_of(groups)]}
    )
    hooked = tmp_path / "hooked"
    data = tmp_path / "data"
    async with in_process.serving(data, settings_for(data, workers=1, on_event=f"tee -a {hooked}")) as service:
        await eventually(lambda: service.reports.document()["events"])
        rolled_back |= {"rollback_count": 1, "last_rollback": [9, 5]}
        assert (await ask(data, {"op": "status"}))["status"]["totals"]["rollback_count"] == 8
    assert names(data) == ["first-fill-done", "rollback"]
    assert {json.loads(line)["event"] for line in hooked.read_text().splitlines()} == {"first-fill-done", "rollback"}


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


async def test_a_reload_reports_each_changed_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process.use(monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]})
    found: list[Settings | ConfigError] = [
        settings_for(
            tmp_path, workers=1, source="couchbase://demo@elsewhere/demo", http="0", lease_max_s=10, on_event="true"
        ),
        settings_for(tmp_path, workers=1),
        ConfigError("the file is no TOML"),
        settings_for(tmp_path, workers=1, on_event="'open"),
    ]

    def reload() -> tuple[Settings, int | None]:
        answer = found.pop(0)
        if isinstance(answer, ConfigError):
            raise answer
        return answer, None

    async with in_process.serving(tmp_path, reload=reload) as service:
        await eventually(lambda: service.reports.document()["events"])
        for count in range(2, 6):
            answer = await ask(tmp_path, {"op": "reload"})
            await eventually(functools.partial(has_events, service, count))
            [event] = service.reports.document()["events"][:1]
            assert (event["text"] in str(answer.get("text", answer.get("error"))), answer["ok"]) == (True, count < 4)
            assert service.reports.document()["warnings"] == ([] if count < 4 else [event["text"]])
        events = service.reports.document()["events"][3::-1]
        first, second, third, fourth = events
        assert (first["in_force"], first["need_restart"]) == (["http", "lease_max_s", "on_event"], ["source"])
        assert first["text"] == (
            "settings read again: in force now: http, lease_max_s, on_event; "
            "only after a restart of the service: source"
        )
        assert (second["in_force"], second["need_restart"]) == (["http", "lease_max_s", "on_event"], [])
        assert (third["event"], third["why"]) == ("settings-refused", "the file is no TOML")
        assert "close its quotes" in fourth["why"]


@pytest.mark.parametrize(
    ("values", "groups", "says"),
    [
        ({"groups": 16}, 16, "was made with 4 groups, not 16"),
        ({"vbuckets": "0-3"}, None, "was made to hold vbuckets 0-7, not 0-3"),
        ({"scope": "shop"}, None, "mirrors the whole bucket, not scope shop"),
    ],
)
async def test_a_reload_refuses_what_the_next_start_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], groups: int | None, says: str
) -> None:
    """It said "only after a restart of the service"; the restart ended with exit code 2, and the unit stayed down."""
    in_process.use(monkeypatch, lambda ours: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(ours)]})
    fresh = settings_for(tmp_path, workers=1, **values)
    async with in_process.serving(tmp_path, reload=lambda: (fresh, groups)) as service:
        await eventually(lambda: service.reports.document()["events"])
        answer = await ask(tmp_path, {"op": "reload"})
        assert (answer["ok"], answer["exit_code"]) == (False, 2)
        assert says in answer["error"]
        event = service.reports.document()["events"][0]
        assert (event["event"], says in event["why"]) == ("settings-refused", True)
    with pytest.raises(ConfigError, match=says):
        await Supervisor(fresh, scripted.look_up, clock=SystemClock(), options=RunOptions(required_groups=groups)).run()


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
