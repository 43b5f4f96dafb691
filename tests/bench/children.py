"""Processes of a bench: each runs a function with a pipe, and ends with the block that started it."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

PATIENCE_S = 900.0
"""Longest wait for a message."""


class Child:
    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...], *, daemon: bool) -> None:
        context = multiprocessing.get_context("spawn")  # LMDB and event loops do not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=daemon)
        self.process.start()
        theirs.close()

    def send(self, message: object) -> None:
        self.pipe.send(message)

    def receive(self) -> Any:
        """The child's next message. Raises RuntimeError if it ended, or sent none for `PATIENCE_S`."""
        try:
            if self.pipe.poll(PATIENCE_S):
                return self.pipe.recv()
        except EOFError:
            pass
        raise RuntimeError("a process of the bench ended, or hangs, before it answered")


@contextmanager
def child(target: Callable[..., None], *arguments: Any, daemon: bool = True) -> Iterator[Child]:
    """Run `target(pipe, *arguments)`. At the end of the block its pipe closes; it is killed 10 s later."""
    started = Child(target, arguments, daemon=daemon)
    try:
        yield started
    finally:
        started.pipe.close()
        started.process.join(10)
        if started.process.is_alive():
            started.process.kill()
            started.process.join()


def wait_closed(pipe: Connection) -> None:
    """Wait in a child until its parent needs it no more."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        return


def until(condition: Callable[[], bool], *, every_s: float = 0.01) -> None:
    """Raises RuntimeError after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing came within {PATIENCE_S:g} s")
        time.sleep(every_s)
