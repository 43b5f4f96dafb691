"""A mirror of a mirror: collections, lags, first fills, sources behind. tests/whole/test_cascade.py kills the links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.errors import NotSupported, SourceTimeout
from mirror.feed.read.reader import Position, Snapshot, SourceReader
from mirror.ingest.selection import Selection
from mirror.sandbox.cluster import SandboxCluster
from mirror.serve.bucket.mirror_session import MirrorSession
from mirror.serve.dcp.dcp_session import SourceContact
from mirror.server.session import Reply
from storage.admin.check import check
from storage.read.view import open_view
from tests.feed.harness import Mirror
from tests.sandbox.past import state_at
from tests.serve.dcp_rig import DcpEndpoint, serving_dcp, until
from tests.serve.kv_rig import Store, mirror_of

VBUCKETS = 8
SETTINGS = {"noop_interval_s": 0.5, "connection_buffer_size": 64 * 1024}


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1) as running:
        yield running


def made(cluster: SandboxCluster, path: Path, selection: Selection | None = None, **settings: Any) -> Mirror:
    return mirror_of(cluster, path, groups=2, selection=selection, settings=SETTINGS | settings)


@asynccontextmanager
async def cascade(
    cluster: SandboxCluster, path: Path, **settings: Any
) -> AsyncIterator[tuple[Mirror, DcpEndpoint, Mirror]]:
    """Source, a mirror of it, its DCP port, and a mirror of that."""
    first, second = made(cluster, path / "first", **settings), made(cluster, path / "second")
    first.start(cluster.connection_string)
    async with serving_dcp(first.path) as endpoint:
        second.start(endpoint.url)
        try:
            yield first, endpoint, second
        finally:
            await second.stop()
            await first.stop()


async def level(cluster: SandboxCluster, *mirrors: Mirror) -> None:
    """Wait until all have what the source has now, by its own histories."""

    def there(mirror: Mirror) -> bool:
        return all(
            mirror.row(vbid)["published_seqno"] == cluster.vbucket(vbid).high_seqno
            and mirror.row(vbid)["vbuuid"] == cluster.vbucket(vbid).vbuuid
            for vbid in range(VBUCKETS)
        )

    for mirror in mirrors:
        await mirror.until(lambda mirror=mirror: there(mirror), "level with the source")  # type: ignore[misc]


Contents = dict[int, dict[tuple[int, bytes], tuple[Any, ...]]]


def contents(mirror: Mirror) -> Contents:
    """Everything that readers see, tombstones left out: a first backfill need not bring them."""
    with open_view(mirror.path) as view:
        return {
            vbid: {
                (each.collection_id, each.key): (
                    each.seqno, each.rev_seqno, each.cas, each.flags, each.expiry, each.datatype, each.value,
                )
                for each in view.scan(vbid, now=0, raw=True)
            }
            for vbid in range(VBUCKETS)
        }  # fmt: skip


def assert_equal(cluster: SandboxCluster, first: Mirror, second: Mirror) -> None:
    one, two = contents(first), contents(second)
    assert one == two
    for vbid in range(VBUCKETS):
        source = {
            item.key: (item.seqno, item.cas)
            for item in state_at(cluster.vbucket(vbid), cluster.vbucket(vbid).high_seqno).values()
        }
        seen = {bytes([cid]) + key: (found[0], found[2]) for (cid, key), found in two[vbid].items()}
        assert seen == source, f"vb {vbid}"
    with open_view(first.path) as a, open_view(second.path) as b:
        assert [a.state(v).failover_log for v in range(VBUCKETS)] == [b.state(v).failover_log for v in range(VBUCKETS)]
        assert [a.manifest(v).collections for v in range(VBUCKETS)] == [
            b.manifest(v).collections for v in range(VBUCKETS)
        ]
    assert check(second.path).problems == []


def write(cluster: SandboxCluster, count: int, name: str = "doc", **where: Any) -> None:
    for number in range(count):
        cluster.set(f"{name}-{number}", {"name": name, "number": number}, **where)


async def test_a_mirror_of_a_mirror_follows_created_and_dropped_collections(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    bucket = cluster.bucket
    bucket.create_scope("shop")
    bucket.create_collection("shop", "carts")
    write(cluster, 100, "cart", collection="shop.carts")
    async with cascade(cluster, tmp_path) as (first, _, second):
        await level(cluster, first, second)
        bucket.create_collection("shop", "items", max_ttl=600)
        write(cluster, 100, "item", collection="shop.items")
        bucket.flush_collection("shop.carts")
        write(cluster, 20, "cart", collection="shop.carts")
        await level(cluster, first, second)
        assert_equal(cluster, first, second)
        bucket.drop_collection("shop.items")
        write(cluster, 10)
        await level(cluster, first, second)
        assert_equal(cluster, first, second)
        bucket.drop_scope("shop")
        await level(cluster, first, second)
        assert_equal(cluster, first, second)


CARTS = Selection.of(None, ["_default.carts"])


async def test_a_collection_recreated_while_the_second_mirror_is_off_leaves_nothing_old_in_it(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    """The first mirror asked for the new id alone, and never had the old one's drop to pass on."""
    bucket = cluster.bucket
    first, second = made(cluster, tmp_path / "a", CARTS), made(cluster, tmp_path / "b", CARTS)
    bucket.create_collection("_default", "carts")
    write(cluster, 40, "old", collection="_default.carts")
    first.start(cluster.connection_string)

    def keys(mirror: Mirror) -> set[bytes]:
        with open_view(mirror.path, partial=True, stale_reads=True) as view:
            return {each.key for each in view.scan()}

    async with serving_dcp(first.path) as endpoint:
        second.start(endpoint.url)
        await second.until(lambda: len(keys(second)) == 40, "the old documents")
        await second.stop()
        bucket.drop_collection("_default.carts")
        bucket.create_collection("_default", "carts")
        write(cluster, 4, "new", collection="_default.carts")
        bucket.to_disk()  # 8.0 reports its purge seqno, 0 here, in the marker of a backfill from disk
        new = {f"new-{number}".encode() for number in range(4)}
        await first.until(lambda: keys(first) == new, "the first mirror to have the new collection alone")
        second.start(endpoint.url)
        await second.until(lambda: keys(second) == new, "the second mirror to equal it")
        await second.stop()
        await first.stop()


async def test_a_mirror_of_the_bucket_does_not_go_on_at_a_mirror_of_a_part(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    """It went on, called itself current, and kept the other collections as they were."""
    cluster.bucket.create_collection("_default", "carts")
    write(cluster, 40)
    write(cluster, 40, collection="_default.carts")
    part, whole = made(cluster, tmp_path / "part", CARTS), made(cluster, tmp_path / "whole")
    part.start(cluster.connection_string)
    whole.start(cluster.connection_string)
    await level(cluster, whole)
    await whole.stop()
    async with serving_dcp(part.path) as endpoint:
        whole.start(endpoint.url)
        await whole.until_state(0, "refused")
        assert "a mirror of a part of the bucket" in whole.row(0)["text"]
        await whole.stop()
    await part.stop()
    whole.start(cluster.connection_string)
    write(cluster, 40, "more")
    await level(cluster, whole)
    await whole.stop()


@pytest.fixture
def seqno_queries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The states of all requests for the seqnos of all vbuckets."""
    queries: list[int] = []
    answer = MirrorSession.all_vb_seqnos

    def all_vb_seqnos(self: MirrorSession, state: int, collection_id: int | None) -> Reply:
        reply = answer(self, state, collection_id)
        queries.append(state)
        return reply

    monkeypatch.setattr(MirrorSession, "all_vb_seqnos", all_vb_seqnos)
    return queries


def filling_store(path: Path) -> tuple[Store, int]:
    """Two vbuckets with a document, of which the first snapshot of one is still coming in: that one."""
    store = Store(path, vbuckets=4)
    store.put(b"k0", b"1", 5)
    vbid = store.put(b"k1", b"1", 5, publish=False)
    store.logs()
    return store, vbid


def read_up_to_now(endpoint: DcpEndpoint, **options: Any) -> set[bytes]:
    """The keys of all documents, by a bounded read."""
    with SourceReader(endpoint.url, password="demo", **options) as reader:
        until = reader.high_seqnos()
        items = reader.read(dict.fromkeys(until, Position()), until)
        return {document.key for item in items if isinstance(item, Snapshot) for document in item.documents()}


async def test_a_bounded_read_of_a_mirror_that_is_filling_reads_all_of_it(
    tmp_path: Path, seqno_queries: list[int]
) -> None:
    store, vbid = filling_store(tmp_path)
    async with serving_dcp(store.path) as endpoint:
        reading = asyncio.create_task(asyncio.to_thread(read_up_to_now, endpoint))
        await until(lambda: reading.done() or len(seqno_queries) > 3)
        store.publish(vbid, 5)
        assert await reading == {b"k0", b"k1"}
    store.close()


async def test_a_read_of_a_mirror_that_is_never_filled_ends_with_a_remedy(
    tmp_path: Path, seqno_queries: list[int]
) -> None:
    store, vbid = filling_store(tmp_path)
    async with serving_dcp(store.path) as endpoint:
        with pytest.raises(SourceTimeout, match=rf"no node knows the high seqno of vb {vbid} .* for 1 s") as caught:
            await asyncio.to_thread(read_up_to_now, endpoint, timeout_s=1.0)
        assert "first fill" in str(caught.value.hint)
        assert len(seqno_queries) < 10, "the pauses between the questions grow"
    store.close()


async def test_a_mirror_of_a_mirror_that_is_filling_waits_for_each_vbucket(tmp_path: Path) -> None:
    store, vbid = filling_store(tmp_path)
    identity = store.identity
    path = tmp_path / "second"
    path.mkdir()
    second = Mirror(path, bucket=identity.bucket_name, bucket_uuid=identity.bucket_uuid, vbuckets=4, password="demo")
    async with serving_dcp(store.path) as endpoint:
        second.start(endpoint.url)
        full = next(each for each in range(4) if each != vbid and store.writer.vbuckets[each].state.published_seqno)
        await second.until_published(full, 5)
        await second.until(lambda: endpoint.server.status()["dcp_streams_refused"] > 3, "several requests")
        await second.until(lambda: second.row(vbid)["state"] == "waiting", "the last refusal to arrive")
        row = second.row(vbid)
        assert (row["source_high_seqno"], row["lag_seqnos"]) == (None, None)
        store.publish(vbid, 5)
        await second.until_published(vbid, 5)
        await second.until(lambda: second.row(vbid)["lag_seqnos"] == 0, "the lag to be known")
        await second.stop()
    store.close()


async def test_a_mirror_without_contact_to_its_source_counts_as_no_contact_downstream(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    write(cluster, 20)
    async with cascade(cluster, tmp_path) as (first, endpoint, second):
        await level(cluster, first, second)
        contact = endpoint.server.producers.contact = SourceContact(range(VBUCKETS), SystemClock())
        contact.note({1: 7000})
        await second.until(lambda: second.row(1)["node"] is None, "the contact to be lost")
        row = second.row(1)
        assert (row["source_high_seqno"], row["lag_seqnos"]) == (None, None)
        assert row["silent_ms"] >= 7000
        assert "a mirror, has no contact with its source" in row["last_error"]
        assert second.row(0)["lag_seqnos"] == 0
        contact.note({})
        await second.until(lambda: second.row(1)["lag_seqnos"] == 0, "contact")


async def test_the_lag_of_a_mirror_of_a_mirror_stays_known_while_the_source_is_written_to(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    """A change may arrive after the last poll of the high seqnos: that does not say that the node is behind."""
    write(cluster, 20)
    async with cascade(cluster, tmp_path) as (first, _, second):
        await level(cluster, first, second)
        await second.until(lambda: all(second.row(vbid)["lag_seqnos"] == 0 for vbid in range(VBUCKETS)), "the lags")
        for round_number in range(10):
            write(cluster, 20, f"round {round_number}")
            await level(cluster, first, second)
            assert None not in [second.row(vbid)["lag_seqnos"] for vbid in range(VBUCKETS)]


async def test_the_lag_of_one_collection_of_a_mirror_is_known_while_others_are_written_to(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    cluster.bucket.create_scope("shop")
    cluster.bucket.create_collection("shop", "carts")
    write(cluster, 40, "cart", collection="shop.carts")
    first = made(cluster, tmp_path / "first")
    second = made(cluster, tmp_path / "second", Selection.of(None, ["shop.carts"]))
    first.start(cluster.connection_string)
    await level(cluster, first)
    async with serving_dcp(first.path) as endpoint:
        second.start(endpoint.url)
        for prefix in ("more", "again"):
            await second.until(lambda: all(second.row(vbid)["lag_seqnos"] == 0 for vbid in range(VBUCKETS)), "the lags")
            write(cluster, 40, prefix)
            high_seqnos = {vbid: cluster.vbucket(vbid).high_seqno for vbid in range(VBUCKETS)}
            for vbid, high_seqno in high_seqnos.items():  # it hears of the others' seqnos
                await second.until_published(vbid, high_seqno)
        await second.stop()
        second.start(endpoint.url)  # nothing is known of polls before
        await second.until(lambda: all(second.row(vbid)["lag_seqnos"] == 0 for vbid in range(VBUCKETS)), "the lags")
        await second.stop()
    await first.stop()


async def test_published_data_does_not_go_back_for_a_source_mirror_that_is_behind(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    """A mirror of the cluster is moved to another mirror that stopped before the last writes and a failover."""
    first, moved = made(cluster, tmp_path / "first"), made(cluster, tmp_path / "moved")
    write(cluster, 40)
    first.start(cluster.connection_string)
    await level(cluster, first)
    await first.stop()
    write(cluster, 40, "more")
    cluster.failover(0)
    write(cluster, 40, "again")
    moved.start(cluster.connection_string)
    await level(cluster, moved)
    await moved.stop()
    held = {vbid: cluster.vbucket(vbid).high_seqno for vbid in range(VBUCKETS)}
    async with serving_dcp(first.path) as endpoint:
        moved.start(endpoint.url)
        for _ in range(3):
            await moved.until(lambda: all("the source, a mirror" in moved.row(v)["text"] for v in held), "it to wait")
            rows = [moved.row(vbid) for vbid in held]
            assert {row["vbid"]: row["published_seqno"] for row in rows} == held
            assert [row["lag_seqnos"] for row in rows] == [None] * VBUCKETS, "it is not known how far the cluster is"
            await asyncio.sleep(0.2)
        await moved.stop()
    first.start(cluster.connection_string)
    write(cluster, 20, "last")
    async with serving_dcp(first.path) as endpoint:
        moved.start(endpoint.url)
        await level(cluster, first, moved)
        rows = [moved.row(vbid) for vbid in held]
        assert [(row["rollback_count"], row["resync_count"]) for row in rows] == [(0, 0)] * VBUCKETS
        await moved.stop()
    await first.stop()


async def test_a_mirror_with_publish_persisted_needs_a_source_mirror_with_it(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    write(cluster, 40)
    first = made(cluster, tmp_path / "first")
    second = made(cluster, tmp_path / "second", publish="persisted")
    first.start(cluster.connection_string)
    await level(cluster, first)
    async with serving_dcp(first.path) as endpoint:
        second.start(endpoint.url)
        error = await second.fails()
        assert isinstance(error, NotSupported)
        assert "set publish to received" in str(error)
        with open_view(second.path) as view:
            assert [int(state.published_seqno) for state in view.states()] == [0] * VBUCKETS
    async with serving_dcp(first.path, publishes_persisted=True) as endpoint:
        second.start(endpoint.url)
        await level(cluster, first, second)
        await second.stop()
    await first.stop()
