"""Every channel tells the truth about a fault within five seconds, and none contradicts another."""

from __future__ import annotations

import os

import pytest

from tests.whole.fault_table import FAULTS, measure

CHEAP = ("all nodes are killed", "the bucket is recreated", "a group is damaged", "a listener is stopped")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci if name in CHEAP else pytest.mark.long]) for name in FAULTS]
)
def test_a_fault_is_seen_in_every_channel(name: str) -> None:
    """Within 5 s on a quiet machine; a test gives a busy one four times as long."""
    if FAULTS[name].full_disk and os.geteuid() != 0:
        pytest.skip("a small disk is mounted by root alone")
    found = measure(name)
    assert [channel for channel, seconds in found.seconds.items() if seconds is None] == [], found.last
    assert len(set(found.states.values())) <= 1, found.states
