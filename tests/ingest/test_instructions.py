"""Instructions: each says for which vbucket and why."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from mirror.ingest.instructions import Instruction, InstructionFields, RetryAfter, RetryReason

KINDS = get_args(Instruction)


@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_begins_with_its_vbucket_and_its_cause(kind: type[InstructionFields]) -> None:
    assert [field.name for field in dataclasses.fields(kind)][:2] == ["vbid", "cause"]
    assert kind.__doc__


@pytest.mark.parametrize("kind", KINDS)
def test_an_instruction_carries_nothing_but_its_fields(kind: type[InstructionFields]) -> None:
    """Two are made per live snapshot: without a dict each."""
    blank: list[Any] = [None] * len(dataclasses.fields(kind))
    assert not hasattr(kind(*blank), "__dict__")


def test_instructions_compare_by_their_fields() -> None:
    made = RetryAfter(1, "why", RetryReason.VIOLATION, 0)
    assert made == RetryAfter(1, "why", RetryReason.VIOLATION, 0)
    assert made != RetryAfter(1, "why", RetryReason.VIOLATION, 1)
