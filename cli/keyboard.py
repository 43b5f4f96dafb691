"""Single keys from a terminal, so that a live view ends without Ctrl-C.

Invariants: the context restores the terminal; nothing is read if stdin is no terminal or belongs to another process
group.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from typing import Any, Self


class Keyboard:
    """Reads keys as they are pressed, without Enter. Use it as a context manager."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        """Switch the terminal to single keys, unless this process runs in the background."""
        try:
            descriptor = sys.stdin.fileno()
            if os.isatty(descriptor) and _in_foreground(descriptor):
                self._before = termios.tcgetattr(descriptor)
                tty.setcbreak(descriptor, termios.TCSADRAIN)
                self._descriptor = descriptor
        except (OSError, ValueError, termios.error):
            self._descriptor = -1
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> str:
        """Return the key pressed within `seconds`; empty if none was."""
        if self._descriptor < 0:
            time.sleep(seconds)
            return ""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        key = os.read(self._descriptor, 1)
        if not key:  # the terminal is gone
            self._descriptor = -1
        return key.decode(errors="replace")


def _in_foreground(descriptor: int) -> bool:
    """False if a change of the terminal would stop this process (SIGTTOU)."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not the controlling terminal, which alone sends SIGTTOU
        return True
