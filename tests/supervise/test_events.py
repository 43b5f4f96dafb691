"""Events have names, levels and sentences, and a row in the documents; they are logged and kept in bounded files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from mirror import log as logs
from mirror.clock import SystemClock
from mirror.supervise.events import log as event_log
from mirror.supervise.events.kinds import (
    DiskFull,
    Event,
    MapChanged,
    SourceLost,
    SourceReached,
    SourceUnreachable,
    VbucketsRolledBack,
    WorkerEnded,
    to_json,
)
from mirror.supervise.events.log import EVENTS_FILE, EVENTS_KEPT, EventLog, read_events

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_an_event_has_the_seqnos_of_one_vbucket_or_the_number_of_many() -> None:
    one = VbucketsRolledBack(vbuckets=1, vbids=(3,), seqnos=168, from_seqno=568, to_seqno=400)
    assert one.text == "1 vbucket rolled back from seqno 568 to 400, 168 seqnos retracted"
    many = VbucketsRolledBack(vbuckets=33, vbids=(0, 2), seqnos=640, from_seqno=None, to_seqno=None)
    assert many.text == "33 vbuckets rolled back, 640 seqnos retracted"
    alone = MapChanged(rev_epoch=1, rev=3, nodes=1)
    assert alone.text == "new cluster map: revision 1.3, 1 node"


def test_a_source_that_was_never_reached_is_not_reported_as_lost() -> None:
    never = SourceUnreachable(why="connection refused")
    assert never.text == "the source has not been reached since the service started: connection refused"
    assert SourceReached(after_s=2.5).text == "the source has answered after 2.5 s"
    lost = SourceLost(vbuckets=3, vbids=(0, 1, 2), nodes=("db1:11210",), why="")
    assert lost.text == "3 vbuckets lost contact with the source"


def test_an_event_is_one_json_object_with_its_fields() -> None:
    event: Event = DiskFull(groups=(1, 2), why="no space")
    shown = to_json(event, 7, 1000)
    assert json.loads(json.dumps(shown)) == {
        "number": 7, "time_ms": 1000, "event": "disk-full", "level": "error",
        "text": "the disk is full for 2 groups: no space", "groups": [1, 2], "why": "no space",
    }  # fmt: skip
    ended = WorkerEnded(process="worker 0", pid=5, exit="SIGKILL", why=None, pause_ms=200)
    assert ended.text == "worker 0 (process 5) died: SIGKILL"


def test_every_event_has_its_row_in_the_documents() -> None:
    section = OPERATIONS.read_text().split("## Events\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (\w+) \|", section, re.M)
    kinds = get_args(Event)
    assert dict(rows) == {kind.name: kind.level for kind in kinds}
    assert len(rows) == len(kinds)


def change(rev: int) -> MapChanged:
    return MapChanged(rev_epoch=1, rev=rev, nodes=3)


def log_of(data: Path) -> EventLog:
    return EventLog(SystemClock(), data)


def test_an_event_is_one_line_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up_logs("info", json=True)
    EventLog(SystemClock(), tmp_path).add(change(8))
    [line] = capsys.readouterr().err.splitlines()
    logged = json.loads(line)
    assert {name: logged[name] for name in ("event", "level", "rev_epoch", "rev", "nodes")} == {
        "event": "map-changed", "level": "info", "rev_epoch": 1, "rev": 8, "nodes": 3,
    }  # fmt: skip


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
def test_an_event_truncated_by_a_crash_is_left_out(tmp_path: Path, cut: bytes) -> None:
    log = log_of(tmp_path)
    log.add(change(1))
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(cut)
    log_of(tmp_path).add(change(2))
    assert [(each["number"], {**each}["rev"]) for each in read_events(tmp_path)] == [(1, 1), (2, 2)]


def test_an_event_that_cannot_be_written_is_logged_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / EVENTS_FILE).mkdir()
    logs.set_up_logs("info")
    log = log_of(tmp_path)
    log.add(change(1))
    assert len(log.newest()) == 1
    assert "event-not-written" in capsys.readouterr().err
