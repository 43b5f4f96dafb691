"""Commands of an operator: roll a vbucket back, read it again next to its old copy."""

from __future__ import annotations

import shutil

import pytest

from mirror.errors import ConfigError, MirrorError
from mirror.messages import Resync, RollBack
from mirror.sandbox.cluster import SandboxCluster
from storage.errors import NoSuchBoundary
from tests.feed.harness import Mirrors, has_published, write


async def test_a_rollback_on_command_is_followed_by_a_stream_from_its_boundary(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    write(cluster, 50)
    mirror = await mirrors.follow()
    boundary = mirror.row(3)["published_seqno"]
    cluster.set("later", {"a": 1}, vbid=3)
    await mirror.follow()
    answer = mirror.consumer.request(RollBack(3, boundary))
    expected = {"vbid": 3, "boundary_seqno": boundary, "from_branch": 1, "from_seqno": boundary + 1, "branch": 2}
    assert answer == expected
    await mirror.follow()
    assert mirror.row(3)["rollback_count"] == 1
    assert mirror.row(3)["requested_again_bytes"] == 0  # it comes again because it was taken back
    nothing = mirror.consumer.request(RollBack(3, 10**9))
    assert nothing["boundary_seqno"] == nothing["from_seqno"] == boundary + 1
    with pytest.raises(NoSuchBoundary, match="history begins at seqno"):
        mirror.consumer.request(RollBack(3, 0))
    assert (mirror.row(3)["rollback_count"], mirror.row(3)["state"]) == (1, "streaming")
    with pytest.raises(ConfigError):
        mirror.consumer.request(RollBack(99, 1))


async def test_a_resync_on_command_serves_the_old_copy_meanwhile(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    write(cluster, 200)
    mirror = await mirrors.follow(resync_reads="stale")
    await mirror.until(lambda: mirror.row(3)["lag_seqnos"] == 0, "all of it is published")
    high_seqno = cluster.vbucket(3).high_seqno
    before = mirror.row(3)["branch"]
    answer = mirror.consumer.request(Resync(3))
    assert mirror.row(3)["published_seqno"] == mirror.row(3)["lag_seqnos"] == high_seqno, "not of what is streamed"
    assert not has_published(mirror.consumer.vbuckets[3], high_seqno)
    assert (answer["vbid"], mirror.row(3)["branch"]) == (3, before), "what is served is what was"
    assert answer["staging_branch"] > before
    assert (mirror.row(3)["resyncs_begun"], mirror.row(3)["resync_count"]) == (1, 0)
    assert mirror.row(3)["resync_why"] == "requested by an operator"
    await mirror.until(lambda: mirror.row(3)["branch"] == answer["staging_branch"], "the new copy is served")
    assert (mirror.row(3)["resyncs_begun"], mirror.row(3)["resync_count"]) == (1, 1)
    write(cluster, 50, "more")
    await mirror.follow()
    assert {row["branch"] for row in mirror.status()["vbuckets"] if row["vbid"] != 3} == {before}
    with pytest.raises(ConfigError, match="resync of vb 99"):
        mirror.consumer.request(Resync(99))


async def test_a_resync_without_space_is_refused_even_during_another(
    cluster: SandboxCluster, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cluster, 200)
    mirror = await mirrors.follow()
    staging = mirror.consumer.request(Resync(3))["staging_branch"]
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1024))
    with pytest.raises(MirrorError, match="0 MiB are free"):
        mirror.consumer.request(Resync(3))
    await mirror.until(lambda: mirror.row(3)["branch"] == staging, "the first resync ends")


async def test_a_published_seqno_above_the_known_high_seqno_is_a_lag_of_zero(
    cluster: SandboxCluster, mirrors: Mirrors
) -> None:
    write(cluster, 50)
    mirror = await mirrors.follow()
    vbucket = mirror.consumer.vbuckets[3]
    assert vbucket.host.session is not None
    vbucket.polled, vbucket.host.session.seqnos_until = (vbucket.host.session, 1), float("inf")
    assert mirror.row(3)["published_seqno"] > 1
    assert mirror.row(3)["lag_seqnos"] == 0
