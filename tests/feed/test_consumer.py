"""The consumer against the embedded source: following, faults, moves, failovers, refusals, a full disk."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from mirror.errors import (
    AuthRejected,
    BucketChanged,
    BucketMissing,
    ConfigError,
    ConnectFailed,
    MirrorError,
    PrivilegeMissing,
)
from mirror.sandbox.cluster import SandboxCluster
from mirror.server.cluster_config import NOWHERE
from storage.admin.check import check
from storage.read.view import open_view
from tests.feed.harness import VBUCKETS, Mirrors, source_high_seqnos, write
from tests.feed.test_errors import SOURCE_ERRORS


async def test_a_mirror_copies_and_follows_the_whole_bucket(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 300)
    mirror = await mirrors.follow()
    write(cluster, 200)
    for number in range(0, 300, 3):
        cluster.delete(f"doc-{number}")
    await mirror.follow()
    status = mirror.status()
    assert status["counters"]["received_documents"] >= 500
    assert status["counters"]["requested_again_bytes"] == 0
    assert {row["state"] for row in status["vbuckets"]} <= {"streaming", "backfilling"}
    assert len(status["nodes"]) == 2
    assert status["map"]["rev"] == cluster.bucket.map.rev
    await mirror.until(lambda: all(row["lag_seqnos"] == 0 for row in mirror.status()["vbuckets"]), "no lag")


async def test_a_restart_requests_no_row_again(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 300)
    mirror = await mirrors.follow()
    await mirror.stop()
    published = {vbid: cluster.vbucket(vbid).high_seqno for vbid in range(VBUCKETS)}
    write(cluster, 50, "new")
    mirror.start(cluster.connection_string)
    await mirror.follow()
    assert mirror.status()["counters"]["requested_again_bytes"] == 0
    assert mirror.status()["counters"]["received_documents"] == 50
    for vbid, seqno in published.items():
        assert [request.start_seqno for request in cluster.sent(vbid).stream_requests] == [0, seqno]


async def test_a_killed_node_that_returns_is_found_again(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 100)
    mirror = await mirrors.follow()
    await cluster.kill_node(1)
    await mirror.until(lambda: not all(node["ready"] for node in mirror.status()["nodes"]), "node missed")
    write(cluster, 100, "while-down")
    here = [vbid for vbid in range(VBUCKETS) if vbid % 2 == 0]
    for vbid in here:
        await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)
    assert {mirror.row(vbid)["state"] for vbid in range(VBUCKETS) if vbid not in here} == {"waiting"}
    await cluster.restart_node(1)
    await mirror.follow()


async def test_moved_vbuckets_are_followed_to_their_new_node(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 100)
    mirror = await mirrors.follow()
    await cluster.add_node()
    await cluster.rebalance()
    write(cluster, 100, "after-rebalance-in")
    await mirror.follow()
    assert len({row["node"] for row in mirror.status()["vbuckets"]}) == 3
    await cluster.rebalance([0])
    write(cluster, 100, "after-rebalance-out")
    await mirror.follow()
    await mirror.until(lambda: len(mirror.status()["nodes"]) == 1, "old nodes let go")
    assert mirror.status()["counters"]["requested_again_bytes"] == 0
    assert sum(row["rollback_count"] for row in mirror.status()["vbuckets"]) == 0


async def test_a_failover_with_loss_is_rolled_back_exactly(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 200)
    mirror = await mirrors.follow()
    for round_ in range(10):  # boundaries of their own
        cluster.set(f"lost-{round_}", {"round": round_}, vbid=3)
        await mirror.until_published(3, cluster.vbucket(3).high_seqno)
    base = cluster.failover(3, lose=6)
    cluster.set("instead", {"new": "history"}, vbid=3)
    await mirror.until(lambda: mirror.row(3)["rollback_count"] == 1, "rollback")
    await mirror.until(lambda: mirror.row(3)["published_seqno"] == cluster.vbucket(3).high_seqno, "the new history")
    assert [request.start_seqno for request in cluster.sent(3).stream_requests][-1] == base
    assert mirror.status()["counters"]["requested_again_bytes"] == 0
    assert {row["rollback_count"] for row in mirror.status()["vbuckets"] if row["vbid"] != 3} == {0}
    assert mirror.row(3)["last_rollback"] == (base + 6, base)


@pytest.mark.parametrize(
    "fault",
    ["cut", "silence", *(pytest.param(each, marks=pytest.mark.ci) for each in ("truncate", "stop_mid_snapshot"))],
)
async def test_a_connection_that_fails_is_replaced(cluster: SandboxCluster, mirrors: Mirrors, fault: str) -> None:
    """Also in the middle of snapshots, with more to come than a window."""
    write(cluster, 100)
    mirror = await mirrors.follow()
    getattr(cluster.faults, fault)()
    for vbid in range(VBUCKETS):
        cluster.multi_write(vbid, [(f"many-{vbid}-{number}", {"pad": "x" * 200}) for number in range(100)])
    await mirror.follow()
    status = mirror.status()
    assert sum(node["reconnects"] for node in status["nodes"]) >= 1
    assert status["counters"]["requested_again_bytes"] == 0


async def test_garbage_is_survived_and_leaves_a_sound_store(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    """Damage in a value cannot be noticed; any other ends the connection, never the mirror."""
    write(cluster, 200)
    mirrors.compares = False
    cluster.faults.garble(3, future=True)
    mirror = mirrors.start(request_timeout_s=0.5)
    await mirror.until(lambda: sum(node["reconnects"] for node in mirror.status()["nodes"]) >= 3, "tried again")
    cluster.faults.clear()
    cluster.faults.cut()
    write(cluster, 20, "after")
    await mirror.until(
        lambda: all(
            row["state"] in ("streaming", "backfilling", "resyncing", "refused") for row in mirror.status()["vbuckets"]
        ),
        "streams again",
    )


async def test_a_silent_node_is_left_when_its_vbuckets_have_moved(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    """No FIN, and the noop interval is long: the map of the other node is enough."""
    write(cluster, 100)
    mirror = await mirrors.follow(noop_interval_s=600)
    cluster.faults.silence(node=1)
    for vbid in range(1, VBUCKETS, 2):
        cluster.move(vbid, 0)
    write(cluster, 100, "moved")
    await mirror.follow()


@pytest.mark.parametrize(
    ("password", "user", "bucket", "kinds"),
    [
        ("wrong", "demo", "demo", AuthRejected),
        ("demo", "demo", "other", BucketMissing),
        ("demo", "reader", "demo", (PrivilegeMissing, BucketMissing)),
    ],
    ids=["wrong password", "no such bucket", "no privilege for DCP"],
)
async def test_a_refusal_by_the_source_at_the_start_is_exit_4(
    cluster: SandboxCluster, mirrors: Mirrors, password: str, user: str, bucket: str, kinds: Any
) -> None:
    cluster.add_user("reader", "demo", frozenset({"Read"}))
    mirror = mirrors.start(
        cluster.connection_string.replace("demo@", f"{user}@").removesuffix("demo") + bucket, password=password
    )
    error = await mirror.fails()
    assert isinstance(error, kinds)
    assert error.exit_code == 4
    assert password == "demo" or "wrong" not in error.what.replace("wrong user or password", "")
    assert bucket == "demo" or bucket in error.what


@pytest.mark.usefixtures("short_pauses")
async def test_a_changed_password_needs_no_restart(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 20)
    mirror = await mirrors.follow()
    cluster.add_user("demo", "rotated")
    cluster.faults.cut()
    await mirror.until(
        lambda: any("refused user" in (node["error"] or "") for node in mirror.status()["nodes"]), "refusal shown"
    )
    mirror.password_file.write_text("rotated\n")
    write(cluster, 20, "after")
    await mirror.follow()
    assert mirror.status()["counters"]["requested_again_bytes"] == 0


async def test_a_missing_password_or_user_is_exit_2(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DCP_MIRROR_PASSWORD", raising=False)
    mirror = mirrors.make()
    mirror.settings = replace(mirror.settings, password_file=None)
    mirror.start(cluster.connection_string)
    error = await mirror.fails()
    assert isinstance(error, ConfigError)
    assert "DCP_MIRROR_PASSWORD" in str(error)
    mirror.start(cluster.connection_string.replace("demo@", ""))
    error = await mirror.fails()
    assert isinstance(error, ConfigError)
    assert "user@" in str(error)


async def test_an_unreachable_source_is_waited_for_or_given_up_by_setting(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"couchbase://demo@127.0.0.1:{unused.getsockname()[1]}/demo"
    mirror = mirrors.start(nowhere, bootstrap_timeout_s=0.05)
    error = await mirror.fails()
    assert isinstance(error, ConnectFailed)
    assert error.exit_code == 1
    patient = mirrors.start(nowhere)
    await patient.until(lambda: "cannot be reached" in (patient.status()["error"] or ""), "error shown")


@pytest.mark.usefixtures("short_pauses")
async def test_a_service_shows_a_recreated_bucket_as_refused_until_the_old_one_is_back(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    write(cluster, 100)
    mirror = await mirrors.follow(run={"ends_on_refusal": False})
    uuid, vbuckets = cluster.bucket.map.bucket_uuid, list(cluster.vbuckets)
    mirrors.compares = False
    await cluster.recreate_bucket()
    await mirror.until(lambda: {mirror.row(vbid)["state"] for vbid in range(VBUCKETS)} == {"refused"}, "refused")
    assert f"uuid {uuid} is now {cluster.bucket.map.bucket_uuid}" in mirror.row(0)["text"]
    cluster.bucket.map.bucket_uuid, cluster.bucket.vbuckets = uuid, vbuckets
    cluster.bucket.map_changed()
    write(cluster, 100, "later")
    for vbid in range(VBUCKETS):
        await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)


@pytest.mark.usefixtures("short_pauses")
async def test_a_service_goes_on_once_a_privilege_is_granted_again(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 100)
    mirror = await mirrors.follow(run={"ends_on_refusal": False})
    privileges = cluster.user.privileges
    cluster.add_user("demo", "demo", frozenset({"Read"}))
    cluster.faults.cut()
    await mirror.until(lambda: mirror.row(0)["state"] == "refused", "refused")
    cluster.add_user("demo", "demo", privileges)
    write(cluster, 100, "later")
    await mirror.follow()


STEPS = {"map": "cluster.map_follower.discover", "session": "connection.negotiation.enter"}


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("kind", SOURCE_ERRORS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
async def test_a_service_shows_any_error_of_a_step_and_goes_on_after_it(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch, step: str, kind: type[MirrorError]
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise kind("not now")

    with monkeypatch.context() as refusing:
        refusing.setattr(f"mirror.feed.{step}", refuse)
        mirror = mirrors.start(run={"ends_on_refusal": False})
        expected = "waiting" if kind.retryable else "refused"
        for vbid in range(VBUCKETS):
            await mirror.until(lambda at=vbid: "not now" in mirror.row(at)["text"], "the error")  # type: ignore[misc]
            assert mirror.row(vbid)["state"] == expected
    write(cluster, 20)
    await mirror.follow()


async def test_another_bucket_is_exit_3_and_the_data_stays(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 100)
    mirror = await mirrors.follow()
    with open_view(mirror.path, partial=True) as view:
        before = {vbid: view.state(vbid).published_seqno for vbid in range(VBUCKETS)}
    mirrors.compares = False
    await cluster.recreate_bucket()
    error = await mirror.fails()
    assert isinstance(error, BucketChanged)
    assert error.exit_code == 3
    with open_view(mirror.path, partial=True) as view:
        assert {vbid: view.state(vbid).published_seqno for vbid in range(VBUCKETS)} == before
        assert sum(1 for _ in view.scan(now=0)) == 100
    assert check(mirror.path).problems == []


async def test_a_large_snapshot_is_hidden_until_it_is_complete(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    """Staged in bounded batches, cut in the middle, resumed where it stood, visible in one instant."""
    cluster.bucket.load(((f"big-{n}".encode(), b'{"pad":"' + b"y" * 300 + b'"}') for n in range(3000)), vbid=1)
    mirror = mirrors.start(batch_bytes_max=64 * 1024, connection_buffer_size=32768)
    await mirror.until(lambda: mirror.row(1)["staged_seqno"] > 500, "part of the snapshot")
    with open_view(mirror.path, partial=True) as view:
        assert view.state(1).published_seqno == 0
        assert list(view.scan(1, now=0)) == []
    staged = mirror.row(1)["staged_seqno"]
    cluster.faults.cut()
    await mirror.follow()
    assert [request.start_seqno for request in cluster.sent(1).stream_requests][-1] >= staged
    assert mirror.status()["counters"]["requested_again_bytes"] == 0
    assert all(group["pending_bytes"] < 2 * 64 * 1024 for group in mirror.status()["groups"])


async def test_the_interrupted_first_fill_of_an_ephemeral_bucket_with_purged_deletions_ends(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    """8.0 accepts the position and ends the stream, again and again: the mirror begins this snapshot anew."""
    cluster.bucket.map.ephemeral = True
    cluster.bucket.load(((f"big-{n}".encode(), b'{"pad":"' + b"y" * 300 + b'"}') for n in range(3000)), vbid=1)
    vbucket = cluster.vbucket(1)
    for key in ("gone", "gone too"):  # the newest item is never purged
        cluster.bucket.set(key, b"1", vbid=1)
        cluster.bucket.delete(key, vbid=1)
    vbucket.to_disk()
    vbucket.purge()
    assert vbucket.purge_seqno > 3000
    mirror = mirrors.start(batch_bytes_max=64 * 1024, connection_buffer_size=32768)
    await mirror.until(lambda: mirror.row(1)["staged_seqno"] > 500, "part of the snapshot")
    cluster.faults.cut()
    await mirror.follow()
    starts = [request.start_seqno for request in cluster.sent(1).stream_requests]
    assert (starts[0], starts[-1]) == (0, 0)
    assert len(set(starts[1:-1])) == 1, starts
    assert len(starts[1:-1]) == 3


async def test_a_stop_before_the_first_connection_returns(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    mirror = mirrors.start()
    await mirror.consumer.stop()
    assert mirror.task is not None
    await mirror.task
    mirror.close()


async def test_a_change_of_the_wall_clock_is_a_warning(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = await mirrors.follow()
    assert mirror.status()["warnings"] == []
    clock = mirror.writers[0].owner.clock
    right = clock._wall_ms
    monkeypatch.setattr(clock, "_wall_ms", lambda: right() + 3_600_000)
    write(cluster, 1, "later")
    await mirror.follow()
    (warning,) = mirror.status()["warnings"]
    assert "the wall clock was set 1 times since this worker began, the last time by +3,600 s" in warning


async def test_the_lag_behind_a_lost_node_is_unknown(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    """The lag is unknown, not 0: the last seqnos of a lost node say nothing about the present ones."""
    write(cluster, 50)
    mirror = await mirrors.follow()
    await mirror.until(lambda: all(row["lag_seqnos"] == 0 for row in mirror.status()["vbuckets"]), "no lag")
    await cluster.kill_node(1)
    theirs = [vbid for vbid, owner in enumerate(cluster.bucket.map.owners) if owner == 1]

    def figures(vbid: int) -> tuple[int | None, int | None]:
        return mirror.row(vbid)["source_high_seqno"], mirror.row(vbid)["lag_seqnos"]

    await mirror.until(lambda: all(figures(vbid) == (None, None) for vbid in theirs), "unknown figures")
    assert set(source_high_seqnos(mirror.consumer)) == set(range(VBUCKETS)) - set(theirs)
    # A vbucket that has no node any more is not as far as its last node said, either.
    cluster.bucket.map.owners[0] = NOWHERE
    cluster.bucket.map_changed(0)
    await mirror.until(lambda: figures(0) == (None, None), "an unknown figure of a vbucket without a node")
    await cluster.restart_node(1)
    await mirror.until(lambda: all(figures(vbid)[1] == 0 for vbid in theirs), "known figures")
