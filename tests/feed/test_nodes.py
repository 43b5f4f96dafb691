"""Keeping a node's session: pauses that grow, one session at a time, nothing left open."""

from __future__ import annotations

import asyncio
from typing import Any

from mirror.config import Settings
from mirror.errors import AuthRejected, ConnectFailed, MirrorError
from mirror.feed.cluster.connections import NodeKeeper, pause_s
from mirror.feed.connection.connection_string import NodeAddress
from mirror.wire.errors import RemoteProtocolError
from tests.manual_clock import ManualClock

SETTINGS = Settings(retry_delay_min_ms=100, retry_delay_max_ms=1000)


class FakeSession:
    """Opens or fails as given."""

    def __init__(self, outcome: Exception | None) -> None:
        self.outcome = outcome
        self.ready = False
        self.closed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.close_count = 0

    async def open(self) -> None:
        if self.outcome is not None:
            raise self.outcome
        self.ready = True

    def close(self, error: Exception | None = None) -> None:
        self.ready = False
        self.close_count += 1
        if not self.closed.done():
            self.closed.set_result(error or ConnectFailed("closed by us"))


class Owner:
    def __init__(self) -> None:
        self.notified: list[Any] = []

    def on_node_ready(self, keeper: NodeKeeper) -> None:
        assert keeper.ready
        self.notified.append("ready")

    def on_node_failed(self, keeper: NodeKeeper, error: MirrorError) -> None:
        assert not keeper.ready
        self.notified.append(str(error.what))


class Bench:
    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.sessions: list[FakeSession] = []
        self.clock = ManualClock()
        self.owner = Owner()
        self.keeper = NodeKeeper(NodeAddress("a", 1), self.make, self.owner, SETTINGS, self.clock)  # type: ignore[arg-type]

    def make(self, _address: NodeAddress) -> FakeSession:
        self.sessions.append(FakeSession(self.outcomes.pop(0) if self.outcomes else None))
        return self.sessions[-1]

    async def pass_time(self, seconds: float) -> None:
        await self.settle()
        self.clock.advance(seconds)
        await self.settle()

    @staticmethod
    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def test_pauses_double_up_to_the_cap_and_spread() -> None:
    assert [pause_s(attempt, SETTINGS, 1.0) for attempt in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert pause_s(10**9, SETTINGS, 1.0) == 1.0
    assert pause_s(-1, SETTINGS, 1.0) == 0.1
    assert pause_s(0, SETTINGS, 0.0) == 0.05


async def test_node_that_fails_is_tried_again_after_growing_pauses() -> None:
    bench = Bench(ConnectFailed("one"), RemoteProtocolError("two"), AuthRejected("three"))
    bench.keeper.start()
    await bench.settle()
    assert bench.owner.notified == ["one"]
    await bench.pass_time(0.049)
    assert len(bench.sessions) == 1
    await bench.pass_time(0.2)
    await bench.pass_time(0.3)
    assert bench.owner.notified == ["one", "two", "three"]
    assert bench.keeper.failures == 3
    assert isinstance(bench.keeper.error, AuthRejected)
    await bench.pass_time(0.5)
    assert bench.owner.notified[-1] == "three", "after a refusal the pause is longer"
    await bench.pass_time(4.0)
    assert bench.owner.notified[-1] == "ready"
    assert bench.keeper.failures == 0
    assert bench.keeper.error is None
    await bench.keeper.stop()


async def test_lost_session_is_replaced_by_one_other() -> None:
    bench = Bench()
    bench.keeper.start()
    await bench.settle()
    bench.sessions[0].close(ConnectFailed("lost"))
    await bench.settle()
    assert bench.owner.notified == ["ready", "lost"]
    assert bench.keeper.session is None
    await bench.pass_time(0.2)
    assert bench.owner.notified == ["ready", "lost", "ready"]
    assert len(bench.sessions) == 2
    assert bench.keeper.reconnects == 1
    await bench.keeper.stop()


async def test_stopped_keeper_leaves_nothing_open_and_tries_no_more() -> None:
    for outcome in (None, ConnectFailed("down")):
        bench = Bench(outcome)
        bench.keeper.start()
        await bench.settle()
        await bench.keeper.stop()
        await bench.pass_time(100)
        assert len(bench.sessions) == 1
        assert not bench.keeper.ready
        assert not bench.sessions[0].ready
    idle = Bench()
    await idle.keeper.stop()
    assert idle.sessions == []


async def test_a_defect_that_ends_the_keeping_is_reported() -> None:
    bench = Bench(AssertionError("a defect"))
    notified: list[BaseException] = []
    bench.keeper.on_died = notified.append
    bench.keeper.start()
    await bench.settle()
    assert [str(error) for error in notified] == ["a defect"]
    idle = Bench(None)
    idle.keeper.on_died = notified.append
    idle.keeper.start()
    await idle.settle()
    await idle.keeper.stop()
    assert len(notified) == 1, "an end on demand is no defect"
