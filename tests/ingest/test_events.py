"""Local events: each has a place in the machine's table, and nobody can change one."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from mirror.ingest import events
from mirror.ingest.machine import TRANSITIONS

KINDS = get_args(events.LocalEvent)


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_legal_in_some_phase(kind: type[Any]) -> None:
    assert any(kind in row for row in TRANSITIONS.values())


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_cannot_be_changed(kind: type[Any]) -> None:
    assert kind.__dataclass_params__.frozen
    fields = dataclasses.fields(kind)
    made = kind(*[None] * len(fields))
    if fields:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, fields[0].name, 1)


def test_the_list_of_events_is_complete() -> None:
    assert {kind for kind in vars(events).values() if getattr(kind, "__module__", "") == events.__name__} == set(KINDS)
