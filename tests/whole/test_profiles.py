"""A cluster of each age, and all that happens to clusters: at the end the mirror is the bucket, and nothing was sent
twice that need not be.

The source is the embedded one, of several nodes, by server profile; the mirror runs as a process and is held against
the source's own record (`judge`) and by its own command (`verify`). What was sent is the source's count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mirror.sandbox import NodeTls, SandboxCluster, SandboxThread
from storage.read.view import open_view
from tests.cli.conftest import call
from tests.crash.judge import judge
from tests.crash.load import Load
from tests.crash.service import Service, until
from tests.feed.authority import Authority

VBUCKETS = 24
RATE = 400.0
LOST = 3
"""Seqnos that each of the vbuckets that fail over loses."""
FAILED_OVER = range(0, VBUCKETS, 6)


class Story:
    def __init__(self, source: SandboxThread, service: Service, load: Load) -> None:
        self.source = source
        self.service = service
        self.load = load
        self._loading: asyncio.Task[None] | None = None

    @property
    def cluster(self) -> SandboxCluster:
        return self.source.cluster

    def begin_load(self) -> None:
        async def begin() -> None:
            self._loading = asyncio.get_running_loop().create_task(self.load.run())

        self.source.run(begin())

    def end_load(self) -> None:
        async def end() -> None:
            assert self._loading is not None
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)

        self.source.run(end())

    def followed(self, what: str) -> None:
        """Wait until the mirror has all that the source has now."""
        expected = self.high_seqnos()
        until(f"the mirror to follow after {what}", lambda: all(map(int.__le__, expected, self.published())))

    def written(self, seqnos: int) -> None:
        """Wait until every vbucket has so many seqnos more, so that a loss takes nothing of what was before."""
        expected = [seqno + seqnos for seqno in self.high_seqnos()]
        until(f"{seqnos} writes in every vbucket", lambda: all(map(int.__le__, expected, self.high_seqnos())))

    def high_seqnos(self) -> list[int]:
        return self.source.call(lambda: [vbucket.high_seqno for vbucket in self.cluster.vbuckets])

    def published(self) -> list[int]:
        with open_view(str(self.service.data), partial=True) as view:
            return [int(each.pub.seqno) for _, each in sorted(view.published().items())]

    def sent_bytes(self) -> int:
        return self.source.call(lambda: sum(self.cluster.sent(vbid).bytes for vbid in range(VBUCKETS)))

    def starts(self) -> dict[int, list[int]]:
        """vbid -> the seqno that each accepted stream began at."""
        return self.source.call(
            lambda: {
                vbid: [each.start_seqno for each in self.cluster.sent(vbid).stream_requests] for vbid in range(VBUCKETS)
            }
        )

    def on_source(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self.source.call(function, *arguments, **options)


def everything_happens(story: Story, authority: Authority, *, collections: bool) -> None:
    cluster, bucket = story.cluster, story.cluster.bucket
    number = story.source.run(cluster.add_node())
    story.source.run(cluster.rebalance(pause_seconds=0.01))
    story.followed("a rebalance in")
    story.source.run(cluster.rebalance([0, 1], pause_seconds=0.01))
    assert number not in {node.number for node in bucket.map.nodes}
    story.followed("a rebalance out")
    story.written(4 * LOST)
    story.followed("some writes")
    for vbid in FAILED_OVER:
        story.on_source(cluster.failover, vbid, lose=LOST)
    story.followed("failovers with loss")
    story.written(4 * LOST)
    story.followed("some more writes")
    story.source.run(cluster.failover_node(1, lose=LOST))
    story.followed("a node that failed over")
    assert cluster.tls is not None
    renewed = Authority(authority.ca_file.parent, "renewed-ca")
    authority.ca_file.write_bytes(authority.ca_file.read_bytes() + renewed.ca_file.read_bytes())
    story.on_source(cluster.tls.rotate, *renewed.sign("localhost", "127.0.0.1", into="renewed"))
    number = story.source.run(cluster.add_node())  # anyone who comes to it sees the new certificate
    story.source.run(cluster.rebalance(pause_seconds=0.01))
    assert number in {node.number for node in bucket.map.nodes}
    story.followed("a change of certificates")
    if collections:
        story.on_source(bucket.create_scope, "news")
        for name in ("read", "dropped", "flushed"):
            story.on_source(bucket.create_collection, "news", name)
            for each in range(100):
                story.on_source(bucket.set, b"%d" % each, b'{"of": "news"}', collection=f"news.{name}")
        story.followed("new collections")
        story.on_source(bucket.drop_collection, "news.dropped")
        story.on_source(bucket.flush_collection, "news.flushed")
        story.on_source(bucket.set, b"after", b'{"of": "the flush"}', collection="news.flushed")
        story.followed("a drop and a flush")


@pytest.mark.ci
@pytest.mark.parametrize("profile", ["5.x", "6.x", "7.x", "8.x"])
def test_a_mirror_equals_a_cluster_of_each_release_after_all_its_changes(
    profile: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    authority = Authority(tmp_path)
    tls = NodeTls(*authority.sign("localhost", "127.0.0.1"))
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, profile=profile, seed=7, tls=tls)
    collections = cluster.bucket.profile.collections
    trust = ("--set", f"tls_ca_file={authority.ca_file}")
    often = ("--set", "map_poll_interval_s=0.2", "--set", "noop_interval_s=1")
    flags = ("--groups", "4", "--workers", "2", *often, *trust)
    with SandboxThread(cluster) as source, Service(source.connection_string, tmp_path / "data", *flags) as service:
        load = Load(cluster, 7, rate=RATE, keys=2000, collections=collections)
        source.call(load.write, 4000)
        story = Story(source, service, load)
        service.start()
        until("the first fill", lambda: (service.data / "mirror.json").exists() and all(story.published()))
        first_fill_bytes = story.sent_bytes()
        story.begin_load()
        everything_happens(story, authority, collections=collections)
        story.end_load()
        until("the mirror to stand where the source does", lambda: story.published() == story.high_seqnos())
        status = service.status()
        assert status is not None
        again = sum(worker["counters"]["requested_again_bytes"] for worker in status["workers"])
        sent_bytes, starts = story.sent_bytes(), story.starts()
        judge(cluster, service.data, live=True)
        verified = call("verify", "--data", service.data, "--source", source.connection_string, "--json", *trust)
        assert verified.code == 0, verified.out + verified.err
        if collections:
            with open_view(str(service.data), partial=True) as view:
                assert [d.key for d in view.scan(collection="news.flushed")] == [b"after"]
                assert sum(1 for _ in view.scan(collection="news.read")) == 100
        from_nothing = [vbid for vbid, seqnos in starts.items() if seqnos.count(0) != 1]
        assert from_nothing == [], "filled more than once, or never"
        assert again == 0
        record_property(
            "sent",
            f"profile {profile}: {first_fill_bytes:,} bytes for the first fill, {sent_bytes:,} in all, "
            f"{again} of what was published requested again, {status['totals']['rollback_count']} rollbacks",
        )
        assert status["totals"]["rollback_count"] >= len(FAILED_OVER)
        assert service.terminate() == 0
        assert not service.tracebacks()
