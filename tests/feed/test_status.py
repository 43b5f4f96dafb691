"""What a consumer reports: warnings, and nothing as known that is not."""

from __future__ import annotations

import pytest

from mirror.sandbox.cluster import SandboxCluster
from mirror.server.cluster_config import NOWHERE
from tests.feed.harness import VBUCKETS, Mirrors, write


async def test_a_wall_clock_that_is_set_is_a_warning(
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


async def test_how_far_a_source_is_that_is_gone_is_not_known(cluster: SandboxCluster, mirrors: Mirrors) -> None:
    """It is no lag of 0: what the lost node said last says nothing of what it has now."""
    write(cluster, 50)
    mirror = await mirrors.follow()
    await mirror.until(lambda: all(row["lag_seqnos"] == 0 for row in mirror.status()["vbuckets"]), "no lag")
    await cluster.kill_node(1)
    theirs = [vbid for vbid, owner in enumerate(cluster.bucket.map.owners) if owner == 1]

    def figures(vbid: int) -> tuple[int | None, int | None]:
        return mirror.row(vbid)["source_high_seqno"], mirror.row(vbid)["lag_seqnos"]

    await mirror.until(lambda: all(figures(vbid) == (None, None) for vbid in theirs), "unknown figures")
    assert set(mirror.consumer.source_high_seqnos()) == set(range(VBUCKETS)) - set(theirs)
    # A vbucket that has no node any more is not as far as its last node said, either.
    cluster.bucket.map.owners[0] = NOWHERE
    cluster.bucket.map_changed(0)
    await mirror.until(lambda: figures(0) == (None, None), "an unknown figure of a vbucket without a node")
    await cluster.restart_node(1)
    await mirror.until(lambda: all(figures(vbid)[1] == 0 for vbid in theirs), "known figures")
