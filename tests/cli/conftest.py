"""A source in a thread, a mirror of it, and the installed command as a person or a script would call it."""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from tests.cli.forkserver import ForkServer
from tests.processes import ProcessGroup

COMMAND = [sys.executable, "-P", "-m", "cli.main"]
LIMIT_S = 120


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    raw: bytes

    def assert_complains(self, code: int, words: str) -> None:
        """Fail unless this is its exit code, and its one complaint has the words."""
        assert self.code == code, self.err
        assert words in self.complaint

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
    """The process's own, without settings of anyone who runs the tests. One worker is the cheapest service to start."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DCP_MIRROR_")}
    return kept | {"DCP_MIRROR_PASSWORD": "demo", "DCP_MIRROR_WORKERS": "1", "COLUMNS": "160"} | more


@functools.cache
def forkserver() -> ForkServer:
    made = ForkServer(environment())
    atexit.register(made.end)
    return made


def call(
    *arguments: object,
    text: str = "",
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    preexec_fn: Callable[[], None] | None = None,
) -> Result:
    """Run the command to its end, in a process of its own. With `preexec_fn` an interpreter starts for it.

    `text`: what it reads from stdin.
    """
    words, variables = [str(word) for word in arguments], environment(**(env or {}))
    with tempfile.TemporaryFile() as typed, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        typed.write(text.encode())
        typed.seek(0)
        if preexec_fn is None:
            code = forkserver().run(words, variables, cwd or Path.cwd(), (typed, out, err), LIMIT_S)
        else:
            code = subprocess.run(
                [*COMMAND, *words],
                env=variables,
                cwd=cwd,
                stdin=typed,
                stdout=out,
                stderr=err,
                timeout=LIMIT_S,
                check=False,
                preexec_fn=preexec_fn,
            ).returncode
        out.seek(0)
        err.seek(0)
        raw = out.read()
        return Result(code, raw.decode(errors="replace"), err.read().decode(), raw)


def succeed(*arguments: object, **more: Any) -> Result:
    """Run the command, which succeeds."""
    result = call(*arguments, **more)
    assert result.code == 0, result.err
    return result


def call_here(*arguments: object, text: str = "", env: dict[str, str] | None = None, cwd: Path | None = None) -> Result:
    """Run the command in the test's own process: for commands that open no store and start no service."""
    raw = io.BytesIO()
    out, err = io.TextIOWrapper(raw, write_through=True), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    mask = os.umask(0o077)
    os.umask(mask)
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        for name, value in environment(**(env or {})).items():
            patched.setenv(name, value)
        patched.setattr(sys, "argv", ["dcp-mirror", *map(str, arguments)])
        patched.setattr(sys, "stdin", io.StringIO(text))
        if cwd is not None:
            patched.chdir(cwd)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            os.umask(mask)
            for number, handler in handlers.items():
                signal.signal(number, handler)
    shown = raw.getvalue()
    return Result(int(ended.value.code or 0), shown.decode(errors="replace"), err.getvalue(), shown)


def background(*arguments: object, **more: Any) -> ProcessGroup:
    """Start the command and let it run; use it as a context manager, which ends it in any case."""
    return ProcessGroup(
        [*COMMAND, *map(str, arguments)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        **more,
    )


def output_to_closed_pipe(*arguments: object) -> tuple[int, str]:
    """Exit code and stderr of the command when the reader of its stdout has closed the pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [*COMMAND, *map(str, arguments)]
        ended = subprocess.run(
            command, env=environment(), stdout=writing, stderr=subprocess.PIPE, timeout=LIMIT_S, check=False
        )
    finally:
        os.close(writing)
    return ended.returncode, ended.stderr.decode()


def copy_of(mirrored: Path, to: Path) -> Path:
    """A copy of a mirror without the sockets in it."""
    return Path(shutil.copytree(mirrored, to, ignore=shutil.ignore_patterns("*.sock")))


def fill(cluster: SandboxCluster) -> None:
    for number in range(200):
        cluster.set(f"order::{number:03}", b'{"number": %d}' % number)
    cluster.set("text", b"plain text")
    cluster.set(b"\xff\xfekey", b"\x00\x01binary")
    cluster.set("schl\u00fcssel", '{"stra\u00dfe": "\u00dc"}'.encode())


def delete_some(cluster: SandboxCluster) -> None:
    """Every tenth order."""
    for number in range(0, 200, 10):
        cluster.delete(f"order::{number:03}")


@contextmanager
def filled_source(cluster: SandboxCluster, data: Path, groups: int) -> Iterator[tuple[SandboxThread, Path]]:
    """A source and its mirror, which saw the documents first, and then some of them deleted."""
    with SandboxThread(cluster) as thread:
        for change in (fill, delete_some):
            thread.call(change, thread.cluster)
            arguments = ["--data", data, "--until-caught-up", "--groups", groups]
            succeed("run", "--source", thread.connection_string, *arguments)
        yield thread, data


@pytest.fixture(scope="session")
def source_and_mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SandboxThread, Path]]:
    data = tmp_path_factory.mktemp("mirror") / "data"
    with filled_source(SandboxCluster(nodes=2, vbuckets=16), data, 4) as made:
        yield made


@pytest.fixture(scope="session")
def source(source_and_mirror: tuple[SandboxThread, Path]) -> SandboxThread:
    """Two nodes, sixteen vbuckets, some documents, and no further writes."""
    return source_and_mirror[0]


@pytest.fixture(scope="session")
def mirrored(source_and_mirror: tuple[SandboxThread, Path]) -> Path:
    """A mirror of the source, with no service running. Tests only read it."""
    return source_and_mirror[1]
