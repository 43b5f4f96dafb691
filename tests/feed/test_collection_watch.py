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
from mirror.sandbox.data.manifest import BucketManifest
from mirror.server.session import ALL_PRIVILEGES, SYSTEM_COLLECTIONS
from mirror.wire.constants import Status, StreamEndReason
from storage.errors import UnknownCollection
from storage.read.view import open_view
from tests.feed.harness import Mirror, Mirrors, source_high_seqnos

VBUCKETS = 4
AIRLINE = Selection.of(None, ["inventory.airline"])
TWO = Selection.of(None, ["inventory.airline", "inventory.route"])


@pytest.fixture
def options(short_pauses: None) -> dict[str, Any]:
    return {"map_poll_interval_s": 0.05, "compares": False}


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
    with open_view(mirror.path, partial=True) as view:
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
    await mirror.until(
        lambda: all(row["lag_seqnos"] == 0 and row["state"] == "streaming" for row in mirror.status()["vbuckets"]),
        "caught up by the seqnos of its collections",
    )


async def test_a_mirror_of_one_collection_holds_no_other(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 40)
    mirror = mirrors.start(selection=AIRLINE)
    await until_holds(mirror, "inventory.airline", keys(40))
    write(cluster, 30, "other", "inventory.route", "_default._default")
    write(cluster, 5, "late", "inventory.airline")
    await until_holds(mirror, "inventory.airline", keys(40) | keys(5, "late"))
    await until_caught_up(mirror)
    status = mirror.status()
    assert status["selection"] == "collections inventory.airline"
    assert status["warnings"] == []
    assert status["counters"]["received_documents"] == 45, "nothing else came over the wire"
    await mirror.stop()
    for other in ("inventory.route", "_default._default"):
        with pytest.raises(UnknownCollection):
            documents(mirror, other)


async def test_a_restart_resumes_at_its_position(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 40)
    mirror = mirrors.start(selection=TWO)
    await until_holds(mirror, "inventory.route", keys(40))
    await until_caught_up(mirror)
    await mirror.stop()
    write(cluster, 5, "late")
    mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.airline", keys(40) | keys(5, "late"))
    await until_holds(mirror, "inventory.route", keys(40) | keys(5, "late"))
    assert mirror.status()["counters"]["requested_again_bytes"] == 0
    assert mirror.status()["counters"]["received_documents"] == 10


async def test_a_mirror_of_a_scope_includes_new_collections(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 20)
    mirror = mirrors.start(selection=Selection.of("inventory", None))
    await until_holds(mirror, "inventory.route", keys(20))
    cluster.bucket.create_collection("inventory", "hotel")
    write(cluster, 7, "new", "inventory.hotel")
    await until_holds(mirror, "inventory.hotel", keys(7, "new"))
    cluster.bucket.drop_collection("inventory.route")
    cluster.bucket.flush_collection("inventory.airline")
    await until_holds(mirror, "inventory.airline", set())
    await mirror.until(lambda: gone(mirror, "inventory.route"), "the dropped collection gone")
    assert mirror.status()["counters"]["requested_again_bytes"] == 0


async def test_a_scope_without_collections_is_caught_up(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    """Its lag was unknown for ever: no collection's high seqno could be polled."""
    cluster.bucket.create_scope("bare")
    mirror = mirrors.start(selection=Selection.of("bare", None))
    await until_caught_up(mirror)
    cluster.bucket.create_collection("bare", "one")
    write(cluster, 7, "doc", "bare.one")
    await until_holds(mirror, "bare.one", keys(7))
    await mirror.until(lambda: all(source_high_seqnos(mirror.consumer).values()), "the collection's seqnos polled")
    cluster.bucket.drop_collection("bare.one")
    await mirror.until(lambda: gone(mirror, "bare.one"), "the dropped collection gone")
    await mirror.until(lambda: not any(source_high_seqnos(mirror.consumer).values()), "nothing left to wait for")
    for node in cluster.nodes:
        for connection in list(node.connections):
            connection.link.cut()
    await mirror.until(lambda: all(node["reconnects"] for node in mirror.status()["nodes"]), "other connections")
    await until_caught_up(mirror)


def gone(mirror: Mirror, collection: str) -> bool:
    try:
        documents(mirror, collection)
    except UnknownCollection:
        return True
    return False


async def test_a_collection_that_does_not_exist_yet_is_waited_for_with_a_warning(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    mirror = mirrors.start(selection=Selection.of(None, ["inventory.hotel"]))
    await mirror.until(lambda: "no collection inventory.hotel" in mirror.row(0)["text"], "said")
    await mirror.until(
        lambda: {row["state"] for row in mirror.status()["vbuckets"]} == {"waiting"}, "every vbucket to wait"
    )
    (warning,) = mirror.status()["warnings"]
    assert "waiting for it to be created" in warning
    cluster.bucket.create_collection("inventory", "hotel")
    write(cluster, 9, "doc", "inventory.hotel")
    await until_holds(mirror, "inventory.hotel", keys(9))
    assert mirror.status()["warnings"] == []


async def test_a_collection_created_later_is_fetched_whole(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    """The others were streamed beyond its creation: what it got till then would never come."""
    mirror = mirrors.make(selection=Selection.of(None, ["inventory.airline", "inventory.hotel"]))
    write(cluster, 20, "doc", "inventory.airline")
    mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.airline", keys(20))
    cluster.bucket.create_collection("inventory", "hotel")
    write(cluster, 9, "doc", "inventory.hotel")
    write(cluster, 9, "more", "inventory.airline")
    await until_holds(mirror, "inventory.hotel", keys(9))
    await until_holds(mirror, "inventory.airline", keys(20) | keys(9, "more"))
    await until_caught_up(mirror)
    assert {row["rollback_count"] for row in mirror.status()["vbuckets"]} == {0}


async def test_a_dropped_collection_leaves_and_the_others_stream_on(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 20)
    mirror = mirrors.start(selection=TWO)
    await until_holds(mirror, "inventory.route", keys(20))
    cluster.bucket.drop_collection("inventory.route")
    write(cluster, 5, "late", "inventory.airline")
    await until_holds(mirror, "inventory.airline", keys(20) | keys(5, "late"))
    await mirror.until(lambda: gone(mirror, "inventory.route"), "the dropped collection gone")
    await mirror.until(lambda: len(mirror.status()["warnings"]) == 1, "said")
    assert cluster.faults.end_streams(StreamEndReason.CLOSED) == VBUCKETS
    write(cluster, 5, "later", "inventory.airline")
    kept = keys(20) | keys(5, "late") | keys(5, "later")
    await until_holds(mirror, "inventory.airline", kept)
    assert mirror.status()["counters"]["requested_again_bytes"] == 0
    cluster.bucket.create_collection("inventory", "route")  # another one of that name
    write(cluster, 3, "again", "inventory.route")
    await until_holds(mirror, "inventory.route", keys(3, "again"))
    await until_holds(mirror, "inventory.airline", kept)


async def test_a_mirror_of_a_dropped_collection_waits_for_a_new_one_of_that_name(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    """End code 7: not requested again and again, and not stopped for ever."""
    write(cluster, 20)
    mirror = mirrors.start(selection=AIRLINE)
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


async def test_a_collection_that_is_missing_at_a_restart_is_served_and_reported(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    """Its vbuckets were "waiting", and the mirror's state "source unreachable". It may be hidden, not dropped."""
    write(cluster, 20)
    mirror = mirrors.start(selection=AIRLINE)
    await until_holds(mirror, "inventory.airline", keys(20))
    await until_caught_up(mirror)
    await mirror.stop()
    cluster.bucket.drop_collection("inventory.airline")
    mirror.start(cluster.connection_string)
    for vbid in range(VBUCKETS):
        await mirror.until_state(vbid, "refused")
        assert "no collection inventory.airline for this user" in mirror.row(vbid)["text"]
    await until_holds(mirror, "inventory.airline", keys(20))
    cluster.bucket.create_collection("inventory", "airline")
    write(cluster, 4, "again")
    await until_holds(mirror, "inventory.airline", keys(4, "again"))
    await until_caught_up(mirror)


async def test_a_collection_recreated_while_the_mirror_was_down_is_the_new_one(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    write(cluster, 20)
    mirror = mirrors.start(selection=TWO)
    await until_holds(mirror, "inventory.route", keys(20))
    await until_holds(mirror, "inventory.airline", keys(20))
    await mirror.stop()
    cluster.bucket.drop_collection("inventory.route")
    cluster.bucket.create_collection("inventory", "route")
    write(cluster, 3, "again", "inventory.route")
    mirror.start(cluster.connection_string)
    await until_holds(mirror, "inventory.route", keys(3, "again"))
    await until_holds(mirror, "inventory.airline", keys(20))


@pytest.mark.parametrize("status", [Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE])
async def test_a_node_with_an_older_manifest_is_queried_again(
    cluster: SandboxCluster, mirrors: Mirrors, status: Status
) -> None:
    write(cluster, 20)
    cluster.bucket.stream_faults.refuse(status, [1], times=2)
    mirror = mirrors.start(selection=AIRLINE)
    await until_holds(mirror, "inventory.airline", keys(20))
    assert "manifest is older" in mirror.row(1)["last_error"]


@pytest.mark.parametrize("selection", [Selection(), AIRLINE], ids=["bucket", "collection"])
async def test_documents_stay_while_a_restarted_node_has_no_manifest(
    cluster: SandboxCluster, mirrors: Mirrors, selection: Selection
) -> None:
    """After its restart a node of 8.0 has manifest 0 until the cluster manager pushes the newest one again."""
    write(cluster, 20)
    mirror = mirrors.start(selection=selection)
    await until_holds(mirror, "inventory.airline", keys(20))
    pushed, cluster.bucket.manifest = cluster.bucket.manifest, BucketManifest()
    await mirror.stop()
    mirror.start(cluster.connection_string)
    states = {"streaming"} if selection.whole else {"refused"}
    await mirror.until(lambda: {row["state"] for row in mirror.status()["vbuckets"]} <= states, "the older manifest")
    for number in range(2):
        await cluster.restart_node(number)
    await mirror.until(lambda: all(node["reconnects"] for node in mirror.status()["nodes"]), "other sessions")
    assert documents(mirror, "inventory.airline") == keys(20)
    cluster.bucket.manifest = pushed
    write(cluster, 3, "later")
    await until_holds(mirror, "inventory.airline", keys(20) | keys(3, "later"))
    assert {row["resyncs_begun"] for row in mirror.status()["vbuckets"]} == {0}


async def test_a_source_without_collections_is_one_clear_error(tmp_path: Path) -> None:
    async with SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1, profile="6.6") as old:
        error = await Mirrors(old, tmp_path).start(selection=AIRLINE).fails()
        assert isinstance(error, NotSupported)
        assert "does not support collections" in str(error)
        assert "7.0 or newer" in str(error)


async def test_a_service_shows_a_source_without_collections_as_refused(tmp_path: Path, short_pauses: None) -> None:
    async with (
        SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1, profile="6.6") as old,
        Mirrors(old, tmp_path, compares=False, map_poll_interval_s=0.05) as mirrors,
    ):
        mirror = mirrors.start(selection=AIRLINE, run={"ends_on_refusal": False})
        await mirror.until(lambda: {row["state"] for row in mirror.status()["vbuckets"]} == {"refused"}, "refused")
        assert "7.0 or newer" in mirror.row(0)["text"]


async def test_a_user_who_may_not_see_system_collections_gets_a_warning(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    """Its streams leave them out without a word, and lag by the bucket's seqnos would never end."""
    cluster.bucket.create_scope("_system")
    cluster.bucket.create_collection("_system", "_query")
    cluster.bucket.map.capabilities = [*cluster.bucket.map.capabilities, "querySystemCollection"]
    cluster.bucket.map_changed()
    cluster.add_user("demo", "demo", ALL_PRIVILEGES - {SYSTEM_COLLECTIONS})
    write(cluster, 10)
    mirror = mirrors.start(selection=Selection())
    await until_holds(mirror, "inventory.route", keys(10))
    await mirror.until(lambda: mirror.status()["warnings"] == [HIDDEN], "explained")
    write(cluster, 30, "hidden", "_system._query")
    write(cluster, 3, "seen", "inventory.route")
    await until_holds(mirror, "inventory.route", keys(10) | keys(3, "seen"))
    await until_caught_up(mirror)
    assert gone(mirror, "_system._query")


def manifest(uid: int, **collections: int) -> SourceManifest:
    names = {("inventory", name): collection_id for name, collection_id in collections.items()}
    return SourceManifest(uid, {"inventory": 8}, names)


def test_the_watch_follows_only_newer_manifests_and_reports_only_changes() -> None:
    notified: list[set[int]] = []
    access = SimpleNamespace(settings=Settings())
    idle: Any = SimpleNamespace(ready_sessions=list, current=None, access=access, clock=SystemClock())
    watch = CollectionWatch(TWO, idle, idle, notified.append)
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
