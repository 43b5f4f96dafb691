"""The retry schedules: bounded, never falling, never all at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mirror.ingest.instructions import RetryReason
from mirror.ingest.reactions import SCHEDULES, delay_s

REASONS = st.sampled_from(RetryReason)


def test_every_reason_to_retry_has_a_schedule() -> None:
    assert set(SCHEDULES) == set(RetryReason)


def test_a_delay_doubles_until_its_cap() -> None:
    assert [delay_s(RetryReason.STREAM_ENDED, attempt, 1.0) for attempt in range(9)] == [
        *(0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4),
        10.0,
    ]


def test_jitter_takes_away_at_most_half() -> None:
    assert delay_s(RetryReason.SOURCE_BUSY, 0, 0.0) == 0.1
    assert delay_s(RetryReason.SOURCE_BUSY, 0, 1.0) == 0.2


@given(REASONS, st.integers(-1, 10_000), st.floats(allow_nan=False))
def test_a_delay_stays_within_its_schedule_whatever_the_jitter(
    reason: RetryReason, attempt: int, jitter: float
) -> None:
    schedule = SCHEDULES[reason]
    assert schedule.first_s / 2 <= delay_s(reason, attempt, jitter) <= schedule.cap_s


@given(REASONS, st.integers(0, 100), st.floats(0, 1))
def test_a_later_attempt_never_waits_less(reason: RetryReason, attempt: int, jitter: float) -> None:
    assert delay_s(reason, attempt, jitter) <= delay_s(reason, attempt + 1, jitter)
