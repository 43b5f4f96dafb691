from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.supervise.processes.plan import (
    PROVEN_MS,
    RESTART_FIRST_MS,
    RESTART_LIMIT_MS,
    START_DEADLINE_MS,
    Action,
    Heartbeat,
    KillProcess,
    ProcessPhase,
    StartProcess,
    StopProcess,
    WorkerFacts,
    assign,
    failures_after,
    plan,
    restart_delay_ms,
)

GRACE_MS = 1_000


def decide(
    desired: dict[int, tuple[int, ...]], actual: list[WorkerFacts], now_ms: int = 0, *, stopping: bool = False
) -> list[Action]:
    return plan(desired, actual, now_ms, stop_grace_ms=GRACE_MS, stopping=stopping)


@given(st.integers(1, 256), st.integers(1, 64))
def test_every_group_has_one_slot_and_the_load_is_even(group_count: int, worker_count: int) -> None:
    slots = assign(group_count, worker_count)
    assert sorted(group for groups in slots.values() for group in groups) == list(range(group_count))
    assert list(slots) == list(range(min(group_count, worker_count)))
    sizes = {len(groups) for groups in slots.values()}
    assert max(sizes) - min(sizes) <= 1


def test_a_dead_worker_comes_back_after_its_pause() -> None:
    dead = WorkerFacts(0, ProcessPhase.ABSENT, not_before_ms=500)
    assert decide({0: (0,)}, [dead], 499) == []
    assert decide({0: (0,)}, [dead], 500) == [StartProcess(0, (0,))]


def test_a_silent_worker_is_killed_and_not_replaced_before_it_is_reaped() -> None:
    silent = WorkerFacts(0, ProcessPhase.RUNNING, overdue=True)
    assert decide({0: (0,)}, [silent]) == [KillProcess(0, "no heartbeat")]
    assert decide({0: (0,)}, [WorkerFacts(0, ProcessPhase.KILLED, overdue=True)]) == []


@pytest.mark.parametrize("phase", [ProcessPhase.STARTING, ProcessPhase.RUNNING])
def test_a_stopping_service_stops_all_and_starts_nothing(phase: ProcessPhase) -> None:
    actual = [WorkerFacts(0, phase), WorkerFacts(1, ProcessPhase.ABSENT)]
    assert decide({0: (0,), 1: (1,)}, actual, stopping=True) == [StopProcess(0)]


@given(st.lists(st.tuples(st.sampled_from(ProcessPhase), st.booleans()), max_size=6), st.booleans())
def test_a_slot_gets_one_order_and_starts_only_when_its_process_is_reaped(
    phases: list[tuple[ProcessPhase, bool]], stopping: bool
) -> None:
    actual = [WorkerFacts(slot, phase, overdue) for slot, (phase, overdue) in enumerate(phases)]
    actions = decide(assign(12, 6), actual, 5_000, stopping=stopping)
    assert len({action.slot for action in actions}) == len(actions)
    started = {action.slot for action in actions if isinstance(action, StartProcess)}
    absent = set(range(6)) - {worker.slot for worker in actual if worker.alive}
    assert started == (set() if stopping else absent)


def test_the_pause_doubles_up_to_its_limit() -> None:
    pauses = [restart_delay_ms(failures) for failures in range(40)]
    assert pauses[:3] == [0, RESTART_FIRST_MS, 2 * RESTART_FIRST_MS]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RESTART_LIMIT_MS


def test_a_crash_loop_is_counted_until_a_long_life() -> None:
    assert failures_after(0, lived_ms=5) == 1
    assert failures_after(3, lived_ms=PROVEN_MS - 1) == 4
    assert failures_after(3, lived_ms=PROVEN_MS) == 1


def test_silence_is_measured_from_the_last_beat() -> None:
    heartbeat = Heartbeat(1_000)
    heartbeat.beat(2_000)
    assert heartbeat.age_ms(2_050) == 50
    assert not heartbeat.overdue(2_100, 100)
    assert heartbeat.overdue(2_101, 100)
    heartbeat.beat(2_200)
    assert not heartbeat.overdue(2_300, 100)


def test_a_start_may_take_longer_than_a_beat() -> None:
    heartbeat = Heartbeat(1_000)
    assert not heartbeat.overdue(1_000 + START_DEADLINE_MS, 100)
    assert heartbeat.overdue(1_001 + START_DEADLINE_MS, 100)
    assert not heartbeat.overdue(1_001 + START_DEADLINE_MS, 2 * START_DEADLINE_MS), "a slow store, killed for ever"
