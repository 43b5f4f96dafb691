"""A stream: disk and memory snapshots, their flags and bounds, and what is shown in them."""

from __future__ import annotations

from mirror.sandbox import SandboxCluster
from mirror.wire import events as ev

from .client import DATA, Client


async def test_a_backfill_sends_the_newest_version_of_each_key_and_then_goes_live() -> None:
    async with SandboxCluster(vbuckets=4) as cluster:
        for round_ in range(3):
            for index in range(50):
                cluster.set(f"k{index}", {"round": round_}, vbid=1)
        cluster.delete("k7", vbid=1)
        cluster.bucket.to_disk()
        client = await Client.dcp(cluster)
        answer = await client.stream(1)
        assert answer.status == 0
        await client.until_seqno(1, 151)
        assert client.markers() == [(0, 151, 6)]
        data = client.of(*DATA)
        assert [e.seqno for e in data] == sorted(e.seqno for e in data)
        assert len(data) == 50
        assert isinstance(data[-1], ev.Deletion)
        cluster.set("k7", {"back": 1}, vbid=1)
        await client.until_seqno(1, 152)
        assert client.markers()[1:] == [(152, 152, 5)]
        assert client.of(ev.Mutation)[-1].rev_seqno == 5
