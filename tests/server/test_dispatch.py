"""Checks that every server makes before an operation gets its request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror.clock import SystemClock
from mirror.sandbox.data.bucket import User
from mirror.sandbox.kv.session import SandboxSession
from mirror.sandbox.node import node
from mirror.serve.access.auth import Reader
from mirror.serve.kv import connection as kv_connection
from mirror.serve.kv.bucket import KvBucket
from mirror.serve.kv.session import KvSession
from mirror.server import dispatch
from mirror.server.session import Reply
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Opcode, Status
from tests.oracle import kv_client
from tests.serve.kv_rig import Store, session_of
from tests.server.test_session import made


def source_session() -> SandboxSession:
    session = made()
    session.user = User("u", "p")
    session.bucket_selected = True
    return session


@pytest.fixture
def mirror_session(tmp_path: Path) -> Iterator[KvSession]:
    store = Store(tmp_path, vbuckets=1)
    bucket = KvBucket(store.path, SystemClock(), stale_allowed=False)
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
def test_a_request_of_another_shape_is_refused_by_every_server(mirror_session: KvSession, frame: fr.Frame) -> None:
    """A GET with extras and a value was answered with success by the mirror."""
    assert status(dispatch.answer(source_session(), node.OPERATIONS, frame)) == Status.EINVAL
    assert status(dispatch.answer(mirror_session, kv_connection.OPERATIONS, frame)) == Status.EINVAL


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
