"""The handbook is run: its lines for the shell in one bash, those in Python here, with the tests' session, in order.

Another port and another folder than it names, and nothing else. Its own asserts are the verdict.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import mirror.spark
from tests.cli.conftest import environment
from tests.spark.conftest import FAST

HANDBOOK = Path(mirror.spark.__file__).with_name("HANDBOOK.md")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDER, PORT = "/tmp/shop", "11310"
DONE = "this block is done"


class Shell:
    """One bash for all blocks: what a block sets or starts is there for the next."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "shell.log"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self._log.open("wb") as log:
            self._bash = subprocess.Popen(
                ["bash", "-eu"],
                env=environment() | {"PATH": path, "JDK_JAVA_OPTIONS": FAST["spark.driver.extraJavaOptions"]},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def run(self, block: str) -> str:
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{block}\necho; echo {DONE}\n")
        self._bash.stdin.flush()
        said: list[str] = []
        for line in self._bash.stdout:
            if line.strip() == DONE:
                return "".join(said)
            said.append(line)
        raise AssertionError(f"failed:\n{block}\n{''.join(said)}\n{self._log.read_text()}")

    def end(self) -> None:
        with self._bash:
            os.killpg(self._bash.pid, signal.SIGKILL)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.end()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.timeout(600)
def test_every_line_of_the_handbook_holds(spark: SparkSession, shell: Shell, tmp_path: Path) -> None:
    text = HANDBOOK.read_text().replace(FOLDER, str(tmp_path / "shop")).replace(PORT, str(free_port()))
    blocks = BLOCK.findall(text)
    assert {language for language, _ in blocks} == {"sh", "python"}
    assert len(blocks) == text.count("\n```\n"), "a block in another language is not run"
    names: dict[str, Any] = {}
    for language, block in blocks:
        if language == "sh":
            shell.run(block)
        else:
            exec(compile(block, str(HANDBOOK), "exec"), names)
    assert names["spark"] is spark
