"""The pace of commits: at once where they are rare, and never more than their share of the time."""

from __future__ import annotations

import math
import random

import pytest

from mirror.feed.pace import COMMIT_SHARE_MAX, CommitPace


def test_a_group_that_was_idle_commits_at_once() -> None:
    pace = CommitPace(0.0)
    assert pace.delay_s(100.0, -math.inf) == 0
    pace.committed(100.0, 100.010)
    assert pace.delay_s(100.010 / COMMIT_SHARE_MAX, 100.0) == 0


def test_after_a_commit_every_group_waits_until_that_was_its_share() -> None:
    pace = CommitPace(0.0)
    pace.committed(100.0, 100.010)
    for group_committed_at in (-math.inf, 100.0):
        assert pace.delay_s(100.010, group_committed_at) == pytest.approx(0.010 / COMMIT_SHARE_MAX - 0.010)


def test_a_group_waits_for_the_interval_that_is_set_and_others_do_not() -> None:
    pace = CommitPace(0.025)
    pace.committed(100.0, 100.001)
    assert pace.delay_s(100.005, 100.0) == pytest.approx(0.020)
    assert pace.delay_s(100.005, 99.0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_commits_take_no_more_than_their_share_whatever_they_cost(seed: int) -> None:
    chance = random.Random(seed)
    pace = CommitPace(0.0)
    now = begin = 50.0
    committing_s = 0.0
    for _ in range(500):
        now += pace.delay_s(now, now) + chance.choice((0.0, 0.0, 0.001))
        cost_s = chance.choice((0.0, 0.0001, 0.002, 0.05))
        pace.committed(now, now + cost_s)
        now += cost_s
        committing_s += cost_s
    assert committing_s <= (now + pace.delay_s(now, now) - begin) * COMMIT_SHARE_MAX * 1.000001
