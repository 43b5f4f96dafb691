"""Servers share checks before each operation, framing of answers, error texts, controls and maps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from mirror.clock import SystemClock
from mirror.sandbox import SandboxCluster
from mirror.sandbox.data.bucket import User
from mirror.sandbox.kv.sandbox_session import SandboxSession, SessionPort
from mirror.sandbox.node import node
from mirror.serve.access.auth import Reader
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.bucket.mirror_session import MirrorSession
from mirror.serve.dcp.dcp_session import ABILITIES as MIRROR
from mirror.serve.kv.server import KvSession
from mirror.server import dispatch
from mirror.server.controls import Controls
from mirror.server.errors import Refused, unknown_collection
from mirror.server.session import Reply
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Magic, Opcode, Status
from tests.oracle import kv_client
from tests.serve.kv_rig import Store, session_of


class Port:
    """A connection of a node."""

    def __init__(self) -> None:
        self.bucket = SandboxCluster(vbuckets=1).bucket
        self.node_number = 0


def made(*features: Feature) -> SandboxSession:
    session = SandboxSession(cast("SessionPort", Port()))
    session.grant(frozenset(map(int, features)))
    return session


def test_answers_with_tracing_carry_their_duration() -> None:
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


def test_a_bare_refusal_has_only_its_status_and_value() -> None:
    session = made(Feature.XERROR)
    assert session.refused(Refused(Status.NOT_MY_VBUCKET, value=b"as recorded")).value == b"as recorded"
    assert session.refused(Refused(Status.NOT_MY_VBUCKET, bare=True)).value == b""
    assert session.refused(Refused(Status.NOT_MY_VBUCKET)).value == session.map_text(with_bucket=True)


def source_session() -> SandboxSession:
    session = made()
    session.user = User("u", "p")
    session.bucket_selected = True
    return session


@pytest.fixture
def mirror_session(tmp_path: Path) -> Iterator[MirrorSession]:
    store = Store(tmp_path, vbuckets=1)
    bucket = ServedBucket(store.path, SystemClock())
    yield session_of(bucket, Reader("all"))
    bucket.close()
    store.close()


def status(reply: object) -> int:
    assert isinstance(reply, Reply)
    return reply.status


MISSHAPEN = [
    fr.request(Opcode.GET, key=b"k", extras=b"\0\0\0\0"),
    fr.request(Opcode.GET, key=b"k", value=b"v"),
    fr.request(Opcode.GET),
    fr.request(Opcode.NOOP, value=b"v"),
    fr.request(Opcode.SELECT_BUCKET, key=b"b", extras=b"\0"),
    fr.request(Opcode.GET_FAILOVER_LOG, key=b"k"),
    fr.request(Opcode.OBSERVE_SEQNO),
]


@pytest.mark.parametrize("frame", MISSHAPEN, ids=lambda frame: f"{frame.opcode:02x}")
def test_a_malformed_request_is_refused_by_every_server(mirror_session: MirrorSession, frame: fr.Frame) -> None:
    """A GET with extras and a value was answered with success by the mirror."""
    assert status(dispatch.answer(source_session(), node.OPERATIONS, frame)) == Status.EINVAL
    assert status(dispatch.answer(mirror_session, KvSession.operations, frame)) == Status.EINVAL


def test_login_comes_first_then_the_bucket_then_the_privilege() -> None:
    session = source_session()
    session.user, session.bucket_selected = None, False
    get = fr.request(Opcode.GET, key=b"k")
    assert status(dispatch.answer(session, node.OPERATIONS, get)) == Status.EACCESS
    assert status(dispatch.answer(session, node.OPERATIONS, fr.request(0xFA))) == Status.EACCESS
    assert status(dispatch.answer(session, node.OPERATIONS, fr.request(Opcode.NOOP))) == Status.SUCCESS
    session.user = User("u", "p", frozenset())
    assert status(dispatch.answer(session, node.OPERATIONS, fr.request(0xFA))) == Status.UNKNOWN_COMMAND
    assert status(dispatch.answer(session, node.OPERATIONS, get)) == Status.NO_BUCKET
    session.bucket_selected = True
    refused = dispatch.answer(session, node.OPERATIONS, get)
    assert status(refused) == Status.EACCESS
    session.grant(frozenset({int(Feature.XERROR)}))
    refused = dispatch.answer(session, node.OPERATIONS, get)
    assert isinstance(refused, Reply)
    assert "GET operation without the Read privilege" in kv_client.error_context(refused.value, refused.datatype)


def test_a_control_that_is_refused_changes_nothing() -> None:
    fresh = Controls(MIRROR, True, True, 1)
    for name in (b"set_noop_interval", b"connection_buffer_size", b"enable_noop", b"max_marker_version"):
        fresh.set(name, b"nonsense")
    assert fresh == Controls(MIRROR, True, True, 1)
