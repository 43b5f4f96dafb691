"""The tables: complete, closed, and reachable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mirror.wire.constants import Opcode
from tests.oracle.states import (
    ANSWERED,
    CLOSE_TRIGGERS,
    CONNECTION_TRANSITIONS,
    SAID_BY,
    STREAM_MESSAGES,
    STREAM_TRANSITIONS,
    Answered,
    ConnectionState,
    Role,
    StreamState,
    Trigger,
    is_dcp,
)

NOBODY = {Opcode.DCP_ADD_STREAM}


def test_every_message_of_dcp_has_someone_to_say_it() -> None:
    assert set(SAID_BY) | NOBODY == set(range(Opcode.DCP_OPEN, Opcode.DCP_CACHE_TRANSFER_END + 1))
    assert all(is_dcp(opcode) for opcode in SAID_BY)
    assert not is_dcp(Opcode.GET_ALL_VB_SEQNOS)


def test_messages_of_a_stream_are_the_producers_and_need_no_answer() -> None:
    for opcode in STREAM_MESSAGES:
        assert SAID_BY[opcode] is Role.PRODUCER
        assert ANSWERED[opcode] is Answered.SOMETIMES
    assert Opcode.DCP_NOOP not in STREAM_MESSAGES
    assert Opcode.DCP_NOOP not in ANSWERED


def test_every_state_has_a_row_and_every_target_is_a_state() -> None:
    assert set(CONNECTION_TRANSITIONS) == set(ConnectionState)
    assert set(STREAM_TRANSITIONS) == set(StreamState)


def test_every_state_is_reached_from_the_first() -> None:
    tables: tuple[tuple[Mapping[Any, Mapping[Trigger, Any]], Any], ...] = (
        (CONNECTION_TRANSITIONS, ConnectionState.PLAIN),
        (STREAM_TRANSITIONS, StreamState.REQUESTED),
    )
    for table, first in tables:
        reached, todo = {first}, [first]
        while todo:
            for state in table[todo.pop()].values():
                if state not in reached:
                    reached.add(state)
                    todo.append(state)
        assert reached == set(table)


def test_the_last_states_are_left_by_nothing() -> None:
    assert CONNECTION_TRANSITIONS[ConnectionState.CLOSED] == {}
    assert STREAM_TRANSITIONS[StreamState.ENDED] == {}


def test_a_connection_can_be_lost_in_every_state_but_the_last() -> None:
    for state in ConnectionState:
        lost = CONNECTION_TRANSITIONS[state].get(Trigger.LOST)
        assert lost is (None if state is ConnectionState.CLOSED else ConnectionState.CLOSED)


def test_dcp_is_opened_once() -> None:
    opens = [state for state, row in CONNECTION_TRANSITIONS.items() if Trigger.OPEN in row]
    assert opens == [ConnectionState.PLAIN]


def test_answers_to_a_close_are_known_to_a_closing_stream() -> None:
    row = STREAM_TRANSITIONS[StreamState.CLOSING]
    assert {*CLOSE_TRIGGERS.values(), Trigger.CLOSE_REFUSED} <= set(row)


def test_each_role_has_the_other_as_its_peer() -> None:
    assert Role.CONSUMER.peer is Role.PRODUCER
    assert Role.PRODUCER.peer is Role.CONSUMER
