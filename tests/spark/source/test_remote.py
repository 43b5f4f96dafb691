"""Changes over a connection without Spark, from the embedded source: failovers with and without loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mirror.errors import AuthRejected, ConfigError
from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.spark.source.changes import LostHistory
from mirror.spark.source.options import Options, parse
from mirror.spark.source.remote import KEPT, RemoteChanges
from tests.sandbox.past import state_at
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
