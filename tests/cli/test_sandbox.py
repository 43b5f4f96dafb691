from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.sandbox import FAULT_HELP, arguments_from, socket_of
from mirror.errors import ConfigError
from mirror.feed.connection.connection_string import parse
from mirror.sandbox.control import COMMANDS, default_path
from tests.cli.conftest import LIMIT_S, background, call, call_here
from tests.terminal import Terminal


@contextmanager
def sandbox(*options: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A source and its connection string, until the block ends."""
    with background("sandbox", *options) as source:
        assert source.stdout is not None
        yield source, source.stdout.readline().strip()
        if source.poll() is None:
            source.terminate()
            source.communicate(timeout=LIMIT_S)


def test_a_sandbox_prints_its_address_obeys_commands_and_ends_on_command(tmp_path: Path) -> None:
    with sandbox("--nodes", "2", "--vbuckets", "8", "--load", "100", "--control", tmp_path / "s") as (source, url):
        assert parse(url).bucket == "demo"
        fault = ["sandbox", "fault", "--control", tmp_path / "s"]
        status = call(*fault, "status").json
        assert (status["documents"], status["vbuckets"], status["connection_string"]) == (100, 8, url)
        before = call(*fault, "vbucket", "vbid=3").json
        assert call(*fault, "failover", "vbid=3", "lose=2").json == {"base_seqno": before["high_seqno"] - 2}
        assert len(call(*fault, "vbucket", "vbid=3").json["failover_log"]) == len(before["failover_log"]) + 1
        assert call(*fault, "cut", "node=0").json == {"connections": 0}
        wrong = call(*fault, "dance")
        assert (wrong.code, wrong.out) == (2, "")
        assert "no such command" in wrong.complaint
        source.send_signal(signal.SIGINT)
        out, err = source.communicate(timeout=LIMIT_S)
        assert (source.returncode, out, err) == (0, "", "")


def test_a_sandbox_restarted_on_its_port_has_the_same_bucket(tmp_path: Path) -> None:
    """A restarted demo source was refused: another bucket."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    uuids = []
    for options in (["--port", port], ["--port", port], ["--port", port, "--bucket", "other"]):
        with sandbox("--control", tmp_path / "s", *options):
            uuids.append(call("sandbox", "fault", "--control", tmp_path / "s", "status").json["bucket_uuid"])
    assert uuids[0] == uuids[1] != uuids[2]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with sandbox("--control", tmp_path / "one") as (_, url):
        port = parse(url).addresses[0].port
        call("sandbox", "--port", str(port), "--control", tmp_path / "two").assert_complains(2, str(port))


def test_an_unknown_profile_is_named() -> None:
    wrong = call_here("sandbox", "--profile", "4.x")
    assert (wrong.code, wrong.out) == (2, "")
    assert "no server profile '4.x'" in wrong.complaint
    assert "7.2" in wrong.complaint


def test_the_help_names_every_command_and_its_optional_arguments() -> None:
    shown = call_here("sandbox", "fault", "--help").out
    assert "[lose=N]" in shown
    words = set(FAULT_HELP.replace(",", " ").replace(";", " ").split())
    assert words >= {*COMMANDS}


def test_a_control_socket_that_is_missing_is_named(tmp_path: Path) -> None:
    call("sandbox", "fault", "status", "--control", tmp_path / "missing.sock").assert_complains(1, "missing.sock")
    assert call("sandbox", "fault", "status").code == 2


def test_the_control_socket_follows_from_the_source_port_or_path() -> None:
    assert socket_of(None, None, Path("/s")) == Path("/s")
    assert socket_of("couchbase://demo@127.0.0.1:1234,127.0.0.1:1235/demo", None, None) == default_path(1234)
    assert socket_of(None, 77, None) == default_path(77)
    with pytest.raises(ConfigError):
        socket_of(None, None, None)


def test_arguments_stay_the_texts_that_were_typed() -> None:
    given = arguments_from(["node=1", "bytes-per-second=2.5", "key=007", "value=true"])
    assert given == {"node": "1", "bytes_per_second": "2.5", "key": "007", "value": "true"}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        arguments_from(["node"])


@pytest.mark.parametrize("password", ["", "secret"])
def test_a_sandbox_on_a_terminal_prints_the_next_step(tmp_path: Path, password: str) -> None:
    options = ("--control", tmp_path / "s", "--load", "10")
    with Terminal("sandbox", *options, cwd=tmp_path, DCP_MIRROR_USER="me", DCP_MIRROR_PASSWORD=password) as terminal:
        shown = terminal.until("--http 8080")
        assert f"user me, password {'that of DCP_MIRROR_PASSWORD' if password else 'demo'}; Ctrl-C" in shown
        given = "" if password else "DCP_MIRROR_PASSWORD=demo "
        assert f"mirror it: {given}dcp-mirror run --source couchbase://me@127.0.0.1:" in shown
        assert "secret" not in shown
        terminal.type("\x03")
        assert terminal.end() == 0
