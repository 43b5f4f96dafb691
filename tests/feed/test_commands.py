"""Commands of an operator: roll a vbucket back, read it again next to its old copy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mirror.errors import ConfigError
from mirror.messages import Resync, RollBack
from mirror.sandbox.cluster import SandboxCluster
from storage.errors import NoSuchBoundary
from tests.feed.consumer_rig import VBUCKETS, assert_equal, follow, mirror_of, write


@pytest.fixture
async def cluster() -> AsyncIterator[SandboxCluster]:
    async with SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=1) as running:
        yield running


async def test_rollback_on_command_and_streaming_on_from_there(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 50)
    mirror = mirror_of(cluster, tmp_path)
    consumer = mirror.start(cluster.connection_string)
    await follow(mirror, cluster)
    boundary = mirror.row(3)["published_seqno"]
    cluster.set("later", {"a": 1}, vbid=3)
    await follow(mirror, cluster)
    answer = consumer.request(RollBack(3, boundary))
    expected = {"vbid": 3, "boundary_seqno": boundary, "from_branch": 1, "from_seqno": boundary + 1, "branch": 2}
    assert answer == expected
    await follow(mirror, cluster)
    assert mirror.row(3)["rollback_count"] == 1
    assert mirror.row(3)["requested_again_bytes"] == 0  # it comes again because it was taken back
    nothing = consumer.request(RollBack(3, 10**9))
    assert nothing["boundary_seqno"] == nothing["from_seqno"] == boundary + 1
    with pytest.raises(NoSuchBoundary, match="history begins at seqno"):
        consumer.request(RollBack(3, 0))
    assert (mirror.row(3)["rollback_count"], mirror.row(3)["state"]) == (1, "streaming")
    with pytest.raises(ConfigError):
        consumer.request(RollBack(99, 1))
    await mirror.stop()
    assert_equal(mirror, cluster)


async def test_resync_on_command_while_the_old_copy_is_served(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 200)
    mirror = mirror_of(cluster, tmp_path, settings={"resync_reads": "stale"})
    consumer = mirror.start(cluster.connection_string)
    await follow(mirror, cluster)
    await mirror.until(lambda: mirror.row(3)["lag_seqnos"] == 0, "all of it is published")
    high_seqno = cluster.vbucket(3).high_seqno
    before = mirror.row(3)["branch"]
    answer = consumer.request(Resync(3))
    assert mirror.row(3)["published_seqno"] == mirror.row(3)["lag_seqnos"] == high_seqno, "not of what is streamed"
    assert not consumer.vbuckets[3].has_published(high_seqno)
    assert (answer["vbid"], mirror.row(3)["branch"]) == (3, before), "what is served is what was"
    assert answer["staging_branch"] > before
    assert (mirror.row(3)["resyncs_begun"], mirror.row(3)["resync_count"]) == (1, 0)
    assert mirror.row(3)["resync_why"] == "requested by an operator"
    await mirror.until(lambda: mirror.row(3)["branch"] == answer["staging_branch"], "the new copy is served")
    assert (mirror.row(3)["resyncs_begun"], mirror.row(3)["resync_count"]) == (1, 1)
    write(cluster, 50, "more")
    await follow(mirror, cluster)
    assert {row["branch"] for row in consumer.status()["vbuckets"] if row["vbid"] != 3} == {before}
    with pytest.raises(ConfigError, match="resync of vb 99"):
        consumer.request(Resync(99))
    await mirror.stop()
    assert_equal(mirror, cluster)


async def test_published_ahead_of_the_last_known_high_seqno_is_no_negative_lag(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    write(cluster, 50)
    mirror = mirror_of(cluster, tmp_path)
    consumer = mirror.start(cluster.connection_string)
    await follow(mirror, cluster)
    vbucket = consumer.vbuckets[3]
    assert vbucket.session is not None
    vbucket.polled = (vbucket.session, 1)
    assert mirror.row(3)["published_seqno"] > 1
    assert mirror.row(3)["lag_seqnos"] == 0
    await mirror.stop()
