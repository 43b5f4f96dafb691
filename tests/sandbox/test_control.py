"""The control socket: what bad commands are answered, and where it is; the commands are in test_commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from mirror.errors import ConfigError, ConnectFailed
from mirror.sandbox.control import SandboxControl, ask, default_path

from .client import send_command


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"garbage\n", "no such command"),
        (b"[1]\n", "no such command"),
        (b'{"command":"nonsense"}\n', "no such command"),
        (b'{"command":"failover"}\n', "vbid is missing"),
        (b'{"command":"failover","vbid":99}\n', "vbid=99: there are 0 to 3"),
        (b'{"command":"cut","colour":"red"}\n', "no such argument: colour; there are: after_pieces"),
        (b'{"command":"cut","vbid":1}\n', "vbid"),
        (b'{"command":"refuse-streams","status":"NO"}\n', "no such Status: NO; there are: KEY_EEXISTS"),
        (b'{"command":"end-streams","reason":99}\n', "no such StreamEndReason: 99"),
        (
            b'{"command":"refuse-streams","status":"ROLLBACK","seqno":18446744073709551616}\n',
            "seqno=18446744073709551616",
        ),
        (b'{"command":"mute-streams","vbids":"all"}\n', "vbids=all is not a list of whole numbers"),
        (b'{"command":"mute-streams","vbids":"0,4"}\n', "vbids=0,4: there are 0 to 3"),
        (b'{"command":"move","vbid":1,"node":2}\n', "node=2: there are 0 to 1"),
        (b'{"command":"user","user":"x"}\n', "password is missing"),
        (b'{"command":"user","user":"demo","lacks":"Nothing"}\n', "no such privilege: Nothing"),
        (b'{"command":"commit","key":"nothing"}\n', "refused as a client would be: KEY_ENOENT"),
        (b'{"command":"tune","colour":3}\n', "no such argument: colour"),
        (b'{"command":"set","key":"k"}\n', "value is missing"),
        (b'{"command":"set","key":"k","value":"1","collection":"no.no"}\n', "no collection no.no"),
        (b'{"command":"drop-scope","scope":"x"}\n', "no scope"),
        (b'{"command":"vbucket","vbid":"x"}\n', "vbid=x is not a whole number"),
        (b'{"command":"create-scope","scope":2026}\n', "scope=2026 is not a text"),
        (b'{"command":"create-scope","scope":"\\ud800"}\n', "scope=\ud800 is not a text"),
        (b'{"command":"create-collection","scope":"_default","collection":"c","max_ttl":"x"}\n', "max_ttl=x is not"),
        (
            b'{"command":"create-collection","scope":"_default","collection":"c","max_ttl":4294967296}\n',
            "max_ttl=42949",
        ),
        (
            b'{"command":"modify-collection","path":"_default._default","history":"x"}\n',
            "history=x is not true or false",
        ),
        (b'{"command":"failover-node","node":0,"lose":"x"}\n', "lose=x is not a whole number"),
        (b'{"command":"failover-node","node":0,"los":10}\n', "no such argument: los"),
        (b'{"command":"slow","bytes_per_second":"x","future":true}\n', "bytes_per_second=x is not a number"),
        (b'{"command":"slow","bytes_per_second":1%b}\n' % (b"0" * 400), "bytes_per_second=1000"),
        (b'{"command":"cut","name":"x","future":true,"dcp_only":false}\n', "a new connection has no name"),
        (b'{"command":"rate","rate":"nan"}\n', "rate=nan is not a number"),
        (b'{"command":"rate","rate":-1}\n', "rate=-1 is not a number"),
        (b'{"command":"rebalance","nodes":[]}\n', "nodes=[] is not a list of whole numbers"),
        (b'{"command":"set","key":7,"value":"{}"}\n', "key=7 is not a text"),
    ],
)
async def test_bad_commands_change_nothing(server: SandboxControl, line: bytes, error: str) -> None:
    before = state(server)
    answer = await server.answer(line)
    assert (answer["ok"], state(server)) == (False, before)
    assert error in str(answer["error"])


def state(server: SandboxControl) -> object:
    cluster, bucket = server.cluster, server.cluster.bucket
    assert server.workload is not None
    return (
        (bucket.map.rev, list(bucket.map.owners), bucket.manifest.uid, bucket.manifest.to_json()),
        [(node.alive, len(node.on_dcp_open), len(node.on_connect)) for node in cluster.nodes],
        [(vbucket.high_seqno, vbucket.failover_log) for vbucket in cluster.vbuckets],
        (bucket.stream_faults.refusal(0), bucket.tuning.antilag_items, server.workload.rate, set(bucket.users.by_name)),
    )


async def test_arguments_may_be_texts_and_texts_stay_texts(server: SandboxControl) -> None:
    """`set key=007 value=1.50` stored the key 7 with the value 1.5, and a list of one node was no list."""
    bucket = server.cluster.bucket
    for key, value in (("007", "true"), ("true", "1.50")):
        await send_command(server, "set", key=key, value=value, vbid="2")
        item = bucket.get(key, vbid=2)
        assert item is not None
        assert item.value == value.encode()
    await send_command(server, "rebalance", nodes="0")
    assert set(bucket.map.owners) == {0}
    await send_command(server, "rebalance", nodes="0,1")
    assert set(bucket.map.owners) == {0, 1}
    await send_command(server, "refuse-streams", status="35", vbids="1", times="1")
    assert await send_command(server, "slow", bytes_per_second="2.5", future="true") == {"connections": 0}


async def test_a_failing_command_gets_an_answer(server: SandboxControl) -> None:
    for node in server.cluster.nodes:
        await server.cluster.kill_node(node.number)
    with pytest.raises(ConfigError, match="no node"):
        await send_command(server, "rebalance")


async def test_a_client_gets_the_reason_of_an_error(server: SandboxControl, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such command"):
        await send_command(server, "nonsense")
    with pytest.raises(ConnectFailed, match="no source answers"):
        ask(tmp_path / "missing.sock", "status")
    server.workload = None
    with pytest.raises(ConfigError, match="no workload"):
        await send_command(server, "write", count=1)
    with pytest.raises(ConfigError, match="no workload"):
        await send_command(server, "rate", rate=1)


def test_the_socket_is_named_after_the_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_path(1234) == tmp_path / "dcp-mirror-sandbox-1234.sock"
