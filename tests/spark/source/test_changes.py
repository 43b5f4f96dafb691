"""Streams of a path without Spark: random histories with rollbacks, replayed batches, checkpoints, lost history."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from mirror.errors import ConfigError
from mirror.spark.source import changes
from mirror.spark.source.changes import LostHistory
from mirror.spark.source.changes_stream import ChangesReader
from mirror.spark.source.failures import MirrorSourceError
from mirror.spark.source.offsets import Offset
from mirror.spark.source.options import Options, parse
from mirror.supervise.processes.worker import restore_missing
from storage.env import directory
from storage.errors import UnknownCollection
from storage.format.keys import vbid_of
from storage.model import Collection, FailoverLog, Seqno
from tests.spark.events import applied
from tests.spark.mirrors import VBUCKETS, SmallMirror, order, orders, scanned
from tests.spark.source.follower import Follower
from tests.storage.rig import commit, put, system_event


def options(small: SmallMirror, **more: str) -> Options:
    return parse({"path": str(small.path), "table": "changes", "partitions": "2"} | more)


@pytest.mark.parametrize("seed", range(4))
def test_a_table_follows_any_history_and_a_replayed_batch_is_the_same(small: SmallMirror, seed: int) -> None:
    rng = Random(seed)
    follower = Follower(options(small, maxRowsPerBatch=str(rng.choice([1, 20, 10_000]))))
    ends: dict[int, list[int]] = {vbid: [0] for vbid in range(VBUCKETS)}
    for turn in range(40):
        if rng.random() < 0.25:
            vbid = rng.randrange(VBUCKETS)
            if len(ends[vbid]) > 1:
                ends[vbid] = ends[vbid][: rng.randrange(1, len(ends[vbid])) + 1]
                small.roll_back(vbid, ends[vbid][-1])
        else:
            names = [f"order::{rng.randrange(60):06d}" for _ in range(rng.randrange(1, 15))]
            small.put({name: None if rng.random() < 0.2 else order(turn) for name in names})
            for vbid, seqno in small.seqnos.items():
                if seqno != ends[vbid][-1]:
                    ends[vbid].append(seqno)
        for _ in range(rng.randrange(3)):
            follower.step()
        if rng.random() < 0.1:
            follower.restart()
    follower.run()
    assert follower.state == scanned(small.path)
    follower.restart()
    for start, end, rows in follower.batches:
        assert follower.rows(follower.driver.plan(start, end)) == rows
    assert not follower.step()
    follower.driver.close()


def test_a_rollback_is_reported_with_its_retractions_and_restorations(small: SmallMirror) -> None:
    follower = Follower(options(small, vbuckets="0"))
    names = [name for name in (f"k{number}" for number in range(99)) if vbid_of(name.encode(), VBUCKETS) == 0]
    small.put({names[0]: b"1", names[1]: b"1"})
    small.put({names[0]: b"2", names[2]: b"2"})
    follower.run()
    small.roll_back(0, 2)
    small.put({names[1]: b"3"})
    follower.run()
    reported = [(row["kind"], row["key"].decode(), row["branch"], row["seqno"]) for row in follower.batches[-1][2]]
    assert reported == [
        ("retraction", names[0], 1, 3),
        ("restoration", names[0], 1, 1),
        ("retraction", names[2], 1, 4),
        ("mutation", names[1], 2, 3),
    ]
    rows = follower.batches[-1][2]
    assert [(row["at_branch"], row["at_seqno"]) for row in rows] == [(2, 0), (2, 2), (2, 0), (2, 3)]
    assert [row["snapshot_end_seqno"] for row in rows] == [2, 2, 2, 3]
    assert {row["vbuuid"] for row in rows} == {77}
    follower.driver.close()


def test_limits_cut_at_snapshots_in_rows_and_in_bytes(small: SmallMirror) -> None:
    small.put(orders(0, 200))
    small.put(orders(0, 200))
    for limit in ({"maxRowsPerBatch": "60"}, {"maxBytesPerBatch": "12k"}):
        follower = Follower(options(small, **limit))
        follower.run()
        sizes = [len(rows) for _, _, rows in follower.batches]
        assert sum(sizes) == 400
        assert len(sizes) > 4
        assert max(sizes) <= 60
        follower.driver.close()
    follower = Follower(options(small, maxRowsPerBatch="60"))
    assert follower.driver.latest(follower.start, False) == follower.driver.published()
    follower.driver.close()


def test_changes_published_after_the_start_of_available_now_are_left(small: SmallMirror) -> None:
    small.put(orders(0, 50))
    first = dict(small.seqnos)
    small.put(orders(50, 50))
    follower = Follower(options(small))
    follower.driver.stop_at_published()
    small.put(orders(100, 50))
    follower.run()
    assert len(follower.state) == 100
    small.roll_back(0, first[0])
    follower.run()
    assert {row["kind"] for row in follower.batches[-1][2]} == {"retraction"}
    assert len(follower.state) == 100 - len(follower.batches[-1][2])
    follower.driver.close()


def test_lost_history_is_refused_or_resynced(small: SmallMirror) -> None:
    small.put(orders(0, 100))
    follower = Follower(options(small))
    follower.run()
    small.put({f"order::{number:06d}": None for number in range(50)})
    small.put(orders(60, 60))
    small.purge(boundaries=1)
    follower.restart()
    with pytest.raises(LostHistory, match=r"vbucket \d: the position 1:\d+ cannot be followed.*resync"):
        follower.step()
    follower.restart(options(small, onLostHistory="resync"))
    follower.run()
    assert {row["vbid"] for row in follower.log if row["kind"] == "resync"} == set(range(VBUCKETS))
    assert follower.state == scanned(small.path)
    follower.driver.close()


def test_a_planned_batch_whose_history_is_gone_is_refused_or_resynced(small: SmallMirror) -> None:
    small.put(orders(0, 100))
    first = dict(small.seqnos)
    follower = Follower(options(small))
    follower.run()
    small.put(orders(0, 50))
    end = follower.driver.latest(follower.start, True)
    for vbid, seqno in first.items():
        small.roll_back(vbid, seqno)
    small.put(orders(200, 100))
    small.purge(boundaries=1)
    follower.restart()
    with pytest.raises(LostHistory, match="is gone"):
        follower.driver.plan(follower.start, end)
    follower.restart(options(small, onLostHistory="resync"))
    follower.replay(end)
    assert "resync" in {row["kind"] for row in follower.log}
    follower.restart()
    follower.run()
    assert follower.state == scanned(small.path)
    follower.driver.close()


def put_back(small: SmallMirror, copy: Path) -> None:
    """An older copy of the mirror takes its place, as out of a backup; to a stream a power cut looks the same."""
    small.close()
    shutil.rmtree(small.path)
    copy.rename(small.path)
    small.open()


def test_a_stream_waits_for_a_mirror_behind_its_checkpoint_of_the_same_history(
    small: SmallMirror, tmp_path: Path
) -> None:
    small.put(orders(0, 50))
    copy = Path(shutil.copytree(small.path, tmp_path / "copy"))
    small.put(orders(50, 50))
    follower = Follower(options(small))
    follower.run()
    follower.driver.close()
    put_back(small, copy)
    follower.restart()
    assert not follower.step()
    small.put(orders(50, 50))
    small.put(orders(0, 10))
    follower.run()
    assert follower.state == scanned(small.path)
    follower.driver.close()


def test_a_mirror_behind_its_checkpoint_with_another_history_is_lost_history(
    small: SmallMirror, tmp_path: Path
) -> None:
    """The source lost what the mirror has lost, too: the seqnos come again, on the same branch, with other events."""
    small.put(orders(0, 50))
    copy = Path(shutil.copytree(small.path, tmp_path / "copy"))
    small.put(orders(50, 50))
    follower = Follower(options(small))
    follower.run()
    follower.driver.close()
    put_back(small, copy)
    for vbid, seqno in small.seqnos.items():
        failover = FailoverLog.of([(78, seqno), (77, 0)])
        small.writers[vbid % len(small.writers)].vbuckets[vbid].save(failover_log=failover)
    small.put(orders(100, 100))
    follower.restart()
    with pytest.raises(LostHistory, match="of a history that this mirror does not have"):
        follower.step()
    follower.driver.close()


def test_a_group_that_was_filled_again_is_lost_history(small: SmallMirror) -> None:
    """No event reports a deletion in between whose tombstone the source has purged."""
    small.put(orders(0, 100))
    follower = Follower(options(small))
    follower.run()
    follower.driver.close()
    small.close()
    for group in range(len(small.writers)):
        folder = directory.group_path(str(small.path), group)
        shutil.rmtree(folder)
        restore_missing(str(small.path), directory.load(str(small.path)), group, 0)
    small.open()
    small.put(orders(50, 150))
    follower.restart()
    with pytest.raises(LostHistory, match="of a history that this mirror does not have"):
        follower.step()
    follower.restart(options(small, onLostHistory="resync"))
    follower.run()
    assert follower.state == scanned(small.path)
    follower.driver.close()


def test_a_checkpoint_of_another_history_or_bucket_is_refused(small: SmallMirror) -> None:
    small.put(orders(0, 100))
    follower = Follower(options(small))
    follower.run()
    foreign = Offset("path", "bucket-uuid", {vbid: at._replace(vbuuid=5) for vbid, at in follower.start.at.items()})
    follower.restart()
    with pytest.raises(LostHistory, match="another history of the source"):
        follower.driver.latest(foreign, True)
    with pytest.raises(ConfigError, match="bucket was recreated"):
        follower.driver.decode(Offset("path", "other").encode())
    follower.driver.close()


def test_dropped_and_flushed_collections_are_reported(small: SmallMirror) -> None:
    default, orders_ = Collection(0, 0, "_default", Seqno(0)), Collection(8, 8, "orders", Seqno(1))
    scopes = {0: "_default", 8: "shop"}
    writer = small.writers[0]
    follower = Follower(options(small, vbuckets="0"))
    system_event(writer, 1, default, orders_, scopes=scopes)
    put(writer, b"o", 2, cid=8)
    put(writer, b"d", 3)
    commit(writer, 3)
    system_event(writer, 4, default, Collection(8, 8, "orders", Seqno(4)), scopes=scopes)
    put(writer, b"p", 5, cid=8)
    commit(writer, 5)
    system_event(writer, 6, default, scopes=scopes)
    commit(writer, 6)
    assert [(row["kind"], row["collection"], row["key"]) for row in follower.next_rows()[1]] == [
        ("mutation", "shop.orders", b"o"),
        ("mutation", "_default._default", b"d"),
        ("collection_flushed", "shop.orders", None),
        ("mutation", "shop.orders", b"p"),
        ("collection_dropped", "shop.orders", None),
    ]
    follower.driver.close()


def test_a_stream_of_a_collection_gets_its_drop_after_a_restart(small: SmallMirror) -> None:
    """A name that never existed gave a stream without rows."""
    default, orders_ = Collection(0, 0, "_default", Seqno(0)), Collection(8, 8, "orders", Seqno(1))
    scopes = {0: "_default", 8: "shop"}
    writer = small.writers[0]
    system_event(writer, 1, default, orders_, scopes=scopes)
    put(writer, b"o", 2, cid=8)
    commit(writer, 2)
    follower = Follower(options(small, vbuckets="0", collection="shop.orders"))
    assert follower.step()
    system_event(writer, 3, default, scopes=scopes)
    commit(writer, 3)
    follower.restart()
    assert [row["kind"] for row in follower.next_rows()[1]] == ["collection_dropped"]
    assert follower.step()
    put(writer, b"d", 4, publish=True)
    assert follower.step(), "it runs on"
    put(writer, b"d", 5, publish=True)
    follower.restart()
    for each in (follower, Follower(options(small, vbuckets="0", collection="shop.others"))):
        with pytest.raises(UnknownCollection):
            each.step()
        each.driver.close()


def test_a_collection_recreated_in_lost_history_is_restored(small: SmallMirror) -> None:
    """Both had a document of that name: what is taken back of the later one is not what is valid again."""
    default, scopes = Collection(0, 0, "_default", Seqno(0)), {0: "_default", 8: "shop"}
    first, second = Collection(8, 8, "orders", Seqno(1)), Collection(9, 8, "orders", Seqno(5))
    writer = small.writers[0]
    follower = Follower(options(small, vbuckets="0"))
    system_event(writer, 1, default, first, scopes=scopes)
    put(writer, b"o", 2, cid=8)
    commit(writer, 2)
    put(writer, b"o", 3, cid=8)
    system_event(writer, 4, default, scopes=scopes)
    system_event(writer, 5, default, second, scopes=scopes)
    put(writer, b"o", 6, cid=9)
    put(writer, b"passing", 7, cid=9)
    system_event(writer, 8, default, scopes=scopes)
    commit(writer, 8)
    end, reported = follower.next_rows()
    small.roll_back(0, 2)
    _, undone = follower.next_rows(end)
    assert [(row["kind"], row["collection"], row["key"], row["seqno"]) for row in undone] == [
        ("retraction", "shop.orders", b"o", 3),
        ("retraction", "shop.orders", b"o", 6),
        ("retraction", "shop.orders", b"passing", 7),
        ("restoration", "shop.orders", b"o", 2),
    ]
    assert list(applied([*reported, *undone])) == [("shop.orders", b"o")]
    follower.driver.close()


def lease_all(small: SmallMirror, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, tuple[int, int]]]:
    """Leases are granted by the writers themselves, as a service has them do; returns what was requested."""
    leased: list[dict[int, tuple[int, int]]] = []

    class Granted:
        def __init__(self, _path: str, positions: dict[int, tuple[int, int]], **_: object) -> None:
            leased.append(positions)
            for group, writer in enumerate(small.writers):
                mine = {vbid: at for vbid, at in positions.items() if vbid % len(small.writers) == group}
                writer.background.lease("stream", mine, 1 << 60)

        def leave(self) -> None:
            pass

        release = leave

    monkeypatch.setattr(changes, "Lease", Granted)
    return leased


def test_a_run_of_available_now_leases_the_history_of_all_its_vbuckets(
    small: SmallMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only positions were leased, and a vbucket at 0 has none: its planned end was purged, its checkpoint useless."""
    for first in range(0, 200, 20):
        small.put(orders(first, 20))
    follower = Follower(options(small, maxRowsPerBatch="10"))
    leased = lease_all(small, monkeypatch)
    follower.driver.stop_at_published()
    then = scanned(small.path)
    while follower.step():
        small.put(orders(0, 200))
        small.purge(boundaries=1)
    assert len(follower.batches) > VBUCKETS
    assert follower.state == then
    assert set(leased[0]) == set(range(VBUCKETS))
    follower.driver.close()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("planned", ["first batch", "second batch", "resync"])
def test_a_planned_batch_whose_end_was_purged_and_the_next_one_have_each_document_once(
    small: SmallMirror, planned: str, restarted: bool
) -> None:
    """The offsets of the batch were in the checkpoint, and the query stood still. The batch had no rows, and the next
    one only what had changed since its end; a resync could never be read again.
    """
    small.put(orders(0, 100))
    follower = Follower(options(small, onLostHistory="resync"))
    if planned != "first batch":
        follower.run()
        small.put(orders(50, 100))
    if planned == "resync":
        small.put(dict.fromkeys(orders(0, 30)))
        small.put(orders(140, 30))
        small.purge(boundaries=1)
    end, _ = follower.next_rows()
    assert planned != "resync" or any(at.fresh for at in end.at.values())
    small.put(orders(120, 100))
    small.purge(boundaries=1)
    follower.restart()
    follower.replay(end)
    if restarted:
        follower.restart()
    follower.run()
    assert follower.state == scanned(small.path)
    follower.driver.close()


def test_a_batch_read_whose_end_was_purged_while_it_was_planned_is_refused(
    small: SmallMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left these vbuckets out, without an error."""
    published = changes.LocalChanges.published

    def then_purged(driver: changes.LocalChanges) -> Offset:
        found = published(driver)
        small.put(orders(50, 100))
        small.purge(boundaries=1)
        return found

    small.put(orders(0, 100))
    monkeypatch.setattr(changes.LocalChanges, "published", then_purged)
    with pytest.raises(MirrorSourceError, match="start the read again"):
        ChangesReader(options(small)).partitions()


def test_an_end_that_was_purged_after_the_run_began_is_replaced_by_the_next(small: SmallMirror) -> None:
    small.put(orders(0, 100))
    follower = Follower(options(small))
    follower.driver.stop_at_published()
    small.put(orders(0, 100))
    small.purge(boundaries=1)
    follower.run()
    assert follower.state == scanned(small.path)
    follower.driver.close()
