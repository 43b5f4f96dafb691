"""The shape of answers: errors with their context for those who take it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirror.clock import SystemClock
from mirror.serve.kv_bucket import KvBucket, Refused
from mirror.serve.kv_map import ClusterMap, own_node
from mirror.serve.kv_session import Session
from mirror.serve.listener import Address
from mirror.wire.constants import Feature, Status
from tests.serve.kv_rig import Store, users


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    store = Store(tmp_path)
    bucket = KvBucket(store.path, SystemClock(), stale_allowed=False)
    cluster_map = ClusterMap(bucket.identity, [own_node([Address("127.0.0.1", 5)])], 1)
    yield Session(bucket, users(), cluster_map, b"secret", plain_allowed=True)
    bucket.close()
    store.close()


def test_features_are_kept_as_they_were_granted(session: Session) -> None:
    names = ("xerror", "tracing", "collections", "snappy", "json")
    assert not any(getattr(session, name) for name in names)
    for name in names:
        session.grant(frozenset({int(Feature[name.upper()])}))
        assert [each for each in names if getattr(session, each)] == [name]


def test_a_context_is_told_only_to_those_who_take_it(session: Session) -> None:
    assert session.refuse(Status.EINVAL, "why").value == b""
    session.grant(frozenset({int(Feature.XERROR)}))
    assert session.refuse(Status.EINVAL).value == b""
    reply = session.refuse(Status.EINVAL, "why", manifest_uid=0x1F)
    assert (reply.datatype, json.loads(reply.value)) == (1, {"error": {"context": "why"}, "manifest_uid": "1f"})
    references = {json.loads(session.refuse(Status.EACCESS, with_reference=True).value)["error"]["ref"] for _ in "ab"}
    assert len(references) == 2


def test_a_vbucket_that_is_elsewhere_comes_with_the_map(session: Session) -> None:
    reply = session.refused(Refused(Status.NOT_MY_VBUCKET))
    assert reply.value == session.cluster_map.of_bucket
    assert session.refused(Refused(Status.KEY_ENOENT)).value == b""
