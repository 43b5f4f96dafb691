"""Decides which processes to start, stop or kill now. Pure.

Compares desired and actual processes by slot, the numbered place of a process. The service calls `plan` after every
event and executes the result. The groups of a slot never change, and its process starts only after the one before it
was reaped: so no two processes hold a group, even if one of them was killed and still writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class ProcessPhase(Enum):
    ABSENT = "absent"
    """Never started, or reaped."""
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    slot: int
    phase: ProcessPhase
    overdue: bool = False
    """True if the process has sent no heartbeat in time."""
    stopping_since_ms: int = 0
    not_before_ms: int = 0
    """End of the restart pause of an absent process."""

    @property
    def alive(self) -> bool:
        return self.phase is not ProcessPhase.ABSENT


@dataclass(frozen=True, slots=True)
class StartProcess:
    slot: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopProcess:
    """Ask the slot's process to commit, close and exit."""

    slot: int


@dataclass(frozen=True, slots=True)
class KillProcess:
    """A later plan decides on a restart."""

    slot: int
    reason: str


Action = StartProcess | StopProcess | KillProcess


def assign(group_count: int, worker_count: int) -> dict[int, tuple[int, ...]]:
    """Divide the groups evenly among at most `worker_count` slots, each with at least one group."""
    assert group_count >= 1, "a directory has at least one group"
    assert worker_count >= 1, "at least one worker"
    slots = min(group_count, worker_count)
    return {slot: tuple(range(slot, group_count, slots)) for slot in range(slots)}


def plan(
    desired: Mapping[int, tuple[int, ...]],
    actual: Sequence[WorkerFacts],
    now_ms: int,
    *,
    stop_grace_ms: int,
    stopping: bool = False,
) -> list[Action]:
    """Return the actions that bring `actual` closer to `desired`, or, if `stopping`, end all processes.

    A process that takes longer than `stop_grace_ms` to commit and close is killed, which loses no data.
    """
    actions: list[Action] = []
    for worker in actual:
        if worker.phase in (ProcessPhase.STARTING, ProcessPhase.RUNNING):
            if worker.overdue:
                actions.append(KillProcess(worker.slot, "no heartbeat"))
            elif stopping:
                actions.append(StopProcess(worker.slot))
        elif worker.phase is ProcessPhase.STOPPING and now_ms - worker.stopping_since_ms > stop_grace_ms:
            actions.append(KillProcess(worker.slot, "did not stop in time"))
    if not stopping:
        not_now = {worker.slot for worker in actual if worker.alive or now_ms < worker.not_before_ms}
        actions += [StartProcess(slot, groups) for slot, groups in sorted(desired.items()) if slot not in not_now]
    return actions


BEAT_INTERVAL_MS = 500

START_DEADLINE_MS = 60_000
"""Shortest deadline of the first heartbeat: opening a large store on a cold disk takes long."""


@dataclass(slots=True)
class Heartbeat:
    started_ms: int
    last_beat_ms: int | None = None

    def beat(self, now_ms: int) -> None:
        assert now_ms >= (self.last_beat_ms or self.started_ms), "a clock that goes back is no clock"
        self.last_beat_ms = now_ms

    def age_ms(self, now_ms: int) -> int:
        return now_ms - (self.started_ms if self.last_beat_ms is None else self.last_beat_ms)

    def overdue(self, now_ms: int, deadline_ms: int) -> bool:
        """Return True if the last heartbeat is older than `deadline_ms`, or the first one is overdue."""
        limit_ms = max(START_DEADLINE_MS, deadline_ms) if self.last_beat_ms is None else deadline_ms
        return self.age_ms(now_ms) > limit_ms


RESTART_FIRST_MS = 200
"""First restart pause: long enough for the release of locks and sockets, short enough to add little lag."""

RESTART_LIMIT_MS = 30_000
"""Longest restart pause. After the cause is fixed, an operator waits no longer than this."""

PROVEN_MS = 60_000
"""A worker that ran this long is not in a crash loop: its failures are counted anew."""


def restart_delay_ms(failures: int) -> int:
    """Return the pause after `failures` in a row. Each failure doubles the pause; 0 failures give none."""
    assert failures >= 0, "failures are counted from 0"
    if failures == 0:
        return 0
    return int(min(RESTART_LIMIT_MS, RESTART_FIRST_MS * 2 ** min(failures - 1, 16)))


def failures_after(failures: int, lived_ms: int) -> int:
    """Return the number of failures in a row after the death of a worker that ran for `lived_ms`."""
    return 1 if lived_ms >= PROVEN_MS else failures + 1
