"""How answers are framed, and what errors tell."""

from __future__ import annotations

import json
from typing import cast

from mirror.sandbox import SandboxCluster
from mirror.sandbox.session import Reply, Session, SessionPort
from mirror.sandbox.users import READ, User
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Magic, Opcode, Status


class Port:
    """A connection that only remembers."""

    def __init__(self) -> None:
        self.bucket = SandboxCluster(vbuckets=1).bucket
        self.node_number = 0
        self.sent = b""

    def send(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.sent += b"closed"


def made(*features: Feature) -> tuple[Session, Port]:
    port = Port()
    session = Session(cast("SessionPort", port))
    session.features = set(features)
    return session, port


def test_with_tracing_answers_are_flexible_and_tell_their_time() -> None:
    request = fr.request(Opcode.GET, opaque=7, key=b"k")
    session, port = made(Feature.TRACING)
    session.respond(request, Reply(value=b"v", after=b"behind"))
    answer, end = fr.decode(port.sent)
    assert (answer.magic, len(answer.framing), answer.opaque) == (Magic.FLEX_RESPONSE, 3, 7)
    assert port.sent[end:] == b"behind"
    plain, port = made()
    called: list[int] = []
    plain.respond(request, Reply(Status.KEY_ENOENT, then=lambda: called.append(1)))
    assert fr.decode(port.sent)[0].magic == Magic.RESPONSE
    assert called == [1]


def test_error_contexts_are_for_who_asked_for_them() -> None:
    session, _ = made()
    assert session.refuse(Status.EINVAL, "why").value == b""
    asked, _ = made(Feature.XERROR)
    assert json.loads(asked.refuse(Status.EINVAL, "why").value) == {"error": {"context": "why"}}
    assert asked.refuse(Status.EINVAL).value == b""
    assert asked.refuse(Status.EINVAL, "why").datatype == 1
    body = json.loads(asked.refuse_collection().value)
    assert body["manifest_uid"] == "0"
    assert len(json.loads(asked.refuse(Status.EACCESS, with_reference=True).value)["error"]["ref"]) == 36


def test_privileges_are_those_of_the_user_now() -> None:
    session, _ = made()
    assert not session.may(READ)
    session.user = User("u", "p", frozenset())
    assert not session.may(READ)
    session.user.privileges = frozenset({READ})
    assert session.may(READ)
