"""The policy of a node of the embedded source: privileges, and which vbuckets it answers for."""

from __future__ import annotations

from typing import cast

import pytest

from mirror.sandbox import SandboxCluster
from mirror.sandbox.data.users import User
from mirror.sandbox.kv.session import SandboxSession, SessionPort
from mirror.server.errors import Refused
from mirror.server.privileges import READ
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status


class Port:
    """A connection of a node."""

    def __init__(self) -> None:
        self.bucket = SandboxCluster(vbuckets=2, nodes=2).bucket
        self.node_number = 0


def made() -> SandboxSession:
    return SandboxSession(cast("SessionPort", Port()))


def test_privileges_are_those_of_the_user_now() -> None:
    session = made()
    assert not session.may(READ)
    session.user = User("u", "p", frozenset())
    assert not session.may(READ)
    session.user.privileges = frozenset({READ})
    assert session.may(READ)


def test_a_replica_answers_for_replica_reads_alone() -> None:
    session = made()
    session.bucket.set("k", {}, vbid=1)
    session.bucket.map.owners[1], session.bucket.map.replicas[1] = 1, [0]
    found = session.find_document(fr.request(Opcode.GET_REPLICA, vbucket=1), b"\0k")
    assert (found.deleted, found.value) == (False, b"{}")
    with pytest.raises(Refused) as error:
        session.find_document(fr.request(Opcode.GET, vbucket=1), b"\0k")
    assert error.value.status == Status.NOT_MY_VBUCKET
    with pytest.raises(Refused):
        session.active_vbucket(1)
