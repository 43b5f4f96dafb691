"""The connections of a consumer or a reader: one for each node, and the source waits on all of them or on none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.errors import ClusterError, ConnectFailed, MirrorError
from mirror.feed.cluster.connections import Connections, NodeKeeper
from mirror.feed.connection.connection_string import NodeAddress
from tests.feed.scripted_node import ScriptedNode
from tests.feed.test_bootstrap import access_to

ONE, OTHER = NodeAddress("node", 1), NodeAddress("node", 2)


class FakeSession:
    """Opens when the test says so."""

    may_open: asyncio.Event

    def __init__(self, _access: Any, address: NodeAddress, _owner: Any, _clock: Any, **named: Any) -> None:
        self.address = address
        self.named = named
        self.ready = self.acks_held = False
        self.closed: asyncio.Future[ClusterError] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        await self.may_open.wait()
        self.ready = True

    def close(self, error: ClusterError | None = None) -> None:
        self.ready = False
        if not self.closed.done():
            self.closed.set_result(error or ConnectFailed("closed"))

    def release_acks(self) -> None:
        self.acks_held = False


class Owner:
    """Writes down which nodes came."""

    def __init__(self) -> None:
        self.ready: list[NodeAddress] = []
        self.changed = asyncio.Event()

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        self.ready.append(keeper.address)
        self.changed.set()

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None: ...

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await self.changed.wait()
                self.changed.clear()


@pytest.fixture
async def owner() -> Owner:
    return Owner()


@pytest.fixture
async def connections(owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connections:
    monkeypatch.setattr("mirror.feed.cluster.connections.NodeSession", FakeSession)
    FakeSession.may_open = asyncio.Event()
    anything: Any = owner
    node = ScriptedNode()
    node.port = 11210
    return Connections(
        access_to(node, tmp_path), SystemClock(), anything, anything, name="test", on_defect=lambda error: None
    )


async def test_a_node_has_one_keeper_for_as_long_as_it_is_needed(connections: Connections, owner: Owner) -> None:
    FakeSession.may_open.set()
    keeper = connections.keep(ONE)
    assert connections.keep(ONE) is keeper
    connections.keep(OTHER)
    await owner.until(lambda: len(owner.ready) == 2)
    first, second = connections.ready_sessions()
    assert (connections.session_at(ONE), connections.session_at(OTHER)) == (first, second)
    one, other = (vars(session)["named"]["opaques"] for session in (first, second))
    assert one is other, "or a message of one would be taken for one of the other"
    connections.retain({OTHER, None})
    assert (connections.session_at(ONE), list(connections.keepers)) == (None, [OTHER])
    await connections.close()
    assert not first.ready
    assert not second.ready
    assert connections.keepers == {}


async def test_the_source_waits_also_on_a_session_that_opens_meanwhile(connections: Connections, owner: Owner) -> None:
    connections.keep(ONE)
    connections.hold_acks()
    FakeSession.may_open.set()
    await owner.until(lambda: owner.ready == [ONE])
    (session,) = connections.ready_sessions()
    assert session.acks_held
    connections.release_acks()
    assert not session.acks_held
    await connections.close()


async def test_what_stands_in_the_way_is_said_once(connections: Connections) -> None:
    assert connections.errors() == ""
    for address in (ONE, OTHER):
        connections.keep(address).error = ConnectFailed("no route")
    assert connections.errors() == "; no route"
    await connections.close()
