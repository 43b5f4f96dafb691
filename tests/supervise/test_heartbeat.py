from __future__ import annotations

import pytest

from mirror.supervise.processes.plan import Heartbeat


def test_silence_is_measured_from_the_last_beat() -> None:
    heartbeat = Heartbeat(1_000, deadline_ms=100, start_deadline_ms=500)
    heartbeat.beat(2_000)
    assert heartbeat.age_ms(2_050) == 50
    assert not heartbeat.overdue(2_100)
    assert heartbeat.overdue(2_101)
    heartbeat.beat(2_200)
    assert not heartbeat.overdue(2_300)


def test_starting_may_take_longer_than_running() -> None:
    heartbeat = Heartbeat(1_000, deadline_ms=100, start_deadline_ms=500)
    assert not heartbeat.overdue(1_500)
    assert heartbeat.overdue(1_501)


def test_a_clock_that_goes_back_is_a_bug() -> None:
    heartbeat = Heartbeat(1_000)
    heartbeat.beat(2_000)
    with pytest.raises(AssertionError):
        heartbeat.beat(1_999)
