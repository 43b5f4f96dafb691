"""Reports become events: each kind of news once, many vbuckets together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from mirror.health import WITHOUT_CONTACT, Trouble, assess
from mirror.supervise.events.kinds import (
    DamageFound,
    DiskFree,
    DiskFull,
    Event,
    FirstFillDone,
    ResyncBegun,
    ResyncDone,
    SourceBack,
    SourceLost,
    SourceReached,
    SourceUnreachable,
    VbucketsRolledBack,
)
from mirror.supervise.reports.observer import COLLECT_MS, CONTACT_LOST_MS, FORGOTTEN_MS, Observer
from mirror.supervise.status import VbucketRow, reported_row

VBUCKETS = 64


class Mirror:
    """Rows of a mirror, looked at every second."""

    def __init__(self, **more: Any) -> None:
        self.observer = Observer()
        self.rows: list[VbucketRow] = [self.row(vbid, **more) for vbid in range(VBUCKETS)]
        self.groups: list[dict[str, Any]] = []
        self.now_ms = 0

    @staticmethod
    def row(vbid: int, **more: Any) -> VbucketRow:
        common = {
            "vbid": vbid, "state": "streaming", "published_seqno": 5, "source_high_seqno": 5, "lag_seqnos": 0,
            "node": "db1:11210",
            "rollback_count": 0, "resyncs_begun": 0, "resync_count": 0,
        }  # fmt: skip
        return reported_row(common | more, vbid % 4)

    def change(self, vbids: range, **more: Any) -> None:
        for vbid in vbids:
            self.rows[vbid].update(cast(Any, more))

    def look(self, passed_ms: int = COLLECT_MS) -> list[Event]:
        self.now_ms += passed_ms
        return self.observer.observe(self.rows, self.groups, VBUCKETS, self.now_ms)

    def news(self) -> list[Event]:
        """Of this look and of the one after the time that news are collected for."""
        return self.look() + self.look()


def settled(**more: Any) -> Mirror:
    mirror = Mirror(**more)
    assert mirror.news() == [], "what is there at first is no news"
    return mirror


def test_a_failover_is_one_event_for_all_vbuckets_that_it_rolls_back() -> None:
    mirror = settled()
    mirror.change(range(20), rollback_count=1, last_rollback=[100, 80])
    assert mirror.look(100) == []
    mirror.change(range(20, 33), rollback_count=1, last_rollback=[50, 49])
    assert mirror.news() == [
        VbucketsRolledBack(vbuckets=33, vbids=tuple(range(10)), seqnos=413, from_seqno=None, to_seqno=None)
    ]
    assert mirror.news() == []


def test_a_rollback_of_one_vbucket_is_reported_with_its_seqnos() -> None:
    mirror = settled(rollback_count=4)
    mirror.change(range(3, 4), rollback_count=5, last_rollback=[568, 400])
    assert mirror.news() == [VbucketsRolledBack(vbuckets=1, vbids=(3,), seqnos=168, from_seqno=568, to_seqno=400)]


@pytest.mark.parametrize("change", [{"rollback_count": 6, "last_rollback": [90, 80]}, {"rollback_count": 5}])
def test_rollbacks_of_unknown_seqnos_are_reported_without_them(change: dict[str, Any]) -> None:
    """Two since the last report, or one of a worker that has ended since: only a worker's last one is reported."""
    mirror = settled(rollback_count=4)
    mirror.change(range(3, 4), **change)
    (event,) = mirror.news()
    assert event == VbucketsRolledBack(vbuckets=1, vbids=(3,), seqnos=None, from_seqno=None, to_seqno=None)
    assert event.text == "1 vbucket rolled back"


def test_a_resync_is_reported_when_it_begins_and_when_it_ends() -> None:
    mirror = settled()
    mirror.change(range(VBUCKETS), resyncs_begun=1, resync_why="no common history with the source")
    begun = ResyncBegun(vbuckets=VBUCKETS, vbids=tuple(range(10)), why="no common history with the source")
    assert mirror.news() == [begun]
    mirror.change(range(VBUCKETS), resync_count=1)
    assert mirror.news() == [ResyncDone(vbuckets=VBUCKETS, vbids=tuple(range(10)))]


def test_a_resync_between_two_reports_gives_both_events() -> None:
    mirror = settled()
    mirror.change(range(1), resyncs_begun=1, resync_why="purged", resync_count=1)
    assert [type(event) for event in mirror.news()] == [ResyncBegun, ResyncDone]


def test_a_group_that_opens_again_does_not_repeat_old_events() -> None:
    """Its rollbacks of days ago once were "rolled back from seqno 0 to 0", and a done resync."""
    known = {"rollback_count": 3, "resync_count": 2, "state": "streaming", "published_seqno": 5}
    unknown = dict.fromkeys(known) | {"state": "damaged", "detail": "permission denied"}
    opened, closed = settled(**known), Mirror(**unknown)
    opened.change(range(VBUCKETS), **unknown)
    for mirror in (opened, closed):
        assert [type(event) for event in mirror.news()] == [DamageFound]
        mirror.change(range(VBUCKETS), **known)
        assert mirror.news() == []
        mirror.change(range(VBUCKETS), rollback_count=4, last_rollback=[50, 49])
        assert [type(event) for event in mirror.news()] == [VbucketsRolledBack]


def test_a_replaced_worker_repeats_no_old_event_and_reports_new_ones() -> None:
    mirror = settled(resyncs_begun=2, resync_count=2)
    mirror.observer.forget([0], mirror.rows)
    mirror.change(range(0, VBUCKETS, 4), state="starting", node=None, source_high_seqno=None, lag_seqnos=None)
    assert mirror.news() == []
    mirror.change(range(0, VBUCKETS, 4), state="requesting", resyncs_begun=0)
    assert mirror.news() == []
    mirror.change(range(0, VBUCKETS, 4), state="streaming", node="db2:11210")
    mirror.change(range(1), resyncs_begun=1, resync_why="purged")
    assert mirror.news() == [ResyncBegun(vbuckets=1, vbids=(0,), why="purged")]


def test_a_source_that_is_lost_and_found_is_reported_once_each_time() -> None:
    mirror = settled()
    mirror.change(range(VBUCKETS), node=None, state="waiting", last_error="connection refused")
    found = mirror.look() + mirror.look(CONTACT_LOST_MS) + mirror.look() + mirror.look(60_000)
    assert found == [SourceLost(vbuckets=64, vbids=tuple(range(10)), nodes=("db1:11210",), why="connection refused")]
    mirror.change(range(VBUCKETS), node="db1:11210", state="streaming", last_error=None)
    away_s = (mirror.now_ms + COLLECT_MS - 3 * COLLECT_MS) / 1000
    assert mirror.news() == [SourceBack(vbuckets=64, vbids=tuple(range(10)), away_s=away_s)]


def test_a_vbucket_that_moves_to_another_node_is_not_a_lost_source() -> None:
    """A move of more than a second was the error event `source-lost`, and ran the command of the operator."""
    mirror = settled()
    mirror.change(range(8), node=None, state="no-active-node", silent_ms=500)
    assert mirror.news() == []
    mirror.change(range(8), state="requesting", silent_ms=9_500)
    assert mirror.news() == []
    mirror.change(range(8), node="db2:11210", state="streaming", silent_ms=0)
    assert mirror.news() == []


def test_an_unreachable_source_at_the_start_is_reported_once() -> None:
    observer = Observer()
    assert observer.source_answers("connection refused", 0) == [SourceUnreachable(why="connection refused")]
    assert observer.source_answers("timed out", 500) == []
    assert observer.source_answers(None, 2_500) == [SourceReached(after_s=2.5)]
    assert observer.source_answers(None, 3_000) == []


def test_damage_at_the_start_is_reported() -> None:
    mirror = Mirror()
    mirror.change(range(8), state="damaged", detail="page 7 is torn")
    assert mirror.news() == [DamageFound(vbuckets=8, vbids=tuple(range(8)), why="page 7 is torn")]
    assert mirror.news() == []


def test_a_full_disk_and_its_end_are_one_event_each_for_all_groups() -> None:
    mirror = settled()
    mirror.groups = [{"group": group, "error": "no space left", "full": group < 3} for group in range(4)]
    assert mirror.look() == [DiskFull(groups=(0, 1, 2), why="no space left")]
    assert mirror.look() == []
    mirror.groups = []
    assert mirror.look() == [], "no worker reports on the groups"
    mirror.groups = [{"group": group, "error": None, "full": False} for group in range(4)]
    assert mirror.look() == [DiskFree(groups=(0, 1, 2))]


def test_the_first_fill_is_reported_once_even_if_it_is_short() -> None:
    filled = Mirror()
    filled.observer.fill_begins()
    assert filled.look() == [FirstFillDone(vbuckets=VBUCKETS, seqnos=320)]
    filled.change(range(1), published_seqno=0, lag_seqnos=3)
    assert filled.news() == []


def test_a_fill_begun_by_an_earlier_service_is_reported_when_done() -> None:
    mirror = Mirror()
    mirror.change(range(8), published_seqno=0, lag_seqnos=9)
    assert mirror.news() == []
    mirror.change(range(8), published_seqno=9, lag_seqnos=0)
    assert mirror.look() == [FirstFillDone(vbuckets=VBUCKETS, seqnos=56 * 5 + 8 * 9)]


def test_a_trouble_without_an_event_of_its_own_is_reported_once_it_lasts() -> None:
    def silent(seconds: int) -> list[Trouble]:
        rows: tuple[dict[str, Any], ...] = ({},) * 8
        return [
            Trouble("degraded", f"of worker 1, silent for {seconds} s", None, rows, 16, "group 1"),
            Trouble("degraded", WITHOUT_CONTACT, None, rows, 16),
            Trouble("catching up", "not published", None, rows, 16),
        ]

    observer = Observer()
    assert observer.troubles(silent(4), 0) == []
    (found,) = observer.troubles(silent(5), COLLECT_MS)
    assert found.text == "8 of 16 vbuckets of worker 1, silent for 5 s: group 1"
    assert observer.troubles(silent(6), 2 * COLLECT_MS) == []
    assert observer.troubles([], 3 * COLLECT_MS) == []
    assert observer.troubles(silent(4), 10 * COLLECT_MS) == [], "it comes and goes"
    assert observer.troubles(silent(4), 10 * COLLECT_MS + 2 * FORGOTTEN_MS) == []
    assert len(observer.troubles(silent(5), 11 * COLLECT_MS + 2 * FORGOTTEN_MS)) == 1


@dataclass(frozen=True)
class Bad:
    """A state that needs attention: its rows and what else `assess` gets, and the events that it must have."""

    events: set[str]
    row: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    vbids: range = range(8)


AWAY = {"node": None, "source_high_seqno": None, "lag_seqnos": None}
EVERY_BAD_STATE = {
    "a node is down": Bad({"source-lost"}, AWAY | {"state": "waiting", "last_error": "connection refused"}),
    "all nodes are down": Bad(
        {"source-lost"}, AWAY | {"state": "waiting", "last_error": "connection refused"}, vbids=range(VBUCKETS)
    ),
    "no connection to a node": Bad({"source-lost"}, AWAY | {"state": "requesting", "silent_ms": 11_000}),
    "no node": Bad({"degraded"}, AWAY | {"state": "no-active-node", "silent_ms": 11_000}),
    "the login is refused": Bad({"degraded", "source-lost"}, AWAY | {"state": "refused", "detail": "wrong password"}),
    "the stream is refused": Bad({"degraded"}, {"state": "refused", "detail": "no privilege"}),
    "damaged": Bad({"damage-found"}, AWAY | {"state": "damaged", "detail": "page 7"}),
    "stalled": Bad({"degraded"}, {"state": "stalled"}),
    "failing": Bad({"degraded"}, {"state": "failing"}),
    "finished": Bad({"degraded"}, {"state": "finished"}),
    "waits after an error": Bad({"degraded"}, {"state": "waiting", "last_error": "busy", "lag_s": 2.0}),
    "a copy does not persist": Bad({"degraded"}, {"held_s": 31.0, "detail": "held: the replica at db2:11210"}),
    "a silent worker": Bad({"degraded"}, {"report_age_s": 4.0}),
    "a store fails": Bad({"degraded"}, more={"groups": [{"group": 1, "error": "input/output error", "full": False}]}),
    "a start on a full disk": Bad(
        {"disk-full"}, AWAY | {"state": "waiting", "last_error": "no space left"}, vbids=range(1, VBUCKETS, 4),
        more={"groups": [{"group": 1, "error": "no space left", "full": True}]},
    ),
    "a full disk": Bad({"disk-full"}, more={"groups": [{"group": 1, "error": "no space left", "full": True}]}),
    "a silent server": Bad({"degraded"}, more={"servers": ["kv 0, silent for 4 s"]}),
    "a closed listener": Bad({"degraded"}, more={"closed": {"kv": "kv 0 ended: SIGKILL"}}),
}  # fmt: skip


@pytest.mark.parametrize("begin", ["from the start", "later", "after its worker was replaced"])
@pytest.mark.parametrize("name", EVERY_BAD_STATE)
def test_each_state_that_needs_attention_has_its_event(name: str, begin: str) -> None:
    """A node that was down at the start left the mirror degraded for ever, without an event."""
    bad = EVERY_BAD_STATE[name]
    mirror = Mirror(lag_s=0.0, worker=0, report_age_s=0.1)
    if begin != "from the start":
        assert mirror.news() == []
    if begin == "after its worker was replaced":
        mirror.observer.forget(range(4), mirror.rows)
    mirror.change(bad.vbids, **bad.row)
    mirror.groups = bad.more.get("groups", [])
    found: list[Event] = []
    for _ in range(4):
        found += mirror.look()
        health = assess(mirror.rows, VBUCKETS, lag_limit_s=30, **bad.more)
        found += mirror.observer.troubles(health.troubles, mirror.now_ms)
    assert health.state in ("degraded", "disk full", "source unreachable")
    names = [event.name for event in found]
    expected = bad.events
    if begin != "later" and len(expected) > 1:
        expected = expected - {"source-lost"}
    assert set(names) == expected
    assert len(names) == len(expected), "each once"
