"""Mirrors of a scope or of collections, end to end: what is streamed, what readers find, and what becomes of it when
collections come, go and come back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import NotSupported
from mirror.feed.cluster.collection_watch import HIDDEN, CollectionWatch
from mirror.ingest.selection import Selection, SourceManifest, StreamFilter
from mirror.sandbox.cluster import SandboxCluster
from mirror.server.privileges import ALL_PRIVILEGES, SYSTEM_COLLECTIONS
from mirror.wire.constants import Status, StreamEndReason
from storage.admin.check import check
from storage.errors import UnknownCollection
from storage.read.view import open_view
from tests.feed import harness
from tests.feed.harness import Mirror

VBUCKETS = 4
AIRLINE = Selection.of(None, ["inventory.airline"])
TWO = Selection.of(None, ["inventory.airline", "inventory.route"])


def mirror_of(cluster: SandboxCluster, path: Path, selection: Selection) -> Mirror:
    options: dict[str, Any] = {"noop_interval_s": 0.5, "map_poll_interval_s": 0.05}
    return harness.mirror_of(cluster, path, groups=2, selection=selection, **options)


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=1) as running:
        running.bucket.create_scope("inventory")
        running.bucket.create_collection("inventory", "airline")
        running.bucket.create_collection("inventory", "route")
        yield running


def write(cluster: SandboxCluster, count: int, name: str = "doc", *collections: str) -> None:
    for collection in collections or ("_default._default", "inventory.airline", "inventory.route"):
        for number in range(count):
            cluster.set(f"{name}-{number}", {"in": collection}, collection=collection)


def documents(mirror: Mirror, collection: str) -> set[bytes]:
    with open_view(mirror.path) as view:
        found = set()
        for vbid in range(VBUCKETS):
            found |= {document.key for document in view.scan(vbid, collection=collection)}
        return found


def keys(count: int, name: str = "doc") -> set[bytes]:
    return {b"%s-%d" % (name.encode(), number) for number in range(count)}


async def until_holds(mirror: Mirror, collection: str, expected: set[bytes]) -> None:
    def holds() -> bool:
        try:
            return documents(mirror, collection) == expected
        except UnknownCollection:
            return False

    await mirror.until(holds, f"{len(expected)} documents in {collection}")


async def until_caught_up(mirror: Mirror) -> None:
    assert mirror.consumer is not None
    consumer = mirror.consumer
    await mirror.until(
        lambda: all(row["lag_seqnos"] == 0 and row["state"] == "streaming" for row in consumer.status()["vbuckets"]),
        "caught up by the seqnos of its collections",
    )


async def test_one_collection_alone_is_mirrored_and_followed(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 40)
    mirror = mirror_of(cluster, tmp_path, AIRLINE)
    consumer = mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.airline", keys(40))
    write(cluster, 30, "other", "inventory.route", "_default._default")
    write(cluster, 5, "late", "inventory.airline")
    await until_holds(mirror, "inventory.airline", keys(40) | keys(5, "late"))
    await until_caught_up(mirror)
    status = consumer.status()
    assert status["selection"] == "collections inventory.airline"
    assert status["warnings"] == []
    assert status["counters"]["received_documents"] == 45, "nothing else came over the wire"
    await mirror.stop()
    for other in ("inventory.route", "_default._default"):
        with pytest.raises(UnknownCollection):
            documents(mirror, other)
    assert check(mirror.path).problems == []


async def test_a_restart_goes_on_where_it_was(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 40)
    mirror = mirror_of(cluster, tmp_path, TWO)
    mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.route", keys(40))
    await until_caught_up(mirror)
    await mirror.stop()
    write(cluster, 5, "late")
    consumer = mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.airline", keys(40) | keys(5, "late"))
    await until_holds(mirror, "inventory.route", keys(40) | keys(5, "late"))
    assert consumer.status()["counters"]["requested_again_bytes"] == 0
    assert consumer.status()["counters"]["received_documents"] == 10
    await mirror.stop()


async def test_a_scope_gets_its_new_collections_by_itself(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 20)
    mirror = mirror_of(cluster, tmp_path, Selection.of("inventory", None))
    consumer = mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.route", keys(20))
    cluster.bucket.create_collection("inventory", "hotel")
    write(cluster, 7, "new", "inventory.hotel")
    await until_holds(mirror, "inventory.hotel", keys(7, "new"))
    cluster.bucket.drop_collection("inventory.route")
    cluster.bucket.flush_collection("inventory.airline")
    await until_holds(mirror, "inventory.airline", set())
    await mirror.until(lambda: gone(mirror, "inventory.route"), "the dropped collection gone")
    assert consumer.status()["counters"]["requested_again_bytes"] == 0
    await mirror.stop()
    assert check(mirror.path).problems == []


def gone(mirror: Mirror, collection: str) -> bool:
    try:
        documents(mirror, collection)
    except UnknownCollection:
        return True
    return False


async def test_a_collection_that_does_not_exist_yet_is_waited_for_and_said(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    mirror = mirror_of(cluster, tmp_path, Selection.of(None, ["inventory.hotel"]))
    consumer = mirror.start(cluster.connection_string)
    await mirror.until(lambda: "no collection inventory.hotel" in mirror.row(0)["text"], "said")
    assert {row["state"] for row in consumer.status()["vbuckets"]} == {"waiting"}
    (warning,) = consumer.status()["warnings"]
    assert "waiting for it to be created" in warning
    cluster.bucket.create_collection("inventory", "hotel")
    write(cluster, 9, "doc", "inventory.hotel")
    await until_holds(mirror, "inventory.hotel", keys(9))
    assert consumer.status()["warnings"] == []
    await mirror.stop()


async def test_one_of_several_that_comes_later_is_fetched_whole(cluster: SandboxCluster, tmp_path: Path) -> None:
    """The others were streamed beyond its creation: what it got till then would never come."""
    mirror = mirror_of(cluster, tmp_path, Selection.of(None, ["inventory.airline", "inventory.hotel"]))
    write(cluster, 20, "doc", "inventory.airline")
    consumer = mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.airline", keys(20))
    cluster.bucket.create_collection("inventory", "hotel")
    write(cluster, 9, "doc", "inventory.hotel")
    write(cluster, 9, "more", "inventory.airline")
    await until_holds(mirror, "inventory.hotel", keys(9))
    await until_holds(mirror, "inventory.airline", keys(20) | keys(9, "more"))
    await until_caught_up(mirror)
    assert {row["rollback_count"] for row in consumer.status()["vbuckets"]} == {0}
    await mirror.stop()
    assert check(mirror.path).problems == []


async def test_one_of_several_that_is_dropped_leaves_and_the_rest_goes_on(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    write(cluster, 20)
    mirror = mirror_of(cluster, tmp_path, TWO)
    consumer = mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.route", keys(20))
    cluster.bucket.drop_collection("inventory.route")
    write(cluster, 5, "late", "inventory.airline")
    await until_holds(mirror, "inventory.airline", keys(20) | keys(5, "late"))
    await mirror.until(lambda: gone(mirror, "inventory.route"), "the dropped collection gone")
    await mirror.until(lambda: bool(consumer.status()["warnings"]), "said")
    cluster.bucket.create_collection("inventory", "route")  # another one of that name
    write(cluster, 3, "again", "inventory.route")
    await until_holds(mirror, "inventory.route", keys(3, "again"))
    await until_holds(mirror, "inventory.airline", keys(20) | keys(5, "late"))
    await mirror.stop()
    assert check(mirror.path).problems == []


async def test_after_a_drop_a_stream_that_ends_requests_what_is_left(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 20)
    mirror = mirror_of(cluster, tmp_path, TWO)
    consumer = mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.route", keys(20))
    cluster.bucket.drop_collection("inventory.route")
    await mirror.until(lambda: gone(mirror, "inventory.route"), "the dropped collection gone")
    await mirror.until(lambda: len(consumer.status()["warnings"]) == 1, "the manifest without it")
    assert cluster.faults.end_streams(StreamEndReason.CLOSED) == VBUCKETS
    write(cluster, 5, "late", "inventory.airline")
    await until_holds(mirror, "inventory.airline", keys(20) | keys(5, "late"))
    assert consumer.status()["counters"]["requested_again_bytes"] == 0
    await mirror.stop()
    assert check(mirror.path).problems == []


async def test_when_its_only_collection_is_dropped_it_says_so_and_takes_the_next_of_that_name(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    """End code 7: not requested again and again, and not stopped for ever."""
    write(cluster, 20)
    mirror = mirror_of(cluster, tmp_path, AIRLINE)
    mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.airline", keys(20))
    cluster.bucket.drop_collection("inventory.airline")
    for vbid in range(VBUCKETS):
        await mirror.until_state(vbid, "refused")
        assert "dropped at the source" in mirror.row(vbid)["text"]
    await mirror.until(lambda: gone(mirror, "inventory.airline"), "its documents gone")
    cluster.bucket.create_collection("inventory", "airline")
    write(cluster, 4, "again", "inventory.airline")
    await until_holds(mirror, "inventory.airline", keys(4, "again"))
    await until_caught_up(mirror)
    await mirror.stop()
    assert check(mirror.path).problems == []


async def test_what_was_dropped_and_made_again_while_nobody_listened_is_the_new_one(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    write(cluster, 20)
    mirror = mirror_of(cluster, tmp_path, TWO)
    mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.route", keys(20))
    await until_holds(mirror, "inventory.airline", keys(20))
    await mirror.stop()
    cluster.bucket.drop_collection("inventory.route")
    cluster.bucket.create_collection("inventory", "route")
    write(cluster, 3, "again", "inventory.route")
    mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.route", keys(3, "again"))
    await until_holds(mirror, "inventory.airline", keys(20))
    await mirror.stop()
    assert check(mirror.path).problems == []


@pytest.mark.parametrize("status", [Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE])
async def test_a_node_whose_manifest_is_older_is_queried_again(
    cluster: SandboxCluster, tmp_path: Path, status: Status
) -> None:
    write(cluster, 20)
    cluster.bucket.stream_faults.refuse(status, [1], times=2)
    mirror = mirror_of(cluster, tmp_path, AIRLINE)
    mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.airline", keys(20))
    assert "manifest is older" in mirror.row(1)["last_error"]
    await mirror.stop()


async def test_a_source_without_collections_is_one_clear_error(tmp_path: Path) -> None:
    async with SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1, profile="6.6") as old:
        mirror = mirror_of(old, tmp_path, AIRLINE)
        mirror.start(old.connection_string)
        error = await mirror.fails()
        assert isinstance(error, NotSupported)
        assert "knows no collections" in str(error)
        assert "7.0 or newer" in str(error)


async def test_a_user_who_may_not_see_the_servers_own_collections_learns_what_is_missing(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    """Its streams leave them out without a word, and lag by the bucket's seqnos would never end."""
    cluster.bucket.create_scope("_system")
    cluster.bucket.create_collection("_system", "_query")
    cluster.bucket.map.capabilities = [*cluster.bucket.map.capabilities, "querySystemCollection"]
    cluster.bucket.map_changed()
    cluster.add_user("demo", "demo", ALL_PRIVILEGES - {SYSTEM_COLLECTIONS})
    write(cluster, 10)
    mirror = mirror_of(cluster, tmp_path, Selection())
    consumer = mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.route", keys(10))
    await mirror.until(lambda: consumer.status()["warnings"] == [HIDDEN], "explained")
    write(cluster, 30, "hidden", "_system._query")
    write(cluster, 3, "seen", "inventory.route")
    await until_holds(mirror, "inventory.route", keys(10) | keys(3, "seen"))
    await until_caught_up(mirror)
    assert gone(mirror, "_system._query")
    await mirror.stop()


def manifest(uid: int, **collections: int) -> SourceManifest:
    names = {("inventory", name): collection_id for name, collection_id in collections.items()}
    return SourceManifest(uid, {"inventory": 8}, names)


def test_manifests_move_forward_alone_and_only_what_is_new_is_reported() -> None:
    notified: list[set[int]] = []
    nobody: Any = SimpleNamespace(ready_sessions=list, current=None)
    watch = CollectionWatch(TWO, nobody, nobody, Settings(), SystemClock(), notified.append)
    assert not watch.resolved.streams
    assert "asking the source" in watch.text
    watch.take(manifest(5, airline=9))
    assert watch.resolved.streams
    assert watch.resolved.filter == StreamFilter(collection_ids=(9,))
    watch.look(3)
    watch.take(manifest(4, airline=9, route=10))
    watch.take(manifest(5, airline=9))
    assert notified == [set()], "an older manifest, and the same one, say nothing"
    watch.take(manifest(6, airline=9, route=10))
    watch.take(manifest(7, route=10))
    watch.take(manifest(8))
    assert notified == [set(), {3}], "streams bring the word of what is dropped by themselves"
    assert not watch.resolved.streams
    assert watch.polled_collections == ()
    assert "inventory.airline, inventory.route" in watch.text
