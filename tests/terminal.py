"""The command on a terminal, as a person uses it: what it shows is waited for, and keys are typed."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cli.conftest import COMMAND, LIMIT_S, environment
from tests.processes import end_group

READ_BYTES = 65536


def plain(text: str) -> str:
    """Without colours, and without what moves the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


class Terminal:
    """A command with its own controlling terminal, until the block ends."""

    def __init__(self, *arguments: object, cwd: Path, columns: int = 80, lines: int = 24, **variables: str) -> None:
        """Start it. A variable that is empty is not set at all."""
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        given = environment(TERM="xterm", **variables)
        command = ["setsid", "--ctty", *COMMAND, *map(str, arguments)]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                cwd=cwd,
                env={name: value for name, value in given.items() if value and name != "COLUMNS"},
            )
        finally:
            os.close(theirs)
        self.shown = ""
        """All that it has written, with what moves the cursor."""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_group(self.process.pid)  # setsid made it the leader of its own
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        if error is not None:
            error.add_note(f"on the terminal:\n{self.shown}")

    def until(self, text: str) -> str:
        """Wait for a text; returns what came after the last one that was waited for, with this."""
        deadline = time.monotonic() + LIMIT_S
        while (at := self.shown.find(text, self._seen)) < 0:
            assert self._read(deadline), f"it ended without {text!r}"
        found, self._seen = self.shown[self._seen : at + len(text)], at + len(text)
        return found

    def type(self, keys: str) -> None:
        """Type on the keyboard."""
        if keys:
            os.write(self._ours, keys.encode())

    def end(self, *, pressing: str = "") -> int:
        """Its exit code, once it has ended by itself; `pressing`: a key that is pressed each second until then.

        readline misses a Ctrl-C that comes between its prompt and its wait for a key.
        """
        deadline = time.monotonic() + LIMIT_S
        self.type(pressing)
        while self._read(deadline, pressing):
            pass
        return self.process.wait(LIMIT_S)

    def _read(self, deadline: float, pressing: str = "") -> bool:
        """Read its output. Return False if no process has the terminal open any more."""
        while not select.select([self._ours], [], [], 1.0)[0]:
            assert time.monotonic() < deadline, "waited in vain"
            self.type(pressing)
        try:
            self.shown += os.read(self._ours, READ_BYTES).decode(errors="replace")
        except OSError:  # EIO: the other end is closed
            return False
        return True
