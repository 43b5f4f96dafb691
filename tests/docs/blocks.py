"""Blocks of the documents, and a place to run them: one bash for all blocks, an embedded source and its mirror.

A block in `sh`, `python` or `toml` is run, unless the line before it is `<!-- not run: REASON -->`. One after
`<!-- runs until Ctrl-C -->` is a service: it is started, and the next block waits until it is ready.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mirror.config_reader import load
from tests.cli.conftest import environment
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "systemd" / "README.md"]
CURL = Path(__file__).with_name("curl.py")
SPARK_PAGE = ROOT / "docs" / "spark.md"
"""Its blocks need Spark: tests/spark/test_handbook.py runs them."""

BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
NOT_RUN = "not run: "
SERVICE = "runs until Ctrl-C"
RUN_LANGUAGES = ("sh", "python", "toml")

FOLDER = "/tmp/orders"
PORTS = ("8080", "11310", "11410", "11510")
"""Folder and ports that the documents name; others are taken in their place."""
DONE = "this block is done"
READY_S = 180


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def is_run(self) -> bool:
        return self.language in RUN_LANGUAGES and not self.mark.startswith(NOT_RUN)

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("text")), found["language"], found["text"], found["mark"] or "")
        for found in BLOCK.finditer(text)
    ]


class Shell:
    """One bash for all blocks, so that a block finds the variables and processes of the blocks before it."""

    def __init__(self, folder: Path, more: Mapping[str, str] | None = None) -> None:
        """Log what the blocks say on stderr into `folder`; `more` are variables of the environment."""
        self._log = folder / "shell.log"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        if shutil.which("curl") is None:
            place = folder / "bin" / "curl"
            place.parent.mkdir()
            place.write_text(f"#!{sys.executable}\n{CURL.read_text()}")
            place.chmod(0o755)
            path = f"{place.parent}:{path}"
        with self._log.open("wb") as log:
            self._bash = subprocess.Popen(
                ["bash", "-eu"],
                env=environment() | {"PATH": path} | dict(more or {}),
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def run(self, block: str) -> str:
        """Return what a block prints. Raises AssertionError where one of its commands fails."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        said: list[str] = []
        with contextlib.suppress(BrokenPipeError):  # an earlier block ended it: the loop below finds nothing to read
            self._bash.stdin.write(f"{block}\necho; echo {DONE}\n")
            self._bash.stdin.flush()
        for line in self._bash.stdout:
            if line.strip() == DONE:
                return "".join(said)
            said.append(line)
        raise AssertionError(f"failed:\n{block}\n{''.join(said)}\n{self._log.read_text()}")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # a failed block ended it
            os.killpg(self._bash.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError), self._bash:
            pass


class Site:
    """A shell with the README's source and mirror in it."""

    def __init__(self, folder: Path, more: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.shell = Shell(folder, more)
        self._places = {port: str(free_port()) for port in PORTS} | {FOLDER: str(folder / "orders")}
        self._services = 0

    def placed(self, text: str) -> str:
        """Return a block with this site's folder and ports, and with this environment's commands."""
        for named, own in self._places.items():
            text = re.sub(rf"{named}(?!\d)", own, text)
        return text.replace("sh cli/setup.sh ", "dcp-mirror ").replace(". .venv/bin/activate\n", "")

    def run(self, block: Block, names: dict[str, Any]) -> None:
        """Run a block; `names` are those that the page's Python blocks have made."""
        text = self.placed(block.text)
        if block.language == "python":
            exec(compile("\n" * block.line + text, str(block.page), "exec"), names)
        elif block.language == "toml":
            file = self.folder / "settings.toml"
            file.write_text(text)
            load(config_file=file)
        elif block.mark == SERVICE:
            self._start(text)
        else:
            self.shell.run(text)

    def _start(self, text: str) -> None:
        """Start a service, and wait until it has printed its addresses and is ready."""
        self._services += 1
        out = self.folder / f"service-{self._services}.out"
        self.shell.run(f"{{\n{text}\n}} > {out} &")
        addresses = max(1, len(re.findall(r"--(?:kv|http|dcp) ", text)))
        deadline = time.monotonic() + READY_S
        while len(out.read_text().splitlines() if out.exists() else ()) < addresses or not self._ready(text):
            assert time.monotonic() < deadline, f"not ready after {READY_S} s:\n{text}"
            time.sleep(0.1)

    def _ready(self, text: str) -> bool:
        found = re.search(r"--http (\d+)", text)
        try:
            return found is None or urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/readyz").status == 200
        except (urllib.error.URLError, ConnectionError):
            return False


@contextmanager
def site(folder: Path, more: Mapping[str, str] | None = None, *, all_blocks: bool = False) -> Iterator[Site]:
    """Start the README's source and mirror, with `all_blocks` run its other blocks too, and keep both meanwhile."""
    made = Site(folder, more)
    try:
        names: dict[str, Any] = {}
        for block in blocks_of(ROOT / "README.md"):
            if block.is_run and (all_blocks or block.mark == SERVICE):
                made.run(block, names)
        yield made
    finally:
        made.shell.end()
