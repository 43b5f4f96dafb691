"""A vbucket: dedup at any cut, groups, failover with loss, purge, checkpoints, and a past that is never forgotten."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.sandbox.data.bucket import Bucket
from mirror.sandbox.data.item import Item
from mirror.sandbox.data.sandbox_vbucket import FAILOVER_LOG_MAX, Vbucket
from tests.manual_clock import ManualClock
from tests.sandbox.past import reset, state_at


def bucket(*, bounded: bool = False, **options: int) -> Bucket:
    made = Bucket(
        "demo",
        vbuckets=1,
        clock=ManualClock(),
        rng=Random(1),
        checkpoint_items_max=options.get("checkpoint_items_max", 10_000),
        checkpoints_kept=options.get("checkpoints_kept", 4),
        bounded=bounded,
    )
    made.map.owners = [0]
    return made


def shown(vbucket: Vbucket, last: int) -> dict[bytes, Item]:
    """Return the state of a client that got the snapshot from 1 to `last`."""
    found: dict[bytes, Item] = {}
    for item in vbucket.changes(1, last):
        if item.next_seqno and item.next_seqno <= last and item.next_seqno != item.seqno:
            continue
        if item.deleted:
            found.pop(item.key, None)
        else:
            found[item.key] = item
    return found


operations = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), min_size=1, max_size=60)


@settings(deadline=None)
@given(operations, st.integers(0, 20))
def test_any_cut_of_the_log_shows_the_state_at_its_end(writes: list[tuple[str, bool]], lose: int) -> None:
    source = bucket()
    vbucket = source.vbuckets[0]
    for key, delete in writes:
        if delete and source.get(key) is not None:
            source.delete(key)
        else:
            source.set(key, {"n": vbucket.high_seqno})
    vbucket.failover(lose)
    for key, _ in writes[:5]:
        source.set(key, {"again": vbucket.high_seqno})
    for last in range(1, vbucket.high_seqno + 1):
        assert shown(vbucket, last) == state_at(vbucket, last)
    newest = {key: item for key, item in vbucket.newest[0].items() if not item.deleted}
    assert newest == state_at(vbucket)


steps = st.lists(
    st.one_of(st.tuples(st.sampled_from("abcdef"), st.booleans()), st.integers(1, 6)), min_size=30, max_size=150
)


@settings(deadline=None)
@given(steps)
def test_a_bounded_vbucket_behaves_as_one_that_forgets_nothing(taken: list[tuple[str, bool] | int]) -> None:
    """Both fail over and open checkpoints alike, and show the same at each seqno that is not forgotten."""
    source = bucket(bounded=True, checkpoint_items_max=5, checkpoints_kept=2)
    whole = bucket(checkpoint_items_max=5, checkpoints_kept=2)
    bounded, model = source.vbuckets[0], whole.vbuckets[0]
    for step in taken:
        if isinstance(step, int):
            assert bounded.failover(step) == model.failover(step) or bounded.high_seqno == bounded.forgotten_seqno
            if bounded.high_seqno != model.high_seqno:
                return
            continue
        key, delete = step
        for each in (source, whole):
            if delete and each.get(key) is not None:
                each.delete(key)
            else:
                each.set(key, {"n": each.vbuckets[0].high_seqno})
        assert bounded.high_seqno == model.high_seqno
        assert len(bounded.log) <= 2 * 10 + 3 * (6 + 10)
    for last in range(bounded.forgotten_seqno, bounded.high_seqno + 1):
        found = {key: item.frame for key, item in shown(bounded, last).items()}
        assert found == {key: item.frame for key, item in state_at(model, last).items()}
        assert {key: item.frame for key, item in state_at(bounded, last).items()} == found
    assert bounded.memory_floor_seqno == model.memory_floor_seqno
    assert bounded.max_visible_seqno == model.max_visible_seqno


def test_a_bounded_vbucket_keeps_a_limited_number_of_tombstones() -> None:
    source = bucket(bounded=True, checkpoint_items_max=5, checkpoints_kept=2)
    vbucket = source.vbuckets[0]
    for index in range(1000):
        source.set(f"k{index}", {})
        source.delete(f"k{index}")
    assert len(vbucket.log) <= 60
    assert 1900 < vbucket.purge_seqno <= vbucket.forgotten_seqno
    assert vbucket.failover(100) == vbucket.forgotten_seqno, "no more can be lost than is kept"
    assert 1900 < vbucket.purge_seqno <= vbucket.high_seqno
    old = vbucket.vbuuid
    reset(vbucket)
    assert (vbucket.high_seqno, vbucket.purge_seqno) == (0, 0)
    assert [entry.vbuuid != old for entry in vbucket.failover_log] == [True]


def test_a_failover_log_is_bounded_and_loses_the_entries_that_were_undone() -> None:
    source = bucket()
    vbucket = source.vbuckets[0]
    for index in range(30):
        source.set("k", {"n": index})
        vbucket.failover()
    assert len(vbucket.failover_log) == FAILOVER_LOG_MAX
    vbucket.failover(5)
    assert [entry.seqno for entry in vbucket.failover_log][:2] == [25, 25]
    assert all(0 < entry.vbuuid < 2**48 for entry in vbucket.failover_log)


def test_a_group_is_never_cut() -> None:
    source = bucket(checkpoint_items_max=3)
    vbucket = source.vbuckets[0]
    source.set("before", {})
    source.multi_write(0, [("a", {}), ("b", {}), ("c", {}), ("d", {})])
    source.multi_write(0, [("a", None), ("b", {})])
    assert vbucket.cut(0, 1) == (1, True)
    assert vbucket.cut(0, 2)[0] in (1, 5)
    assert vbucket.cut(1, 1)[0] == 5
    assert vbucket.failover(1) == 5
    assert vbucket.failover(2) == 1


def test_tombstones_are_purged_but_not_the_newest_change() -> None:
    source = bucket()
    vbucket = source.vbuckets[0]
    for key in "abc":
        source.set(key, {})
    for key in "abc":
        source.delete(key)
    before = state_at(vbucket, 5, tombstones=True)
    assert vbucket.purge() == 5
    assert sorted(vbucket.newest[0]) == [b"\0c"]
    assert state_at(vbucket, 5, tombstones=True) == before
    source.set("a", {})
    assert source.get("a") is not None
    assert vbucket.newest[0][b"\0a"].rev_seqno == 3
    vbucket.failover(1)
    assert vbucket.purge_seqno == 5
    assert sorted(vbucket.newest[0]) == [b"\0c"]


def test_checkpoints_bound_the_changes_in_memory() -> None:
    source = bucket(checkpoint_items_max=10, checkpoints_kept=2)
    vbucket = source.vbuckets[0]
    for index in range(35):
        source.set(f"k{index}", {})
    assert vbucket.memory_floor_seqno == 20
    assert vbucket.cut(20, 100) == (30, True)
    assert vbucket.cut(30, 100) == (35, True)
    assert vbucket.cut(32, 100) == (35, False)
    vbucket.to_disk()
    assert vbucket.memory_floor_seqno == 35


def test_a_dropped_collection_is_empty_and_a_flushed_one_begins_again() -> None:
    source = bucket()
    vbucket = source.vbuckets[0]
    source.create_scope("s")
    source.create_collection("s", "c")
    source.set("k", {}, collection="s.c")
    source.set("k", {})
    source.flush_collection("s.c")
    assert sorted(state_at(vbucket)) == [b"\0k"]
    source.set("k2", {}, collection="s.c")
    assert sorted(state_at(vbucket)) == [b"\0k", b"\x08k2"]
    source.drop_collection("s.c")
    assert sorted(state_at(vbucket)) == [b"\0k"]
    assert shown(vbucket, vbucket.high_seqno).keys() >= {b"\0k"}
    assert 8 not in vbucket.newest
    vbucket.failover(1)
    assert sorted(state_at(vbucket)) == [b"\0k", b"\x08k2"]
    assert b"\x08k2" in vbucket.newest[8]


def test_a_load_is_on_disk_and_has_rising_cas() -> None:
    source = bucket()
    assert source.load(((b"k%d" % i, b"{}") for i in range(1000)), vbid=0) == 1000
    vbucket = source.vbuckets[0]
    assert (vbucket.high_seqno, vbucket.memory_floor_seqno, vbucket.document_count) == (1000, 1000, 1000)
    cas = [item.cas for item in vbucket.log]
    assert cas == sorted(set(cas))
    assert source.set("k5", {}).rev_seqno == 2
    with pytest.raises(AssertionError, match="twice"):
        source.load([(b"k1", b"{}")], vbid=0)


def test_cas_never_goes_back_when_the_clock_does() -> None:
    vbucket = bucket().vbuckets[0]
    first = vbucket.next_cas(10**18)
    assert vbucket.next_cas(10**17) == first + 1
    assert vbucket.next_cas(10**18 + 10**9) == (10**18 + 10**9) & ~0xFFFF


def test_the_groups_of_a_lost_history_are_forgotten() -> None:
    """Found by the simulation: a snapshot of the new history was said to end where an old group did, beyond the newest
    change; what was written up to there later was never sent.
    """
    source = bucket()
    vbucket = source.vbuckets[0]
    source.multi_write(0, [("a", {}), ("b", {}), ("c", {}), ("d", {})])
    reset(vbucket)
    source.set("a", {})
    assert vbucket.cut(0, 10)[0] == 1
    assert vbucket.failover(0) == 1


def test_aborts_are_superseded_by_the_next_prepare_and_purged_like_tombstones() -> None:
    source = bucket()
    vbucket = source.vbuckets[0]
    for _ in range(2):
        source.prepare("k", {})
        source.abort("k")
    assert [item.next_seqno for item in vbucket.log] == [2, 3, 4, 0]
    source.prepare("open", {})
    source.set("last", {})
    assert vbucket.purge() == 4
    vbucket.failover(1)
    assert (vbucket.purge_seqno, set(vbucket.prepared)) == (4, {b"\0open"})
    source.prepare("k", {})
    assert vbucket.log[3].next_seqno == 4
    source.commit("open")
    assert state_at(vbucket).keys() == {b"\0open"}


def test_a_prepare_is_dropped_with_its_collection() -> None:
    source = bucket()
    source.create_scope("s")
    source.create_collection("s", "c")
    source.prepare("k", {}, collection="s.c")
    source.prepare("l", {}, collection="s.c")
    source.abort("l", collection="s.c")
    source.flush_collection("s.c")
    vbucket = source.vbuckets[0]
    assert [item.next_seqno for item in vbucket.log] == [0, 6, 6, 5, 6, 0]
    assert not vbucket.prepared
    source.set("k", {}, collection="s.c")


def test_a_failover_does_not_part_a_prepare_from_its_commit() -> None:
    source = bucket()
    vbucket = source.vbuckets[0]
    source.set("a", {})
    source.set("k", {}, durable=True)
    assert vbucket.failover(1) == 1
    source.prepare("k", {})
    source.commit("k")
    assert vbucket.failover(1) == 2
    assert vbucket.prepared.keys() == {b"\0k"}
