"""A source in a thread, a mirror of it, and the installed command as a person or a script would call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread

COMMAND = [sys.executable, "-P", "-m", "cli.main"]
LIMIT_S = 120


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str
    raw: bytes

    @property
    def json(self) -> Any:
        """The one JSON value on stdout."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """The JSON values on stdout, one a line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def complaint(self) -> str:
        """The one line that says what was wrong; there must be no other line of it, and no traceback."""
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("dcp-mirror: ")]
        assert len(lines) == 1, self.err
        return lines[0]


Call = Callable[..., Result]


def environment(**more: str) -> dict[str, str]:
    """The process's own, without settings of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DCP_MIRROR_")}
    return kept | {"DCP_MIRROR_PASSWORD": "demo", "COLUMNS": "160"} | more


def call(*arguments: object, env: dict[str, str] | None = None, **more: Any) -> Result:
    """Run the command to its end."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
        **more,
    )
    return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(), done.stdout)


def background(*arguments: object, **more: Any) -> subprocess.Popen[str]:
    """Start the command and let it run."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def fill(cluster: SandboxCluster) -> None:
    """A few documents of every kind."""
    for number in range(200):
        cluster.set(f"order::{number:03}", b'{"number": %d}' % number)
    cluster.set("text", b"plain text")
    cluster.set(b"\xff\xfekey", b"\x00\x01binary")
    cluster.set("schl\u00fcssel", '{"stra\u00dfe": "\u00dc"}'.encode())


def delete_some(cluster: SandboxCluster) -> None:
    """Every tenth order."""
    for number in range(0, 200, 10):
        cluster.delete(f"order::{number:03}")


@pytest.fixture(scope="session")
def source_and_mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SandboxThread, Path]]:
    """A source and its mirror, which saw the documents first, and then some of them deleted."""
    data = tmp_path_factory.mktemp("mirror") / "data"
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=16)) as thread:
        for change in (fill, delete_some):
            thread.call(change, thread.cluster)
            arguments = ["--data", data, "--until-caught-up", "--groups", "4"]
            result = call("run", "--source", thread.connection_string, *arguments)
            assert result.code == 0, result.err
        yield thread, data


@pytest.fixture(scope="session")
def source(source_and_mirror: tuple[SandboxThread, Path]) -> SandboxThread:
    """Two nodes, sixteen vbuckets, some documents; nobody writes to it any more."""
    return source_and_mirror[0]


@pytest.fixture(scope="session")
def mirrored(source_and_mirror: tuple[SandboxThread, Path]) -> Path:
    """A mirror of the source, with no service running. Tests only read it."""
    return source_and_mirror[1]
