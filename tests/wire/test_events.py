"""Events are values."""

from __future__ import annotations

import dataclasses

import pytest

from mirror.wire import events as ev


def test_every_event_is_frozen_and_has_an_opaque() -> None:
    kinds = [kind for kind in vars(ev).values() if isinstance(kind, type) and issubclass(kind, ev.Event)]
    assert len(kinds) > 20
    for kind in kinds:
        fields = {field.name for field in dataclasses.fields(kind)}
        assert "opaque" in fields, kind
        assert vars(kind)["__dataclass_params__"].frozen, kind
        assert not hasattr(kind, "__dict__") or "__slots__" in vars(kind), kind


def test_messages_of_a_stream_can_carry_its_id() -> None:
    for kind in (ev.SnapshotMarker, ev.Mutation, ev.Deletion, ev.Expiration, ev.SystemEvent, ev.StreamEnd):
        assert issubclass(kind, ev.StreamEvent)
    assert ev.StreamEnd(1, 0).stream_id is None
    assert ev.StreamEnd(1, 0, stream_id=3) != ev.StreamEnd(1, 0)
    assert ev.StreamEnd(1, 0, opaque=3) != ev.StreamEnd(1, 0)


def test_an_event_cannot_be_changed() -> None:
    event = ev.SeqnoAdvanced(1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.seqno = 3  # type: ignore[misc]


def test_the_question_is_no_part_of_what_an_answer_says() -> None:
    assert ev.Response(0x5C, 0, request=ev.DcpNoop()) == ev.Response(0x5C, 0)
