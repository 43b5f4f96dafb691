"""Changes over a connection without Spark, from the embedded source: failovers with and without loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest

from mirror.errors import AuthRejected, ConfigError, SourceTimeout
from mirror.feed.read.reader import SourceReader
from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.spark.source import remote
from mirror.spark.source.changes import LostHistory
from mirror.spark.source.options import Options, parse
from mirror.spark.source.remote import KEPT, RemoteChanges
from storage.format.keys import split_key
from tests.sandbox.past import state_at
from tests.spark.events import applied
from tests.spark.source.follower import Follower

VBUCKETS = 4


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxThread]:
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "demo")
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=3)) as running:
        yield running
        KEPT.drop()


def options(source: SandboxThread, **more: str) -> Options:
    return parse({"connection": source.connection_string, "table": "changes", "partitions": "2"} | more)


def write(source: SandboxThread, first: int, count: int, value: object = 1, **where: Any) -> None:
    def each() -> None:
        for number in range(first, first + count):
            source.cluster.set(f"k{number}", {"v": value}, **where)

    source.call(each)


def there(source: SandboxThread) -> dict[str, tuple[int, bytes]]:
    def look() -> dict[str, tuple[int, bytes]]:
        found = {}
        for vbid in range(VBUCKETS):
            for key, item in state_at(source.cluster.vbucket(vbid)).items():
                found[key[1:].decode()] = (item.seqno, item.value)
        return found

    return source.call(look)


def test_each_event_comes_once_over_one_connection_for_each_process(source: SandboxThread) -> None:
    follower = Follower(options(source))
    write(source, 0, 100)
    follower.run()
    reader = KEPT.reader(follower.options, None)
    for turn in range(3):
        write(source, 50 * turn, 60, turn)
        source.call(source.cluster.delete, f"k{50 * turn}")
        follower.run()
    assert KEPT.reader(follower.options, None) is reader
    assert follower.state == there(source)
    positions = [(row["vbid"], row["seqno"]) for row in follower.log]
    assert len(set(positions)) == len(positions)
    assert {row["kind"] for row in follower.log} == {"mutation", "deletion"}
    assert all(row["snapshot_end_seqno"] >= row["seqno"] and row["vbuuid"] for row in follower.log)
    follower.driver.close()


def test_a_limit_takes_some_vbuckets_whole(source: SandboxThread) -> None:
    write(source, 0, 200)
    follower = Follower(options(source, maxRowsPerBatch="100"))
    assert follower.step()
    assert 0 < len(follower.log) < 200
    assert len({row["vbid"] for row in follower.log}) < VBUCKETS
    follower.run()
    assert follower.state == there(source)
    follower.driver.close()


def test_a_failover_without_loss_reads_the_last_batch_again(source: SandboxThread) -> None:
    write(source, 0, 100)
    follower = Follower(options(source))
    follower.run()
    write(source, 0, 20, 2)
    follower.run()
    source.call(source.cluster.failover, 0)
    write(source, 0, 100, 3)
    follower.restart()
    follower.run()
    assert follower.state == there(source)
    assert "resync" not in {row["kind"] for row in follower.log}
    follower.driver.close()


def test_changes_lost_in_a_failover_are_refused_or_resynced(source: SandboxThread) -> None:
    write(source, 0, 100)
    follower = Follower(options(source))
    follower.run()
    source.call(source.cluster.failover, 0, lose=3)
    write(source, 200, 40, 2)
    with pytest.raises(LostHistory, match=r"vbucket 0: the source lost the writes after.*resync"):
        follower.step()
    follower.restart(options(source, onLostHistory="resync"))
    follower.run()
    assert follower.state == there(source)
    assert [row["vbid"] for row in follower.log if row["kind"] == "resync"] == [0]
    again = [row for row in follower.log if row["vbid"] == 0 and row["at_branch"] == 1]
    assert again[0]["kind"] == "resync"
    follower.driver.close()


def test_a_loss_hidden_by_as_many_new_writes_is_noticed(source: SandboxThread) -> None:
    write(source, 0, 100)
    follower = Follower(options(source))
    follower.run()
    source.call(source.cluster.failover, 0, lose=3)
    source.call(lambda: [source.cluster.set(f"new{number}", {}, vbid=0) for number in range(3)])
    with pytest.raises(LostHistory, match=r"vbucket 0: the source lost"):
        follower.run()
    follower.restart(options(source, onLostHistory="resync"))
    follower.run()
    assert follower.state == there(source)
    follower.driver.close()


def test_a_batch_whose_end_was_lost_before_it_ran_is_resynced(source: SandboxThread) -> None:
    write(source, 0, 100)
    follower = Follower(options(source))
    follower.run()
    write(source, 100, 100)
    end = follower.driver.latest(follower.start, True)
    source.call(source.cluster.failover, 0, lose=3)
    with pytest.raises(LostHistory, match="vbucket 0"):
        follower.driver.plan(follower.start, end)
    follower.restart(options(source, onLostHistory="resync"))
    works = follower.driver.plan(follower.start, end)
    assert 0 not in {way.vbid for work in works for way in work.ways}
    for row in follower.rows(works):
        follower.apply(row)
    follower.start = end
    write(source, 300, 40)
    follower.run()
    assert follower.state == there(source)
    follower.driver.close()


def test_a_first_batch_is_read_again_unless_deletions_behind_it_are_forgotten(source: SandboxThread) -> None:
    """The read began where the batch before had begun, and the source was asked about the end of that batch."""
    write(source, 0, 20)
    follower = Follower(options(source, onLostHistory="resync", vbuckets="0"))
    source.call(source.cluster.set, "a", {}, vbid=0)
    follower.run()
    source.call(source.cluster.delete, "a", vbid=0)
    source.call(source.cluster.set, "b", {}, vbid=0)
    follower.run()
    source.call(source.cluster.failover, 0)
    source.call(source.cluster.bucket.purge, 0)
    source.call(source.cluster.set, "c", {}, vbid=0)
    follower.restart()
    follower.run()
    assert [row["kind"] for row in follower.log if row["key"] is None] == ["resync"]
    assert set(follower.state) == {key for key in there(source) if source.cluster.bucket.get(key, vbid=0) is not None}
    follower.driver.close()


def test_an_end_that_an_idle_source_lost_after_the_plan_is_named(
    source: SandboxThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task waited for that end, and reported a source that brings nothing."""
    write(source, 0, 100)
    follower = Follower(options(source))
    works = follower.driver.plan(follower.start, follower.driver.latest(follower.start, True))
    source.call(source.cluster.failover, 0, lose=3)
    monkeypatch.setattr(remote, "SourceReader", partial(SourceReader, timeout_s=3.0))
    with pytest.raises(LostHistory, match="vbucket 0: the source lost the writes after"):
        follower.rows(works)
    follower.driver.close()


class Anything:
    """A source to which anything happens, also between the plan of a batch and its tasks."""

    def __init__(self, source: SandboxThread, rng: Random) -> None:
        self.source, self.rng = source, rng
        self.names = ["_default._default"]
        self.purged = False
        """True until the next batch: what is purged is older than the driver."""
        source.call(source.cluster.bucket.create_scope, "s")

    def happens(self) -> None:
        steps = [self._writes, self._fails_over, self._changes_collections, self._purges, lambda: None]
        self.source.call(self.rng.choices(steps, [50, 18, 5, 4, 20])[0])

    def _writes(self) -> None:
        for _ in range(self.rng.randrange(1, 30)):
            key, collection = f"k{self.rng.randrange(40)}", self.rng.choice(self.names)
            if self.source.cluster.bucket.get(key, collection=collection) and self.rng.random() < 0.4:
                self.source.cluster.delete(key, collection=collection)
            else:
                self.source.cluster.set(key, {"v": self.rng.random()}, collection=collection)

    def _fails_over(self) -> None:
        self.source.cluster.failover(self.rng.randrange(VBUCKETS), lose=self.rng.choice([0, 0, 1, 3, 10]))

    def _changes_collections(self) -> None:
        bucket, name = self.source.cluster.bucket, f"s.c{self.rng.randrange(3)}"
        if name not in self.names:
            bucket.create_collection(*name.split("."))
            self.names.append(name)
        elif self.rng.random() < 0.5:
            bucket.flush_collection(name)
        else:
            bucket.drop_collection(name)
            self.names.remove(name)

    def _purges(self) -> None:
        self.source.cluster.bucket.purge(self.rng.randrange(VBUCKETS))
        self.purged = True

    def documents(self) -> dict[tuple[int, str, bytes], int]:
        bucket = self.source.cluster.bucket
        scopes, entries = bucket.manifest.scopes, bucket.manifest.collections.items()
        names = {collection_id: f"{scopes[each.scope_id]}.{each.name}" for collection_id, each in entries}
        found = {}
        for vbid in range(VBUCKETS):
            for wire_key, item in state_at(self.source.cluster.vbucket(vbid)).items():
                collection_id, key = split_key(wire_key)
                found[vbid, names[collection_id], key] = item.seqno
        return found


@pytest.mark.parametrize("seed", [9, 14, *(pytest.param(each, marks=pytest.mark.ci) for each in range(4))])
def test_a_table_follows_any_history_of_a_source(
    source: SandboxThread, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SourceReader", partial(SourceReader, timeout_s=2.0))
    rng = Random(seed)
    anything = Anything(source, rng)
    follower = Follower(options(source, onLostHistory="resync", maxRowsPerBatch=str(rng.choice([1, 20, 100_000]))))
    log: dict[int, list[dict[str, Any]]] = {vbid: [] for vbid in range(VBUCKETS)}

    def batch(happens: Callable[[], None]) -> bool:
        """True: there may be more."""
        if anything.purged or rng.random() < 0.05:
            anything.purged = False
            follower.restart()
        start = follower.start
        try:
            end = follower.driver.latest(start, True)
            happens()
            works = follower.driver.plan(start, end)
            happens()
            if anything.purged:
                return True
            rows = follower.rows(works)
        except (LostHistory, SourceTimeout):  # on a busy machine there may be a pause that long
            return True
        follower.start = end
        for row in rows:
            log[row["vbid"]].append(row)
        return end != start

    for _ in range(60):
        anything.happens()
        if rng.random() < 0.6:
            batch(lambda: anything.happens() if rng.random() < 0.5 else None)
        if rng.random() < 0.15:
            assert not all(batch(lambda: None) for _ in range(1_000)), "it comes to the end"
            held = {(vbid, *name): row["seqno"] for vbid in log for name, row in applied(log[vbid]).items()}
            assert held == source.call(anything.documents)
    follower.driver.close()


def test_a_selected_collection_that_was_recreated_is_lost_history(source: SandboxThread) -> None:
    """Its old documents stayed for ever: the stream of the new id does not have the drop of the old one."""
    bucket = source.cluster.bucket
    chosen = {"collection": "shop.orders,_default._default"}
    source.call(bucket.create_scope, "shop")
    source.call(bucket.create_collection, "shop", "orders")
    write(source, 0, 40, collection="shop.orders")
    follower = Follower(options(source, **chosen))
    follower.run()
    assert len(follower.state) == 40
    source.call(bucket.drop_collection, "shop.orders")
    source.call(bucket.create_collection, "shop", "orders")
    write(source, 30, 20, collection="shop.orders")
    follower.restart()
    with pytest.raises(LostHistory, match="was dropped and created again"):
        follower.step()
    follower.restart(options(source, onLostHistory="resync", **chosen))
    follower.run()
    assert follower.state == there(source)
    resynced = len([row for row in follower.log if row["kind"] == "resync"])
    write(source, 60, 10, collection="shop.orders")
    follower.restart(options(source, onLostHistory="resync", collection="_default._default,shop.orders"))
    follower.run()
    assert follower.state == there(source)
    assert len([row for row in follower.log if row["kind"] == "resync"]) == resynced
    follower.driver.close()


def test_dropped_and_flushed_collections_are_reported_by_name(source: SandboxThread) -> None:
    bucket = source.cluster.bucket
    source.call(bucket.create_scope, "shop")
    source.call(bucket.create_collection, "shop", "orders")
    write(source, 0, 20, collection="shop.orders")
    follower = Follower(options(source))
    follower.run()
    assert {row["collection"] for row in follower.log} == {"shop.orders"}
    source.call(bucket.flush_collection, "shop.orders")
    follower.run()
    source.call(bucket.drop_collection, "shop.orders")
    follower.run()
    reported = [(row["kind"], row["collection"]) for row in follower.log if row["key"] is None]
    assert (
        reported
        == [("collection_flushed", "shop.orders")] * VBUCKETS + [("collection_dropped", "shop.orders")] * VBUCKETS
    )
    follower.driver.close()


def test_a_missing_vbucket_and_a_wrong_password_are_named(
    source: SandboxThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="the bucket does not hold vbucket 9"):
        RemoteChanges(options(source, vbuckets="9"))
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "wrong")
    with pytest.raises(AuthRejected):
        RemoteChanges(options(source))
