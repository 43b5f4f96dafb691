"""The pace of commits: at once where they are rare, at their share of the time where they are not, never too late."""

from __future__ import annotations

import random

import pytest

from mirror.feed.follow.group_commits import COMMIT_SHARE, CommitPace

WAIT_MAX_S = 0.025


def test_a_group_that_was_idle_commits_at_once() -> None:
    pace = CommitPace(WAIT_MAX_S)
    assert pace.delay_s(100.0, 100.0) == 0
    pace.committed(100.0, 100.004)
    assert pace.delay_s(100.0 + 0.004 / COMMIT_SHARE + 1e-9, 100.020) == 0


def test_all_groups_of_a_worker_that_was_idle_commit_at_once() -> None:
    pace = CommitPace(WAIT_MAX_S)
    now = 100.0
    for _ in range(8):
        assert pace.delay_s(now, now) == 0
        pace.committed(now, now + 0.001)
        now += 0.001


def test_after_what_an_idle_time_pays_for_commits_wait_until_they_took_their_share() -> None:
    pace = CommitPace(WAIT_MAX_S)
    pace.committed(100.0, 100.010)
    pace.committed(100.010, 100.020)
    assert pace.delay_s(100.020, 100.020) == 0
    pace.committed(100.020, 100.030)
    paid_at = 100.0 - WAIT_MAX_S + 0.030 / COMMIT_SHARE
    assert pace.delay_s(100.030, 100.030) == pytest.approx(paid_at - 100.030)


def test_a_timer_that_is_late_does_not_slow_down_the_commits_after_it() -> None:
    pace = CommitPace(WAIT_MAX_S)
    now, cost_s, late_s = 100.0, 0.002, 0.001
    ended = []
    for _ in range(200):
        now += (delay_s := pace.delay_s(now, now)) + (late_s if delay_s else 0)
        pace.committed(now, now + cost_s)
        now += cost_s
        ended.append(now)
    assert ended[-1] - ended[99] <= 100 * cost_s / COMMIT_SHARE + 2 * late_s


def test_no_group_waits_longer_than_it_may_whatever_commits_cost() -> None:
    pace = CommitPace(WAIT_MAX_S)
    pace.committed(100.0, 101.0)
    assert pace.delay_s(101.0, 100.990) == pytest.approx(0.015)
    assert pace.delay_s(101.0, 100.5) == 0


@pytest.mark.parametrize("seed", range(5))
def test_commits_take_no_more_than_their_share_while_no_group_waits_too_long(seed: int) -> None:
    chance = random.Random(seed)
    pace = CommitPace(10.0)
    now = begin = 50.0
    committing_s = 0.0
    for _ in range(2_000):
        now += pace.delay_s(now, now) + chance.choice((0.0, 0.0, 0.001))
        cost_s = chance.choice((0.0, 0.0001, 0.002, 0.05))
        pace.committed(now, now + cost_s)
        now += cost_s
        committing_s += cost_s
    paid_s = 10.0 + now + pace.delay_s(now, now) - begin
    assert committing_s > 20.0
    assert committing_s <= paid_s * COMMIT_SHARE * 1.000001
