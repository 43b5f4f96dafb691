"""Reactions: every end code and status has one, which says what happened; and the pauses after them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.ingest.instructions import RetryReason
from mirror.ingest.reactions import REFUSALS, SCHEDULES, STREAM_ENDS, Action, delay_s, on_refusal, on_stream_end
from mirror.wire.constants import Status, StreamEndReason

REASONS = st.sampled_from(RetryReason)
STOPPING_STATUSES = {Status.EINVAL, Status.NOT_SUPPORTED, Status.DCP_STREAM_ID_INVALID}


def test_every_end_code_of_the_protocol_has_a_row() -> None:
    assert set(STREAM_ENDS) == set(StreamEndReason)


@given(st.integers(0, 2**32 - 1) | st.sampled_from(StreamEndReason))
def test_an_end_code_does_not_stop_a_vbucket_for_good(reason: int) -> None:
    assert on_stream_end(reason).action is not Action.STOP


@given(st.integers(0, 0xFFFF) | st.sampled_from(Status))
def test_a_vbucket_stops_only_on_a_status_that_retries_cannot_fix(status: int) -> None:
    assert (on_refusal(status).action is Action.STOP) == (status in STOPPING_STATUSES)


@pytest.mark.parametrize("reaction", [*STREAM_ENDS.values(), *REFUSALS.values(), on_refusal(0xFFFF), on_stream_end(99)])
def test_every_reaction_describes_its_cause_and_its_action(reaction: object) -> None:
    text = getattr(reaction, "text", "")
    assert len(text.split()) >= 6
    assert not text.endswith(".")


def test_the_text_of_a_stopping_reaction_names_a_remedy() -> None:
    for reaction in [*STREAM_ENDS.values(), *REFUSALS.values()]:
        if reaction.action is Action.STOP:
            assert any(word in reaction.text for word in ("grant", "report", "enable_noop")), reaction.text


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
