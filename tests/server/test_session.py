"""Framing of answers, error texts, and the map for each client, by the embedded source's session."""

from __future__ import annotations

import json
from typing import cast

from mirror.sandbox import SandboxCluster
from mirror.sandbox.kv.session import SandboxSession, SessionPort
from mirror.server.errors import Refused, unknown_collection
from mirror.server.session import Reply
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Magic, Opcode, Status
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
