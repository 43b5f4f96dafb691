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
    dead = WorkerFacts(0, (), ProcessPhase.ABSENT, not_before_ms=500)
    assert decide({0: (0,)}, [dead], 499) == []
    assert decide({0: (0,)}, [dead], 500) == [StartProcess(0, (0,))]


def test_a_silent_worker_is_killed_and_not_replaced_before_it_is_reaped() -> None:
    silent = WorkerFacts(0, (0,), ProcessPhase.RUNNING, overdue=True)
    assert decide({0: (0,)}, [silent]) == [KillProcess(0, "no heartbeat")]
    assert decide({0: (0,)}, [WorkerFacts(0, (0,), ProcessPhase.KILLED, overdue=True)]) == []


def test_a_group_moves_only_when_its_holder_is_gone() -> None:
    desired: dict[int, tuple[int, ...]] = {0: (0,), 1: (1,)}
    before = [WorkerFacts(0, (0, 1), ProcessPhase.RUNNING)]
    assert decide(desired, before) == [StopProcess(0)]
    leaving = [WorkerFacts(0, (0, 1), ProcessPhase.STOPPING)]
    assert decide(desired, leaving) == []
    gone = [WorkerFacts(0, (), ProcessPhase.ABSENT)]
    assert decide(desired, gone) == [StartProcess(0, (0,)), StartProcess(1, (1,))]


@pytest.mark.parametrize("phase", [ProcessPhase.STARTING, ProcessPhase.RUNNING])
def test_a_stopping_service_stops_all_and_starts_nothing(phase: ProcessPhase) -> None:
    actual = [WorkerFacts(0, (0,), phase), WorkerFacts(1, (), ProcessPhase.ABSENT)]
    assert decide({0: (0,), 1: (1,)}, actual, stopping=True) == [StopProcess(0)]


@st.composite
def situations(draw: st.DrawFn) -> tuple[int, int, list[WorkerFacts], bool]:
    group_count = draw(st.integers(1, 12))
    owners = draw(st.lists(st.integers(0, 5), min_size=group_count, max_size=group_count))
    actual = []
    for slot in range(draw(st.integers(0, 6))):
        phase = draw(st.sampled_from(ProcessPhase))
        groups = tuple(
            group for group, owner in enumerate(owners) if owner == slot and phase is not ProcessPhase.ABSENT
        )
        actual.append(
            WorkerFacts(slot, groups, phase, draw(st.booleans()), draw(st.integers(0, 9)), draw(st.booleans()))
        )
    return group_count, draw(st.integers(1, 6)), actual, draw(st.booleans())


@given(situations())
def test_a_group_is_never_given_to_two_workers(situation: tuple[int, int, list[WorkerFacts], bool]) -> None:
    """The groups of living and started workers never overlap, and no slot gets two orders."""
    group_count, worker_count, actual, stopping = situation
    actions = decide(assign(group_count, worker_count), actual, 5_000, stopping=stopping)
    held = [group for worker in actual if worker.alive for group in worker.groups]
    started = [group for action in actions if isinstance(action, StartProcess) for group in action.groups]
    assert len(held) + len(started) == len(set(held) | set(started))
    assert len({action.slot for action in actions}) == len(actions)
    assert not (stopping and started)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 6))
def test_the_actions_lead_to_the_desired_state(group_count: int, before: int, after: int) -> None:
    """Perform every action at once, over and over: the desired state is reached, and then nothing is requested."""
    actual = {
        slot: WorkerFacts(slot, groups, ProcessPhase.RUNNING) for slot, groups in assign(group_count, before).items()
    }
    desired = assign(group_count, after)
    for _ in range(3):
        for action in decide(desired, list(actual.values())):
            if isinstance(action, StartProcess):
                actual[action.slot] = WorkerFacts(action.slot, action.groups, ProcessPhase.RUNNING)
            else:
                actual[action.slot] = WorkerFacts(action.slot, (), ProcessPhase.ABSENT)
    assert {slot: worker.groups for slot, worker in actual.items() if worker.alive} == desired
    assert decide(desired, list(actual.values())) == []


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
