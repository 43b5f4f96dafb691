"""The pace of commits: at once where they are rare, at their share of the time where they are not, never too late."""

from __future__ import annotations

import random

import pytest

from mirror.feed.pace import COMMIT_SHARE, CommitPace


def test_a_group_that_was_idle_commits_at_once() -> None:
    pace = CommitPace(0.025)
    assert pace.delay_s(100.0, 100.0) == 0
    pace.committed(100.0, 100.004)
    assert pace.delay_s(100.0 + 0.004 / COMMIT_SHARE + 1e-9, 100.020) == 0


def test_after_a_commit_the_next_one_waits_until_that_was_its_share() -> None:
    pace = CommitPace(0.025)
    pace.committed(100.0, 100.004)
    assert pace.delay_s(100.004, 100.004) == pytest.approx(0.004 / COMMIT_SHARE - 0.004)


def test_no_group_waits_longer_than_it_may_whatever_commits_cost() -> None:
    pace = CommitPace(0.025)
    pace.committed(100.0, 101.0)
    assert pace.delay_s(101.0, 100.990) == pytest.approx(0.015)
    assert pace.delay_s(101.0, 100.5) == 0


@pytest.mark.parametrize("seed", range(5))
def test_commits_take_no_more_than_their_share_while_no_group_waits_too_long(seed: int) -> None:
    chance = random.Random(seed)
    pace = CommitPace(10.0)
    now = begin = 50.0
    committing_s = 0.0
    for _ in range(500):
        now += pace.delay_s(now, now) + chance.choice((0.0, 0.0, 0.001))
        cost_s = chance.choice((0.0, 0.0001, 0.002, 0.05))
        pace.committed(now, now + cost_s)
        now += cost_s
        committing_s += cost_s
    assert committing_s <= (now + pace.delay_s(now, now) - begin) * COMMIT_SHARE * 1.000001
