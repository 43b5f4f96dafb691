"""A bucket that keeps history: with `change_streams` superseded versions come too, in snapshots of two markers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirror.sandbox.cluster import SandboxCluster
from storage.read.view import open_view
from tests.feed.harness import Mirror, Mirrors
from tests.storage.model import events

VBUCKETS = 1


def versions(mirror: Mirror) -> list[int]:
    with open_view(mirror.path, partial=True) as view:
        return [document.seqno for document in events(view) if document.key == b"hot"]


@pytest.mark.parametrize("requested", [True, False])
async def test_every_version_that_the_source_kept_is_mirrored_on_request(tmp_path: Path, requested: bool) -> None:
    cluster = SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1, keeps_history=True)
    async with cluster, Mirrors(cluster, tmp_path, compares=False, groups=1) as mirrors:
        for number in range(6):
            cluster.set("hot", {"n": number})
            cluster.set(f"cold-{number}", {"n": number})
        cluster.bucket.discard_history(0, 5)  # retention has passed the first ones
        cluster.bucket.to_disk()
        mirror = mirrors.start(change_streams=requested)
        await mirror.until_published(0, cluster.vbucket(0).high_seqno)
        cluster.set("hot", {"n": 6})
        await mirror.until_published(0, cluster.vbucket(0).high_seqno)
        assert bool(mirror.status()["nodes"][0]["controls"].get("change_streams")) is requested
        assert mirror.status()["warnings"] == []
        found = versions(mirror)
        assert found[-2:] == [11, 13]
        assert (len(found) > 2) is requested, found
        with open_view(mirror.path, partial=True) as view:
            hot = view.get("hot")
            assert hot is not None
            assert hot.seqno == 13


async def test_a_bucket_without_history_is_mirrored_with_a_warning(tmp_path: Path) -> None:
    cluster = SandboxCluster(nodes=1, vbuckets=VBUCKETS, seed=1)
    async with cluster, Mirrors(cluster, tmp_path, compares=False, groups=1) as mirrors:
        cluster.set("hot", {"n": 1})
        mirror = mirrors.start(change_streams=True)
        await mirror.until_published(0, 1)
        (warning,) = mirror.status()["warnings"]
        assert "does not offer change_streams" in warning
