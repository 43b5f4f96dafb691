"""Events are numbered, logged as one line each, and kept in files of bounded size through restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mirror import log as logs
from mirror.clock import SystemClock
from mirror.supervise.events import log as event_log
from mirror.supervise.events.kinds import MapChanged
from mirror.supervise.events.log import EVENTS_FILE, EVENTS_KEPT, EventLog, read_events


def change(rev: int) -> MapChanged:
    return MapChanged(rev_epoch=1, rev=rev, nodes=3)


def log_of(data: Path) -> EventLog:
    return EventLog(SystemClock(), data, lambda _: None)


def test_an_event_is_one_line_of_the_log_and_goes_to_the_hook(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forwarded: list[Any] = []
    logs.set_up_logs("info", json=True)
    EventLog(SystemClock(), tmp_path, forwarded.append).add(change(8))
    [line] = capsys.readouterr().err.splitlines()
    logged = json.loads(line)
    assert {name: logged[name] for name in ("event", "level", "rev_epoch", "rev", "nodes")} == {
        "event": "map-changed", "level": "info", "rev_epoch": 1, "rev": 8, "nodes": 3,
    }  # fmt: skip
    assert [(each["number"], each["event"]) for each in forwarded] == [(1, "map-changed")]


def test_events_survive_a_restart_and_their_numbers_rise(tmp_path: Path) -> None:
    for start in range(3):
        log = log_of(tmp_path)
        log.add(change(2 * start))
        log.add(change(2 * start + 1))
    assert [(each["number"], {**each}["rev"]) for each in read_events(tmp_path)] == [(n + 1, n) for n in range(6)]
    assert [each["number"] for each in read_events(tmp_path, 4)] == [5, 6]
    assert [each["number"] for each in log.newest()] == [6, 5, 4, 3, 2, 1]
    assert (tmp_path / EVENTS_FILE).stat().st_mode & 0o777 == 0o600


def test_the_files_are_bounded_and_the_newest_events_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "FILE_BYTES_MAX", 4_000)
    log = log_of(tmp_path)
    for rev in range(500):
        log.add(change(rev))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3 * 4_000
    numbers = [each["number"] for each in read_events(tmp_path)]
    assert numbers == list(range(numbers[0], 501))
    assert len(numbers) > 20
    assert len(log.newest()) == EVENTS_KEPT
    after = log_of(tmp_path).newest()
    assert len(after) > 20
    assert after == log.newest()[: len(after)]


@pytest.mark.parametrize("cut", [b'{"number": 3, "time_', b"\x00\x00", b'{"number": "x"}\n', b"[]\n"])
def test_what_a_crash_cut_is_left_out(tmp_path: Path, cut: bytes) -> None:
    log = log_of(tmp_path)
    log.add(change(1))
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(cut)
    log_of(tmp_path).add(change(2))
    assert [(each["number"], {**each}["rev"]) for each in read_events(tmp_path)] == [(1, 1), (2, 2)]


def test_an_event_that_cannot_be_written_is_logged_and_forwarded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / EVENTS_FILE).mkdir()
    forwarded: list[Any] = []
    logs.set_up_logs("info")
    EventLog(SystemClock(), tmp_path, forwarded.append).add(change(1))
    assert len(forwarded) == 1
    assert "event-not-written" in capsys.readouterr().err
