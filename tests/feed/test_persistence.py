"""Publishing only what the source has persisted on every copy: the gate, the answers, the consumer with both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.errors import NotSupported
from mirror.feed.cluster.discovery import discover
from mirror.feed.connection.bootstrap import Access
from mirror.feed.connection.connection_string import NodeAddress, parse
from mirror.feed.follow.persistence import PersistencePoller, common_persisted
from mirror.feed.follow.store_sink import HELD_MAX, PersistenceGate
from mirror.ingest import events
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.node import node as sandbox_node
from mirror.wire.codec_kv import ObservedSeqno
from mirror.wire.constants import Opcode
from storage.admin.check import check
from storage.history.purge import Window
from storage.model import FailoverLog, Seqno, Vbuuid
from storage.read import wait
from storage.read.view import Change, Token, open_view
from storage.read.wait import MutationToken
from tests.feed.gated_rig import GatedVbucket
from tests.feed.harness import Mirrors

VBUCKETS = 4
PLAIN: Any = SimpleNamespace(rollback_deferred=False)


@pytest.fixture
def options() -> dict[str, Any]:
    return {"publish": "persisted", "groups": 1}


# --- the gate


@pytest.mark.parametrize("seed", range(20))
def test_the_gate_keeps_few_ends_and_releases_only_real_ones(seed: int) -> None:
    rng, gate, ends, released = Random(seed), PersistenceGate(), [0], 0
    for _ in range(3000):
        ends.append(ends[-1] + rng.randrange(1, 4))
        gate.hold(ends[-1], ends[-2] + 1)
        assert gate.waiting <= HELD_MAX
        if rng.random() < 0.05 and (found := gate.release(rng.randrange(released, ends[-1] + 1), PLAIN)) is not None:
            assert found[0] in ends
            assert released < found[0] <= gate.persisted_seqno
            released = found[0]
    assert gate.release(ends[-1], PLAIN) == (ends[-1], ends[-2] + 1) or gate.waiting == 0


def test_a_persisted_seqno_counts_only_up_to_the_common_history() -> None:
    assert common_persisted(ObservedSeqno(1, 7, 30, 40), 7) == 30
    assert common_persisted(ObservedSeqno(1, 8, 30, 40), 7) == 0
    assert common_persisted(ObservedSeqno(1, 8, 30, 40, 7, 20), 7) == 20
    assert common_persisted(ObservedSeqno(1, 8, 10, 40, 7, 20), 7) == 10
    assert common_persisted(ObservedSeqno(1, 8, 10, 40, 9, 20), 7) == 0


# --- the whole


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=2, vbuckets=VBUCKETS, replicas=1, seed=3) as running:
        yield running


def write(cluster: SandboxCluster, vbid: int, count: int, name: str = "doc") -> int:
    for number in range(count):
        cluster.set(f"{name}-{number}", {"n": number}, vbid=vbid)
    return cluster.vbucket(vbid).high_seqno


def replica_of(cluster: SandboxCluster, vbid: int) -> int:
    return cluster.bucket.map.replicas[vbid][0]


@pytest.mark.parametrize("copy", ["active", "replica"])
async def test_changes_that_one_copy_has_not_persisted_stay_invisible(
    cluster: SandboxCluster, mirrors: Mirrors, copy: str
) -> None:
    node = cluster.bucket.map.owners[1] if copy == "active" else replica_of(cluster, 1)
    first = write(cluster, 1, 20)
    mirror = mirrors.start()
    await mirror.until_published(1, first)
    cluster.bucket.persistence_holds[1, node] = first + 5
    other = write(cluster, 2, 10)
    for round_number in range(10):
        high = write(cluster, 1, 3, f"round-{round_number}")
        await mirror.until(lambda high=high: mirror.row(1)["staged_seqno"] >= high, "staged")  # type: ignore[misc]
    await mirror.until_published(2, other)  # the others do not wait
    row = mirror.row(1)
    assert first <= row["published_seqno"] <= first + 5
    assert row["held_snapshots"] > 0
    assert row["persisted_seqno"] == first + 5
    name = "active copy" if copy == "active" else "replica"
    port = cluster.nodes[node].port
    assert row["text"] == f"held: the {name} at 127.0.0.1:{port} has persisted no more than seqno {first + 5}"
    await mirror.until(lambda: (mirror.row(1)["held_s"] or 0) > 0, "held for a while")
    cluster.bucket.persistence_holds[1, node] = first + 20
    await mirror.until(lambda: mirror.row(1)["published_seqno"] > first + 5, "some of it")
    assert mirror.row(1)["published_seqno"] <= first + 20
    del cluster.bucket.persistence_holds[1, node]
    await mirror.until_published(1, high)
    assert mirror.row(1)["held_snapshots"] == 0


async def test_a_failover_does_not_take_back_published_changes(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    first = write(cluster, 1, 20)
    mirror = mirrors.start()
    await mirror.until_published(1, first)
    cluster.bucket.persistence_holds[1, replica_of(cluster, 1)] = first
    high = write(cluster, 1, 10, "lost")
    await mirror.until(lambda: mirror.row(1)["staged_seqno"] == high, "staged")
    cluster.failover(1, lose=10)
    cluster.bucket.persistence_holds.clear()
    write(cluster, 1, 3, "after")
    await mirror.until_published(1, first + 3)
    assert mirror.row(1)["rollback_count"] == 0
    with open_view(mirror.path, partial=True) as view:
        assert view.rollbacks(1) == []
        assert view.boundaries(1)[0].seqno == first + 3


async def test_a_restart_does_not_release_held_snapshots(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    """Small batches, so that waiting snapshots are written down; then a new process finds them there."""
    first = write(cluster, 1, 5)
    mirror = mirrors.start(batch_bytes_max=64 * 1024)
    await mirror.until_published(1, first)
    cluster.bucket.persistence_holds[1, replica_of(cluster, 1)] = first
    for number in range(100):
        cluster.set(f"large-{number}", b"x" * 4096, vbid=1)
        if number % 10 == 9:
            high = cluster.vbucket(1).high_seqno
            await mirror.until(lambda high=high: mirror.row(1)["staged_seqno"] >= high, "staged")  # type: ignore[misc]
    assert mirror.writers[0].pending_bytes < 200 * 1024
    assert mirror.row(1)["published_seqno"] == first
    await mirror.stop()
    with open_view(mirror.path, partial=True) as view:
        assert view.state(1).published_seqno == first
        assert view.state(1).staged_seqno > first
    mirror.start(cluster.connection_string)
    await mirror.until(lambda: mirror.row(1)["staged_seqno"] >= high, "staged again")
    assert mirror.row(1)["published_seqno"] == first
    cluster.bucket.persistence_holds.clear()
    await mirror.until_published(1, high)


async def test_an_ephemeral_bucket_is_refused_by_name(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    cluster.bucket.map.ephemeral = True
    cluster.bucket.map.bump()
    mirror = mirrors.start()
    error = await mirror.fails()
    assert isinstance(error, NotSupported)
    assert "ephemeral" in str(error)
    assert "set publish to received" in str(error)


@pytest.mark.usefixtures("short_pauses")
async def test_a_service_shows_an_ephemeral_bucket_as_refused(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    """Its workers once ended and started again without end, and no vbucket said why."""
    cluster.bucket.map.ephemeral = True
    cluster.bucket.map.bump()
    mirror = mirrors.make()
    source = await discover(Access.of(parse(cluster.connection_string), mirror.settings), SystemClock())
    mirror.start(cluster.connection_string, ends_on_refusal=False, cluster_map=source)
    await mirror.until(lambda: {row["state"] for row in mirror.status()["vbuckets"]} == {"refused"}, "refused")
    assert "set publish to received" in mirror.row(0)["text"]
    mirror.consumer.follow(replace(source, rev=source.rev + 1))
    assert mirror.status()["map"]["rev"] is None, "a map from the supervisor is refused, too"


async def test_a_replica_that_is_away_holds_its_vbuckets_until_the_map_drops_it(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    here = next(vbid for vbid in range(VBUCKETS) if cluster.bucket.map.owners[vbid] == 0)
    mirror = mirrors.start()
    await mirror.until_published(here, write(cluster, here, 5))
    await cluster.kill_node(1)
    high = write(cluster, here, 5, "while-away")
    await mirror.until(lambda: mirror.row(here)["staged_seqno"] == high, "staged")
    assert mirror.row(here)["published_seqno"] < high
    held = f"held: the replica at 127.0.0.1:{cluster.nodes[1].port} does not report what it has persisted"
    await mirror.until(lambda: mirror.row(here)["text"] == held, "the reason")
    await cluster.restart_node(1)
    await mirror.until_published(here, high)


@pytest.mark.usefixtures("short_pauses")
async def test_a_password_that_is_missing_for_a_moment_does_not_end_the_mirror(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    """The poller of the copies once took the configuration error for a defect, and ended the mirror."""
    mirror = mirrors.start()
    await mirror.until_published(1, write(cluster, 1, 5))
    password = mirror.password_file.read_text()
    mirror.password_file.unlink()
    streams = cluster.faults.connections()
    for connection in cluster.faults.connections(dcp_only=False):
        if connection not in streams:
            connection.link.cut()
    high = write(cluster, 1, 5, "held")
    await mirror.until(lambda: mirror.row(1)["held_snapshots"] > 0, "something to ask about")
    await asyncio.sleep(0.1)
    assert mirror.row(1)["published_seqno"] < high
    mirror.password_file.write_text(password)
    await mirror.until_published(1, high)


async def test_a_server_without_persisted_seqnos_is_refused(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sandbox_node.OPERATIONS, Opcode.OBSERVE_SEQNO)
    mirror = mirrors.start()
    write(cluster, 1, 1)
    error = await mirror.fails()
    assert isinstance(error, NotSupported)
    assert "does not report persisted seqnos" in str(error)


@pytest.mark.usefixtures("short_pauses")
async def test_a_service_shows_a_server_without_persisted_seqnos_as_refused(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a mirror as the source, that does not wait for persistence itself."""
    with monkeypatch.context() as patch:
        patch.delitem(sandbox_node.OPERATIONS, Opcode.OBSERVE_SEQNO)
        mirror = mirrors.start(run={"ends_on_refusal": False})
        write(cluster, 1, 1)
        await mirror.until_state(1, "refused")
        assert "set publish to received" in mirror.row(1)["text"]
        assert mirror.row(1)["published_seqno"] == 0
    await mirror.until_published(1, cluster.vbucket(1).high_seqno)
    await mirror.until(lambda: {row["state"] for row in mirror.status()["vbuckets"]} == {"streaming"}, "streaming")


async def test_an_empty_answer_holds_and_a_moved_vbucket_refreshes_the_map(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    class Away:
        def copies_of(self, vbid: int) -> list[NodeAddress]:
            return list(parse(cluster.connection_string).addresses)[:1]

        def refresh_map(self, config: bytes, vbid: int) -> None:
            refreshed.append(vbid)

    refreshed: list[int] = []
    mirror = mirrors.make()
    access = Access.of(parse(cluster.connection_string), mirror.settings)
    away: Any = Away()
    poller = PersistencePoller(access, away, SystemClock())

    async def seqnos(vbuuids: dict[int, int]) -> dict[int, int | None]:
        return {vbid: slowest.seqno for vbid, slowest in (await poller.ask(vbuuids)).items()}

    assert await seqnos({0: cluster.vbucket(0).vbuuid}) == {0: 0}
    assert await seqnos({0: 12345}) == {0: None}  # an unknown history
    assert await seqnos({0: cluster.vbucket(0).vbuuid, 200: 1}) == {0: 0, 200: None}
    assert refreshed == [200]
    for node in poller._nodes.values():
        node.close()


# --- histories


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[GatedVbucket]:
    rig = GatedVbucket(tmp_path)
    yield rig
    rig.close()
    assert check(rig.path).problems == []


def test_a_persisted_seqno_of_the_old_history_does_not_release_the_new_one(gated: GatedVbucket) -> None:
    """Every copy had persisted 500 of history A; an end of history B at 300, persisted nowhere, was published."""
    gated.accept((0xA, 0))
    gated.snapshot(0, 100, {100: (b"a", b"1")})
    gated.persisted(0xA, 500)
    assert gated.published == 100
    gated.reconnect()
    gated.accept((0xB, 200), (0xA, 0))
    gated.snapshot(201, 300, {300: (b"b", b"2")})
    assert gated.published == 100
    gated.persisted(0xB, 299)
    assert gated.published == 100
    gated.persisted(0xB, 300)
    assert gated.published == 300


def test_an_answer_about_another_history_releases_nothing(gated: GatedVbucket) -> None:
    """The answer was sent before the failover and arrives after it."""
    gated.accept((0xA, 0))
    gated.snapshot(0, 100, {100: (b"a", b"1")})
    gated.reconnect()
    gated.accept((0xB, 100), (0xA, 0))
    gated.persisted(0xA, 500)
    assert gated.published == 0
    gated.persisted(0xB, 100)
    assert gated.published == 100


def test_a_snapshot_released_late_keeps_the_purge_seqno_of_a_newer_one(gated: GatedVbucket) -> None:
    """Its release set its own again, and a request inside of the next snapshot sent that to the source."""
    gated.accept((0xA, 0))
    gated.snapshot(0, 100, {100: (b"a", b"1")}, purge_seqno=40)
    gated.snapshot(101, 200, {200: (b"b", b"2")}, purge_seqno=90)
    gated.persisted(0xA, 150)
    assert gated.published == 100
    assert gated.writer.vbuckets[0].state.source_purge_seqno == 90


def test_a_source_upgraded_to_purge_seqnos_does_not_change_the_first_snapshot(gated: GatedVbucket) -> None:
    """The first marker with a purge seqno saved that all tombstones may be missing, not those of the first snapshot."""
    gated.accept((0xA, 0))
    gated.snapshot(0, 100, {100: (b"a", b"1")})
    gated.persisted(0xA, 100)
    assert gated.writer.vbuckets[0].state.missing_seqno == 100
    gated.session.sends_purge_seqno = True
    gated.reconnect()
    gated.accept((0xA, 0))
    gated.snapshot(101, 200, {200: (b"b", b"2")}, purge_seqno=40)
    state = gated.writer.vbuckets[0].state
    assert (state.missing_seqno, state.source_purge_seqno) == (100, 40)


@pytest.mark.parametrize("moves", [True, False])
async def test_an_answer_from_before_a_map_change_releases_nothing(
    cluster: SandboxCluster, mirrors: Mirrors, moves: bool
) -> None:
    """A replica that joined while the question was under way was not queried."""

    class Moving:
        looks = 0
        looked = asyncio.Event()

        def copies_of(self, vbid: int) -> list[NodeAddress]:
            self.looks += 1
            if self.looks == 2:  # the answer is compared with the map
                asyncio.get_running_loop().call_soon(self.looked.set)
            return list(parse(cluster.connection_string).addresses)[: 2 if moves and self.looks == 2 else 1]

        def refresh_map(self, config: bytes, vbid: int) -> None: ...

    class Waiting:
        vbid = 0
        observed_vbuuid = cluster.vbucket(0).vbuuid

        gate = PersistenceGate()

        def persisted(self, vbuuid: int, seqno: int) -> None:
            received.append(seqno)

    received: list[int] = []
    high = write(cluster, 0, 3)
    access = Access.of(parse(cluster.connection_string), mirrors.make().settings)
    copies: Any = Moving()
    waiting: Any = Waiting()
    task = asyncio.create_task(PersistencePoller(access, copies, SystemClock()).run([waiting]))
    async with asyncio.timeout(60):
        await copies.looked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert received == ([] if moves else [high])


# --- a rollback of what every copy had persisted


def promoted(gated: GatedVbucket) -> Token:
    """Published up to 85, then a replica is promoted that had part of a snapshot: its history begins at 81."""
    gated.accept((0xA, 0))
    gated.snapshot(0, 81, {41: (b"c", b"0"), 81: (b"a", b"1")})
    gated.persisted(0xA, 81)
    gated.snapshot(82, 85, {83: (b"a", b"2"), 84: (b"c", b"3"), 85: (b"b", b"4")})
    gated.persisted(0xA, 85)
    token = gated.changes()[-1].token
    assert token.seqno == gated.published == 85
    gated.reconnect()
    gated.roll_back(81)
    assert gated.session.requests[-1].offset.start_seqno == 81
    gated.accept((0xB, 81), (0xA, 0))
    return token


def reported(changes: list[Change]) -> list[tuple[str, bytes, int]]:
    return [(each.kind, each.document.key, int(each.document.seqno)) for each in changes if each.document is not None]


def test_readers_see_a_rollback_once_the_new_history_has_reached_their_boundary(gated: GatedVbucket) -> None:
    """Readers once saw 85 -> 81 first."""
    token = promoted(gated)
    before = gated.seen()
    assert gated.published == 85
    assert gated.changes(token) == []
    gated.snapshot(82, 84, {83: (b"a", b"2"), 84: (b"c", b"3")})
    gated.persisted(0xB, 84)
    assert (gated.published, gated.seen()) == (85, before)
    gated.snapshot(85, 88, {85: (b"b", b"4"), 88: (b"a", b"5")})
    gated.persisted(0xB, 87)
    assert (gated.published, gated.seen()) == (85, before)
    gated.persisted(0xB, 88)
    assert gated.published == 88
    assert gated.seen() == {b"a": (88, b"5"), b"b": (85, b"4"), b"c": (84, b"3")}
    new_history = [("mutation", b"a", 83), ("mutation", b"c", 84), ("mutation", b"b", 85), ("mutation", b"a", 88)]
    taken_back = [
        ("retraction", b"a", 83),
        ("restoration", b"a", 81),
        ("retraction", b"c", 84),
        ("restoration", b"c", 41),
        ("retraction", b"b", 85),
    ]
    assert reported(gated.changes(token)) == taken_back + new_history
    half = replace(token, seqno=Seqno(83))
    assert reported(gated.changes(half)) == taken_back[:2] + new_history
    with gated.view() as view:
        (record,) = view.rollbacks(0)
    assert (record.from_seqno, record.to_seqno) == (85, 81)
    state = gated.writer.vbuckets[0].state
    assert (state.rollback_count, state.last_rollback_ms) == (1, gated.now_ms)
    gated.close()
    gated.open()
    assert gated.writer.vbuckets[0].state == state


@pytest.mark.parametrize("high", [81, 83])
def test_a_history_that_ends_below_the_published_seqno_is_shown_once_confirmed(gated: GatedVbucket, high: int) -> None:
    token = promoted(gated)
    if high == 83:
        gated.snapshot(82, 83, {83: (b"a", b"2")})
    gated.high_seqno(high, 1)
    gated.persisted(0xB, high)
    assert gated.published == 85, "that answer may be from before the failover"
    gated.high_seqno(high, 1)
    gated.persisted(0xB, high)
    assert gated.published == high
    retracted = [each for each in reported(gated.changes(token)) if each[0] == "retraction"]
    assert retracted == [("retraction", b"a", 83), ("retraction", b"c", 84), ("retraction", b"b", 85)]
    assert gated.seen()[b"a"] == ((83, b"2") if high == 83 else (81, b"1"))
    gated.snapshot(high + 1, 95, {95: (b"e", b"8")})
    gated.persisted(0xB, 95)
    assert gated.published == 95


def test_a_low_high_seqno_does_not_replace_a_released_snapshot(gated: GatedVbucket) -> None:
    """A scope's high seqno is 0 once its collections are dropped. The mirror published 81, and went on serving them."""
    promoted(gated)
    gated.snapshot(82, 90, {86: (b"a", b"6"), 90: (b"d", b"7")})
    gated.actor.persisted(0xB, 90)
    gated.high_seqno(0)
    gated.persisted(0xB, 90)
    assert gated.published == 90


def test_a_low_high_seqno_does_not_publish_the_boundary_below_an_open_snapshot(gated: GatedVbucket) -> None:
    promoted(gated)
    gated.snapshot(82, 90, {86: (b"a", b"6")})
    gated.high_seqno(0)
    gated.persisted(0xB, 90)
    assert gated.published == 85


def test_a_low_high_seqno_does_not_take_readers_back_below_an_open_snapshot(gated: GatedVbucket) -> None:
    promoted(gated)
    gated.snapshot(82, 84, {83: (b"a", b"2"), 84: (b"c", b"3")})
    gated.snapshot(85, 90, {86: (b"a", b"6")})
    gated.high_seqno(0)
    gated.persisted(0xB, 84)
    assert gated.published == 85


def test_a_held_snapshot_outlasts_a_rollback_that_has_no_boundary(gated: GatedVbucket) -> None:
    """The source's failover log shares the snapshot, so it is kept; it once stayed hidden until the next write."""
    gated.accept((0xA, 0))
    gated.snapshot(0, 81, {81: (b"a", b"1")})
    gated.persisted(0xA, 81)
    gated.snapshot(82, 85, {85: (b"b", b"2")})
    gated.reconnect()
    gated.roll_back(40)
    gated.actor.enter(events.FailoverLogReceived(FailoverLog.of([(0xB, 85), (0xA, 0)])))
    assert gated.session.requests[-1].offset.start_seqno == 85
    gated.accept((0xB, 85), (0xA, 0))
    gated.persisted(0xB, 85)
    assert gated.published == 85


@pytest.mark.parametrize("flush", [False, True], ids=["in memory", "on the disk"])
def test_a_crash_during_a_deferred_rollback_shows_readers_nothing(gated: GatedVbucket, flush: bool) -> None:
    token = promoted(gated)
    before = gated.seen()
    gated.snapshot(82, 90, {86: (b"a", b"6"), 88: (b"d", b"7")}, flush=flush)
    gated.close()
    gated.open()
    assert (gated.published, gated.seen()) == (85, before)
    offset = gated.session.requests[-1].offset
    assert (offset.start_seqno, offset.vbuuid) == ((88, 0xB) if flush else (81, 0xA))
    gated.accept((0xB, 81), (0xA, 0))
    gated.snapshot(82, 90, {90: (b"d", b"9")})
    assert (gated.published, gated.seen()) == (85, before)
    gated.persisted(0xB, 90)
    assert gated.published == 90
    assert reported(gated.changes(token))[-1] == ("mutation", b"d", 90)


@pytest.mark.parametrize("to_seqno", [83, 81, 40, 5])
def test_a_second_rollback_meanwhile_starts_from_the_staged_history(gated: GatedVbucket, to_seqno: int) -> None:
    gated.accept((0xA, 0))
    gated.snapshot(0, 40, {40: (b"z", b"0")})
    gated.persisted(0xA, 40)
    promoted(gated)
    gated.snapshot(82, 88, {88: (b"a", b"6")})
    gated.reconnect()
    gated.roll_back(to_seqno)
    assert gated.published == 85
    if to_seqno == 5:  # nothing is kept that far back
        assert gated.host.machine is not None
        assert gated.host.machine.phase.name == "ASKING_LOG"
        return
    start = {83: 81, 81: 81, 40: 40}[to_seqno]
    assert gated.session.requests[-1].offset.start_seqno == start
    gated.accept((0xC, start), (0xA, 0))
    gated.snapshot(start + 1, 90, {90: (b"y", b"8")})
    gated.persisted(0xC, 90)
    assert gated.published == 90
    kept = {b"z": (40, b"0"), b"y": (90, b"8")} | ({b"c": (41, b"0"), b"a": (81, b"1")} if start == 81 else {})
    assert gated.seen() == kept


def test_a_second_rollback_meanwhile_ignores_boundaries_of_the_old_history(gated: GatedVbucket) -> None:
    """Readers still see 83; the staged history left theirs at 81 and does not have it."""
    gated.accept((0xA, 0))
    gated.snapshot(0, 81, {41: (b"c", b"0"), 81: (b"a", b"1")})
    gated.persisted(0xA, 81)
    gated.snapshot(82, 83, {83: (b"a", b"lost")})
    gated.persisted(0xA, 83)
    gated.snapshot(84, 85, {85: (b"b", b"lost")})
    gated.persisted(0xA, 85)
    gated.reconnect()
    gated.roll_back(81)
    gated.accept((0xB, 81), (0xA, 0))
    gated.snapshot(82, 88, {88: (b"d", b"5")})
    gated.reconnect()
    gated.roll_back(84)
    assert gated.session.requests[-1].offset.start_seqno == 81
    gated.accept((0xC, 81), (0xA, 0))
    gated.snapshot(82, 90, {90: (b"d", b"6")})
    gated.persisted(0xC, 90)
    assert gated.seen() == {b"a": (81, b"1"), b"c": (41, b"0"), b"d": (90, b"6")}


def test_history_below_a_deferred_rollback_is_not_purged(tmp_path: Path) -> None:
    gated = GatedVbucket(tmp_path, Window(boundaries=1))
    promoted(gated)
    for _ in range(50):
        gated.writer.step()
        gated.now_ms += 10_000
    assert gated.writer.vbuckets[0].state.history_floor_seqno <= 81
    gated.snapshot(82, 90, {90: (b"d", b"7")})
    gated.persisted(0xB, 90)
    assert gated.seen() == {b"a": (81, b"1"), b"c": (41, b"0"), b"d": (90, b"7")}
    for _ in range(50):
        gated.writer.step()
        gated.now_ms += 10_000
    assert gated.writer.vbuckets[0].state.history_floor_seqno == 90
    assert gated.seen() == {b"a": (81, b"1"), b"c": (41, b"0"), b"d": (90, b"7")}
    gated.close()
    assert check(gated.path).problems == []


def test_a_deferred_rollback_ends_with_the_next_snapshot_without_the_setting(gated: GatedVbucket) -> None:
    """The process was restarted with publish=received."""
    promoted(gated)
    gated.close()
    gated.open(gated=False)
    gated.accept((0xB, 81), (0xA, 0))
    gated.snapshot(82, 83, {83: (b"a", b"2")})
    assert gated.published == 83
    assert gated.seen() == {b"a": (83, b"2"), b"c": (41, b"0")}


def test_a_write_is_neither_visible_nor_lost_while_a_rollback_is_deferred(gated: GatedVbucket) -> None:
    promoted(gated)

    def status(vbuuid: int) -> wait.WriteStatus:
        with gated.view() as view:
            return wait.write_status(view.reader(0), MutationToken(0, Vbuuid(vbuuid), Seqno(84)))

    assert [status(vbuuid) for vbuuid in (0xA, 0xB)] == [wait.WriteStatus.WAITING] * 2
    gated.snapshot(82, 90, {90: (b"d", b"7")})
    gated.persisted(0xB, 90)
    assert status(0xB) is wait.WriteStatus.PUBLISHED
    assert status(0xA) is wait.WriteStatus.LOST
