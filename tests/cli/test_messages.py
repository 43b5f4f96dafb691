"""Messages survive the way over the wire, and an object that is none is refused by name."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgpack
import pytest

from mirror.errors import ConfigError, SupervisionError
from mirror.messages import (
    Answer,
    Beat,
    ControlCommand,
    ExitReport,
    GetSource,
    GetStatus,
    GrantLease,
    HoldPositions,
    NewClusterMap,
    Ping,
    PipeMessage,
    Ready,
    ReleaseLease,
    Request,
    Resync,
    RollBack,
    StartServer,
    StartWorker,
    StopService,
    StopWork,
    Turned,
    control_command,
    encode,
    pipe_message,
)

COMMANDS: list[ControlCommand] = [
    Ping(), GetSource(), GetStatus(), StopService(), RollBack(3, 5), Resync(3),
    GrantLease("a", "job", 60.0, [[0, 1, 5]]), ReleaseLease("a"),
]  # fmt: skip
MESSAGES: list[PipeMessage] = [
    StartWorker(0, [0, 2], {"data": None}, [HoldPositions("a", 9, [[0, 1, 5]])], {"rev": 1}, [1, 2], 5, [[1, "died"]]),
    StartServer(1000, {"data": None}, "kv", 1, "00", [["localhost:1", None]]),
    StopWork(), Request(1, GetStatus()),
    Request(2, HoldPositions("a", 9, [[0, 1, 5]])),
    Request(4, ReleaseLease("a")), Request(5, RollBack(1, 2)), Request(6, Resync(1)), NewClusterMap({"rev": 2}), Beat(),
    Turned(), Ready(), Answer(1, {"vbuckets": []}), Answer(2, error="no"), ExitReport("wrong password", 4, True),
]  # fmt: skip


def test_every_command_is_the_same_after_json() -> None:
    assert [control_command(json.loads(json.dumps(encode(each)))) for each in COMMANDS] == COMMANDS
    assert {type(each) for each in COMMANDS} == set(get_args(ControlCommand))


def test_every_message_is_the_same_after_msgpack() -> None:
    assert [pipe_message(msgpack.unpackb(msgpack.packb(encode(each)))) for each in MESSAGES] == MESSAGES
    assert {type(each) for each in MESSAGES} == set(get_args(PipeMessage))


@pytest.mark.parametrize("kinds", [ControlCommand, PipeMessage], ids=["commands", "messages"])
def test_each_message_of_a_kind_has_its_own_op(kinds: Any) -> None:
    operations = [kind.op for kind in get_args(kinds)]
    assert len(set(operations)) == len(operations)


def test_a_client_sends_what_the_first_release_sent() -> None:
    assert json.dumps(encode(RollBack(3, 5))) == '{"op": "rollback", "vbid": 3, "to": 5}'
    assert json.dumps(encode(Resync(3))) == '{"op": "resync", "vbid": 3}'


def test_unknown_keys_are_ignored_and_defaults_apply() -> None:
    assert control_command({"op": "status", "verbose": True}) == GetStatus()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"op": "rollback", "vbid": "x", "to": 1}, "rollback: vbid is 'x' (give a whole number)"),
        ({"op": "rollback", "vbid": True, "to": 1}, "rollback: vbid is True (give a whole number)"),
        ({"op": "resync", "vbid": True}, "resync: vbid is True (give a whole number)"),
        ({"op": "lease", "id": "a", "name": "job", "seconds": True, "positions": []}, "True (give a number)"),
        ({"op": "rollback", "vbid": 1}, "rollback: to is missing (give a whole number)"),
        ({"op": "lease", "id": 5, "name": "job", "seconds": 1, "positions": []}, "lease: id is 5 (give a text)"),
        ({"op": "lease", "id": "a", "name": "job", "seconds": "long", "positions": []}, "'long' (give a number)"),
        ({"op": "lease", "id": "a", "name": "job", "seconds": 1, "positions": {}}, "give a list"),
        ({"op": "release", "id": None}, "release: id is None"),
    ],
)
def test_a_wrong_field_is_named_with_the_expected_type(message: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        control_command(message)
    assert words in str(caught.value)


@pytest.mark.parametrize("operation", ["dance", None, 5, "start-worker"])
def test_an_unknown_command_is_answered_with_the_known_ones(operation: object) -> None:
    with pytest.raises(SupervisionError, match=r"unknown command .* \(ping, source, status, stop"):
        control_command({"op": operation})


def test_a_command_that_workers_do_not_know_is_refused_inside_a_request() -> None:
    with pytest.raises(SupervisionError, match="unknown command 'ping'"):
        pipe_message({"op": "request", "id": 1, "command": {"op": "ping"}})
