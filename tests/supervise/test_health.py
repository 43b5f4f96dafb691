"""The one judgement for every channel; each state in docs/troubleshooting.md has a row here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.health import BROKEN, HEARD_S, SILENT_S, STATES, assess

Row = dict[str, Any]


def row(vbid: int, published: int = 5, high: int | None = 5, lag_s: float | None = 0.0, **more: Any) -> Row:
    lag = None if high is None else max(0, high - published)
    return {
        "vbid": vbid, "group": vbid % 4, "state": "streaming", "node": "db1:11210", "detail": None, "last_error": None,
        "published_seqno": published, "source_high_seqno": high, "lag_seqnos": lag, "lag_s": lag_s,
        "worker": vbid % 2, "report_age_s": 0.4, "silent_ms": 100,
    } | more  # fmt: skip


def away(vbid: int, lag_s: float | None = 20.0, **more: Any) -> Row:
    return row(vbid, 5, None, lag_s, **{"state": "waiting", "node": None} | more)


def connecting(vbid: int, silent_ms: int = 2_000, **more: Any) -> Row:
    """Return the row of a vbucket of a fresh worker, or of one whose node is new."""
    return away(vbid, state="requesting", detail="connecting to db2:11210", silent_ms=silent_ms, **more)


def left(vbid: int) -> Row:
    """Return the row of a vbucket whose worker ended."""
    error = "worker 0 ended: SIGKILL"
    return row(vbid, 5, None, 0.2, state="starting", node=None, worker=None, report_age_s=None, last_error=error)


GOOD = row(0)
REFUSED = "cannot connect to db1:11210"
SITUATIONS: dict[str, tuple[list[Row], str, list[str]]] = {
    "all published": ([GOOD, row(1)], "following", []),
    "some seqnos on their way": ([GOOD, row(1, 5, 8, 0.5)], "following", []),
    "an empty vbucket": ([GOOD, row(1, 0, 0)], "following", []),
    "first fill": ([GOOD, row(1, 0, 8, 3.0)], "catching up", ["1 of 2 vbuckets not published: 1"]),
    "far behind": ([GOOD, row(1, 5, 9, 31.0)], "catching up", ["1 of 2 vbuckets more than 30 s behind: 1"]),
    "a report is missing": ([GOOD], "starting", ["1 of 2 vbuckets reported"]),
    "before the first contact": (
        [connecting(0, lag_s=None), connecting(1, lag_s=None)], "starting", ["no contact with the source yet"],
    ),
    "no connection for long": (
        [connecting(0, 11_000), connecting(1, 11_000)], "source unreachable",
        ["no contact with the source: connecting to db2:11210"],
    ),
    "the only worker was replaced": (
        [connecting(0), connecting(1)], "catching up", ["2 of 2 vbuckets being connected to their node"],
    ),
    "a vbucket moves": (
        [GOOD, connecting(1)], "catching up", ["1 of 2 vbuckets being connected to their node: 1"],
    ),
    "a vbucket moves, and its node is not named yet": (
        [GOOD, away(1, state="no-active-node", silent_ms=9_000)], "catching up",
        ["1 of 2 vbuckets being connected to their node: 1"],
    ),
    "a vbucket has no node": (
        [GOOD, away(1, state="no-active-node", silent_ms=11_000)], "degraded",
        ["1 of 2 vbuckets without a node at the source: 1"],
    ),
    "the source was killed": (
        [away(0, last_error=REFUSED), away(1)], "source unreachable", [f"no contact with the source: {REFUSED}"],
    ),
    "the source falls silent": ([away(0), away(1)], "source unreachable", ["no contact with the source"]),
    "never reached": (
        [away(0, None, last_error=REFUSED), away(1, None)], "source unreachable",
        [f"no contact with the source: {REFUSED}"],
    ),
    "one of two nodes is away": ([GOOD, away(1)], "degraded", ["1 of 2 vbuckets without contact to the source: 1"]),
    "a damaged group, and the source is away": (
        [row(0, state="damaged", detail="page 7"), away(1)], "source unreachable", ["no contact with the source"],
    ),
    "the worker ended": (
        [left(0), left(1)], "degraded", ["2 of 2 vbuckets without a worker (worker 0 ended: SIGKILL)"],
    ),
    "one of two workers ended": (
        [GOOD, left(1)], "degraded", ["1 of 2 vbuckets without a worker: 1 (worker 0 ended: SIGKILL)"],
    ),
    "an error that stays": (
        [GOOD, row(1, 5, 9, 2.0, state="waiting", last_error="not my vbucket")], "degraded",
        ["1 of 2 vbuckets waiting after an error: 1 (not my vbucket)"],
    ),
    "a retry is due": ([GOOD, row(1, 5, 9, 0.2, state="waiting", last_error="busy")], "following", []),
    "behind from the start": (
        [GOOD, row(1, 5, 9, None)], "catching up", ["1 of 2 vbuckets behind since before the service started: 1"],
    ),
    "a copy does not persist": (
        [GOOD, row(1, 5, 9, 31.0, held_s=31.0, detail="held: the replica at db2:11210 has persisted seqno 5")],
        "degraded", ["1 of 2 vbuckets held until every copy has persisted them: 1 "
                     "(held: the replica at db2:11210 has persisted seqno 5)"],
    ),
    "a copy persists slowly": (
        [GOOD, row(1, 5, 9, 31.0, held_s=3.0, detail="held: the replica at db2:11210 has persisted seqno 5")],
        "catching up", ["1 of 2 vbuckets more than 30 s behind: 1 "
                        "(held: the replica at db2:11210 has persisted seqno 5)"],
    ),
    "a position is not known yet": ([GOOD, row(1, 5, None)], "catching up", ["1 of 2 vbuckets of unknown lag: 1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_situation_has_its_state_and_its_reasons(name: str) -> None:
    rows, state, reasons = SITUATIONS[name]
    found = assess(rows, 2, lag_limit_s=30)
    assert (found.state, found.reasons) == (state, reasons)
    assert (not found.troubles) == (reasons == []) == (state == "following")
    assert found.state in STATES


@pytest.mark.parametrize("state", BROKEN)
def test_a_broken_vbucket_degrades_the_mirror_and_is_named(state: str) -> None:
    """A vbucket once received nothing, and the service reported `following`."""
    found = assess([GOOD, row(1, state=state, detail="vb 1: the key has 600 bytes")], 2, lag_limit_s=30)
    assert found.state == "degraded"
    assert found.reasons == [f"1 of 2 vbuckets {BROKEN[state]}: 1 (vb 1: the key has 600 bytes)"]
    assert found.message == f"1 of 2 vbuckets {BROKEN[state]}: 1"


def test_a_damaged_vbucket_is_named_once() -> None:
    """It is unpublished, too, and the headline once gave the same error twice."""
    damaged = row(1, 0, None, None, state="damaged", detail="page not found")
    found = assess([GOOD, damaged], 2, lag_limit_s=30)
    assert found.reasons == ["1 of 2 vbuckets damaged: 1 (page not found)"]


def test_an_unreachable_source_is_the_first_reason() -> None:
    found = assess([], None, lag_limit_s=30, source_error="connection refused")
    assert (found.state, found.reasons) == ("source unreachable", ["the source cannot be reached: connection refused"])
    assert assess([], None, lag_limit_s=30).reasons == ["the source has not answered yet"]


def test_a_full_disk_is_not_a_lost_contact() -> None:
    """Its vbuckets have no streams meanwhile; with one group the mirror said that its source was away."""
    waiting = [away(0, 2.0, last_error="no space left"), away(4, 2.0, last_error="no space left")]
    cannot = "cannot be written, the disk is full"
    full = {"group": 0, "error": "no space left", "full": True}
    found = assess(waiting, 2, lag_limit_s=30, groups=[full])
    assert (found.state, found.reasons) == ("disk full", [f"2 of 2 vbuckets {cannot} (no space left)"])
    found = assess([*waiting, row(1, state="refused", detail="why")], 3, lag_limit_s=30, groups=[full])
    assert found.state == "degraded"
    assert [reason.partition(":")[0] for reason in found.reasons] == [
        "1 of 3 vbuckets refused", f"2 of 3 vbuckets {cannot.partition(':')[0]}"
    ]  # fmt: skip
    found = assess(waiting, 2, lag_limit_s=30, groups=[full | {"full": False}])
    assert (found.state, found.reasons) == ("degraded", ["2 of 2 vbuckets whose store failed (no space left)"])
    found = assess([away(0, 2.0), away(1, 2.0)], 2, lag_limit_s=30, groups=[full])
    assert found.state == "source unreachable", "no other vbucket has contact either"


@pytest.mark.parametrize(
    ("late", "where"),
    [
        (range(64), ""),
        (range(3, 64, 4), ": group 3"),
        ([vbid for vbid in range(64) if vbid % 4 in (1, 2)], ": groups 1, 2"),
        (range(32), ": 0-31"),
        ((5, 7, 8, 9, 40), ": 5, 7-9, 40"),
        (range(0, 62, 3), ": 0, 3, 6, 9, 12, 15, 18, 21, 24, 27, ..."),
    ],
)
def test_the_vbuckets_of_a_trouble_are_shown_as_groups_or_ranges(late: Sequence[int], where: str) -> None:
    rows = [row(vbid, 5, 9, 99.0 if vbid in late else 0.5) for vbid in range(64)]
    found = assess(rows, 64, lag_limit_s=30)
    assert found.reasons == [f"{len(late)} of 64 vbuckets more than 30 s behind{where}"]


def test_a_vbucket_is_reported_only_under_its_worst_trouble() -> None:
    """The same error stood in four bold lines: once for the failed store, once for the lag that follows."""
    rows = [row(0), row(1, 5, 9, 99.0, state="damaged", detail="page 7"), row(2, 5, 9, 99.0)]
    found = assess(rows, 3, lag_limit_s=30)
    assert found.message == "1 of 3 vbuckets damaged: 1; 1 of 3 vbuckets more than 30 s behind: 2"
    assert [trouble.row()["error"] for trouble in found.troubles] == ["page 7", None]


@given(st.lists(st.none() | st.floats(0, 40), min_size=1, max_size=8))
def test_rows_of_a_silent_worker_are_never_good(ages: list[float | None]) -> None:
    """Half of the vbuckets stood still for 30 s behind a stopped worker, under `caught up`, lag 0 and 200."""
    rows = [row(vbid, worker=vbid, report_age_s=age) for vbid, age in enumerate(ages)]
    found = assess(rows, len(rows), lag_limit_s=30)
    oldest = max(age or 0.0 for age in ages)
    assert (not found.troubles) == (found.state == "following") == (oldest <= HEARD_S)
    assert (found.state == "degraded") == (oldest > SILENT_S)
    for each in rows:
        named = any(f"of worker {each['worker']}, silent for" in reason for reason in found.reasons)
        assert named == ((each["report_age_s"] or 0) > SILENT_S)


def test_a_silent_worker_is_named_once_with_its_share() -> None:
    rows = [row(vbid, report_age_s=7.2 if vbid % 2 else 0.1, lag_seqnos=None if vbid % 2 else 0) for vbid in range(4)]
    found = assess(rows, 4, lag_limit_s=30)
    assert found.reasons == ["2 of 4 vbuckets of worker 1, silent for 7 s: 1, 3"]


def test_the_error_of_a_silent_worker_is_that_of_its_reports() -> None:
    rows = [row(vbid, report_age_s=7.2, state="waiting", last_error="not my vbucket") for vbid in range(2)]
    found = assess(rows, 2, lag_limit_s=30, process_errors={1: "page 7"})
    assert found.reasons == [
        "1 of 2 vbuckets of worker 0, silent for 7 s: 0",
        "1 of 2 vbuckets of worker 1, silent for 7 s: 1 (page 7)",
    ]


def test_silent_servers_are_one_trouble_of_the_service() -> None:
    found = assess([GOOD], 1, lag_limit_s=30, servers=["kv 0, silent for 4 s", "dcp 1, silent for 5 s"])
    assert (found.state, bool(found.troubles)) == ("degraded", True)
    assert found.reasons == ["servers do not report: kv 0, silent for 4 s, dcp 1, silent for 5 s"]


@pytest.mark.parametrize(
    ("closed", "state", "reasons"),
    [
        ({}, "following", []),
        ({"kv": None}, "starting", ["kv does not listen"]),
        ({"kv": "kv 0 ended: SIGKILL"}, "degraded", ["kv does not listen: kv 0 ended: SIGKILL"]),
        ({"kv": None, "dcp": "killed"}, "degraded", ["dcp does not listen: killed", "kv does not listen"]),
    ],
)
def test_a_listener_that_is_configured_and_not_open_is_not_ready(
    closed: dict[str, str | None], state: str, reasons: list[str]
) -> None:
    """Its process died again and again, and the port was refused for 30 s at a time under `following` and 200."""
    found = assess([GOOD], 1, lag_limit_s=30, closed=closed)
    assert (found.state, bool(found.troubles), found.reasons) == (state, bool(reasons), reasons)
