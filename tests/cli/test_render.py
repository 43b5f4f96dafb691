from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from cli import doctor, exits, output, render
from mirror.inspection.doctor import Finding, StepVerdict
from mirror.supervise.status import reported_row, totals


def drawn(view: RenderableType, width: int = 80) -> str:
    file = io.StringIO()
    render.DataConsole(file=file, width=width, highlight=False).print(view)
    return file.getvalue()


def document(**more: Any) -> dict[str, Any]:
    rows = [
        reported_row(
            {
                "vbid": 0,
                "state": "streaming",
                "published_seqno": 1_234_567,
                "source_high_seqno": 1_234_567,
                "lag_seqnos": 0,
            },
            0,
        ),
        reported_row(
            {"vbid": 1, "state": "streaming", "published_seqno": 5, "source_high_seqno": 50, "lag_seqnos": 45}, 0
        ),
        reported_row({"vbid": 2, "state": "refused", "text": "no [bold]privilege", "source_high_seqno": None}, 0),
    ]
    rows[1]["lag_s"] = 90.0
    worker = {
        "slot": 0,
        "pid": 4711,
        "phase": "running",
        "groups": list(range(8)),
        "uptime_s": 3725.0,
        "heartbeat_age_s": 0.2,
        "restarts": 2,
        "last_exit": "SIGKILL",
        "last_error": None,
        "cpu_percent": 12.3,
        "private_bytes": 31 * 2**20,
        "resident_bytes": 2**30,
    }
    found: dict[str, Any] = {
        "service": "up",
        "state": "catching up",
        "message": "2 of 3 vbuckets not published: 0-1",
        "troubles": [
            {"what": "refused", "vbuckets": 1, "where": "2", "error": "no [bold]privilege", "lag_s": 90.0},
            {"what": "not published", "vbuckets": 2, "where": "0-1", "error": None, "lag_s": None},
        ],
        "pid": 1,
        "uptime_s": 10.0,
        "data": "/data/[red]mirror",
        "source": "couchbase://demo@h/demo",
        "bucket": "demo",
        "vbucket_count": 3,
        "vbuckets_held": 3,
        "workers": [worker],
        "servers": [],
        "listeners": {"http": ["http://127.0.0.1:8080"]},
        "totals": totals(rows) | {"documents_per_s": 1500.0, "bytes_per_s": 2.0**20},
        "vbuckets": rows,
        "catch_up": None,
    }
    return found | more


def test_a_count_of_one_takes_the_singular() -> None:
    found = [output.counted(count, "batch", "batches") for count in (0, 1, 1234)]
    assert [*found, output.counted(1, "file")] == ["0 batches", "1 batch", "1,234 batches", "1 file"]


def test_the_status_begins_with_the_problems_and_fits_eighty_columns() -> None:
    text = drawn(render.status_view(document()))
    assert max(map(len, text.splitlines())) <= 80
    assert text.rindex("refused") < text.rindex("1 min 30 s")
    for shown in (
        "catching up",
        "2 of 3 vbuckets not",
        "1,234,572 seqnos",
        "1,500 docs/s",
        "4711",
        "31.0 MiB",
        "SIGKILL",
    ):
        assert shown in text


def test_each_server_process_is_shown_with_its_figures() -> None:
    server = document()["workers"][0] | {"kind": "kv", "groups": [], "slot": 1000, "pid": 54_321}
    server["counters"] = {"kv_connections": 1024, "kv_requests": 9_876_543}
    absent = server | {"kind": "http", "pid": None, "phase": "absent", "counters": {}, "cpu_percent": None}
    text = drawn(render.status_view(document(servers=[server, absent])))
    assert max(map(len, text.splitlines())) <= 80
    for shown in ("kv", "54321", "1,024", "9,876,543", "SIGKILL", "12 %", "31.0 MiB", "http", "absent"):
        assert shown in text


def test_a_mirror_of_some_vbuckets_shows_their_number() -> None:
    assert "demo (3 vbuckets)" in drawn(render.status_view(document()))
    assert "demo (3 of 8 vbuckets)" in drawn(render.status_view(document(vbucket_count=8)))


def test_the_holders_of_leases_are_shown() -> None:
    lease = {"id": "x", "name": "spark [red]job", "until_ms": 1_700_000_000_000, "vbuckets": 64}
    text = drawn(render.status_view(document(leases=[lease])), 160)
    assert "history for spark [red]job (64 vbuckets, until 2023-11-14" in text
    many = drawn(render.status_view(document(leases=[lease] * 5)), 1000)
    assert many.count("spark") == render.LEASES_SHOWN
    assert "history for" not in drawn(render.status_view(document(leases=[])))


def test_markup_in_data_is_shown_as_text() -> None:
    text = drawn(render.status_view(document(), every_vbucket=True), 160)
    assert "/data/[red]mirror" in text
    assert "no [bold]privilege" in text


CLEARING = "a\x1b[2J\x9b2J\u202eb"
"""Clears the screen, twice, and turns the writing around."""
SHOWN = "a.[2J.2J.b"


def test_control_characters_of_data_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader could take a lease under a name that cleared the screen of every user who looked at the status."""
    lease = {"id": "x", "name": CLEARING, "until_ms": 1_700_000_000_000, "vbuckets": 64}
    assert f"history for {SHOWN} (64" in drawn(render.status_view(document(leases=[lease])), 160)
    assert SHOWN in drawn(render.plain_table(["a long headline"], [[CLEARING]]))
    render.print_event({"time_ms": 0, "level": "info", "event": "lease-taken", "text": CLEARING})
    render.show(render.fact_table({"name": f"{CLEARING}\na longer line"}))
    output.echo(CLEARING)
    doctor.say(Finding("login", StepVerdict.FAIL, CLEARING))
    assert [line.count(SHOWN) for line in capsys.readouterr().out.splitlines()] == [1, 1, 0, 1, 1]
    exits.complain(CLEARING)
    assert capsys.readouterr().err == f"dcp-mirror: {SHOWN}\n"


def test_the_status_shows_every_vbucket_on_request() -> None:
    text = drawn(render.status_view(document(), every_vbucket=True), 160)
    assert "1,234,567" in text
    assert len([line for line in text.splitlines() if "streaming" in line]) == 2


def test_a_status_with_the_service_down_has_dashes() -> None:
    rows = [reported_row({"vbid": 0, "state": "stored"}, 0)]
    down = document(service="down", state="stored", message="", workers=[], vbuckets=rows, source=None)
    down["totals"] = totals(rows) | {"documents_per_s": None, "bytes_per_s": None}
    text = drawn(render.status_view(down))
    assert "not running" in text
    assert "documents  -" in text


def test_the_progress_shows_seqnos_vbuckets_and_rate() -> None:
    catch_up = {"vbuckets": 4, "vbuckets_done": 1, "seqnos_target": 1000, "seqnos_received": 900}
    line = render.progress_line(document(catch_up=catch_up | {"seqnos_published": 250}))
    assert line == "900 of 1,000 seqnos received, 250 published | 1 of 4 vbuckets | 1,500/s"
    assert render.progress_line(document()) == "catching up: 2 of 3 vbuckets not published: 0-1"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (59, "59 s"),
        (61, "1 min 01 s"),
        (3725, "1 h 02 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_is_shown_with_its_unit(seconds: float | None, text: str) -> None:
    assert output.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20 * 300, "300 MiB"), (2**42, "4096 GiB")],
)
def test_a_size_is_shown_with_its_unit(value: int | None, text: str) -> None:
    assert output.size(value) == text


def test_progress_without_a_terminal_is_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("cli.render.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(render, "stderr", Console(stderr=True, highlight=False))
    with render.ProgressLine() as screen:
        for second, line in [(0.0, "too early"), (2.0, "one"), (3.0, "too soon"), (4.5, "two"), (9.0, "two")]:
            now_s[0] = second
            screen.show(line)
    assert capsys.readouterr().err.splitlines() == ["one", "two"]
