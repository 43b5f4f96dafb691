"""Streams that stall: noticed by seqnos, bytes and time, requested again, in the end over another connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mirror.config_reader import validated
from mirror.errors import ClusterError, HandshakeFailed, SourceTimeout
from mirror.feed.connection.bootstrap import Handshake
from mirror.feed.follow.watch import SourceWatch
from mirror.health import assess
from mirror.ingest.selection import Selection
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.dcp.producer_stream import ProducerStream
from mirror.supervise.status import reported_row
from tests.feed.harness import Mirrors, source_high_seqnos
from tests.manual_clock import ManualClock

VBUCKETS = 4


@pytest.fixture
def options() -> dict[str, Any]:
    return {"stall_timeout_s": 1, "groups": 1}


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1) as running:
        yield running


def write(cluster: SandboxCluster, vbid: int, name: str) -> None:
    cluster.set(name, {"a": 1}, vbid=vbid)


async def test_a_stalled_stream_is_restarted_and_the_second_stall_ends_the_connection(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    """The node answers, its noops come, every other stream is well: only this one brings nothing."""
    mirror = mirrors.make()
    mirror.settings = replace(mirror.settings, stall_timeout_s=0.5)  # sooner than the setting allows
    mirror.start(cluster.connection_string)
    for vbid in range(VBUCKETS):
        write(cluster, vbid, f"first-{vbid}")
    await mirror.follow()
    requested = len(cluster.sent(2).stream_requests)
    cluster.bucket.stream_faults.mute([2])
    write(cluster, 2, "unheard")
    await mirror.until_state(2, "stalled")
    row = mirror.row(2)
    assert "the source is at 2" in row["text"]
    assert row["stalls"] >= 1
    health = assess([reported_row(row, 0) | {"lag_s": 0.0, "worker": 0}], 1, lag_limit_s=30)
    assert health.state == "degraded"
    assert health.reasons[0].startswith("1 of 1 vbuckets stalled: the source has more and sends nothing")
    await mirror.until(lambda: len(cluster.sent(2).stream_requests) > requested, "requested again")
    await mirror.until(lambda: mirror.status()["nodes"][0]["reconnects"] >= 1, "another connection")
    await mirror.until(lambda: mirror.status()["counters"]["stalls"] >= 2, "twice")
    write(cluster, 0, "others go on")
    for vbid in (0, 1, 3):
        await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)
    cluster.bucket.stream_faults.clear()
    await mirror.follow()
    await mirror.until_state(2, "streaming")
    assert mirror.status()["counters"]["requested_again_bytes"] == 0


async def test_an_announced_end_that_never_comes_is_requested_again(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8.0.2 may announce a hidden durable write's seqno to a filtered stream, and send nothing there (MB-73354)."""
    mirrors.compares = False  # the mirror has one collection
    cluster.bucket.create_scope("s")
    cluster.bucket.create_collection("s", "c")
    mirror = mirrors.start(selection=Selection.of(None, ["s.c"]))
    await mirror.until(lambda: all(row["lag_seqnos"] == 0 for row in mirror.status()["vbuckets"]), "no lag")
    finish = ProducerStream._finish

    def withhold(stream: ProducerStream, out: bytearray) -> None:
        stream._last_sent = stream._snapshot_end  # as if an item had been sent there
        finish(stream, out)

    monkeypatch.setattr(ProducerStream, "_finish", withhold)
    with cluster.vbucket(2).group():
        cluster.bucket.set("seen", {"a": 1}, collection="s.c", vbid=2)
        cluster.bucket.prepare("hidden", {}, collection="s.c", vbid=2)
    await mirror.until(lambda: mirror.row(2)["stalls"] > 0, "a stall")
    monkeypatch.setattr(ProducerStream, "_finish", finish)
    await mirror.until_published(2, cluster.vbucket(2).high_seqno)
    assert [node["reconnects"] for node in mirror.status()["nodes"]] == [0]


async def test_the_high_seqno_of_a_new_connection_does_not_wait_for_the_next_poll(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start, or a connection that is open again, would otherwise be "of unknown lag" for an interval."""
    monkeypatch.setattr("mirror.feed.follow.watch.POLL_INTERVAL_S", 600)
    write(cluster, 2, "first")
    mirror = mirrors.start()
    await mirror.until(lambda: source_high_seqnos(mirror.consumer) == {0: 0, 1: 0, 2: 1, 3: 0}, "known at the start")
    await mirror.follow()
    write(cluster, 2, "second")
    for connection in list(cluster.nodes[0].connections):
        connection.link.cut()
    await mirror.until(
        lambda: source_high_seqnos(mirror.consumer) == {0: 0, 1: 0, 2: 2, 3: 0}, "known of the new connection"
    )


def watch_of(keepers: Any, vbuckets_at: Any, settings: dict[str, Any], clock: ManualClock | None = None) -> SourceWatch:
    access = SimpleNamespace(settings=validated(settings))
    connections: Any = SimpleNamespace(keepers=keepers, access=access, clock=clock or ManualClock())
    collections: Any = SimpleNamespace(polled_collections=None)
    reopen: Any = lambda vbucket, cause: vbucket.done.append(cause)  # noqa: E731
    return SourceWatch(connections, collections, vbuckets_at, reopen)


async def test_an_open_connection_has_its_node_polled_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many collections a poll is many queries: a node that comes and goes must not multiply those of the rest."""
    polled: list[str] = []

    async def fetch(link: str, *_: object) -> dict[int, int]:
        polled.append(link)
        return {}

    async def turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def session(link: str) -> SimpleNamespace:
        return SimpleNamespace(ready=True, link=link, handshake=Handshake(frozenset()))

    monkeypatch.setattr("mirror.feed.follow.watch.fetch_high_seqnos", fetch)
    keepers = {name: SimpleNamespace(address=name, session=None) for name in ("a", "b")}
    keepers["a"].session = session("a, first")
    monkeypatch.setattr("mirror.feed.follow.watch.POLL_INTERVAL_S", 600)
    watch = watch_of(keepers, lambda _address: [], {})
    running = asyncio.create_task(watch.run())
    await turns()
    assert polled == ["a, first"]
    for name, link in (("b", "b, first"), ("a", "a, second")):
        keepers[name].session = session(link)
        watch.look()
        await turns()
        assert polled[-1] == link
        watch.look()
        await turns()
    assert len(polled) == 3
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_node_that_answers_nothing_is_not_in_contact(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.feed.connection.node_session.SILENCE_MAX_S", 0.5)
    mirror = mirrors.start(noop_interval_s=60, request_timeout_s=60)
    await mirror.until(lambda: mirror.row(1)["source_high_seqno"] == 0, "a figure")
    address = f"127.0.0.1:{cluster.nodes[0].port}"
    assert mirror.row(1)["node"] == address
    cluster.faults.silence(dcp_only=False)
    await mirror.until(lambda: mirror.row(1)["node"] is None, "the loss of contact")
    row = mirror.row(1)
    assert (row["state"], row["source_high_seqno"], row["lag_seqnos"]) == ("waiting", None, None)
    assert row["last_error"] == f"{address} does not answer"
    assert row["silent_ms"] > 500
    assert mirror.consumer.connections.ready_sessions()
    health = assess([reported_row(row, 0) | {"lag_s": 0.6, "worker": 0}], 1, lag_limit_s=30)
    assert (health.state, *health.reasons) == (
        "source unreachable",
        f"no contact with the source: {address} does not answer",
    )


async def test_the_lag_is_unknown_while_the_answer_waits_behind_rows_on_a_slow_link(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows came, so the node was in contact, and the last answer counted: lag 0 for 30 s, while 9,000 seqnos behind."""
    monkeypatch.setattr("mirror.feed.follow.watch.SILENCE_MAX_S", 0.5)
    write(cluster, 1, "first")
    mirror = mirrors.start(request_timeout_s=60)
    await mirror.until(lambda: mirror.row(1)["lag_seqnos"] == 0, "the first document")
    cluster.faults.slow(4000, dcp_only=False)
    for number in range(40):
        cluster.set(f"big-{number}", {"a": "x" * 1000}, vbid=1)
    await mirror.until(lambda: mirror.row(1)["lag_seqnos"] is None, "an unknown lag")
    row = mirror.row(1)
    assert (row["state"], row["lag_seqnos"]) == ("streaming", None)
    assert row["node"] is not None
    assert row["silent_ms"] > 500
    health = assess([reported_row(row, 0) | {"lag_s": 0.6, "worker": 0}], 1, lag_limit_s=30)
    assert (health.state, health.reasons) == ("catching up", ["1 of 1 vbuckets of unknown lag"])
    cluster.faults.slow(0, dcp_only=False)
    await mirror.until(lambda: mirror.row(1)["lag_seqnos"] == 0, "the answer")


async def test_the_lag_is_unknown_while_the_node_refuses_to_send_its_high_seqnos(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.feed.follow.watch.SILENCE_MAX_S", 0.2)
    mirror = mirrors.start()
    await mirror.until(lambda: mirror.row(1)["source_high_seqno"] == 0, "a figure")

    async def refuse(*_: object) -> None:
        raise HandshakeFailed("not initialised yet")

    monkeypatch.setattr("mirror.feed.follow.watch.fetch_high_seqnos", refuse)
    await mirror.until(lambda: mirror.row(1)["lag_seqnos"] is None, "an unknown lag")
    assert mirror.row(1)["node"] is not None


# --- the judgement, without a source ---


class Stand:
    """A vbucket and its session, as the watch sees them."""

    def __init__(self, clock: ManualClock) -> None:
        self.vbid = 0
        self.session = self.machine = self.host = self.progress = self
        self.source_high_seqno: int | None = 10
        self.streaming = True
        self.waits_for_end = False
        self.last_at = self.received_at = self.backfill_at = clock.monotonic()
        self.stalled_streams = self.stalls = 0
        self.address = "node"
        self.clock = clock
        self.writer = self.state = self
        self.staged_seqno = self.staging_published_seqno = 5
        self.done: list[str] = []

    def moved(self, at: float) -> None:
        self.last_at = at
        self.stalled_streams = 0

    def stalled(self, _text: str, at: float) -> None:
        self.stalled_streams += 1
        self.stalls += 1
        self.last_at = at

    def close(self, error: Exception) -> None:
        self.done.append(str(error))


@pytest.fixture
def watched() -> tuple[ManualClock, Stand, SourceWatch]:
    clock = ManualClock()
    stand = Stand(clock)
    watch = watch_of({"node": None}, lambda _address: [stand], {"stall_timeout_s": 100}, clock)
    return clock, stand, watch


def later(clock: ManualClock, watch: SourceWatch, seconds: float) -> None:
    clock.advance(seconds)
    watch.judge()


def test_a_vbucket_that_is_behind_and_silent_for_long_is_stalled(
    watched: tuple[ManualClock, Stand, SourceWatch],
) -> None:
    clock, stand, watch = watched
    later(clock, watch, 100)
    assert stand.done == []
    later(clock, watch, 1)
    assert stand.done == ["stalled"]
    later(clock, watch, 50)
    assert len(stand.done) == 1
    later(clock, watch, 51)
    assert len(stand.done) == 2
    assert "answers and does not stream vb 0" in stand.done[1]


def test_a_snapshot_without_its_end_is_requested_again_on_its_connection(
    watched: tuple[ManualClock, Stand, SourceWatch],
) -> None:
    """A filter may leave out all the rest of a snapshot that was resumed: nothing comes, and nothing was published."""
    clock, stand, watch = watched
    stand.source_high_seqno, stand.waits_for_end = 4, True
    for _ in range(4):
        later(clock, watch, 101)
    assert stand.done == ["stalled"] * 4
    stand.waits_for_end = False
    later(clock, watch, 101)
    assert stand.done == ["stalled"] * 4
    assert stand.stalled_streams == 0


@pytest.mark.parametrize(
    "change",
    [
        {"source_high_seqno": None},
        {"source_high_seqno": 5},
        {"source_high_seqno": 4},
        {"streaming": False},
        {"session": None},
    ],
)
def test_a_vbucket_that_is_not_behind_or_has_no_stream_is_not_stalled(
    watched: tuple[ManualClock, Stand, SourceWatch], change: dict[str, Any]
) -> None:
    clock, stand, watch = watched
    for name, value in change.items():
        setattr(stand, name, value)
    for _ in range(5):
        later(clock, watch, 101)
    assert (stand.done, stand.stalls) == ([], 0)


def test_a_stream_that_waits_behind_a_backfill_is_not_stalled(watched: tuple[ManualClock, Stand, SourceWatch]) -> None:
    clock, stand, watch = watched
    for _ in range(10):
        stand.backfill_at = clock.monotonic()
        later(clock, watch, 60)
    assert stand.done == []
    later(clock, watch, 60)
    assert stand.done == ["stalled"]


def test_progress_between_stalls_restarts_the_count(watched: tuple[ManualClock, Stand, SourceWatch]) -> None:
    clock, stand, watch = watched
    for _ in range(4):
        later(clock, watch, 101)
        stand.moved(clock.monotonic())
    assert stand.done == ["stalled"] * 4


@pytest.mark.parametrize(
    ("error", "unanswered", "closed"),
    [
        (SourceTimeout("no answer"), {}, True),
        (SourceTimeout("the streams of 1,024 vbuckets come first"), {7: "the stream request"}, False),
        (HandshakeFailed("not initialised yet"), {}, False),
    ],
)
async def test_a_node_that_does_not_send_its_high_seqnos_counts_as_not_answering(
    watched: tuple[ManualClock, Stand, SourceWatch],
    monkeypatch: pytest.MonkeyPatch,
    error: ClusterError,
    unanswered: dict[int, str],
    closed: bool,
) -> None:
    _, stand, watch = watched

    async def fetch(*_: object) -> None:
        raise error

    monkeypatch.setattr("mirror.feed.follow.watch.fetch_high_seqnos", fetch)
    session = SimpleNamespace(ready=True, link=None, close=stand.close, requests=SimpleNamespace(unanswered=unanswered))
    keeper = SimpleNamespace(session=session, address="node")
    await watch._poll(keeper)  # type: ignore[arg-type]
    assert stand.done == ([str(error)] if closed else [])
