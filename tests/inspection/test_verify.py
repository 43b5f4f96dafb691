"""Verifying a mirror against the embedded source: nothing is found where nothing is wrong, whatever goes on meanwhile,
and whatever is altered in the store is found.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import lmdb
import pytest

from mirror.feed.read.reader import SourceReader
from mirror.inspection import verify
from mirror.inspection.comparison import VbucketResult, Verdict, not_said
from mirror.inspection.verify import Verifier
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.bucket import fork
from storage.env import directory
from storage.errors import DeviceFailed, NotPublished, StorageError, Unavailable
from storage.format import keys, seal
from storage.read.reading import BoundaryRead
from storage.read.view import View, open_view
from storage.read.wait import MutationToken
from tests.feed.harness import Mirror
from tests.serve import kv_rig
from tests.storage.frames import sealed

VBUCKETS = 4


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=5) as running:
        yield running


def mirror_of(cluster: SandboxCluster, path: Path, **settings: Any) -> Mirror:
    return kv_rig.mirror_of(cluster, path, groups=2, settings=settings)


def write(cluster: SandboxCluster, count: int, name: str = "doc", **where: Any) -> None:
    for number in range(count):
        cluster.set(f"{name}-{number}", {"name": name, "number": number}, **where)


async def filled(cluster: SandboxCluster, path: Path) -> Mirror:
    mirror = mirror_of(cluster, path)
    mirror.start(cluster.connection_string)
    await caught_up(mirror, cluster)
    await mirror.stop()
    return mirror


async def caught_up(mirror: Mirror, cluster: SandboxCluster) -> None:
    for vbid in range(VBUCKETS):
        await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)


async def verified(
    mirror: Mirror, cluster: SandboxCluster, *, service: bool, vbids: list[int] | None = None, **options: Any
) -> list[VbucketResult]:
    def work() -> list[VbucketResult]:
        with (
            open_view(mirror.path, stale_reads=True, partial=True) as view,
            SourceReader(cluster.connection_string, password="demo", settings=mirror.settings) as reader,
        ):
            return Verifier(mirror.path, view, reader, service=service, **options).run(vbids or [*range(VBUCKETS)])

    return await asyncio.to_thread(work)


def alter(mirror: Mirror, work: Callable[[Any, Callable[[bytes], Any]], None], vbid: int = 1) -> None:
    """Change a vbucket's trees as no program would: `work(transaction, tree by name)`."""
    path = directory.group_path(mirror.path, vbid % mirror.identity.group_count)
    with lmdb.open(path, max_dbs=64, map_size=1 << 30) as environment:
        trees = {name: environment.open_db(name, create=False) for name in (keys.rows_db(vbid), keys.keys_db(vbid))}
        with environment.begin(write=True) as txn:
            work(txn, trees.__getitem__)


def states(results: list[VbucketResult]) -> list[str]:
    return [result.state for result in results]


# -- nothing is wrong ---------------------------------------------------------------------------------------------


async def test_an_idle_mirror_is_equal(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 200)
    cluster.delete("doc-7")
    mirror = await filled(cluster, tmp_path)
    results = await verified(mirror, cluster, service=False)
    assert states(results) == ["equal"] * VBUCKETS
    assert sum(result.documents for result in results) == sum(result.source_documents for result in results) == 199
    assert sum(result.tombstones for result in results) == 1
    for vbid, result in enumerate(results):
        assert result.digest == result.source_digest
        assert result.published_seqno == result.source_seqno == cluster.vbucket(vbid).high_seqno
        assert (result.moved, result.not_compared) == (0, 0)
    cluster.bucket.to_disk()
    assert [result.digest for result in await verified(mirror, cluster, service=False)] == [
        result.digest for result in results
    ], "however the source sends it"


async def test_changes_of_the_source_above_the_published_seqno_are_not_compared(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    write(cluster, 200)
    mirror = await filled(cluster, tmp_path)
    write(cluster, 30)
    write(cluster, 10, "new")
    cluster.delete("doc-99")
    results = await verified(mirror, cluster, service=False)
    assert states(results) == ["unsure"] * VBUCKETS
    assert sum(result.not_compared for result in results) == sum(result.behind_seqnos for result in results) == 41
    assert sum(result.documents for result in results) == 200 - 31
    assert "no service runs" in results[0].detail


async def test_an_empty_mirror_is_equal_and_after_writes_unsure(cluster: SandboxCluster, tmp_path: Path) -> None:
    mirror = await filled(cluster, tmp_path)
    assert states(await verified(mirror, cluster, service=False)) == ["equal"] * VBUCKETS
    write(cluster, 50)
    results = await verified(mirror, cluster, service=False)
    assert states(results) == ["unsure"] * VBUCKETS
    assert all(result.behind_seqnos == result.source_seqno > 0 for result in results)
    assert not any(result.equal for result in results)


async def test_a_failover_during_the_comparison_is_followed(
    cluster: SandboxCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cluster, 200)
    mirror = mirror_of(cluster, tmp_path)
    mirror.start(cluster.connection_string)
    await caught_up(mirror, cluster)
    loop = asyncio.get_running_loop()
    lost: list[int] = []

    def settled(*arguments: Any) -> None:
        if not lost:  # everything was compared once, its history not yet requested
            lost.append(1)
            asyncio.run_coroutine_threadsafe(fail_over(), loop).result()
        settle(*arguments)

    settle = Verifier._settle
    monkeypatch.setattr(Verifier, "_settle", settled)

    async def fail_over() -> None:
        cluster.failover(2, lose=3)
        cluster.set("after", {}, vbid=2)

    results = await verified(mirror, cluster, service=True)
    assert states(results) == ["equal"] * VBUCKETS
    assert lost
    assert results[2].branch == mirror.row(2)["branch"]
    assert results[2].source_seqno == cluster.vbucket(2).high_seqno
    await mirror.stop()


async def test_a_pending_rollback_is_reported_if_no_service_runs(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 200)
    mirror = await filled(cluster, tmp_path)
    cluster.failover(2, lose=3)
    results = await verified(mirror, cluster, service=False)
    assert states(results) == ["equal", "equal", "rollback", "equal"]
    assert f"above seqno {cluster.vbucket(2).high_seqno}" in results[2].detail


async def test_tombstones_that_one_side_purged_are_not_differences(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 100)
    for number in range(40):
        cluster.delete(f"doc-{number}")
    write(cluster, 100, "later")
    mirror = await filled(cluster, tmp_path)
    cluster.bucket.to_disk()
    cluster.bucket.purge()
    results = await verified(mirror, cluster, service=False)
    assert states(results) == ["equal"] * VBUCKETS
    assert sum(result.purged_there for result in results) > 30
    # And a deletion that the source forgot before a mirror that stood still could learn of it: no false alarm.
    cluster.delete("doc-50", vbid=None)
    write(cluster, 20, "last")
    cluster.bucket.to_disk()
    cluster.bucket.purge()
    results = await verified(mirror, cluster, service=False)
    assert not any(result.wrong for result in results)
    assert any("forgotten deletions" in result.detail for result in results)


async def test_tombstones_that_were_purged_at_the_node_of_the_first_fill_are_reported_apart(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    """Each node purges by itself: after a failover to one that purged less, 88 tombstones were "missing here"."""
    write(cluster, 100)
    for number in range(40):
        cluster.delete(f"doc-{number}")
    write(cluster, 100, "later")
    cluster.bucket.to_disk()
    replica = fork(cluster.bucket)
    cluster.bucket.purge()
    mirror = await filled(cluster, tmp_path)
    cluster.vbuckets[:] = replica.vbuckets
    for vbid in range(VBUCKETS):
        cluster.failover(vbid)
    results = await verified(mirror, cluster, service=False)
    assert states(results) == ["equal"] * VBUCKETS
    unsent = sum(result.never_sent for result in results)
    assert unsent > 30
    assert f"{unsent} tombstones of the source were purged before" in not_said(results)
    cluster.delete("doc-50")  # above what was purged then, a missing deletion is a difference
    mirror.start(cluster.connection_string)
    await caught_up(mirror, cluster)
    await mirror.stop()
    (vbid,) = [vbid for vbid in range(VBUCKETS) if cluster.vbucket(vbid).log[-1].deleted]
    alter(mirror, lambda txn, tree: txn.drop(tree(keys.keys_db(vbid)), delete=False), vbid)
    (result,) = await verified(mirror, cluster, service=False, vbids=[vbid])
    tombstones = [each for each in result.differences if each.there is not None and each.there.deleted]
    assert [each.verdict for each in tombstones] == [Verdict.MISSING_HERE]


# -- it cannot be decided -----------------------------------------------------------------------------------------


async def test_waits_for_a_mirror_that_is_stuck_take_no_longer_than_allowed_in_all(
    cluster: SandboxCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They added up: `--wait 2` took 85 s, and then "equal", although no key was compared."""
    write(cluster, 100)
    mirror = await filled(cluster, tmp_path)
    for number in range(100):
        cluster.delete(f"doc-{number}")
    now_s, waits = 0.0, []

    def in_vain(_: View, token: MutationToken, timeout_s: float) -> None:
        nonlocal now_s
        now_s += timeout_s
        waits.append(timeout_s)
        raise NotPublished(str(token))

    monkeypatch.setattr(verify, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep))
    monkeypatch.setattr(View, "wait_for", in_vain)
    results = await verified(mirror, cluster, service=True, wait_s=2.0)
    assert sum(waits) == 2.0
    assert states(results) == ["unsure"] * VBUCKETS
    assert sum(result.not_compared for result in results) == 100


@pytest.mark.parametrize(
    "error", [Unavailable("no lease: too many leases are held"), DeviceFailed("input/output error")]
)
async def test_a_read_that_fails_without_damage_is_not_repaired(
    cluster: SandboxCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StorageError
) -> None:
    write(cluster, 20)
    mirror = await filled(cluster, tmp_path)

    def fails(_: BoundaryRead) -> NoReturn:
        raise error

    monkeypatch.setattr(BoundaryRead, "hold", fails)
    results = await verified(mirror, cluster, service=False)
    assert {(each.state, each.detail, each.wrong) for each in results} == {("unsure", str(error), False)}


# -- something is wrong -------------------------------------------------------------------------------------------


def rows_of(txn: Any, tree: Any) -> list[tuple[bytes, bytes]]:
    return [
        (key, stored[: -seal.SIZE])
        for key, stored in txn.cursor(tree)
        if len(key) == keys.ROW_KEY_SIZE and stored[1] == 0x57
    ]


async def test_every_altered_byte_that_a_reader_can_see_is_found(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 120)
    mirror = await filled(cluster, tmp_path)
    altered: set[bytes] = set()

    def work(txn: Any, tree: Callable[[bytes], Any]) -> None:
        rows = rows_of(txn, tree(keys.rows_db(1)))
        places = {"cas": 20, "rev_seqno": 39, "flags": 43, "expiry": 47, "datatype": 5, "value": -1}
        for (key, frame), (name, place) in zip(rows, places.items(), strict=False):
            changed = bytearray(frame)
            changed[place] ^= 4 if name == "rev_seqno" else 1  # a revision that is 1 higher counts as equal
            txn.put(key, sealed(bytes(changed)), db=tree(keys.rows_db(1)))
            altered.add(frame[55 : 55 + int.from_bytes(frame[2:4])])

    alter(mirror, work)
    results = await verified(mirror, cluster, service=False)
    assert states(results) == ["equal", "different", "equal", "equal"]
    assert {difference.key for difference in results[1].differences} == altered
    assert (results[1].different, results[1].missing_here, results[1].missing_there) == (6, 0, 0)
    assert results[1].digest != results[1].source_digest


async def test_missing_documents_and_invented_documents_are_found(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 120)
    mirror = await filled(cluster, tmp_path)

    def work(txn: Any, tree: Callable[[bytes], Any]) -> None:
        (_, gone), (row_key, renamed), *_ = rows_of(txn, tree(keys.rows_db(1)))
        gone_key = gone[55 : 55 + int.from_bytes(gone[2:4])]
        assert txn.delete(gone_key, db=tree(keys.keys_db(1)))
        length = int.from_bytes(renamed[2:4])
        old = renamed[55 : 55 + length]
        new = b"\0" + b"z" * (length - 1)
        dup = txn.get(old, db=tree(keys.keys_db(1)))
        assert txn.delete(old, db=tree(keys.keys_db(1)))
        txn.put(new, dup, db=tree(keys.keys_db(1)))
        txn.put(row_key, sealed(renamed[:55] + new + renamed[55 + length :]), db=tree(keys.rows_db(1)))

    alter(mirror, work)
    (result,) = await verified(mirror, cluster, service=False, vbids=[1])
    assert (result.state, result.missing_here, result.missing_there, result.different) == ("different", 2, 1, 0)


async def test_an_unreadable_row_affects_only_its_own_vbucket(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 120)
    mirror = await filled(cluster, tmp_path)

    def cut(txn: Any, tree: Callable[[bytes], Any]) -> None:
        key, frame = rows_of(txn, tree(keys.rows_db(1)))[0]
        txn.put(key, sealed(frame[:-3]), db=tree(keys.rows_db(1)))

    alter(mirror, cut)
    results = await verified(mirror, cluster, service=False)
    assert states(results) == ["equal", "unreadable", "equal", "equal"]
    assert "lengths" in results[1].detail
