"""A mirror of the embedded source, for tests of the consumer and of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mirror.sandbox.cluster import SandboxCluster
from storage.admin.check import check
from storage.read.view import open_view
from tests.feed.harness import Mirror
from tests.sandbox.past import state_at

VBUCKETS = 8


def mirror_of(cluster: SandboxCluster, path: Path, **options: Any) -> Mirror:
    settings = {"noop_interval_s": 0.5, "connection_buffer_size": 64 * 1024, **options.pop("settings", {})}
    return Mirror(
        path,
        bucket=cluster.bucket.name,
        bucket_uuid=options.pop("bucket_uuid", cluster.bucket.map.bucket_uuid),
        vbuckets=VBUCKETS,
        password=options.pop("password", "demo"),
        groups=options.pop("groups", 2),
        settings=settings,
        **options,
    )


def write(cluster: SandboxCluster, count: int, name: str = "doc") -> None:
    for number in range(count):
        cluster.set(f"{name}-{number}", {"name": name, "number": number})


async def follow(mirror: Mirror, cluster: SandboxCluster) -> None:
    """Wait until everything that the source has now is published."""
    assert mirror.consumer is not None
    targets = {vbid: cluster.vbucket(vbid).high_seqno for vbid in range(VBUCKETS)}
    consumer = mirror.consumer
    await mirror.until(lambda: consumer.caught_up(targets), "caught up")
    await mirror.until(
        lambda: all(mirror.row(vbid)["published_seqno"] == seqno for vbid, seqno in targets.items()), "exactly there"
    )


def assert_equal(mirror: Mirror, cluster: SandboxCluster) -> None:
    """What readers see of every vbucket is the source's state at that boundary."""
    assert check(mirror.path).problems == []
    with open_view(mirror.path) as view:
        for vbid in range(VBUCKETS):
            source = state_at(cluster.vbucket(vbid), view.state(vbid).published_seqno)
            seen = {
                b"\0" + document.key: (document.seqno, document.cas, document.rev_seqno, document.flags)
                for document in view.scan(vbid, now=0)
            }
            expected = {key: (item.seqno, item.cas, item.rev_seqno, item.flags) for key, item in source.items()}
            assert seen == expected, f"vb {vbid}"
