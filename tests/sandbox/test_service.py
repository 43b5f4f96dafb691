"""The source as a program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mirror.errors import ConfigError
from mirror.sandbox import ServeOptions, serve
from mirror.sandbox.control.server import ask
from tests.processes import ProcessGroup

PROGRAM = """
import sys
from pathlib import Path
from mirror.sandbox import ServeOptions, serve
serve(ServeOptions(nodes=2, vbuckets=8, load=500, rate=100, control=Path(sys.argv[1])))
"""


def test_it_prints_its_connection_string_and_ends_on_a_signal(tmp_path: Path) -> None:
    control = tmp_path / "s.sock"
    environment = {**os.environ, "DCP_MIRROR_USER": "me", "DCP_MIRROR_PASSWORD": "secret"}
    with ProcessGroup(
        [sys.executable, "-c", PROGRAM, str(control)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        process_group=0,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        status = ask(control, "status")
        assert line == status["connection_string"]
        assert line.startswith("couchbase://me@127.0.0.1:")
        assert "secret" not in line
        assert status["documents"] >= 500
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stdout.read() == ""
    assert not control.exists()


@pytest.mark.parametrize("options", [ServeOptions(vbuckets=0), ServeOptions(vbuckets=2000), ServeOptions(nodes=0)])
def test_numbers_that_cannot_be(options: ServeOptions) -> None:
    with pytest.raises(ConfigError, match="take 1 to"):
        serve(options)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"):
            serve(ServeOptions(port=port, control=tmp_path / "s.sock"))
