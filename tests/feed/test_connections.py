"""The connections of a consumer or a reader: one for each node, kept with growing pauses; the source waits on all of
them or on none.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mirror.config_reader import validated
from mirror.errors import AuthRejected, BucketMissing, ClusterError, ConnectFailed, MirrorError, SourceTimeout
from mirror.feed.cluster.connections import Connections, FailureCount, NodeKeeper
from mirror.feed.connection.connection_string import NodeAddress
from mirror.wire.errors import RemoteProtocolError
from tests.feed.scripted_node import ScriptedNode
from tests.feed.test_bootstrap import access_to
from tests.manual_clock import ManualClock

ONE, OTHER = NodeAddress("node", 1), NodeAddress("node", 2)
RETRIES: dict[str, Any] = {"retry_delay_max_ms": 1000}


@pytest.fixture(autouse=True)
def frequent_polls() -> None:
    """The product's own pauses."""


class FakeSession:
    """Opens or fails as the owner of the connections says."""

    def __init__(self, _access: Any, address: NodeAddress, owner: Owner, _clock: Any, **named: Any) -> None:
        self.address = address
        self.opaques = named["opaques"]
        self.ready = self.acks_held = False
        self.closed: asyncio.Future[ClusterError] = asyncio.get_running_loop().create_future()
        self._owner = owner
        owner.sessions.append(self)

    async def open(self) -> None:
        await self._owner.may_open.wait()
        if self._owner.outcomes and (outcome := self._owner.outcomes.pop(0)) is not None:
            raise outcome
        self.ready = True

    def close(self, error: ClusterError | None = None) -> None:
        self.ready = False
        if not self.closed.done():
            self.closed.set_result(error or ConnectFailed("closed"))

    def release_acks(self) -> None:
        self.acks_held = False


class Owner:
    """Owns the connections, and writes down what becomes of them."""

    def __init__(self, access: Any) -> None:
        self.outcomes: list[Exception | None] = []
        """The errors of the next sessions, in order; None opens one."""
        self.sessions: list[FakeSession] = []
        self.notified: list[str] = []
        self.defects: list[str] = []
        self.may_open = asyncio.Event()
        self.may_open.set()
        self.clock = ManualClock()
        on_defect = lambda error: self.defects.append(str(error))  # noqa: E731
        anything: Any = self
        self.connections = Connections(access, self.clock, anything, anything, name="test", on_defect=on_defect)

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        assert keeper.ready
        self.notified.append("ready")

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        assert not keeper.ready
        self.notified.append(error.what)

    async def pass_time(self, seconds: float = 0) -> None:
        for advance in (0, seconds):
            self.clock.advance(advance)
            for _ in range(5):
                await asyncio.sleep(0)


@pytest.fixture
async def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    monkeypatch.setattr("mirror.feed.cluster.connections.NodeSession", FakeSession)
    node = ScriptedNode()
    node.port = 11210
    return Owner(access_to(node, tmp_path, **RETRIES))


async def test_a_node_has_one_keeper_for_as_long_as_it_is_needed(owner: Owner) -> None:
    connections = owner.connections
    keeper = connections.keep(ONE)
    assert connections.keep(ONE) is keeper
    connections.keep(OTHER)
    await owner.pass_time()
    first, second = owner.sessions
    ready: list[Any] = list(connections.ready_sessions())
    assert ready == [first, second]
    assert ready == [connections.session_at(ONE), connections.session_at(OTHER)]
    assert first.opaques is second.opaques, "or a message of one would be taken for one of the other"
    connections.retain({OTHER, None})
    assert (connections.session_at(ONE), list(connections.keepers)) == (None, [OTHER])
    await connections.close()
    assert not first.ready
    assert not second.ready
    assert connections.keepers == {}


async def test_a_session_opened_while_acks_are_held_holds_its_acks(owner: Owner) -> None:
    owner.may_open.clear()
    owner.connections.keep(ONE)
    owner.connections.hold_acks()
    owner.may_open.set()
    await owner.pass_time()
    (session,) = owner.connections.ready_sessions()
    assert session.acks_held
    owner.connections.release_acks()
    assert not session.acks_held
    await owner.connections.close()


async def test_an_error_shared_by_several_nodes_is_shown_once(owner: Owner) -> None:
    assert owner.connections.errors() == ""
    for address in (ONE, OTHER):
        owner.connections.keep(address).error = ConnectFailed("no route")
    assert owner.connections.errors() == "; no route"
    await owner.connections.close()


class Jitter(ManualClock):
    value = 1.0

    def jitter(self) -> float:
        return self.value


def test_pauses_double_up_to_the_cap_and_spread() -> None:
    clock = Jitter()
    failures = FailureCount(validated(RETRIES), clock)
    down: list[MirrorError] = [ConnectFailed("down"), SourceTimeout("silent"), MirrorError("garbage", retryable=True)]
    assert [failures.add(down[number % 3]) for number in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for _ in range(100):
        assert failures.add(down[0]) == 1.0
    failures.clear()
    clock.value = 0.0
    assert failures.add(down[0]) == 0.05


def test_another_kind_of_failure_is_retried_soon() -> None:
    """An engine was away for 15 s; its bucket came 3 s after its port, and the mirror 45 s later."""
    failures = FailureCount(validated(RETRIES), Jitter())
    errors = [ConnectFailed("down"), BucketMissing("no bucket"), AuthRejected("no user"), BucketMissing("gone again")]
    for error in errors:
        pauses = [failures.add(error) for _ in range(10)]
        assert pauses[0] <= 2
        assert pauses == sorted(pauses)
        assert pauses[-1] == (1.0 if error.retryable else 60.0)


async def test_a_node_that_fails_is_tried_again_after_growing_pauses(owner: Owner) -> None:
    owner.outcomes = [ConnectFailed("one"), RemoteProtocolError("two"), AuthRejected("three")]
    keeper = owner.connections.keep(ONE)
    await owner.pass_time()
    assert owner.notified == ["one"]
    await owner.pass_time(0.049)
    assert len(owner.sessions) == 1
    await owner.pass_time(0.2)
    await owner.pass_time(0.3)
    assert owner.notified == ["one", "two", "three"]
    assert keeper.failures.count == 3
    assert isinstance(keeper.error, AuthRejected)
    await owner.pass_time(0.4)
    assert owner.notified[-1] == "three", "after a refusal the pause is longer"
    await owner.pass_time(0.6)
    assert owner.notified[-1] == "ready"
    assert keeper.failures.count == 0
    assert keeper.error is None
    await keeper.stop()


async def test_a_lost_session_is_replaced_by_one_other(owner: Owner) -> None:
    keeper = owner.connections.keep(ONE)
    await owner.pass_time()
    owner.sessions[0].close(ConnectFailed("lost"))
    await owner.pass_time()
    assert owner.notified == ["ready", "lost"]
    assert keeper.session is None
    await owner.pass_time(0.2)
    assert owner.notified == ["ready", "lost", "ready"]
    assert (len(owner.sessions), keeper.reconnects) == (2, 1)
    await keeper.stop()


@pytest.mark.parametrize("outcome", [None, ConnectFailed("down")])
async def test_a_stopped_keeper_leaves_nothing_open_and_stops_trying(owner: Owner, outcome: Exception | None) -> None:
    owner.outcomes = [outcome]
    keeper = owner.connections.keep(ONE)
    await owner.pass_time()
    await keeper.stop()
    await owner.pass_time(100)
    (session,) = owner.sessions
    assert not keeper.ready
    assert not session.ready
    assert owner.defects == [], "an end on demand is no defect"


async def test_a_defect_that_ends_a_keeper_is_reported(owner: Owner) -> None:
    owner.outcomes = [AssertionError("a defect")]
    owner.connections.keep(ONE)
    await owner.pass_time()
    assert owner.defects == ["a defect"]
