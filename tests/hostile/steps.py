"""A timer of an event loop's steps: the processor time of each callback, by the name of what ran.

Processor time of the thread, so that neither the machine's load nor another thread's work counts.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mirror.server.turns import Turns

STEP_MAX_S = 0.01
"""Twenty times a small request's wait at rest, on a core that adds up 100,000 numbers in `COUNTING_S`."""
LARGE_STEP_MAX_S = 0.1
"""The same for documents of more than 256 KiB."""
COUNTING_S = 0.0012


def slowness() -> float:
    """Return how many times longer than `COUNTING_S` this core needs now, at least 1: beside a busy sibling a core is
    half as fast, and so is an older machine.
    """
    began = time.thread_time()
    sum(range(100_000))
    return max(1.0, (time.thread_time() - began) / COUNTING_S)


class Steps:
    def __init__(self) -> None:
        self.longest_s: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        if seconds > self.longest_s.get(name, 0.0):
            self.longest_s[name] = seconds

    def worst(self) -> tuple[float, str]:
        return max(((seconds, name) for name, seconds in self.longest_s.copy().items()), default=(0.0, "no step"))


def name_of(handle: Any) -> str:
    """Name a callback: for a task its coroutine, and the innermost coroutine that it awaits."""
    callback = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        names = []
        while coroutine is not None and hasattr(coroutine, "cr_code"):
            names.append(coroutine.cr_code.co_qualname)
            coroutine = coroutine.cr_await
        return " > ".join(names)
    if isinstance(owner, Turns):
        step = owner._waiting[0]
        step = getattr(step, "func", step)  # never a repr: a partial's would be that of the pieces which it lets go of
        return f"turn: {getattr(step, '__qualname__', type(step).__name__)}"
    protocol = getattr(owner, "_protocol", None)
    name = getattr(callback, "__qualname__", None) or repr(callback)
    return f"{name} of {type(protocol).__name__}" if protocol is not None else name


@contextmanager
def timed(thread: threading.Thread) -> Iterator[Steps]:
    """Time the steps of one thread's event loop."""
    run = asyncio.Handle._run
    steps = Steps()

    def add(name: str, seconds: float) -> None:
        if threading.current_thread() is thread:
            steps.add(name, seconds)

    measure(add)
    try:
        yield steps
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


def write_long_steps(path: Path) -> None:
    """From now on, write each step of this process that is longer than `STEP_MAX_S` to a file."""
    file = path.open("a", buffering=1)

    def write(name: str, seconds: float) -> None:
        if seconds > STEP_MAX_S:
            file.write(f"{seconds * 1000:.1f} ms: {name}\n")

    measure(write)


def measure(note: Callable[[str, float], None]) -> None:
    run = asyncio.Handle._run

    def measured(handle: Any) -> None:
        name = name_of(handle)
        began = time.thread_time()
        run(handle)
        note(name, time.thread_time() - began)

    asyncio.Handle._run = measured  # type: ignore[method-assign,assignment]
