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
        (b'{"command":"cut","colour":"red"}\n', "no such argument: colour; there are: collection"),
        (b'{"command":"cut","vbid":1}\n', "vbid"),
        (b'{"command":"user","user":"x"}\n', "password is missing"),
        (b'{"command":"user","user":"demo","lacks":"Nothing"}\n', "no such privilege: Nothing"),
        (b'{"command":"delete","key":"nothing"}\n', "refused as a client would be: KEY_ENOENT"),
        (b'{"command":"set","key":"k","value":"1","collection":"no.no"}\n', "no collection no.no"),
        (b'{"command":"set","key":7,"value":"{}"}\n', "key=7 is not a text"),
        (b'{"command":"drop-collection","path":"x"}\n', "no collection"),
        (b'{"command":"vbucket","vbid":"x"}\n', "vbid=x is not a whole number"),
        (b'{"command":"kill-node","node":2}\n', "node=2: there are 0 to 1"),
        (b'{"command":"create-scope","scope":"\\ud800"}\n', "scope=\ud800 is not a text"),
        (b'{"command":"failover-node","node":0,"lose":18446744073709551616}\n', "lose=1844"),
        (b'{"command":"rate","rate":"nan"}\n', "rate=nan is not a number"),
        (b'{"command":"rate","rate":-1}\n', "rate=-1 is not a number"),
        (b'{"command":"rate","rate":1%b}\n' % (b"0" * 400), "rate=1000"),
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
        (server.workload.rate, set(bucket.users.by_name)),
    )


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
