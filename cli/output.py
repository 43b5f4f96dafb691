"""JSON objects on stdout (shapes: cli/JSON.md), one a line, and readable text for bytes, figures and times.

An unknown figure is a dash, or words. Lines of text have no control characters from data.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
import sys
import termios
import time
from collections.abc import Iterable, Mapping
from typing import Any

import typer

from mirror import units
from mirror.serve.objects import dumps

DASH = "-"
READER_STAYS_MS = 50
"""Time after which a pipe's reader that has taken everything and is still there counts as one that reads on."""


def print_json(value: Any) -> None:
    sys.stdout.flush()  # before the bytes of `print_parts`, which do not pass through the text's buffer
    print_parts((dumps(value),))


def print_parts(parts: Iterable[bytes]) -> None:
    """Print a JSON object that `mirror.serve.objects` made, on one line."""
    sys.stdout.buffer.writelines(parts)
    sys.stdout.buffer.write(b"\n")


def deliver() -> None:
    """Flush stdout; if it is a pipe, wait until its reader has taken everything and stays. Raises BrokenPipeError.

    `head` takes a whole block, and hangs up after its third line.
    """
    sys.stdout.flush()
    descriptor = sys.stdout.fileno()
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return
    hung_up = select.poll()
    hung_up.register(descriptor, 0)
    unread = True
    while unread:
        unread = any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
        if hung_up.poll(READER_STAYS_MS):
            raise BrokenPipeError(errno.EPIPE, "the reader of stdout hung up")


def echo(text: str, *, err: bool = False) -> None:
    """Print a line of text, which may contain names and errors from data, the source or another process."""
    typer.echo(units.printable(text), err=err)


def for_people(data: bytes, limit: int = 200) -> str:
    """Return bytes as one readable line: UTF-8 if possible, shortened if long."""
    text = data[: limit * 4].decode(errors="backslashreplace").translate({10: "\\n", 13: "\\r", 9: "\\t", 27: "\\e"})
    text = units.printable(text)
    return text if len(text) <= limit and len(data) <= limit * 4 else text[:limit] + "..."


def number(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return `1 batch` or `1,234 batches`; `many` is the plural, by default `one` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def size(value: float | None) -> str:
    if value is None:
        return DASH
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the loop ends with GiB")


def lag_text(sums: Mapping[str, Any]) -> str:
    if sums["lag_seqnos"] is None:
        return DASH if sums.get("lag_s") is None else f"unknown seqnos, {duration(sums['lag_s'])}"
    return f"{number(sums['lag_seqnos'])} seqnos, {duration(sums['lag_s'])}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def moment(ms: int | None) -> str:
    return DASH if ms is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ms / 1000))
