"""Leaving the block ends the process, its children, and what outlived it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.crash.service import gone, until
from tests.processes import ProcessGroup

PROGRAM = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
if sys.argv[1] == "stays":
    signal.pause()
"""


@pytest.mark.parametrize("leader", ["stays", "ends"])
def test_a_process_group_is_gone_after_its_block(leader: str) -> None:
    command = [sys.executable, "-c", PROGRAM, leader]
    with ProcessGroup(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        if leader == "ends":
            process.wait()
    assert process.returncode is not None
    until("the child to die", lambda: gone(child))
