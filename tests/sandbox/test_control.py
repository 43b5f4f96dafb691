"""The control socket: every command, and what bad ones are answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mirror.errors import ConfigError, ConnectFailed
from mirror.sandbox import SandboxCluster, Workload, WorkloadOptions
from mirror.sandbox.control import ControlServer, ask, default_path
from mirror.wire import events as ev
from mirror.wire.constants import Status, StreamEndReason

from .client import Client


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ControlServer]:
    async with SandboxCluster(nodes=2, vbuckets=4) as cluster:
        control = ControlServer(cluster, Workload(cluster.bucket, WorkloadOptions()), tmp_path / "s.sock")
        await control.start()
        yield control
        await control.stop()
    assert not control.path.exists()


async def tell(server: ControlServer, command: str, **arguments: object) -> Any:
    return await asyncio.to_thread(ask, server.path, command, **arguments)


async def test_status_and_vbuckets(server: ControlServer) -> None:
    await tell(server, "write", count=50)
    status = await tell(server, "status")
    assert (status["vbuckets"], status["written"], len(status["nodes"])) == (4, 50, 2)
    assert status["documents"] == server.cluster.bucket.document_count
    seen = await tell(server, "vbucket", vbid=1)
    assert (seen["node"], seen["high_seqno"]) == (1, server.cluster.vbucket(1).high_seqno)


async def test_faults_and_topology(server: ControlServer) -> None:
    cluster = server.cluster
    client = await Client.dcp(cluster)
    assert await tell(server, "fault", kind="slow", bytes_per_second=1000) == {"connections": 1}
    assert await tell(server, "fault", kind="cut", node=0, name="test") == {"connections": 1}
    await client.until_closed()
    assert await tell(server, "fault", kind="clear") == {"connections": None}
    await tell(server, "write", count=50)
    high = cluster.vbucket(0).high_seqno
    assert await tell(server, "failover", vbid=0, lose=2) == {"base_seqno": high - 2}
    await tell(server, "move", vbid=0, node=0)
    await tell(server, "kill-node", node=1)
    assert not cluster.nodes[1].alive
    await tell(server, "restart-node", node=1)
    assert await tell(server, "add-node") == {"node": 2}
    assert (await tell(server, "rebalance"))["moved"] > 0
    await tell(server, "failover-node", node=1)
    assert {node.number for node in cluster.bucket.map.nodes} == {0, 2}


async def test_streams_and_privileges(server: ControlServer) -> None:
    cluster = server.cluster
    client = await Client.dcp(cluster, set_noop_interval="0.1")
    await tell(server, "fault", kind="refuse-streams", status="rollback", vbids=2, seqno=7)
    await tell(server, "fault", kind="refuse-streams", status=0x86, vbids=[0, 2], times=1)
    assert [(await client.stream(vbid)).status for vbid in (2, 2, 0)] == [Status.ETMPFAIL, Status.ROLLBACK, 0]
    assert await tell(server, "fault", kind="end-streams", reason="lost-privileges") == {"streams": 1}
    await client.until(lambda: [e.reason for e in client.of(ev.StreamEnd)] == [StreamEndReason.LOST_PRIVILEGES])
    await tell(server, "fault", kind="mute-streams", vbids=0)
    await tell(server, "fault", kind="withhold-noops")
    assert cluster.bucket.stream_faults.noops_withheld
    assert cluster.bucket.stream_faults.muted(0, 0)
    await tell(server, "fault", kind="clear")
    assert not cluster.bucket.stream_faults.noops_withheld
    left = (await tell(server, "user", user="demo", lacks="DcpStream,Upsert"))["privileges"]
    assert "DcpStream" not in left
    assert (await client.stream(0)).status == Status.EACCESS
    await tell(server, "user", user="new", password="pw")
    assert cluster.bucket.users.password_of("new") == "pw"


async def test_data_and_collections(server: ControlServer) -> None:
    bucket = server.cluster.bucket
    await tell(server, "create-scope", scope="s")
    assert await tell(server, "create-collection", scope="s", collection="c", max_ttl=5) == {"collection_id": 8}
    await tell(server, "flush-collection", path="s.c")
    await tell(server, "drop-collection", path="s.c")
    await tell(server, "drop-scope", scope="s")
    assert bucket.manifest.uid == 5
    await tell(server, "to-disk", vbid=0)
    assert bucket.vbuckets[0].memory_floor_seqno == 5
    await tell(server, "purge")
    assert await tell(server, "expire") == {"expired": 0}
    await tell(server, "rate", rate=5)
    assert server.workload is not None
    assert server.workload.rate == 5
    await tell(server, "recreate-bucket")
    assert bucket.manifest.uid == 0


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"garbage\n", "no such command"),
        (b"[1]\n", "no such command"),
        (b'{"command":"nonsense"}\n', "no such command"),
        (b'{"command":"failover"}\n', "vbid is missing"),
        (b'{"command":"failover","vbid":99}\n', "range"),
        (b'{"command":"fault","kind":"earthquake"}\n', "no such fault"),
        (b'{"command":"fault","kind":"cut","colour":"red"}\n', "colour"),
        (b'{"command":"fault","kind":"refuse-streams","status":"NO"}\n', "no such Status: NO; there are: SUCCESS"),
        (b'{"command":"fault","kind":"end-streams","reason":99}\n', "no such StreamEndReason: 99"),
        (b'{"command":"fault","kind":"mute-streams","vbids":"all"}\n', "vbids are numbers"),
        (b'{"command":"user","user":"x"}\n', "password is missing"),
        (b'{"command":"user","user":"demo","lacks":"Nothing"}\n', "no such privilege: Nothing"),
        (b'{"command":"drop-scope","scope":"x"}\n', "no scope"),
        (b'{"command":"vbucket","vbid":"x"}\n', "indices"),
    ],
)
async def test_bad_commands_change_nothing(server: ControlServer, line: bytes, error: str) -> None:
    rev = server.cluster.bucket.map.rev
    answer = await server.answer(line)
    assert answer["ok"] is False
    assert error in answer["error"]
    assert server.cluster.bucket.map.rev == rev


async def test_who_asks_is_told_what_is_wrong(server: ControlServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such command"):
        await tell(server, "nonsense")
    with pytest.raises(ConnectFailed, match="no source answers"):
        ask(tmp_path / "nobody.sock", "status")
    server.workload = None
    with pytest.raises(ConfigError, match="no workload"):
        await tell(server, "write", count=1)
    with pytest.raises(ConfigError, match="no workload"):
        await tell(server, "rate", rate=1)


def test_the_socket_is_named_after_the_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_path(1234) == tmp_path / "dcp-mirror-sandbox-1234.sock"
    assert json.dumps(str(default_path(1)))
