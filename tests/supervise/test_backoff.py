from __future__ import annotations

from mirror.supervise.processes.plan import (
    PROVEN_MS,
    RESTART_FIRST_MS,
    RESTART_LIMIT_MS,
    failures_after,
    restart_delay_ms,
)


def test_the_first_start_waits_for_nothing() -> None:
    assert restart_delay_ms(0) == 0


def test_the_pause_doubles_up_to_its_limit() -> None:
    pauses = [restart_delay_ms(failures) for failures in range(1, 40)]
    assert pauses[0] == RESTART_FIRST_MS
    assert pauses[1] == 2 * RESTART_FIRST_MS
    assert pauses == sorted(pauses)
    assert pauses[-1] == RESTART_LIMIT_MS
    assert max(pauses) == RESTART_LIMIT_MS


def test_a_crash_loop_is_counted_and_a_long_life_forgives() -> None:
    assert failures_after(0, lived_ms=5) == 1
    assert failures_after(3, lived_ms=PROVEN_MS - 1) == 4
    assert failures_after(3, lived_ms=PROVEN_MS) == 1
