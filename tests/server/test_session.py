"""How answers are framed, what errors say, and which map a client is sent; by the session of the embedded source."""

from __future__ import annotations

import json
from typing import cast

from mirror.sandbox import SandboxCluster
from mirror.sandbox.kv.session import SandboxSession, SessionPort
from mirror.server.errors import Refused, unknown_collection
from mirror.server.session import Reply, failover_statistics
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Magic, Opcode, Status
from storage.model import FailoverLog
from tests.oracle import kv_client


class Port:
    """A connection of a node."""

    def __init__(self) -> None:
        self.bucket = SandboxCluster(vbuckets=1).bucket
        self.node_number = 0


def made(*features: Feature) -> SandboxSession:
    session = SandboxSession(cast("SessionPort", Port()))
    session.grant(frozenset(map(int, features)))
    return session


def test_with_tracing_answers_are_flexible_and_carry_their_duration() -> None:
    request = fr.request(Opcode.GET, opaque=7, key=b"k")
    answer, _ = fr.decode(made(Feature.TRACING).encode(request, Reply(value=b"v"), 100.0))
    assert (answer.magic, answer.opaque) == (Magic.FLEX_RESPONSE, 7)
    duration = kv_client.server_duration_us(answer.framing)
    assert duration is not None
    assert 90 < duration < 110
    plain, _ = fr.decode(made().encode(request, Reply(Status.KEY_ENOENT), 100.0))
    assert plain.magic == Magic.RESPONSE
    hello, _ = fr.decode(made(Feature.TRACING).encode(fr.request(Opcode.HELLO), Reply(), 100.0))
    assert hello.magic == Magic.RESPONSE


def test_answers_that_go_before_come_first() -> None:
    data = made().encode(fr.request(Opcode.STAT, opaque=3), Reply(before=(Reply(key=b"a"), Reply(key=b"b"))), 1.0)
    keys = []
    while data:
        frame, end = fr.decode(data)
        keys.append((frame.opaque, frame.key))
        data = data[end:]
    assert keys == [(3, b"a"), (3, b"b"), (3, b"")]


def test_error_contexts_are_for_clients_that_negotiated_them() -> None:
    assert made().refuse(Status.EINVAL, "why").value == b""
    session = made(Feature.XERROR)
    assert json.loads(session.refuse(Status.EINVAL, "why").value) == {"error": {"context": "why"}}
    assert session.refuse(Status.EINVAL).value == b""
    assert session.refuse(Status.EINVAL, "why").datatype == 1
    assert json.loads(session.refused(unknown_collection(31)).value)["manifest_uid"] == "1f"
    assert json.loads(session.refused(Refused(Status.UNKNOWN_COLLECTION)).value)["manifest_uid"] == "0"
    assert len(json.loads(session.refuse(Status.EACCESS, with_reference=True).value)["error"]["ref"]) == 36


def test_a_bare_refusal_is_its_status_and_value() -> None:
    session = made(Feature.XERROR)
    assert session.refused(Refused(Status.NOT_MY_VBUCKET, value=b"as recorded")).value == b"as recorded"
    assert session.refused(Refused(Status.NOT_MY_VBUCKET, bare=True)).value == b""
    assert session.refused(Refused(Status.NOT_MY_VBUCKET)).value == session.map_text(with_bucket=True)


def test_failover_logs_are_counted_and_listed() -> None:
    assert failover_statistics(3, FailoverLog.of([(9, 5), (7, 0)])) == {
        "vb_3:num_entries": "2",
        "vb_3:0:id": "9",
        "vb_3:0:seq": "5",
        "vb_3:1:id": "7",
        "vb_3:1:seq": "0",
    }
