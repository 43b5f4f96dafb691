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
        (b'{"command":"cut","colour":"red"}\n', "colour"),
        (b'{"command":"refuse-streams","status":"NO"}\n', "no such Status: NO; there are: KEY_EEXISTS"),
        (b'{"command":"end-streams","reason":99}\n', "no such StreamEndReason: 99"),
        (b'{"command":"mute-streams","vbids":"all"}\n', "vbids=all: there are 0 to 3"),
        (b'{"command":"move","vbid":1,"node":2}\n', "node=2: there are 0 to 1"),
        (b'{"command":"user","user":"x"}\n', "password is missing"),
        (b'{"command":"user","user":"demo","lacks":"Nothing"}\n', "no such privilege: Nothing"),
        (b'{"command":"commit","key":"nothing"}\n', "refused as a client would be: KEY_ENOENT"),
        (b'{"command":"tune","colour":3}\n', "colour=3 is not antilag_items=N"),
        (b'{"command":"set","key":"k"}\n', "value is missing"),
        (b'{"command":"set","key":"k","value":"1","collection":"no.no"}\n', "no collection no.no"),
        (b'{"command":"drop-scope","scope":"x"}\n', "no scope"),
        (b'{"command":"vbucket","vbid":"x"}\n', "vbid=x: there are 0 to 3"),
    ],
)
async def test_bad_commands_change_nothing(server: SandboxControl, line: bytes, error: str) -> None:
    rev = server.cluster.bucket.map.rev
    answer = await server.answer(line)
    assert answer["ok"] is False
    assert error in str(answer["error"])
    assert server.cluster.bucket.map.rev == rev


async def test_a_client_gets_the_reason_of_an_error(server: SandboxControl, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such command"):
        await send_command(server, "nonsense")
    with pytest.raises(ConnectFailed, match="no source answers"):
        ask(tmp_path / "nobody.sock", "status")
    server.workload = None
    with pytest.raises(ConfigError, match="no workload"):
        await send_command(server, "write", count=1)
    with pytest.raises(ConfigError, match="no workload"):
        await send_command(server, "rate", rate=1)


def test_the_socket_is_named_after_the_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_path(1234) == tmp_path / "dcp-mirror-sandbox-1234.sock"
