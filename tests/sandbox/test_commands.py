"""The commands of a running source: every command does what it says."""

from __future__ import annotations

from mirror.sandbox.control import SandboxControl
from mirror.wire import events as ev
from mirror.wire.constants import Status, StreamEndReason

from .client import Client, send_command


async def test_the_commands_status_and_vbucket_show_the_cluster(server: SandboxControl) -> None:
    await send_command(server, "write", count=50)
    status = await send_command(server, "status")
    assert (status["vbuckets"], status["written"], len(status["nodes"])) == (4, 50, 2)
    assert status["profile"] == "8.0"
    assert status["documents"] == server.cluster.bucket.document_count
    seen = await send_command(server, "vbucket", vbid=1)
    assert (seen["node"], seen["high_seqno"]) == (1, server.cluster.vbucket(1).high_seqno)


async def test_the_commands_for_faults_and_topology_change_the_cluster(server: SandboxControl) -> None:
    cluster = server.cluster
    client = await Client.dcp(cluster)
    assert await send_command(server, "slow", bytes_per_second=1000) == {"connections": 1}
    assert await send_command(server, "cut", node=0, name="test") == {"connections": 1}
    await client.until_closed()
    await send_command(server, "clear")
    await send_command(server, "write", count=50)
    high = cluster.vbucket(0).high_seqno
    assert await send_command(server, "failover", vbid=0, lose=2) == {"base_seqno": high - 2}
    await send_command(server, "move", vbid=0, node=0)
    await send_command(server, "kill-node", node=1)
    assert not cluster.nodes[1].alive
    await send_command(server, "restart-node", node=1)
    assert await send_command(server, "add-node") == {"node": 2}
    assert (await send_command(server, "rebalance"))["moved"] > 0
    await send_command(server, "split-off", node=0)
    assert cluster.nodes[0].bucket is not cluster.bucket
    await send_command(server, "failover-node", node=1)
    assert {node.number for node in cluster.bucket.map.nodes} == {0, 2}


async def test_the_commands_for_streams_and_privileges_take_effect(server: SandboxControl) -> None:
    cluster = server.cluster
    client = await Client.dcp(cluster, set_noop_interval="0.1")
    await send_command(server, "refuse-streams", status="rollback", vbids=2, seqno=7)
    await send_command(server, "refuse-streams", status=0x86, vbids=[0, 2], times=1)
    assert [(await client.stream(vbid)).status for vbid in (2, 2, 0)] == [Status.ETMPFAIL, Status.ROLLBACK, 0]
    assert await send_command(server, "end-streams", reason="lost-privileges") == {"streams": 1}
    await client.until(lambda: [e.reason for e in client.of(ev.StreamEnd)] == [StreamEndReason.LOST_PRIVILEGES])
    await send_command(server, "mute-streams", vbids=0)
    await send_command(server, "withhold-noops")
    assert cluster.bucket.stream_faults.noops_withheld
    assert cluster.bucket.stream_faults.muted(0, 0)
    await send_command(server, "clear")
    assert not cluster.bucket.stream_faults.noops_withheld
    left = (await send_command(server, "user", user="demo", lacks="DcpStream,Upsert"))["privileges"]
    assert "DcpStream" not in left
    assert (await client.stream(0)).status == Status.EACCESS
    await send_command(server, "user", user="new", password="pw")
    assert cluster.bucket.users.password_of("new") == "pw"


async def test_the_commands_for_collections_change_the_bucket(server: SandboxControl) -> None:
    bucket = server.cluster.bucket
    await send_command(server, "create-scope", scope="s")
    assert await send_command(server, "create-collection", scope="s", collection="c", max_ttl=5) == {"collection_id": 8}
    await send_command(server, "flush-collection", path="s.c")
    await send_command(server, "drop-collection", path="s.c")
    await send_command(server, "drop-scope", scope="s")
    assert bucket.manifest.uid == 5
    await send_command(server, "to-disk", vbid=0)
    assert bucket.vbuckets[0].memory_floor_seqno == 5
    await send_command(server, "purge")
    assert await send_command(server, "expire") == {"expired": 0}
    await send_command(server, "rate", rate=5)
    assert server.workload is not None
    assert server.workload.rate == 5
    await send_command(server, "recreate-bucket")
    assert bucket.manifest.uid == 0


async def test_the_commands_for_documents_and_durable_writes_change_the_bucket(server: SandboxControl) -> None:
    bucket = server.cluster.bucket
    assert await send_command(server, "set", key="k", value='{"a":1}', vbid=2) == {"vbid": 2, "seqno": 1}
    assert await send_command(server, "prepare", key="k", value="2", vbid=2) == {"vbid": 2, "seqno": 2}
    assert await send_command(server, "abort", key="k", vbid=2) == {"vbid": 2, "seqno": 3}
    await send_command(server, "prepare", key="k", vbid=2)
    assert await send_command(server, "commit", key="k", vbid=2) == {"vbid": 2, "seqno": 5}
    assert bucket.get("k", vbid=2) is None
    await send_command(server, "set", key="k", value="3")
    await send_command(server, "delete", key="k")
    assert bucket.get("k") is None


async def test_the_commands_for_settings_take_effect(server: SandboxControl) -> None:
    bucket = server.cluster.bucket
    await send_command(server, "create-scope", scope="s")
    await send_command(server, "create-collection", scope="s", collection="c")
    await send_command(server, "modify-collection", path="s.c", max_ttl=7, history=True)
    entry = bucket.manifest.collection("s.c")
    assert entry is not None
    assert (entry.max_ttl, entry.history) == (7, True)
    assert await send_command(server, "tune", antilag_items=5) == {"antilag_items": 5}
    assert bucket.tuning.antilag_items == 5
    vbucket = bucket.vbuckets[0]
    vbucket.history_start_seqno = 1
    await send_command(server, "discard-history", vbid=0, below_seqno=3)
    assert vbucket.history_start_seqno == 3
    for key in ("a", "b"):
        bucket.set(key, {}, vbid=1)
        bucket.delete(key, vbid=1)
    await send_command(server, "purge", vbid=1, below_seqno=5)
    assert bucket.vbuckets[1].purge_seqno == 5
