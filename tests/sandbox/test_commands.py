"""The commands of a running source: every command does what it says."""

from __future__ import annotations

from mirror.sandbox.control import SandboxControl

from .client import Client, send_command


async def test_the_commands_status_and_vbucket_show_the_cluster(server: SandboxControl) -> None:
    await send_command(server, "write", count=50)
    status = await send_command(server, "status")
    assert (status["vbuckets"], status["written"], len(status["nodes"])) == (4, 50, 2)
    assert status["profile"] == "8.0"
    assert status["documents"] == server.cluster.bucket.document_count
    seen = await send_command(server, "vbucket", vbid=1)
    assert (seen["node"], seen["high_seqno"]) == (1, server.cluster.vbucket(1).high_seqno)


async def test_the_commands_for_faults_change_the_cluster(server: SandboxControl) -> None:
    cluster = server.cluster
    client = await Client.dcp(cluster)
    assert await send_command(server, "cut", node="0") == {"connections": 1}
    await client.until_closed()
    assert await send_command(server, "silence") == {"connections": 0}
    await send_command(server, "write", count=50)
    high = cluster.vbucket(0).high_seqno
    assert await send_command(server, "failover", vbid=0, lose=2) == {"base_seqno": high - 2}
    await send_command(server, "kill-node", node=1)
    assert not cluster.nodes[1].alive
    await send_command(server, "restart-node", node=1)
    await send_command(server, "failover-node", node=1)
    assert {node.number for node in cluster.bucket.map.nodes} == {0}
    left = (await send_command(server, "user", user="demo", lacks="DcpStream,Upsert"))["privileges"]
    assert "DcpStream" not in left
    await send_command(server, "user", user="new", password="pw")
    assert cluster.bucket.users.password_of("new") == "pw"


async def test_the_commands_for_data_change_the_bucket(server: SandboxControl) -> None:
    bucket = server.cluster.bucket
    await send_command(server, "create-scope", scope="s")
    assert await send_command(server, "create-collection", scope="s", collection="c") == {"collection_id": 8}
    await send_command(server, "flush-collection", path="s.c")
    await send_command(server, "drop-collection", path="s.c")
    assert bucket.manifest.uid == 4
    await send_command(server, "rate", rate="2.5")
    assert server.workload is not None
    assert server.workload.rate == 2.5
    for key, value in (("007", "true"), ("true", "1.50")):
        # `key=007 value=1.50` once stored the key 7 with the value 1.5
        await send_command(server, "set", key=key, value=value, vbid="2")
        item = bucket.get(key, vbid=2)
        assert item is not None
        assert item.value == value.encode()
    await send_command(server, "delete", key="007", vbid=2)
    assert bucket.get("007", vbid=2) is None
    await send_command(server, "recreate-bucket")
    assert bucket.manifest.uid == 0
