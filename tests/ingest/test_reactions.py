"""End codes and statuses: every one has a reaction, and every reaction says what happened."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.ingest.reactions import REFUSALS, STREAM_ENDS, Action, on_refusal, on_stream_end
from mirror.wire.constants import Status, StreamEndReason

STOPPING_STATUSES = {Status.EINVAL, Status.NOT_SUPPORTED, Status.DCP_STREAM_ID_INVALID}


def test_every_end_code_of_the_protocol_has_a_row() -> None:
    assert set(STREAM_ENDS) == set(StreamEndReason)


@given(st.integers(0, 2**32 - 1) | st.sampled_from(StreamEndReason))
def test_no_end_code_stops_a_vbucket_for_good(reason: int) -> None:
    assert on_stream_end(reason).action is not Action.STOP


@given(st.integers(0, 0xFFFF) | st.sampled_from(Status))
def test_only_what_asking_again_cannot_fix_stops_a_vbucket(status: int) -> None:
    assert (on_refusal(status).action is Action.STOP) == (status in STOPPING_STATUSES)


@pytest.mark.parametrize("reaction", [*STREAM_ENDS.values(), *REFUSALS.values(), on_refusal(0xFFFF), on_stream_end(99)])
def test_every_reaction_says_what_happened_and_what_is_done(reaction: object) -> None:
    text = getattr(reaction, "text", "")
    assert len(text.split()) >= 6
    assert not text.endswith(".")


def test_stopping_texts_say_what_fixes_it() -> None:
    for reaction in [*STREAM_ENDS.values(), *REFUSALS.values()]:
        if reaction.action is Action.STOP:
            assert any(word in reaction.text for word in ("grant", "report", "enable_noop")), reaction.text
